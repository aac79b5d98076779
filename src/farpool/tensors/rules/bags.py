"""Rules for ``embedding_bag``. A *bag* is a group of rows of a table whose sum, mean or maximum is computed.

Only the blocks of these rows are read. torch's operation runs on a small table (see `farpool.tensors.rules.compact`).
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.compact import Compact, can_be_compacted, compact
from farpool.tensors.rules.rows import INDEX_TYPES, out_of_range, plain, raise_as_torch

__all__ = ["MAX", "renamed_padding", "rows_of_bags"]

_aten = torch.ops.aten
MAX = 2
"""Mode of ``embedding_bag`` in which the result has the largest elements of each bag."""


def rows_of_bags(indices: torch.Tensor, row_bytes: int, padding: int) -> Compact:
    """The rows that bags touch. They include the padding row, if any, because it changes how torch computes bags."""
    return compact(indices, row_bytes, padding) if padding >= 0 else compact(indices, row_bytes)


def renamed_padding(rows: Compact, padding: int) -> int:
    """Row number of the padding row in the small table; -1 if there is no padding row."""
    return rows.place_of(padding) if padding >= 0 else padding


def _rows_chosen(rows: Compact, chosen: torch.Tensor, bag_size: torch.Tensor) -> torch.Tensor:
    """Convert `chosen`, the row numbers of the largest elements of each bag, from the small table to the large one."""
    named = rows.names()[chosen].to(chosen.dtype)
    return torch.where((bag_size == 0).unsqueeze(1), chosen, named)  # an empty bag has no largest element


@rule(_aten._embedding_bag.default, _aten._embedding_bag_forward_only.default)
def _bags(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _compute(func, *args, **kwargs)


def _compute(
    func: Any,
    weight: Any,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    if not can_be_compacted(weight) or weight.dim() != 2 or indices.dim() != 1 or indices.dtype not in INDEX_TYPES:
        return NotImplemented
    indices = plain(indices)
    options = (scale_grad_by_freq, mode, sparse, plain(per_sample_weights), include_last_offset)
    # In the small table every index is valid, so we compare with the large one first.
    if out_of_range(indices, weight.size(0)):
        raise_as_torch(func, weight, (indices, plain(offsets), *options, padding_idx), {})
    rows = rows_of_bags(indices, _row_bytes(weight), padding_idx)
    values = rows.read(weight, "aten.embedding_bag")
    result = func(values, rows.indices, plain(offsets), *options, renamed_padding(rows, padding_idx))
    if mode != MAX or result[3].numel() == 0:
        return result
    return (*result[:3], _rows_chosen(rows, result[3], result[2]))


@rule(_aten._embedding_bag_per_sample_weights_backward.default)
def _weights_of_samples(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _compute_weights_of_samples(func, *args, **kwargs)


def _compute_weights_of_samples(
    func: Any,
    grad: torch.Tensor,
    weight: Any,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    mode: int,
    padding_idx: int = -1,
) -> Any:
    indices = plain(indices)
    if not can_be_compacted(weight) or weight.dim() != 2 or out_of_range(indices, weight.size(0)):
        return NotImplemented
    rows = rows_of_bags(indices, _row_bytes(weight), padding_idx)
    values = rows.read(weight, "aten.embedding_bag")
    padding = renamed_padding(rows, padding_idx)
    return func(plain(grad), values, rows.indices, plain(offsets), plain(offset2bag), mode, padding)


def _row_bytes(table: PagedTensor) -> int:
    return table.stride(0) * table.itemsize
