"""Makes the live tensors of a pool plain before the pool is closed; if that fails, the pool stays open.

If an autograd graph holds a tensor, ``close()`` raises an error that names the tensor, and the program can continue. At
the end of a ``with`` block the program cannot continue with the pool, so there the tensors become plain even if a graph
holds them. The graph keeps the paged tensors, and a backward pass through it raises. Weights, gradients and moments are
safe, and only the forward pass has to be repeated.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import torch

from farpool.available import available_memory
from farpool.errors import BudgetError, UnsupportedError
from farpool.sizes import format_size
from farpool.tensors.identity import check_swappable
from farpool.tensors.offload import move_out
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.referrers import referrer_of

if TYPE_CHECKING:
    from farpool.memory.pager.storage import StorageOwner

__all__ = ["live_parameters", "materialize_all", "take_along"]

_MEMORY_SHARE_MAX = 0.8
"""Fraction of the available memory that the plain tensors may take; the program needs the rest."""


def _living(pool: StorageOwner) -> list[PagedTensor]:
    """The pool's tensors that the program still holds."""
    if gc.get_freeze_count():
        gc.unfreeze()  # the collector does not list objects that the program has frozen
    # A tensor that only a garbage cycle holds would seem to be live.
    gc.collect()
    return [value for value in gc.get_objects() if type(value) is PagedTensor and value._storage.pool is pool]


def _gradients(tensors: list[PagedTensor]) -> dict[int, PagedTensor]:
    """Paged gradients of the leaves among `tensors`, by their identity. A gradient becomes plain with its leaf."""
    found = (tensor.grad for tensor in tensors if tensor.is_leaf)
    return {id(grad): grad for grad in found if type(grad) is PagedTensor}


def materialize_all(pool: StorageOwner) -> None:
    """Make every tensor that lives in a pool plain, in place.

    Raises
    ------
    UnsupportedError
        A tensor has history, or native code or an autograd graph holds it; nothing was changed.
    """
    found = _living(pool)
    gradients = _gradients(found)
    found = [tensor for tensor in found if id(tensor) not in gradients]
    bases = {id(tensor._base) for tensor in found if tensor._base is not None}
    for tensor in found:
        if not tensor.is_leaf:
            raise UnsupportedError(
                f"{describe(tensor)} is a view, or a result, with history and cannot become plain. Drop it or detach "
                f"it first. It is held by {referrer_of(tensor)}"
            )
        # A base is held by its views, which become plain before it.
        if id(tensor) not in bases:
            check_swappable(tensor, describe(tensor))
    found.sort(key=lambda tensor: id(tensor) in bases)
    move_out(found)


def take_along(pool: StorageOwner) -> str:
    """Make every tensor that lives in a closing pool plain, in place, even one that an autograd graph holds.

    Returns
    -------
    str
        Text of a warning about the tensors that became plain; empty if no tensor was live.

    Raises
    ------
    BudgetError
        The plain tensors would take more than four fifths of the available memory; nothing was changed.
    UnsupportedError
        A tensor has history, and no live leaf shares its storage, so its bytes would be lost; nothing was changed.
    FarpoolError
        A tier failed. The tensors that were read before the failure are plain, and the others still live in the pool. A
        note on the error gives both counts.
    """
    found = _living(pool)
    if not found:
        return ""
    leaves = [tensor for tensor in found if tensor.is_leaf]
    kept = {id(tensor._storage) for tensor in leaves}
    for tensor in found:
        # We may drop a view of a parameter with its graph, but not bytes that no leaf has.
        if id(tensor._storage) not in kept:
            raise UnsupportedError(
                f"{describe(tensor)} is the result of a computation with history, so it cannot become plain, and only "
                "the pool, which stays open, has its bytes: drop it or detach it, then close the pool. It is held by "
                f"{referrer_of(tensor)}"
            )
    gradients = _gradients(leaves)
    needed = sum({id(tensor._storage): tensor._storage.nbytes for tensor in leaves}.values())
    available = _available(leaves[0].device)
    limit = int(available * _MEMORY_SHARE_MAX)
    parameters = sum(isinstance(tensor, torch.nn.Parameter) for tensor in leaves)
    what = f"{len(leaves)} live tensors ({parameters} of them parameters, {format_size(needed)} altogether)"
    if needed > limit:
        on_host = "" if leaves[0].device.type == "cpu" else "farpool.restore(model, device='cpu'), or "
        raise BudgetError(
            f"the pool cannot be left: it holds {what}, and as plain tensors they do not fit into 80 % of the "
            f"{format_size(available)} that are available ({format_size(limit)}). It stays open and nothing is lost: "
            f"{on_host}save them (torch.save(model.state_dict(), path)), drop those that you do not need (del model, "
            "optimizer), then pool.close()",
            op="leaving the pool",
            needed=needed,
            budget=limit,
        )
    moving = [tensor for tensor in leaves if id(tensor) not in gradients]
    try:
        move_out(moving)
    except BaseException as error:
        left = sum(type(tensor) is PagedTensor for tensor in moving)
        error.add_note(
            f"{left} of {len(moving)} tensors (their gradients not counted) still live in the pool, which stays open; "
            "the others are plain"
        )
        raise
    return (
        f"the pool was left with {what}: they were made plain, in place. To do without this warning, call "
        "farpool.restore(model) and farpool.restore(optimizer) before, or drop tensors that you no longer need"
    )


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()


def live_parameters(pool: StorageOwner) -> str:
    """The count and the bytes of the parameters that live in a pool, as text for a message; empty if there are none."""
    found = [tensor for tensor in _living(pool) if isinstance(tensor, torch.nn.Parameter)]
    if not found:
        return ""
    storages = {id(tensor._storage): tensor._storage.nbytes for tensor in found}
    return f"{len(found)} live parameters ({format_size(sum(storages.values()))})"
