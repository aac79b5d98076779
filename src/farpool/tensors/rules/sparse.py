"""Sparse gradients and tables that do not fit into the fast tier: only the rows that they name are read and written.

torch adds a sparse tensor row by row, and each row with one call of a vector library, whose bits may depend on how the
row is aligned. So the same call is made on a small table of the rows that are named, in their order, and only where
rows are whole cache lines, so that they are aligned alike there.
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.pager import ALIGNMENT
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.rows import gather_rows, is_table, scatter_rows

__all__ = ["add_sparse"]

_aten = torch.ops.aten


def _names_rows(table: Any, sparse: Any) -> bool:
    return (
        is_table(table)
        and table.device.type == "cpu"
        and table.is_contiguous()
        and table.stride(0) * table.itemsize % ALIGNMENT == 0
        and table.storage_offset() * table.itemsize % ALIGNMENT == 0
        and type(sparse) is torch.Tensor
        and sparse.layout is torch.sparse_coo
        and sparse.sparse_dim() == 1
        and sparse.dtype is table.dtype
        and sparse.size() == table.size()
    )


def _compacted(sparse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that are named, sorted and distinct, and the same values as a tensor with those rows alone."""
    rows, places = torch.unique(sparse._indices()[0], return_inverse=True)
    size = (rows.numel(), *sparse.size()[1:])
    compact = torch.sparse_coo_tensor(
        places.unsqueeze(0), sparse._values(), size, is_coalesced=sparse.is_coalesced(), check_invariants=False
    )
    return rows, compact


def add_sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``table.add_(sparse, alpha=...)``."""
    table, sparse = args[0], args[1]
    if func is not _aten.add_.Tensor or not _names_rows(table, sparse):
        return NotImplemented
    rows, compact = _compacted(sparse)
    values = gather_rows(table, rows, "aten.add_")
    scatter_rows(table, rows, func(values, compact, **kwargs), "aten.add_")
    return table


@rule(_aten.sparse_mask.default)
def _sparse_mask(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    table, mask = args
    if type(table) is not PagedTensor or not _names_rows(table, mask):
        return NotImplemented
    rows, compact = _compacted(mask)
    result = func(gather_rows(table, rows, "aten.sparse_mask"), compact)
    return torch.sparse_coo_tensor(
        rows[result._indices()],
        result._values(),
        mask.size(),
        is_coalesced=result.is_coalesced(),
        check_invariants=False,
    )
