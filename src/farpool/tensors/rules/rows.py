"""Reads and writes rows of a table, which may be larger than the fast tier. Only the blocks of touched rows are pinned.

The rows are only copied, so the bits are the same as in the operation on the whole table. The touched blocks are pinned
in groups that fit well into the budget, so the number of rows is not limited.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from farpool.errors import FarpoolError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.tensors.calls import calls
from farpool.tensors.dispatch import rule
from farpool.tensors.factories import materialize
from farpool.tensors.geometry import plain_empty
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.transfer import spans_blocks

__all__ = [
    "INDEX_TYPES",
    "from_the_front",
    "gather_rows",
    "is_table",
    "named_once",
    "out_of_range",
    "plain",
    "raise_as_torch",
    "scatter_rows",
    "without_masks",
]

_aten = torch.ops.aten
INDEX_TYPES = (torch.int64, torch.int32)
_MASKS = (torch.bool, torch.uint8)
# A group of blocks takes at most this part of the budget, so that the next group can be fetched at the same time.
_GROUP = 4


def is_table(value: Any) -> bool:
    """Return True if a value is a paged tensor of several blocks, each row of which can be pinned separately."""
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


def plain(value: Any) -> Any:
    """A plain copy of a paged tensor; any other value is returned as it is."""
    return materialize(value) if type(value) is PagedTensor else value


class _Touched(NamedTuple):
    """The blocks in which touched rows begin, in order, with one byte range for each block.

    Attributes
    ----------
    uses : list of Use
        For each block, the bytes from the first to the last touched row that begins in the block.
    firsts : torch.Tensor
        Row number of the first touched row of each range.
    ends : list of int
        For each range, the count of touched rows in this range and all ranges before it.
    blocks : list of int
        For each range, the count of blocks that this range and all ranges before it touch. A block that two ranges
        share counts twice.
    """

    uses: list[Use]
    firsts: torch.Tensor
    ends: list[int]
    blocks: list[int]

    def group(self, first: int, limit: int) -> int:
        """Return the end index of a group of ranges that begins with range `first` and touches at most `limit` blocks.

        The group has at least one range, even if that range touches more blocks.
        """
        before = self.blocks[first - 1] if first else 0
        return max(first + 1, bisect_right(self.blocks, before + limit))


def _touched(table: PagedTensor, rows: torch.Tensor, mode: Mode) -> _Touched:
    storage = table._storage
    itemsize = table.itemsize
    step = table.stride(0) * itemsize
    origin = int(table.storage_offset()) * itemsize
    inner = zip(table.size()[1:], table.stride()[1:], strict=True)
    row_bytes = (1 + sum((size - 1) * stride for size, stride in inner)) * itemsize
    block_bytes = storage.block_bytes
    found, counts = torch.unique_consecutive((rows * step + origin) // block_bytes, return_counts=True)
    ends = counts.cumsum(0)
    firsts = rows[ends - counts]
    starts = firsts * step + origin
    stops = rows[ends - 1] * step + origin + row_bytes
    blocks = ((stops - 1) // block_bytes - found + 1).cumsum(0)
    uses = [Use(storage, start, stop, mode) for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return _Touched(uses, firsts, ends.tolist(), blocks.tolist())


def gather_rows(table: PagedTensor, indices: torch.Tensor, op: str) -> torch.Tensor:
    """Rows of `table` along dimension 0, as a plain contiguous tensor ``[len(indices), *table.shape[1:]]``.

    Parameters
    ----------
    table : PagedTensor
        At least one-dimensional.
    indices : torch.Tensor
        One-dimensional, integers in ``[0, len(table))``. If they are on a GPU, the host waits for them.
    op : str
        For errors and events.
    """
    shape = tuple(table.size()[1:])
    result = torch.empty((indices.numel(), *shape), dtype=table.dtype, device=table.device)
    if result.numel() == 0 or _copied(table, indices, result, op, write=False):
        return result
    # All that depends on the values of the indices is computed on the host, so that it waits for the device only once.
    rows, positions = torch.unique(indices.cpu().long(), return_inverse=True)
    touched = _touched(table, rows, Mode.READ)

    pool = table._storage.pool
    step = table.stride(0)
    index = 0
    while index < len(touched.uses):
        stop = touched.group(index, pool.fast // _GROUP // table._storage.block_bytes)
        first_row = touched.ends[index - 1] if index else 0
        last_row = touched.ends[stop - 1]
        counts = torch.tensor(touched.ends[index:stop]).diff(prepend=torch.tensor([first_row]))
        access = pool.acquire(touched.uses[index:stop], op, rows=True)
        try:
            # Rows of different blocks may be anywhere in the arena, so each is addressed by its first element.
            places = torch.tensor(access.offsets) // table.itemsize - touched.firsts[index:stop] * step
            starts = places.repeat_interleave(counts) + rows[first_row:last_row] * step
            arena = table._arena.windows(table.dtype, shape, table.stride()[1:])
            if stop - index == len(touched.uses):
                # The selection copies the rows, so the result does not depend on the arena after the release.
                return arena.index_select(0, _sent(starts[positions], table.device))
            chosen = ((positions >= first_row) & (positions < last_row)).nonzero().squeeze(1)
            found = arena.index_select(0, _sent(starts[positions[chosen] - first_row], table.device))
            result.index_copy_(0, _sent(chosen, table.device), found)
        finally:
            pool.release(access)
        index = stop
    return result


def _sent(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor in host memory, on the table's device. The host does not wait until it is there."""
    return numbers if device.type == "cpu" else numbers.pin_memory().to(device, non_blocking=True)


