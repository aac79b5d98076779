"""PyTorch on a pool: paged tensors, and moving modules and weights into a pool and out of it.

A *paged* tensor stores its bytes in a pool, and a *plain* tensor is any other tensor of torch. A *real* tensor is a
view of the arena that stands for a paged tensor while an operation runs. A *table* is a tensor whose rows are picked by
data, such as the weight of an embedding. The *moments* of a parameter are the tensors that an optimizer keeps for it.
"""

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
