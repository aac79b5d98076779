"""PyTorch on a pool: paged tensors, and moving modules and weights in and out."""

from __future__ import annotations

from farpool.tensors.paged_tensor import PagedTensor  # isort: skip  (the other modules build on it)
from farpool.tensors import integration
from farpool.tensors.loading import load_safetensors
from farpool.tensors.mode import paged
from farpool.tensors.offload import offload, restore
from farpool.tensors.pretrained import from_pretrained
from farpool.tensors.published import map_tensors, publish_tensors

__all__ = [
    "PagedTensor",
    "from_pretrained",
    "load_safetensors",
    "map_tensors",
    "offload",
    "paged",
    "publish_tensors",
    "restore",
]

integration.apply()
