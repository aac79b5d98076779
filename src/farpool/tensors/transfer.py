"""Copies between plain and paged memory, block by block, so that a tensor may be larger than the fast tier.

Everything here works on *dense* geometries: the elements in the order of memory, whatever the order of the dimensions.
Copying, filling and comparing elements gives the same bits in pieces as at once; conversions between floating-point
types do, conversions to integers do not have to (what happens to NaN depends on the vector lane) and are refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from farpool.engine import Mode
from farpool.tensors.geometry import is_dense
from farpool.tensors.paged_tensor import PagedTensor
from farpool.use import Use

if TYPE_CHECKING:
    from farpool.storage import Storage

__all__ = [
    "convertible",
    "copy_dense",
    "equal_dense",
    "fill_dense",
    "flat",
    "same_layout",
    "spans_blocks",
    "streamable",
]


def spans_blocks(tensor: PagedTensor) -> bool:
    """Whether the storage is cut into several blocks."""
    return tensor._storage.count > 1


def streamable(tensor: torch.Tensor) -> bool:
    """Whether the tensor can be handled piece by piece: dense, and no pending conjugation or negation."""
    return is_dense(tensor) and not tensor.is_conj() and not tensor.is_neg()


def same_layout(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether both hold the same elements in the same order of memory."""
    return (
        left.size() == right.size()
        and streamable(left)
        and streamable(right)
        and (left.stride() == right.stride() or (left.is_contiguous() and right.is_contiguous()))
    )


def convertible(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether converting element by element gives the same bits in pieces as at once."""
    if source is target:
        return True
    return source.is_floating_point and target.is_floating_point


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense plain tensor in the order of memory, as a one-dimensional view."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _cuts(storage: Storage, start: int, stop: int, itemsize: int) -> set[int]:
    """Element positions, counted from byte `start`, at which the range is cut into blocks."""
    cuts = {0, (stop - start) // itemsize}
    for first, _ in storage.pieces():
        if start < first < stop and (first - start) % itemsize == 0:
            cuts.add((first - start) // itemsize)
    return cuts


def _steps(*tensors: PagedTensor) -> Iterator[tuple[int, int]]:
    """Element ranges that lie in one block of each tensor."""
    cuts: set[int] = set()
    for tensor in tensors:
        cuts |= _cuts(tensor._storage, *tensor.byte_range(), tensor.itemsize)
    return pairwise(sorted(cuts))


def _use(tensor: PagedTensor, first: int, last: int, mode: Mode) -> Use:
    start = tensor.byte_range()[0]
    itemsize = tensor.itemsize
    return Use(tensor._storage, start + first * itemsize, start + last * itemsize, mode)


def copy_dense(target: torch.Tensor, source: torch.Tensor, op: str) -> None:
    """Copy between tensors of the same layout, of which at least one is paged."""
    paged = [tensor for tensor in (target, source) if type(tensor) is PagedTensor]
    pool = paged[0]._storage.pool
    for first, last in _steps(*paged):
        modes = (
            (Mode.OVERWRITE, Mode.READ) if len(paged) == 2 else (Mode.OVERWRITE if target is paged[0] else Mode.READ,)
        )
        access = pool.acquire([_use(tensor, first, last, mode) for tensor, mode in zip(paged, modes, strict=True)], op)
        try:
            offsets = iter(access.offsets)
            pieces = [
                tensor._arena.flat(tensor.dtype, last - first, next(offsets))
                if type(tensor) is PagedTensor
                else flat(tensor)[first:last]
                for tensor in (target, source)
            ]
            pieces[0].copy_(pieces[1])
        finally:
            pool.release(access)


def fill_dense(target: PagedTensor, value: complex | torch.Tensor, op: str) -> None:
    """Set every element of a dense paged tensor."""
    pool = target._storage.pool
    for first, last in _steps(target):
        access = pool.acquire([_use(target, first, last, Mode.OVERWRITE)], op)
        try:
            target._arena.flat(target.dtype, last - first, access.offsets[0]).fill_(value)
        finally:
            pool.release(access)


def equal_dense(left: torch.Tensor, right: torch.Tensor, op: str) -> bool:
    """Whether two tensors of the same layout and dtype, at least one of them paged, are equal."""
    paged = [tensor for tensor in (left, right) if type(tensor) is PagedTensor]
    pool = paged[0]._storage.pool
    for first, last in _steps(*paged):
        access = pool.acquire([_use(tensor, first, last, Mode.READ) for tensor in paged], op)
        try:
            offsets = iter(access.offsets)
            pieces = [
                tensor._arena.flat(tensor.dtype, last - first, next(offsets))
                if type(tensor) is PagedTensor
                else flat(tensor)[first:last]
                for tensor in (left, right)
            ]
            if not torch.equal(pieces[0], pieces[1]):
                return False
        finally:
            pool.release(access)
    return True
