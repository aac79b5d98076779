"""Rules for composite operations whose native code reads the values of an argument before anything is dispatched.

A paged argument has no memory that they could read, so the values are copied out before they run.
"""

from __future__ import annotations

from typing import Any

import torch

from farpool.tensors.before_autograd import keys_after, register
from farpool.tensors.factories import materialize
from farpool.tensors.paged_tensor import PagedTensor

_split = torch.ops.aten.tensor_split.tensor_indices_or_sections


def _split_at_values(keys: Any, source: torch.Tensor, indices: torch.Tensor, dim: int = 0) -> Any:
    if type(indices) is PagedTensor:
        indices = materialize(indices)
    return _split.redispatch(keys_after(keys), source, indices, dim)


register("tensor_split.tensor_indices_or_sections", _split_at_values)
