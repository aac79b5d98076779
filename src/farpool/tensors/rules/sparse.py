"""Rules for sparse gradients. The rules read and write only the rows that a gradient names in a table.

torch adds each row of a sparse tensor with one call of a vector library. So the bits are the same if torch adds the
sparse tensor to a small table that has only the named rows, in the same order (see `farpool.tensors.rules.compact`).
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.compact import Compact, can_be_compacted, compact

_aten = torch.ops.aten


def _names_rows(table: Any, sparse: Any) -> bool:
    return (
        type(sparse) is torch.Tensor
        and sparse.layout is torch.sparse_coo
        and sparse.sparse_dim() == 1
        and can_be_compacted(table)
        and sparse.dtype is table.dtype
        and sparse.size() == table.size()
    )


def _compacted(table: PagedTensor, sparse: torch.Tensor) -> tuple[Compact, torch.Tensor]:
    """Return the rows that a sparse tensor names, and the sparse tensor with its indices changed to the small table."""
    rows = compact(sparse._indices()[0], table.stride(0) * table.itemsize)
    size = (rows.size, *sparse.size()[1:])
    small = torch.sparse_coo_tensor(
        rows.indices.unsqueeze(0), sparse._values(), size, is_coalesced=sparse.is_coalesced(), check_invariants=False
    )
    return rows, small


@rule(_aten.add_.Tensor, sparse=True)
def _add(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, sparse = args[0], args[1]
    if not _names_rows(table, sparse):
        return NotImplemented
    rows, small = _compacted(table, sparse)
    rows.write(table, func(rows.read(table, "aten.add_"), small, *args[2:], **kwargs), "aten.add_")
    return table


@rule(_aten.sparse_mask.default)
def _sparse_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, mask = args
    if not _names_rows(table, mask):
        return NotImplemented
    rows, small = _compacted(table, mask)
    result = func(rows.read(table, "aten.sparse_mask"), small)
    return torch.sparse_coo_tensor(
        rows.names()[result._indices()],
        result._values(),
        mask.size(),
        is_coalesced=result.is_coalesced(),
        check_invariants=False,
    )
