"""Hooks that move the gradients of paged leaves into the pool as soon as autograd has accumulated them."""

from __future__ import annotations

import torch

from farpool.tensors.calls import calls
from farpool.tensors.factories import from_tensor
from farpool.tensors.geometry import is_strided
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import copy_dense

__all__ = ["forget_gradients_of", "page_gradients_of"]


def page_gradients_of(tensor: PagedTensor) -> None:
    """Register a hook that replaces each plain gradient of a leaf by a paged one. A second call changes nothing."""
    if tensor.is_leaf and tensor.requires_grad and "_gradient_hook" not in tensor.__dict__:
        tensor.__dict__["_gradient_hook"] = tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            _page
        )


def forget_gradients_of(tensor: torch.Tensor) -> None:
    """Remove the hook that `page_gradients_of` registered; do nothing if there is none."""
    hook = tensor.__dict__.pop("_gradient_hook", None)
    if hook is not None:
        hook.remove()


def _page(tensor: torch.Tensor) -> None:
    if calls.page_gradient(tensor, "farpool.gradient", copy_dense):
        return
    grad = tensor.grad
    # A gradient with history (create_graph=True) would lose it, and blocks cannot hold a sparse gradient.
    if grad is None or type(grad) is not torch.Tensor or grad.requires_grad or not is_strided(grad):
        return
    if type(tensor) is PagedTensor and grad.device == tensor.device:
        storage = tensor._storage
        tensor.grad = from_tensor(storage.pool, grad, cls="gradient", name=storage.gradient_name)
