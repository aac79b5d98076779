"""Concatenates tensors that do not fit into the fast tier together: copies one tensor after the other."""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.dispatch import fallback
from farpool.tensors.geometry import plain_empty, stand_in

_aten = torch.ops.aten


@fallback(_aten.cat.default)
def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    first = tensors[0]
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
    whole = func([stand_in(tensor) for tensor in tensors], dim)
    result = plain_empty(whole.size(), whole.stride(), whole.dtype, first.device)
    parts = _aten.split_with_sizes(result, [tensor.size(dim) for tensor in tensors], dim)
    for tensor, part in zip(tensors, parts, strict=True):
        part.copy_(tensor)
    return result
