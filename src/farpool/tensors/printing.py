"""Text of paged tensors for printing. torch's printer shows only the edges of a large tensor, and reads only these."""

from __future__ import annotations

import torch

from farpool.tensors.paged_tensor import PagedTensor

__all__ = ["text"]


def text(tensor: PagedTensor) -> str:
    """The text that ``repr`` and ``str`` of a paged tensor show."""
    storage = tensor._storage
    where = f"farpool={storage.name or storage.cls!r}"
    if storage.pool.closed:
        shown = f"PagedTensor(..., size={tuple(tensor.size())}, dtype={tensor.dtype}, {where}, closed=True)"
    else:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            shown = str(torch._tensor_str._str(tensor.detach()))  # type: ignore[no-untyped-call]
        history = ", requires_grad=True" if tensor.is_leaf and tensor.requires_grad else ""
        if tensor.grad_fn is not None:
            history = f", grad_fn=<{type(tensor.grad_fn).__name__}>"
        shown = f"{shown[:-1]}, {where}{history})"
    return f"Parameter containing:\n{shown}" if isinstance(tensor, torch.nn.Parameter) else shown
