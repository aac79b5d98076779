"""Refusals of operations that torch, before it dispatches, computes with other bits for any tensor subclass."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor, describe

_aten = torch.ops.aten


@rule(_aten.prod.default, _aten.prod.dim_int)
def _prod(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"the gradient of prod() of {describe(args[0])} would differ in its last bits from that of a plain tensor: "
            "take the product of (t * 1), which is plain"
        )
    return NotImplemented


@rule(_aten.min.default, _aten.max.default, _aten.median.default, _aten.nanmedian.default)
def _extreme(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"the gradient of {func._opname}() of {describe(args[0])} would have zeros of another sign than that of "
            "a plain tensor: take it of (t * 1), which is plain"
        )
    return NotImplemented


@rule(_aten.masked_fill.Tensor, _aten.masked_fill_.Tensor)
def _masked_fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    mask, value = args[1], args[2]
    if type(mask) is PagedTensor and value.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"the gradient of masked_fill()'s value would differ in its last bits with {describe(mask)} as mask: "
            "use a plain mask, pool.materialize(mask)"
        )
    return NotImplemented


@rule(_aten._linalg_svd.default, _aten.linalg_eig.default, _aten._linalg_eigh.default)
def _decomposition(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # svdvals() and eigvals() of a plain tensor without gradient leave the vectors out, which changes the values; seen
    # from here they look like svd() and eig().
    matrix = args[0]
    if type(matrix) is not PagedTensor or (matrix.requires_grad and torch.is_grad_enabled()):
        return NotImplemented
    raise UnsupportedError(
        f"{func} of {describe(matrix)} could differ in its last bits from that of a plain tensor: "
        "decompose (t * 1), which is plain"
    )