def _copied(table: PagedTensor, rows: torch.Tensor, memory: torch.Tensor, op: str, *, write: bool) -> bool:
    """Copy rows between a table and a contiguous plain tensor in the native core; return False if it cannot do that."""
    if table.device.type != "cpu":
        return False
    rows = rows.long().contiguous()
    footprint = table._footprint
    return calls.copy_rows(footprint, op, rows.data_ptr(), rows.numel(), memory.data_ptr(), _GROUP, write)


def scatter_rows(table: PagedTensor, rows: torch.Tensor, values: torch.Tensor, op: str) -> None:
    """Overwrite the rows `rows` of `table` along dimension 0 with `values`.

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
        stop = touched.group(index, pool.fast // _GROUP // table._storage.block_bytes)
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
            starts = places.repeat_interleave(counts) + host_rows[first_row:last_row] * step
            arena = table._arena.windows(table.dtype, shape, table.stride()[1:])
            arena.index_copy_(0, _sent(starts, table.device), values[first_row:last_row])
        finally:
            pool.release(access)
        index, first_row = stop, last_row


def out_of_range(indices: torch.Tensor, rows: int, lowest: int = 0) -> bool:
    """Return True if any index is outside ``[lowest, rows)``."""
    if indices.numel() == 0:
        return False
    smallest, largest = torch.aminmax(indices)
    return int(smallest) < lowest or int(largest) >= rows


def without_masks(indices: Sequence[Any], size: Sequence[int]) -> list[Any] | None:
    """Replace each mask among indices by the positions of its true elements; None if a mask has no dimension."""
    found: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or index.dtype not in _MASKS:
            found.append(plain(index))
            continue
        if index.dim() == 0:
            return None
        first = len(found)
        for dim, extent in enumerate(index.size()):
            if list(size[first + dim : first + dim + 1]) != [extent]:
                raise IndexError(
                    f"The shape of the mask {list(index.size())} at index {dim} does not match "
                    f"the shape of the indexed tensor {list(size)} at index {first + dim}"
                )
        found.extend(plain(index).nonzero(as_tuple=True))
    return found


def named_once(indices: torch.Tensor) -> torch.Tensor:
    """Return a view of an expanded tensor. The view has each repeated element only once.

    A caller expands its own result again, because torch chooses another kernel for expanded indices.
    """
    for dim, stride in enumerate(indices.stride()):
        if stride == 0 and indices.size(dim) > 1:
            indices = indices.narrow(dim, 0, 1)
    return indices


def from_the_front(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Replace negative indices, which count from the end of `count` rows, by the indices that count from the front."""
    single = named_once(indices)
    return torch.where(single < 0, single + count, single).expand(indices.size())


def raise_as_torch(func: Any, table: PagedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    """Raise torch's own error for an index out of range: run the operation on a plain tensor of the table's shape.

    The plain tensor takes little memory: only the failing operation writes to it, and the operating system provides
    memory only for written pages.
    """
    try:
        memory = plain_empty(table.size(), table.stride(), table.dtype, table.device)
    except RuntimeError:  # the system refuses to promise memory that it could not back
        memory = torch.zeros(1, dtype=table.dtype, device=table.device).expand(table.size())
    func(memory, *args, **kwargs)
    raise IndexError(f"{func}: index out of range for {describe(table)}")


@rule(_aten.embedding.default)
def _embedding(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, indices = args[0], plain(args[1])
    if not is_table(table) or table.dim() != 2 or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    named = indices.cpu()
    if out_of_range(named, table.size(0)):
        raise_as_torch(func, table, (indices, *args[2:]), kwargs)
    return gather_rows(table, named.reshape(-1), "aten.embedding").view(*indices.size(), table.size(1))


@rule(_aten.index_select.default)
def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices = args[0], args[1], plain(args[2])
    if not is_table(table) or dim not in (0, -table.dim()) or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    named = indices.cpu()
    if indices.dim() > 1 or out_of_range(named, table.size(0)):
        raise_as_torch(func, table, (dim, indices), kwargs)
    return gather_rows(table, named.reshape(-1), "aten.index_select")


@rule(_aten.index.Tensor)
def _index(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, given = args[0], args[1]
    if not is_table(table) or not given or given[0] is None:
        return NotImplemented
    indices = without_masks(given, table.size())
    if indices is None or indices[0].dtype not in INDEX_TYPES:
        return NotImplemented
    first, *others = indices
    rows = table.size(0)
    if out_of_range(first, rows, -rows):
        raise_as_torch(func, table, (indices,), kwargs)
    wrapped = from_the_front(first, rows).to(table.device)
    if all(index is None for index in others):
        return gather_rows(table, wrapped.reshape(-1), "aten.index").view(*wrapped.size(), *table.size()[1:])
    if not table.is_contiguous():
        return NotImplemented  # the order of the result's memory would depend on the table's
    touched, places = torch.unique(wrapped.long(), return_inverse=True)
    return func(gather_rows(table, touched, "aten.index"), [places, *others])


@rule(_aten.gather.default)
def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices = args[0], args[1], plain(args[2])
    # A dimension out of range may pass this check if it is a multiple (4 of 2); `func` below receives it and raises.
    if not is_table(table) or dim % table.dim() != 0 or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    if indices.dim() != table.dim() or out_of_range(indices, table.size(0)):
        raise_as_torch(func, table, (dim, indices), kwargs)
    if any(size > extent for size, extent in zip(indices.size()[1:], table.size()[1:], strict=True)):
        raise_as_torch(func, table, (dim, indices), kwargs)
    rows, places = torch.unique(indices.long(), return_inverse=True)
    for inner, size in enumerate(indices.size()[1:], start=1):
        table = table.narrow(inner, 0, size)  # the other columns are not needed
    return func(gather_rows(table, rows, "aten.gather"), dim, places)
