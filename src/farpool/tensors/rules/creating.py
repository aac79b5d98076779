"""Rules for operations that make a tensor like a paged one, such as ``zeros_like``. Optimizers use them for moments."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.arena import is_device
from farpool.tensors.dispatch import rule
from farpool.tensors.factories import allocate, class_of_moments, from_tensor
from farpool.tensors.geometry import META, dense_strides, meta_view, stand_in
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.transfer import fill_dense

_aten = torch.ops.aten


def _elsewhere(source: PagedTensor, kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    return device is not None and not is_device(device, source.device)


def _empty_like(source: PagedTensor, kwargs: dict[str, Any]) -> PagedTensor:
    if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
        raise UnsupportedError(
            f"a tensor like {describe(source)} cannot be page-locked or of another layout: "
            "make it from a plain copy, pool.materialize(t)"
        )
    strides = dense_strides(source, kwargs.get("memory_format"))
    storage = source._storage
    cls = class_of_moments(source)
    dtype = kwargs.get("dtype") or source.dtype
    return allocate(storage.pool, source.size(), strides, dtype, cls=cls, name=storage.name)


def _plain_like(source: PagedTensor) -> torch.Tensor:
    """A plain tensor with the geometry of a paged tensor, for operations that use only the geometry."""
    return torch.empty_strided(source.size(), source.stride(), dtype=source.dtype, device=source.device)


@rule(_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.full_like.default)
def _filled_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if _elsewhere(source, kwargs):
        return func(meta_view(source), *args[1:], **kwargs)
    tensor = _empty_like(source, kwargs)
    if func is _aten.zeros_like.default:
        fill_dense(tensor, 0, "aten.zeros_like")
    elif func is _aten.ones_like.default:
        fill_dense(tensor, 1, "aten.ones_like")
    elif func is _aten.full_like.default:
        fill_dense(tensor, args[1], "aten.full_like")
    return tensor


@rule(
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
    _aten.randint_like.Tensor,
)
def _random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    if kwargs.get("device") is not None and is_device(kwargs["device"], META):
        return func(stand_in(source), *args[1:], **kwargs)
    # One call outside the pool, because the generator's numbers depend on the length of a call.
    plain = func(_plain_like(source), *args[1:], **kwargs)
    if _elsewhere(source, kwargs):
        return plain
    return from_tensor(source._storage.pool, plain, cls=class_of_moments(source))


@rule(
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
)
def _new(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    # Only dtype and device of the first argument matter, so its bytes are not fetched.
    stand_in = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    return func(stand_in, *args[1:], **kwargs)
