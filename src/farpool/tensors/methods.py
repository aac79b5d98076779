"""Functions behind the methods of a paged tensor: copying, pickling, printing, paging its gradients.

They need the class, so the class cannot import them; it receives this module as its
`farpool.tensors.paged_tensor.Methods`.
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
