"""Gradients of paged leaves go to the pool as soon as autograd has accumulated them."""

from __future__ import annotations

import torch

from farpool._native import memmove
from farpool.pager import Mode
from farpool.pager.use import Use
from farpool.tensors.factories import from_tensor
from farpool.tensors.footprint import Footprint
from farpool.tensors.geometry import is_strided, row_bytes_of
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import copy_dense

__all__ = ["forget_gradients_of", "page_gradients_of"]


def page_gradients_of(tensor: PagedTensor) -> None:
    """Have each plain gradient of a leaf replaced by a paged one. Doing so twice changes nothing."""
    if tensor.is_leaf and tensor.requires_grad and "_gradient_hook" not in tensor.__dict__:
        tensor.__dict__["_gradient_hook"] = tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            _page
        )


def forget_gradients_of(tensor: torch.Tensor) -> None:
    """Undo `page_gradients_of`."""
    hook = tensor.__dict__.pop("_gradient_hook", None)
    if hook is not None:
        hook.remove()


def _page(tensor: torch.Tensor) -> None:
    grad = tensor.grad
    # A gradient with history (create_graph=True) would lose it, and a sparse one has no block to live in.
    if grad is None or type(grad) is not torch.Tensor or grad.requires_grad or not is_strided(grad):
        return
    if type(tensor) is PagedTensor and grad.device == tensor.device:
        storage = tensor._storage
        name = f"{storage.name}.grad" if storage.name else ""
        paged = _copied(tensor._footprint, grad, name)
        tensor.grad = from_tensor(storage.pool, grad, cls="gradient", name=name) if paged is None else paged


def _copied(like: Footprint, grad: torch.Tensor, name: str) -> PagedTensor | None:
    """A paged copy of a small gradient, in a few calls; None where it takes more.

    There is one for each parameter and step, so that what it costs counts where parameters are small.
    """
    pool, nbytes = like.storage.pool, grad.nbytes
    if pool.device != "cpu" or pool.debug or nbytes == 0 or not grad.is_contiguous():
        return None
    if grad.is_conj() or grad.is_neg() or grad._is_zerotensor():  # what it has of memory are not its values
        return None
    size, stride = grad.size(), grad.stride()
    storage = pool.allocate(nbytes, cls="gradient", row_bytes=row_bytes_of(size, stride, grad.itemsize), name=name)
    paged = PagedTensor.over(Footprint(storage, like.arena, grad.dtype, size, stride, 0))
    if storage.count > 1:
        copy_dense(paged, grad, "farpool.gradient")
        return paged
    grant = pool.acquire([Use(storage, 0, nbytes, Mode.OVERWRITE)], "farpool.gradient")
    try:
        memmove(like.arena.start + grant.offsets[0], grad.data_ptr(), nbytes)
    finally:
        pool.release(grant)
    return paged
