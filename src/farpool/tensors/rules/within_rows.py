"""Rules for gathers and scatters within the rows of a table that does not fit into the fast tier.

Each element of the result depends on one row of the table, so we compute with a few rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from farpool.errors import FarpoolError
from farpool.tensors.dispatch import fallback
from farpool.tensors.geometry import plain_empty
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.compact import can_be_compacted
from farpool.tensors.rules.rows import INDEX_TYPES, out_of_range, plain, raise_as_torch
from farpool.tensors.rules.table_writes import SCATTERS, passes_by_other_rows

_aten = torch.ops.aten
# A part takes at most the budget divided by this number.
_PART = 4


def _within_rows(table: Any, dim: int, indices: torch.Tensor) -> bool:
    return (
        can_be_compacted(table)
        and dim % table.dim() != 0
        and indices.dim() == table.dim()
        and indices.size(0) <= table.size(0)
        and indices.dtype in INDEX_TYPES
    )


def _parts(table: PagedTensor, count: int) -> Iterator[tuple[int, int]]:
    step = max(1, table._storage.pool.fast // _PART // (table.stride(0) * table.itemsize))
    for first in range(0, count, step):
        yield first, min(first + step, count)


@fallback(_aten.gather.default)
def _gather(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices = args
    indices = plain(indices)
    if not _within_rows(table, dim, indices):
        return NotImplemented
    size = tuple(indices.size())
    result = plain_empty(size, indices.contiguous().stride(), table.dtype, table.device)
    for first, last in _parts(table, size[0]):
        result[first:last] = func(table[first:last], dim, indices[first:last], **kwargs)
    return result


@fallback(*SCATTERS)
def _scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, dim, indices, *others = args
    indices = plain(indices)
    if not _within_rows(table, dim, indices) or not passes_by_other_rows(func, table, others):
        return NotImplemented
    source = others[0] if others else None
    if isinstance(source, torch.Tensor) and source.dim() != table.dim():
        return NotImplemented
    # All indices are checked before the first part, so that torch's own error leaves nothing changed.
    if out_of_range(indices, table.size(dim)):
        raise_as_torch(func, table, (dim, indices, *map(plain, others)), kwargs)
    for first, last in _parts(table, indices.size(0)):
        part = [source[first:last], *others[1:]] if isinstance(source, torch.Tensor) else others
        try:
            func(table[first:last], dim, indices[first:last], *part, **kwargs)
        except FarpoolError as error:
            if first:
                error.add_note(f"{func} had changed the first {first} rows already; do not simply try it again")
            raise
    return table
