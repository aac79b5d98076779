"""Elementwise arithmetic on tensors larger than the fast tier. Optimizers use it on weights, gradients and moments.

Tensors that fit into the fast tier are not cut into pieces: they are pinned in one access, so if a transfer fails,
nothing has changed, and the program can call the operation again. Functions from a library of vector functions
(``exp_``) always run on whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.dispatch import fallback
from farpool.tensors.factories import allocate
from farpool.tensors.geometry import plain_empty
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.pieces import compute_in_pieces

_aten = torch.ops.aten
_OPTIMIZER_CLASSES = ("gradient", "optimizer", "embedding")
"""Classes of blocks of gradients and moments. ``embedding`` is one, because a table's moments may have its class."""


@fallback(
    _aten.add.Tensor,
    _aten.add_.Tensor,
    _aten.sub.Tensor,
    _aten.sub_.Tensor,
    _aten.mul.Tensor,
    _aten.mul_.Tensor,
    _aten.mul.out,
    _aten.div.Tensor,
    _aten.div_.Tensor,
    _aten.addcmul.default,
    _aten.addcmul_.default,
    _aten.addcdiv.default,
    _aten.addcdiv_.default,
    _aten.lerp.Scalar,
    _aten.lerp_.Scalar,
    _aten.lerp.Tensor,
    _aten.lerp_.Tensor,
    _aten.sqrt.default,
    _aten.sqrt_.default,
    _aten.neg.default,
    _aten.neg_.default,
    _aten.sign.default,
    _aten.sign_.default,
    _aten.abs.default,
    _aten.abs_.default,
    _aten.reciprocal.default,
    _aten.reciprocal_.default,
    _aten.clamp.default,
    _aten.clamp_.default,
    _aten.clamp_min.default,
    _aten.clamp_min_.default,
    _aten.clamp_max.default,
    _aten.clamp_max_.default,
    _aten.maximum.default,
    _aten.maximum.out,
    _aten.minimum.default,
    _aten.minimum.out,
    _aten.gt.Scalar,
    _aten.lt.Scalar,
    _aten.eq.Scalar,
    _aten.where.self,
)
def _in_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if any(isinstance(value, torch.Tensor) and value.layout is not torch.strided for value in args):
        return NotImplemented

    def make_result(like: torch.Tensor) -> torch.Tensor:
        for value in args:
            # A result that an optimizer or autograd computes from gradients and moments is as large as their table.
            if type(value) is PagedTensor and value._storage.cls in _OPTIMIZER_CLASSES and not value.requires_grad:
                pool, cls = value._storage.pool, value._storage.cls
                return allocate(pool, like.size(), like.stride(), like.dtype, cls=cls, name=value._storage.name)
        device = next(value.device for value in args if isinstance(value, torch.Tensor) and value.dim())
        return plain_empty(like.size(), like.stride(), like.dtype, device)

    result = compute_in_pieces(func, args, kwargs, make_result)
    return kwargs.get("out", args[0]) if result is None else result
