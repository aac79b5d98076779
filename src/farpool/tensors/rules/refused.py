"""Operations whose backward pass takes another way for any tensor subclass, with other bits."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import describe

_aten = torch.ops.aten


@rule(_aten.prod.default, _aten.prod.dim_int)
def _prod(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args[0].requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"the gradient of prod() of {describe(args[0])} would differ in its last bits from that of a plain tensor: "
            "take the product of (t * 1), which is plain"
        )
    return NotImplemented
