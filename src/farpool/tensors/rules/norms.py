"""Refuses norms of tensors that do not fit into the fast tier. The error advises what to do instead.

torch adds up the squares of all elements in vector registers, in an order that depends on the processor. So a norm
computed from the norms of parts could round differently.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from farpool.errors import BudgetError
from farpool.tensors.dispatch import fallback

__all__ = ["ADVICE"]

ADVICE = (
    "a norm takes the whole tensor at once, because sums over its parts would round in another way; nothing was "
    "changed: clip a table's gradient by value (torch.nn.utils.clip_grad_value_), which works block by block, or leave "
    "it out of clip_grad_norm_"
)


@fallback(torch.ops.aten.linalg_vector_norm.default)
def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    error = sys.exception()
    assert isinstance(error, BudgetError)  # the dispatcher calls fallbacks while it handles this error
    error.add_note(ADVICE)
    return NotImplemented
