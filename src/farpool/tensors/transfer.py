"""Copies between plain and paged memory, block by block, so that a tensor may be larger than the fast tier.

All functions here need *dense* tensors, whose elements fill a range of memory, in any order of the dimensions. They
handle the elements in the order of memory. Copies, fills, comparisons and conversions between floating-point types give
the same bits in pieces as on whole tensors. Conversions to integers may not, because the result for NaN depends on the
position in the vector register, so they are not done in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

import torch

from farpool.errors import FarpoolError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.geometry import is_dense
from farpool.tensors.paged_tensor import PagedTensor

__all__ = [
    "block_cuts",
    "convertible",
    "copy_dense",
    "equal_dense",
    "fill_dense",
    "flat",
    "same_layout",
    "spans_blocks",
    "stream",
    "streamable",
]

_TINY_DIVISOR = 64
"""Blocks are tiny if they are smaller than the budget divided by this."""


def spans_blocks(tensor: PagedTensor) -> bool:
    """Return True if the tensor's storage is cut into several blocks."""
    return tensor._storage.count > 1


def streamable(tensor: torch.Tensor) -> bool:
    """Return True if the tensor can be handled in pieces: it is dense, and no conjugation or negation is pending."""
    return is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if both tensors have the same size and the same order of elements in memory."""
    return (
        left.size() == right.size()
        and streamable(left)
        and streamable(right)
        and (left.stride() == right.stride() or (left.is_contiguous() and right.is_contiguous()))
    )


def convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if converting between these dtypes gives the same bits in pieces as on a whole tensor."""
    if source is target:
        return True
    return source.is_floating_point and target.is_floating_point


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense plain tensor in the order of memory, as a one-dimensional view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def block_cuts(tensors: Iterable[PagedTensor], fast: int = 0) -> set[int]:
    """Element positions at which dense tensors of equal length are cut into blocks.

    Parameters
    ----------
    fast : int
        The budget. Blocks that are tiny compared with the budget are joined. With 0, no blocks are joined.
    """
    cuts: set[int] = set()
    for tensor in tensors:
        start, stop = tensor.byte_range()
        itemsize = tensor.itemsize
        step = max(tensor._storage.block_bytes, 1)
        step *= max(fast // _TINY_DIVISOR // step, 1)
        for cut in range(start // step * step + step, stop, step):
            if (cut - start) % itemsize == 0:
                cuts.add((cut - start) // itemsize)
    return cuts


def _steps(tensors: Sequence[PagedTensor]) -> Iterable[tuple[int, int]]:
    """Element ranges that touch one block of each tensor, or a few tiny blocks of each tensor."""
    return pairwise(sorted(block_cuts(tensors, tensors[0]._storage.pool.fast) | {0, tensors[0].numel()}))


def _use(tensor: PagedTensor, first: int, last: int, mode: Mode) -> Use:
    start = tensor.byte_range()[0]
    itemsize = tensor.itemsize
    return Use(tensor._storage, start + first * itemsize, start + last * itemsize, mode)


def stream(
    op: str,
    function: Callable[..., object],
    *operands: tuple[torch.Tensor, Mode],
    steps: Iterable[tuple[int, int]] | None = None,
) -> bool:
    """Call `function` with one-dimensional pieces of operands of the same layout. At least one operand is paged.

    Parameters
    ----------
    op : str
        Name of the operation for errors and events.
    function : callable
        Called for each piece with one plain tensor for each operand. If it returns False, the iteration ends.
    *operands : tuple of torch.Tensor and Mode
        Dense tensors, each with its access mode. The mode matters only for paged tensors.
    steps : iterable of (int, int), optional
        Element ranges of the pieces, in order. By default, each range is one block or a few tiny blocks.

    Returns
    -------
    bool
        True if `function` went through all pieces.
    """
    paged = [(tensor, mode) for tensor, mode in operands if type(tensor) is PagedTensor]
    pool = paged[0][0]._storage.pool
    plain = {id(tensor): flat(tensor) for tensor, _ in operands if type(tensor) is not PagedTensor}
    changes = any(mode is Mode.WRITE for _, mode in operands)
    for first, last in _steps([tensor for tensor, _ in paged]) if steps is None else steps:
        try:
            access = pool.acquire([_use(tensor, first, last, mode) for tensor, mode in paged], op)
        except FarpoolError as error:
            if changes and first:
                error.add_note(f"{op} had changed the first {first} elements already; do not simply try it again")
            raise
        try:
            offsets = iter(access.offsets)
            pieces = [
                tensor._arena.flat(tensor.dtype, last - first, next(offsets))
                if type(tensor) is PagedTensor
                else plain[id(tensor)][first:last]
                for tensor, _ in operands
            ]
            if function(*pieces) is False:
                return False
        finally:
            pool.release(access)
    return True


def copy_dense(target: torch.Tensor, source: torch.Tensor, op: str) -> None:
    """Copy between two tensors of the same layout. At least one of them is paged."""
    stream(op, torch.Tensor.copy_, (target, Mode.OVERWRITE), (source, Mode.READ))


def fill_dense(target: PagedTensor, value: complex | torch.Tensor, op: str) -> None:
    """Set every element of a dense paged tensor."""
    stream(op, lambda piece: piece.fill_(value), (target, Mode.OVERWRITE))


def equal_dense(left: torch.Tensor, right: torch.Tensor, op: str) -> bool:
    """Return True if two tensors of the same layout and dtype are equal. At least one of them is paged."""
    return stream(op, torch.equal, (left, Mode.READ), (right, Mode.READ))
