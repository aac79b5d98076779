"""Geometry of tensors: the ranges that views touch, density, strides, and stand-ins on the meta device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = [
    "META",
    "contiguous_strides",
    "dense_strides",
    "element_range",
    "is_dense",
    "is_strided",
    "meta_view",
    "plain_empty",
    "row_bytes_of",
    "stand_in",
]

META = torch.device("meta")
# Larger than anything that can be stored, so that every legal geometry is a view into it.
_META_ELEMENTS = 1 << 48
_meta_bases: dict[torch.dtype, torch.Tensor] = {}


def is_strided(tensor: torch.Tensor) -> bool:
    """Return True if a plain tensor can be paged: it is strided, has memory, and is not nested or quantized."""
    return (
        tensor.layout is torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_mkldnn
    )


def element_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the range of storage elements that a view touches, ``(first, last + 1)``; ``(0, 0)`` if it is empty."""
    if tensor.numel() == 0:
        return 0, 0
    first = int(tensor.storage_offset())
    extent = 1
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        extent += (size - 1) * stride
    return first, first + extent


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the view fills its element range, each element once, in some order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.size(), tensor.stride(), strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


def contiguous_strides(size: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major tensor of this size."""
    strides: list[int] = []
    step = 1
    for extent in reversed(size):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def dense_strides(
    tensor: torch.Tensor, memory_format: torch.memory_format | None = torch.preserve_format
) -> tuple[int, ...]:
    """The strides that torch gives to a copy of `tensor`, or to a new tensor like it, in a memory format."""
    memory_format = memory_format or torch.preserve_format
    if memory_format is torch.preserve_format and is_dense(tensor):
        return tuple(tensor.stride())
    # We do not use empty_like: on the meta device it gives other strides to dimensions of one element.
    return tuple(stand_in(tensor).clone(memory_format=memory_format).stride())


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with the geometry of `tensor` but without bytes. Operations on it show the geometry of their results."""
    if tensor.numel():
        return meta_view(tensor)
    # The meta device gives empty tensors other strides than the CPU does.
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)


def meta_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the meta device with the geometry, dtype, conjugate bit and negative bit of `tensor`."""
    base = _meta_bases.get(tensor.dtype)
    if base is None:
        # A base made under inference mode would remain an inference tensor.
        with torch.inference_mode(False):
            base = torch.empty(_META_ELEMENTS, dtype=tensor.dtype, device="meta")
        _meta_bases[tensor.dtype] = base
    view = torch.as_strided(base, tensor.size(), tensor.stride(), tensor.storage_offset())
    if tensor.is_conj():
        torch._C._set_conj(view, True)
    if tensor.is_neg():
        torch._C._set_neg(view, True)
    return view


def plain_empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new plain tensor with unspecified values, even inside ``with farpool.paged(pool)``."""
    return torch.ops.aten.empty_strided.default(  # type: ignore[no-any-return]
        tuple(size), tuple(stride), dtype=dtype, device=device
    )


def row_bytes_of(size: Sequence[int], stride: Sequence[int], itemsize: int) -> int:
    """Bytes of one entry along dimension 0; 0 for a tensor that is empty, not contiguous, or below two dimensions."""
    if len(size) < 2 or 0 in size:
        return 0
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride), strict=True):
        if extent != 1 and step != expected:
            return 0
        expected *= extent
    return stride[0] * itemsize
