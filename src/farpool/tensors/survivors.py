"""Debug mode's search for survivors: real tensors over the arena that outlive the operation they were made for.

What it viewed is moved, evicted and overwritten as soon as the access has been released. So each storage and view that
an operation makes of the arena is noted, weakly, and looked for when the operation is over and nothing of it is on the
stack any more. The storage tells of views, too, that the operation has made of its operands.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from farpool.errors import LifetimeError
from farpool.tensors.calls import calls

__all__ = ["in_use", "look_for_survivors", "note", "without_survivors"]

in_use = False
"""True once a pool in debug mode has been made."""


class _Local(threading.local):
    made: list[StorageWeakRef | weakref.ref[torch.Tensor]] | None = None
    """Storages and views over the arena that the running operation has made; None outside of operations."""


_local = _Local()


def look_for_survivors() -> None:
    """Switch the search on for the rest of the process; the native core then leaves all operations to Python."""
    global in_use
    in_use = True
    calls.suspend()


def note(memory: torch.UntypedStorage | torch.Tensor) -> None:
    """Note a storage or tensor that was made and shares memory with the arena."""
    if _local.made is not None:
        _local.made.append(
            weakref.ref(memory) if isinstance(memory, torch.Tensor) else StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        )


def without_survivors(
    handler: Callable[[Any, Any, Any], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation, and raise if a tensor over the arena that it made outlives it.

    An operation that raises is not looked at: the traceback keeps what was on its stack.

    Raises
    ------
    LifetimeError
        Somebody keeps a tensor that views the arena. Names the operation.
    """
    outer = _local.made
    made = _local.made = []
    try:
        result = handler(func, args, kwargs)
    finally:
        _local.made = outer
    if any(map(_alive, made)):
        gc.collect()
        count = sum(map(_alive, made))
        if count:
            raise LifetimeError(
                f"{func}: {count} of the {len(made)} real tensors that it ran on, or views of them, are still alive "
                "after it: whoever keeps them will read what comes to lie there next. Keep a clone() instead"
            )
    return result


def _alive(reference: StorageWeakRef | weakref.ref[torch.Tensor]) -> bool:
    if isinstance(reference, StorageWeakRef):
        return not reference.expired()  # type: ignore[no-untyped-call]
    return reference() is not None
