"""Dense gradients of tables, written into the pool block by block, so that no plain copy of the table's size exists.

torch's own backward pass of a lookup in a table makes a plain gradient as large as the table. So we replace the
backward pass if the gradient will be paged anyway: if the table is a leaf, spans several blocks, and is of class
"embedding" or larger than the fast tier. Our backward pass runs torch's kernel on a small table of the rows that were
looked up, so the kernel adds the gradients of a row in the same order. Then it writes each block of the large gradient
once. Sparse gradients, gradients of gradients, forward-mode derivatives and ``torch.func`` use torch's own backward
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from farpool.memory.pager import Mode
from farpool.memory.pager.storage import StorageOwner
from farpool.tensors.before_autograd import keys_after, register
from farpool.tensors.factories import allocate
from farpool.tensors.geometry import contiguous_strides
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.rules.bags import MAX, renamed_padding, rows_of_bags
from farpool.tensors.rules.compact import Compact, can_be_compacted, compact
from farpool.tensors.rules.rows import INDEX_TYPES, from_the_front, without_masks
from farpool.tensors.transfer import block_cuts, stream

_aten = torch.ops.aten

Add = Callable[[torch.Tensor, list[Any], torch.Tensor], torch.Tensor]
"""Function that adds a gradient at indices to zeros of a table's size, as torch's backward pass does."""


class _Table:
    """Geometry of a table, for making its gradient. An autograd graph holds this object instead of the table.

    Attributes
    ----------
    pool : StorageOwner
    size : tuple of int
        Shape of the table. Its first entry is the number of rows.
    row_bytes : int
    """

    __slots__ = ("_dtype", "_name", "pool", "row_bytes", "size")

    def __init__(self, table: PagedTensor) -> None:
        storage = table._storage
        self.pool: StorageOwner = storage.pool
        self.size = tuple(table.size())
        self.row_bytes = table.stride(0) * table.itemsize
        self._dtype = table.dtype
        self._name = storage.gradient_name

    def takes(self, grad: torch.Tensor) -> bool:
        """Return True if our backward pass can compute the table's gradient from `grad`, the gradient of the result."""
        return (
            type(grad) is torch.Tensor
            and grad.dtype is self._dtype
            and not self.pool.closed
            and not torch.is_grad_enabled()  # else the gradient is to have a history
            and not torch.is_anomaly_enabled()  # which looks for NaN in the whole gradient
            and not torch._C._functorch.is_legacy_batchedtensor(grad)  # several gradients at once
        )

    def gradient(self, rows: Compact, values: torch.Tensor) -> PagedTensor:
        """Make the table's paged gradient from `values`, a small table of the rows `rows`. All other rows are zero."""
        stride = contiguous_strides(self.size)
        grad = allocate(self.pool, self.size, stride, self._dtype, cls="gradient", name=self._name)
        width = math.prod(self.size[1:])
        values = values.view(rows.size, width)
        cuts = {cut // width * width for cut in block_cuts([grad], self.pool.fast)}
        steps = list(pairwise(sorted(cuts | {0, grad.numel()})))
        bounds = torch.tensor([(first // width, last // width) for first, last in steps])
        pieces = iter(zip(bounds.tolist(), torch.searchsorted(rows.rows, bounds).tolist(), strict=True))

        def fill(piece: torch.Tensor) -> None:
            # `stream` goes through the steps in order, so the next bounds are the ones of this piece.
            (first, _), (start, stop) = next(pieces)
            # The gradient is written in mode OVERWRITE, which fetches no old bytes: every element must be set here.
            piece.zero_()
            chosen = values.index_select(0, rows.places[start:stop])
            piece.view(-1, width).index_copy_(0, rows.rows[start:stop] - first, chosen)

        stream("farpool.gradient", fill, (grad, Mode.OVERWRITE), steps=steps)
        return grad


class _Lookup(torch.autograd.Function):
    """Autograd function of ``embedding`` that writes the dense gradient of the table into the pool."""

    @staticmethod
    def forward(
        ctx: Any, keys: Any, table: PagedTensor, indices: torch.Tensor, padding: int, scale_grad_by_freq: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.table, ctx.padding, ctx.scale_grad_by_freq = _Table(table), padding, scale_grad_by_freq
        result: torch.Tensor = _aten.embedding.default.redispatch(keys, table, indices, padding, scale_grad_by_freq)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        table, padding = ctx.table, ctx.padding
        if not table.takes(grad):
            whole = _aten.embedding_backward(grad, indices, table.size[0], padding, ctx.scale_grad_by_freq, False)
            return None, whole, None, None, None
        rows = rows_of_bags(indices, table.row_bytes, padding)
        values = _aten.embedding_dense_backward(
            grad, rows.indices, rows.size, renamed_padding(rows, padding), ctx.scale_grad_by_freq
        )
        return None, table.gradient(rows, values), None, None, None


class _Bags(torch.autograd.Function):
    """Autograd function of ``_embedding_bag`` that writes the dense gradient of the table into the pool."""

    @staticmethod
    def forward(
        ctx: Any,
        keys: Any,
        table: PagedTensor,
        indices: torch.Tensor,
        offsets: torch.Tensor,
        scale_grad_by_freq: bool,
        mode: int,
        weights: torch.Tensor | None,
        include_last_offset: bool,
        padding: int,
    ) -> Any:
        result = _aten._embedding_bag.default.redispatch(
            keys, table, indices, offsets, scale_grad_by_freq, mode, False, weights, include_last_offset, padding
        )
        ctx.options = scale_grad_by_freq, mode, padding
        ctx.table = _Table(table)
        # The gradient of the samples' weights needs the rows of the table.
        ctx.save_for_backward(indices, offsets, *result[1:], weights, table if ctx.needs_input_grad[6] else None)
        ctx.mark_non_differentiable(*result[1:])
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *_: Any) -> Any:
        if grad is None:
            return (None,) * 9
        scale_grad_by_freq, mode, padding = ctx.options
        indices, offsets, offset2bag, bag_size, largest, weights, whole_table = ctx.saved_tensors
        of_weights = None
        if whole_table is not None:
            of_weights = _aten._embedding_bag_per_sample_weights_backward(
                grad, whole_table, indices, offsets, offset2bag, mode, padding
            )
        table = ctx.table

        def backward(indices: torch.Tensor, largest: torch.Tensor, count: int, padding: int) -> Any:
            return _aten._embedding_bag_backward(
                *(grad, indices, offsets, offset2bag, bag_size, largest, count),
                *(scale_grad_by_freq, mode, False, weights, padding),
            )

        of_table: torch.Tensor | None = None
        if ctx.needs_input_grad[1]:
            if table.takes(grad):
                rows = rows_of_bags(indices, table.row_bytes, padding)
                renamed = _renamed_largest(rows, largest) if mode == MAX else largest
                values = backward(rows.indices, renamed, rows.size, renamed_padding(rows, padding))
                of_table = table.gradient(rows, values)
            else:
                of_table = backward(indices, largest, table.size[0], padding)
        return None, of_table, None, None, None, None, of_weights, None, None


class _Picked(torch.autograd.Function):
    """Like `_Lookup`, but for ``index_select``, ``index`` and ``gather`` along the rows of a table."""

    @staticmethod
    def forward(ctx: Any, keys: Any, func: Any, add: Add, table: PagedTensor, *indices: torch.Tensor | None) -> Any:
        ctx.save_for_backward(*indices)
        ctx.table, ctx.add = _Table(table), add
        return func(keys, table, indices)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        indices = ctx.saved_tensors
        table = ctx.table
        nothing = (None,) * len(indices)
        named = without_masks(indices, table.size) if table.takes(grad) else None
        if named is None or named[0].dtype not in INDEX_TYPES:
            return None, None, None, ctx.add(grad.new_zeros(table.size), list(indices), grad), *nothing
        first, *others = named
        rows = compact(from_the_front(first, table.size[0]), table.row_bytes)
        values = ctx.add(grad.new_zeros((rows.size, *table.size[1:])), [rows.indices, *others], grad)
        return None, None, None, table.gradient(rows, values), *nothing


def _renamed_largest(rows: Compact, largest: torch.Tensor) -> torch.Tensor:
    """Convert row numbers of the large table to the small table; arbitrary for a bag without a chosen row."""
    if rows.rows.numel() == 0:
        return torch.zeros_like(largest)
    found = torch.searchsorted(rows.rows, largest.long()).clamp_(max=rows.rows.numel() - 1)
    return rows.places[found].to(largest.dtype)


def _wants_paged_gradient(table: Any) -> bool:
    return (
        can_be_compacted(table)
        and (table._storage.cls == "embedding" or table.nbytes > table._storage.pool.fast)
        and table.is_leaf
        and table.requires_grad
        and torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
    )


def _lookup(
    keys: Any,
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    keys = keys_after(keys)
    if sparse or weight.dim() != 2 or not _wants_paged_gradient(weight):
        return _aten.embedding.default.redispatch(keys, weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return _Lookup.apply(keys, weight, indices, padding_idx, scale_grad_by_freq)  # type: ignore[no-untyped-call]


def _bags(
    keys: Any,
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    keys = keys_after(keys)
    options = per_sample_weights, include_last_offset, padding_idx
    if sparse or weight.dim() != 2 or not _wants_paged_gradient(weight):
        return _aten._embedding_bag.default.redispatch(
            keys, weight, indices, offsets, scale_grad_by_freq, mode, sparse, *options
        )
    return _Bags.apply(keys, weight, indices, offsets, scale_grad_by_freq, mode, *options)  # type: ignore[no-untyped-call]


def _index_select(keys: Any, table: Any, dim: int, indices: Any) -> Any:
    keys = keys_after(keys)
    if not _wants_paged_gradient(table) or dim not in (0, -table.dim()):
        return _aten.index_select.default.redispatch(keys, table, dim, indices)
    select = lambda keys, table, indices: _aten.index_select.default.redispatch(keys, table, 0, *indices)  # noqa: E731
    add = lambda zeros, indices, grad: zeros.index_add_(0, *indices, grad)  # noqa: E731
    return _Picked.apply(keys, select, add, table, indices)  # type: ignore[no-untyped-call]


def _index(keys: Any, table: Any, indices: Any) -> Any:
    keys = keys_after(keys)
    if not indices or indices[0] is None or not _wants_paged_gradient(table):
        return _aten.index.Tensor.redispatch(keys, table, indices)
    add = lambda zeros, indices, grad: zeros.index_put_(indices, grad, accumulate=True)  # noqa: E731
    return _Picked.apply(keys, _aten.index.Tensor.redispatch, add, table, *indices)  # type: ignore[no-untyped-call]


def _gather(keys: Any, table: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> Any:
    keys = keys_after(keys)
    if sparse_grad or not _wants_paged_gradient(table) or dim not in (0, -table.dim()):
        return _aten.gather.default.redispatch(keys, table, dim, indices, sparse_grad=sparse_grad)
    gather = lambda keys, table, indices: _aten.gather.default.redispatch(keys, table, 0, *indices)  # noqa: E731
    add = lambda zeros, indices, grad: zeros.scatter_add_(0, *indices, grad)  # noqa: E731
    return _Picked.apply(keys, gather, add, table, indices)  # type: ignore[no-untyped-call]


register("embedding", _lookup)
register("_embedding_bag", _bags)
register("index_select", _index_select)
register("index.Tensor", _index)
register("gather", _gather)
