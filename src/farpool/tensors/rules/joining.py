"""Concatenation, one tensor after the other: all of them together may be larger than the fast tier."""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.dispatch import rule
from farpool.tensors.geometry import plain_empty, stand_in
from farpool.tensors.paged_tensor import PagedTensor

_aten = torch.ops.aten
# Tensors that take at most this part of the budget are joined at once.
_PART = 4


@rule(_aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors = args[0]
    paged = [tensor for tensor in tensors if type(tensor) is PagedTensor]
    first = paged[0]
    if sum(tensor.nbytes for tensor in paged) <= first._storage.pool.fast // _PART:
        return NotImplemented
    for tensor in tensors:
        if (
            tensor.dtype is not first.dtype
            or tensor.device != first.device
            or tensor.layout is not torch.strided
            or tensor.numel() == 0
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            return NotImplemented
    whole = func([stand_in(tensor) for tensor in tensors], *args[1:], **kwargs)
    result = plain_empty(whole.size(), whole.stride(), whole.dtype, first.device)
    dim = args[1] if len(args) > 1 else 0
    for tensor, part in zip(tensors, result.split([tensor.size(dim) for tensor in tensors], dim), strict=True):
        part.copy_(tensor)
    return result
