"""Arithmetic that rounds once for each element, in place: the same bits in pieces as at once.

That is what accumulating and scaling gradients larger than the fast tier needs. What fits is computed at once: if a
transfer fails, nothing has been changed, and the operation can be tried again. Operations that round twice (``add_``
with a factor) or approximate (``exp_``) may differ between the vector lanes and the rest of a piece, so they run on
whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.engine import Mode
from farpool.errors import BudgetError
from farpool.tensors.compute import compute
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import same_layout, spans_blocks, stream, streamable

_aten = torch.ops.aten
_FLOATS = (torch.float32, torch.float64)


@rule(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor)
def _arithmetic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, other = args[0], args[1]
    if type(target) is not PagedTensor or not spans_blocks(target) or not streamable(target):
        return NotImplemented
    if target.dtype not in _FLOATS or kwargs.get("alpha", 1) != 1:
        return NotImplemented
    name = f"aten.{func._opname}"
    try:
        return compute(func, args, kwargs)
    except BudgetError:
        pass
    if not isinstance(other, torch.Tensor) or (other.dim() == 0 and type(other) is torch.Tensor):
        stream(name, lambda piece: func(piece, other), (target, Mode.WRITE))
        return target
    if (
        other.dtype is not target.dtype
        or not same_layout(target, other)
        or (type(other) is PagedTensor and other._storage.pool is not target._storage.pool)
        or (type(other) is PagedTensor and other._storage is target._storage)
    ):
        return NotImplemented
    stream(name, func, (target, Mode.WRITE), (other, Mode.READ))
    return target
