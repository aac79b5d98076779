"""Functions that implement methods of `PagedTensor`, such as copying, pickling and printing.

These functions need the class `PagedTensor`, so the class's module cannot import them. Instead, this module is passed
to `farpool.tensors.paged_tensor.use_methods`.
"""

from __future__ import annotations

from farpool.tensors.factories import materialize, to_cpu
from farpool.tensors.gradients import page_gradients_of
from farpool.tensors.identity import deep_copy, reduce, set_data, shallow_copy
from farpool.tensors.paged_storage import storage_of
from farpool.tensors.printing import text

__all__ = [
    "deep_copy",
    "materialize",
    "page_gradients_of",
    "reduce",
    "set_data",
    "shallow_copy",
    "storage_of",
    "text",
    "to_cpu",
]
