"""PyTorch on a pool: paged tensors, and moving modules and weights in and out."""

from __future__ import annotations

import farpool.tensors.rules  # noqa: F401  (registers them)
from farpool.cluster.store.tensors import map_tensors, publish_tensors, read_tensors
from farpool.tensors import integration, methods
from farpool.tensors.loading import load_safetensors
from farpool.tensors.mode import paged
from farpool.tensors.offload import offload, restore
from farpool.tensors.paged_tensor import PagedTensor, use_methods
from farpool.tensors.pretrained import from_pretrained

__all__ = [
    "PagedTensor",
    "from_pretrained",
    "load_safetensors",
    "map_tensors",
    "offload",
    "paged",
    "publish_tensors",
    "read_tensors",
    "restore",
]

use_methods(methods)
integration.apply()
