"""Rows of a table that may be larger than the fast tier: only the blocks of the touched rows are acquired.

The rows are copied, so the bits are those of the operation on the whole table. Touched blocks are taken in groups that
fit well into the budget, whatever the number of rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from farpool.errors import FarpoolError
from farpool.pager import Mode
from farpool.pager.use import Use
from farpool.tensors.calls import calls
from farpool.tensors.dispatch import rule
from farpool.tensors.factories import materialize
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import spans_blocks

__all__ = ["gather_rows", "is_table", "scatter_rows"]

_aten = torch.ops.aten
_INDEX_TYPES = (torch.int64, torch.int32)
# A group of blocks takes at most this part of the budget, so that the next group can be fetched meanwhile.
_GROUP = 4


def is_table(value: Any) -> bool:
    """Whether the rows of this tensor can be acquired alone."""
    return (
        type(value) is PagedTensor
        and value.dim() >= 1
        and value.numel() > 0
        and value.stride(0) > 0
        and 0 not in value.stride()
        and spans_blocks(value)
        and not value.is_conj()
        and not value.is_neg()
    )


def _plain(indices: torch.Tensor) -> torch.Tensor:
    return materialize(indices) if type(indices) is PagedTensor else indices


class _Touched(NamedTuple):
    """The blocks that hold sorted distinct rows, as one byte range for each.

    Attributes
    ----------
    uses : list of Use
        Range of bytes from the first to the last touched row that begins in the block.
    firsts : torch.Tensor
        First row of each range.
    ends : list of int
        How many of the rows lie in the ranges up to and including each.
    """

    uses: list[Use]
    firsts: torch.Tensor
    ends: list[int]


def _touched(table: PagedTensor, rows: torch.Tensor, mode: Mode) -> _Touched:
    storage = table._storage
    itemsize = table.itemsize
    step = table.stride(0) * itemsize
    origin = table.storage_offset() * itemsize
    inner = zip(table.size()[1:], table.stride()[1:], strict=True)
    row_bytes = (1 + sum((size - 1) * stride for size, stride in inner)) * itemsize
    _, counts = torch.unique_consecutive((rows * step + origin) // storage.block_bytes, return_counts=True)
    ends = counts.cumsum(0)
    firsts = rows[ends - counts]
    uses = [
        Use(storage, origin + first * step, origin + last * step + row_bytes, mode)
        for first, last in zip(firsts.tolist(), rows[ends - 1].tolist(), strict=True)
    ]
    return _Touched(uses, firsts, ends.tolist())


def gather_rows(table: PagedTensor, indices: torch.Tensor, op: str) -> torch.Tensor:
    """Rows of `table` along dimension 0, as a plain contiguous tensor ``[len(indices), *table.shape[1:]]``.

    Parameters
    ----------
    table : PagedTensor
        At least one-dimensional.
    indices : torch.Tensor
        One-dimensional, integers in ``[0, len(table))``.
    op : str
        For errors and events.
    """
    shape = tuple(table.size()[1:])
    result = torch.empty((indices.numel(), *shape), dtype=table.dtype, device=table.device)
    if result.numel() == 0 or _copied(table, indices, result, op, write=False):
        return result
    rows, positions = torch.unique(indices.long(), return_inverse=True)
    host_rows = rows.cpu()
    touched = _touched(table, host_rows, Mode.READ)

    pool = table._storage.pool
    step = table.stride(0)
    index = 0
    while index < len(touched.uses):
        stop = _group(touched.uses, index, pool.fast // _GROUP)
        first_row = touched.ends[index - 1] if index else 0
        last_row = touched.ends[stop - 1]
        counts = torch.tensor(touched.ends[index:stop]).diff(prepend=torch.tensor([first_row]))
        access = pool.acquire(touched.uses[index:stop], op, rows=True)
        try:
            # Rows of different blocks lie anywhere in the arena: each is addressed by its first element.
            places = torch.tensor(access.offsets) // table.itemsize - touched.firsts[index:stop] * step
            starts = (places.repeat_interleave(counts) + host_rows[first_row:last_row] * step).to(table.device)
            arena = table._arena.windows(table.dtype, shape, table.stride()[1:])
            if stop - index == len(touched.uses):
                return arena.index_select(0, starts[positions])
            chosen = ((positions >= first_row) & (positions < last_row)).nonzero().squeeze(1)
            result[chosen] = arena.index_select(0, starts[positions[chosen] - first_row])
        finally:
            pool.release(access)
        index = stop
    return result


def _copied(table: PagedTensor, rows: torch.Tensor, memory: torch.Tensor, op: str, *, write: bool) -> bool:
    """Copy rows between a table and a contiguous plain tensor in the native core, where that can be."""
    if table.device.type != "cpu":
        return False
    rows = rows.long().contiguous()
    limit = table._storage.pool.fast // _GROUP
    footprint = table._footprint
    return calls.copy_rows(footprint, op, rows.data_ptr(), rows.numel(), memory.data_ptr(), limit, write)


def scatter_rows(table: PagedTensor, rows: torch.Tensor, values: torch.Tensor, op: str) -> None:
    """Replace rows of `table` along dimension 0.

    Parameters
    ----------
    table : PagedTensor
        At least one-dimensional.
    rows : torch.Tensor
        Sorted and distinct, integers in ``[0, len(table))``.
    values : torch.Tensor
        Plain, ``[len(rows), *table.shape[1:]]``.
    op : str
        For errors and events.
    """
    values = values.contiguous()
    if _copied(table, rows, values, op, write=True):
        return
    shape = tuple(table.size()[1:])
    host_rows = rows.cpu()
    touched = _touched(table, host_rows, Mode.WRITE)
    pool = table._storage.pool
    step = table.stride(0)
    index = first_row = 0
    while index < len(touched.uses):
        stop = _group(touched.uses, index, pool.fast // _GROUP)
        last_row = touched.ends[stop - 1]
        try:
            access = pool.acquire(touched.uses[index:stop], op, rows=True)
        except FarpoolError as error:
            if first_row:
                error.add_note(f"{op} had changed {first_row} rows already; do not simply try it again")
            raise
        try:
            counts = torch.tensor(touched.ends[index:stop]).diff(prepend=torch.tensor([first_row]))
            places = torch.tensor(access.offsets) // table.itemsize - touched.firsts[index:stop] * step
            starts = (places.repeat_interleave(counts) + host_rows[first_row:last_row] * step).to(table.device)
            arena = table._arena.windows(table.dtype, shape, table.stride()[1:])
            arena.index_copy_(0, starts, values[first_row:last_row])
        finally:
            pool.release(access)
        index, first_row = stop, last_row


def _group(uses: list[Use], first: int, limit: int) -> int:
    """End of the group that begins at `first`: at least one use, and at most `limit` bytes."""
    block_bytes = uses[first].storage.block_bytes
    return min(len(uses), first + max(1, limit // block_bytes))


def _out_of_range(indices: torch.Tensor, rows: int, lowest: int = 0) -> bool:
    return bool(indices.numel()) and bool(((indices < lowest) | (indices >= rows)).any())


def _raise_as_torch(func: Any, table: PagedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the operation on a table of the same shape that holds one element, for its error."""
    single = torch.zeros(1, dtype=table.dtype, device=table.device)
    return func(single.expand(table.size()), *args, **kwargs)


