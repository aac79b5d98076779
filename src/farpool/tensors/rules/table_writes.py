"""Rules for writes to the rows that indices name in a table: only the blocks of those rows are read and written back.

The rows are copied to a small plain table (see `farpool.tensors.rules.compact`), torch's own operation runs on it, and
the rows are copied back. So an operation that fails because of wrong shapes or an index out of range changes nothing in
the table. Rows that are overwritten completely are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from farpool.memory.pager import Mode
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.compact import can_be_compacted, compact
from farpool.tensors.rules.rows import INDEX_TYPES, from_the_front, out_of_range, plain, raise_as_torch, without_masks
from farpool.tensors.transfer import block_cuts, flat, same_layout, stream

__all__ = ["SCATTERS", "passes_by_other_rows"]

_aten = torch.ops.aten
SCATTERS = (
    _aten.scatter_.src,
    _aten.scatter_.value,
    _aten.scatter_.reduce,
    _aten.scatter_.value_reduce,
    _aten.scatter_add_.default,
    _aten.scatter_reduce_.two,
)
_REPLACE = frozenset(("index_copy_", "index_fill_"))
"""Operations that overwrite whole rows."""
_HALF = (torch.float16, torch.bfloat16)


def _change(
    table: PagedTensor,
    indices: torch.Tensor,
    op: str,
    function: Callable[[torch.Tensor, torch.Tensor], object],
    *,
    replaces: bool = False,
    only_changed: bool = False,
) -> PagedTensor:
    """Change the rows of a table that `indices` name.

    `function` is called with a small table of these rows and the indices into the small table, and changes the small
    table. The rows are then copied back to the table.

    Parameters
    ----------
    replaces : bool
        True if every touched row is overwritten completely.
    only_changed : bool
        True to write back only rows whose bytes have changed, for operations that change few rows. Rows must have one
        dimension.
    """
    rows = compact(indices, table.stride(0) * table.itemsize)
    values = rows.make(table) if replaces else rows.read(table, op)
    before = rows.chosen(values).clone() if only_changed else None
    function(values, rows.indices)
    if before is not None:
        # Compared as bytes, because a NaN differs from itself and a zero equals its negative.
        changed = (rows.chosen(values).view(torch.uint8) != before.view(torch.uint8)).any(1)
        rows = rows._replace(rows=rows.rows[changed], places=rows.places[changed])
    rows.write(table, values, op)
    return table


def passes_by_other_rows(func: Any, table: PagedTensor, args: Sequence[Any]) -> bool:
    """Return True if torch keeps every bit of the rows that no index names, even in a NaN.

    torch may change such rows in two cases. A reduction to the mean divides all rows, most of them by one. In half
    precision, torch copies all rows to single precision for ``scatter_*``, and for ``index_add_`` with rows of one
    element.
    """
    name = func._opname
    if any(value == "mean" for value in args if isinstance(value, str)):
        return False
    single = name.startswith("scatter_") or (name == "index_add_" and table.numel() == table.size(0))
    return table.dtype not in _HALF or not single


def _shares_memory(table: PagedTensor, others: Sequence[Any]) -> bool:
    """Return True if an operand may share memory with `table`, which is written; torch usually refuses such calls."""
    return any(type(other) is PagedTensor and other._storage is table._storage for other in others)


@rule(
    _aten.index_add_.default,
    _aten.index_copy_.default,
    _aten.index_reduce_.default,
    _aten.index_fill_.int_Scalar,
    _aten.index_fill_.int_Tensor,
    *SCATTERS,
)
def _along_rows(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices, *others = args
    if not can_be_compacted(table) or dim % table.dim() != 0 or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    if _shares_memory(table, (indices, *others)) or not passes_by_other_rows(func, table, others):
        return NotImplemented
    indices = plain(indices)
    others = [plain(value) for value in others]
    kwargs = {name: plain(value) for name, value in kwargs.items()}
    count = table.size(0)
    if func._opname == "index_fill_" and not out_of_range(indices, count, -count):
        indices = from_the_front(indices, count)
    if out_of_range(indices, count):
        raise_as_torch(func, table, (dim, indices, *others), kwargs)
    return _change(
        table,
        indices,
        f"aten.{func._opname}",
        lambda values, places: func(values, dim, places, *others, **kwargs),
        replaces=func._opname in _REPLACE,
    )


def _fills_by_mask(table: PagedTensor, given: Sequence[Any], values: torch.Tensor) -> bool:
    """Return True if the only index is a mask of the table's shape, and all selected elements get the same number."""
    mask = given[0]
    return (
        len(given) == 1
        and mask.dtype is torch.bool
        and same_layout(table, mask)
        and values.numel() == 1
        and values.dtype is table.dtype
        and not (type(mask) is PagedTensor and mask._storage.pool is not table._storage.pool)
    )


def _fill_by_mask(func: Any, table: PagedTensor, mask: torch.Tensor, value: torch.Tensor) -> None:
    """Set the elements that a mask selects, block by block. A list of their positions would take 16 bytes for each."""
    steps = list(pairwise(sorted(block_cuts([table], table._storage.pool.fast) | {0, table.numel()})))
    if type(mask) is not PagedTensor:
        truths = flat(mask)
        steps = [(first, last) for first, last in steps if truths[first:last].any()]

    def fill(piece: torch.Tensor, truths: torch.Tensor) -> None:
        func(piece, [truths], value)

    stream("aten.index_put_", fill, (table, Mode.WRITE), (mask, Mode.READ), steps=steps)


@rule(_aten.index_put_.default, _aten._index_put_impl_.default)
def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, given, values, *options = args
    if not can_be_compacted(table) or not given or given[0] is None or _shares_memory(table, (*given, values)):
        return NotImplemented
    values = plain(values)
    accumulate = options[0] if options else kwargs.get("accumulate", False)
    if not accumulate and _fills_by_mask(table, given, values):
        _fill_by_mask(func, table, given[0], values)
        return table
    indices = without_masks(given, table.size())
    if indices is None or indices[0].dtype not in INDEX_TYPES:
        return NotImplemented
    named = [index for index in given if index is not None]
    if not accumulate and values.numel() == 1 and len(named) == 1 and named[0].dtype is torch.uint8:
        # torch fills by mask here and does not accept a mask of this type, so let it raise its own error.
        torch.zeros(1).masked_fill_(torch.zeros(1, dtype=torch.uint8), 0)
    count = table.size(0)
    first, *others = indices
    if out_of_range(first, count, -count):
        raise_as_torch(func, table, (indices, values, *options), kwargs)
    return _change(
        table,
        from_the_front(first, count),
        "aten.index_put_",
        lambda chosen, places: func(chosen, [places, *others], values, *options, **kwargs),
        replaces=not accumulate and all(index is None for index in others),
    )


@rule(_aten.embedding_renorm_.default)
def _renorm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, indices, *options = args
    indices = plain(indices)
    if not can_be_compacted(table) or table.dim() != 2 or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    if out_of_range(indices, table.size(0), -table.size(0)):
        raise_as_torch(func, table, (indices, *options), kwargs)
    if out_of_range(indices, table.size(0)):
        return NotImplemented  # torch treats -1 as another row than the last one, and scales that row twice
    return _change(
        table,
        indices,
        "aten.embedding_renorm_",
        lambda values, places: func(values, places, *options, **kwargs),
        only_changed=True,
    )
