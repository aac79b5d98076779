"""Debug mode's search for survivors: real tensors over the arena that outlive the operation they were made for.

Each operation on paged tensors has an access, which pins the bytes of its operands in the arena. After the operation,
the access is released. From then on the bytes that a survivor views may be moved, evicted or overwritten. So we keep a
weak reference to each storage and view of the arena that is made for an operation, and check after the operation that
all of them are gone. Checking the storages also finds views that the operation itself has made of its operands.
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
"""True after the first pool in debug mode was made."""


class _Local(threading.local):
    made: list[StorageWeakRef | weakref.ref[torch.Tensor]] | None = None
    """Storages and views over the arena that the running operation has made; None outside of operations."""


_local = _Local()


def look_for_survivors() -> None:
    """Switch the search on until the process ends. The native core passes all operations to Python from now on."""
    global in_use
    in_use = True
    calls.suspend()


def note(memory: torch.UntypedStorage | torch.Tensor) -> None:
    """Record a new storage or tensor that shares memory with the arena, if an operation is running."""
    if _local.made is not None:
        _local.made.append(
            weakref.ref(memory) if isinstance(memory, torch.Tensor) else StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        )


def without_survivors(
    handler: Callable[[Any, Any, Any], Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operation, and raise if a tensor over the arena that was made for the operation still exists afterwards.

    An operation that raises is not checked, because the traceback keeps the tensors of its functions alive.

    Raises
    ------
    LifetimeError
        A tensor that views the arena is still alive. The message names the operation.
    """
    # Operations nest, because a rule calls others. Each one is checked for the tensors that it made itself.
    outer = _local.made
    made = _local.made = []
    try:
        result = handler(func, args, kwargs)
    finally:
        _local.made = outer
    if any(map(_alive, made)):
        # A reference cycle keeps tensors alive until the collector runs, and that is no error.
        gc.collect()
        count = sum(map(_alive, made))
        if count:
            raise LifetimeError(
                f"{func}: {count} of the {len(made)} real tensors that it ran on, or views of them, are still alive "
                "after it, and reading them would return other bytes soon. Keep a clone() instead"
            )
    return result


def _alive(reference: StorageWeakRef | weakref.ref[torch.Tensor]) -> bool:
    if isinstance(reference, StorageWeakRef):
        return not reference.expired()  # type: ignore[no-untyped-call]
    return reference() is not None