@rule(_aten.embedding.default)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, indices = args[0], _plain(args[1])
    if not is_table(table) or table.dim() != 2 or indices.dtype not in _INDEX_TYPES:
        return NotImplemented
    if _out_of_range(indices, table.size(0)):
        return _raise_as_torch(func, table, (indices, *args[2:]), kwargs)
    return gather_rows(table, indices.reshape(-1), "aten.embedding").view(*indices.size(), table.size(1))


@rule(_aten.index_select.default)
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices = args[0], args[1], _plain(args[2])
    if not is_table(table) or dim % max(table.dim(), 1) != 0 or indices.dtype not in _INDEX_TYPES:
        return NotImplemented
    if indices.dim() > 1 or _out_of_range(indices, table.size(0)):
        return _raise_as_torch(func, table, (dim, indices), kwargs)
    return gather_rows(table, indices.reshape(-1), "aten.index_select")


@rule(_aten.index.Tensor)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, indices = args[0], args[1]
    if not is_table(table) or not indices or indices[0] is None or any(item is not None for item in indices[1:]):
        return NotImplemented
    chosen = _plain(indices[0])
    if chosen.dtype not in _INDEX_TYPES:
        return NotImplemented
    rows = table.size(0)
    if _out_of_range(chosen, rows, -rows):
        return _raise_as_torch(func, table, ([chosen],), kwargs)
    wrapped = torch.where(chosen < 0, chosen + rows, chosen).to(table.device)
    return gather_rows(table, wrapped.reshape(-1), "aten.index").view(*wrapped.size(), *table.size()[1:])
