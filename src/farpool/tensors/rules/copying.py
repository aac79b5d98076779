"""Rules for copies, fills and comparisons: block by block if possible, so that tensors may exceed the fast tier."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.arena import is_device
from farpool.tensors.compute import compute
from farpool.tensors.dispatch import rule
from farpool.tensors.factories import allocate
from farpool.tensors.geometry import META, dense_strides, stand_in
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.transfer import (
    convertible,
    copy_dense,
    equal_dense,
    fill_dense,
    same_layout,
    spans_blocks,
    streamable,
)

__all__ = ["copy_like"]

_aten = torch.ops.aten
# A view is copied in one access if it touches at most the budget divided by this.
_PART = 4


def _mixed(left: Any, right: Any) -> bool:
    return type(left) is PagedTensor and type(right) is PagedTensor and left._storage.pool is not right._storage.pool


@rule(_aten.copy_.default)
def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if target.device == META:  # there are no bytes to copy
        return func(target, stand_in(source), *args[2:], **kwargs)
    if _mixed(target, source) or target.device != source.device or source.layout is not torch.strided:
        return NotImplemented
    if not any(spans_blocks(tensor) for tensor in (target, source) if type(tensor) is PagedTensor):
        return NotImplemented
    # In pieces, an overlapping source would show bytes that an earlier piece has overwritten.
    if not convertible(source.dtype, target.dtype) or _overlap(target, source):
        return NotImplemented
    if same_layout(target, source):
        copy_dense(target, source, "aten.copy_")
    else:
        _copy_in_parts(target, source.expand(target.size()))
    return target


def _overlap(left: torch.Tensor, right: torch.Tensor) -> bool:
    if type(left) is not PagedTensor or type(right) is not PagedTensor or left._storage is not right._storage:
        return False
    (start, stop), (other_start, other_stop) = left.byte_range(), right.byte_range()
    return start < other_stop and other_start < stop


def _copy_in_parts(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between views of any layout. A large copy is split in half along the dimension that spans most bytes."""
    paged = [tensor for tensor in (target, source) if type(tensor) is PagedTensor]
    ranges = [tensor.byte_range() for tensor in paged]
    largest = paged[0] if len(paged) == 1 or ranges[0][1] - ranges[0][0] >= ranges[1][1] - ranges[1][0] else paged[1]
    reach = [(size - 1) * stride for size, stride in zip(largest.size(), largest.stride(), strict=True)]
    if sum(stop - start for start, stop in ranges) <= paged[0]._storage.pool.fast // _PART or not any(reach):
        compute(_aten.copy_.default, (target, source), {})
        return
    dim = reach.index(max(reach))
    half = target.size(dim) // 2
    for start, length in ((0, half), (half, target.size(dim) - half)):
        _copy_in_parts(target.narrow(dim, start, length), source.narrow(dim, start, length))


@rule(_aten.fill_.Scalar, _aten.zero_.default)
def _fill(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not streamable(target):
        return NotImplemented
    fill_dense(target, args[1] if len(args) > 1 else kwargs.get("value", 0), str(func))
    return target


@rule(_aten.equal.default)
def _equal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    left, right = args[0], args[1]
    if left.size() != right.size():
        return False
    if left.dtype is not right.dtype or _mixed(left, right) or not same_layout(left, right):
        return NotImplemented
    return left.device == right.device and equal_dense(left, right, "aten.equal")


def copy_like(source: PagedTensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> PagedTensor:
    """A paged copy of a tensor, in a new storage of the same class of blocks."""
    storage = source._storage
    strides = dense_strides(source, memory_format)
    copy = allocate(storage.pool, source.size(), strides, dtype, cls=storage.cls, name=storage.name)
    _aten.copy_.default(copy, source)
    return copy


@rule(_aten.clone.default)
def _clone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return copy_like(args[0], args[0].dtype, kwargs.get("memory_format"))


@rule(_aten._to_copy.default)
def _to_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    device = kwargs.get("device")
    if device is not None and is_device(device, META):
        return func(stand_in(source), **kwargs)
    if device is not None and not is_device(device, source.device):
        raise UnsupportedError(
            f"{describe(source)} cannot move to {device}: it lives in its pool on {source.device}; take a plain copy "
            "with pool.materialize(t), or offload into a pool on that device"
        )
    if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
        raise UnsupportedError(
            f"{describe(source)} cannot change its layout or be page-locked: use pool.materialize(t)"
        )
    return copy_like(source, kwargs.get("dtype") or source.dtype, kwargs.get("memory_format"))


@rule(_aten.uniform_.default, _aten.normal_.default)
def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if not streamable(target) or not spans_blocks(target):
        return NotImplemented
    # The generator's numbers depend on the length of the call, so draw all at once, outside the pool.
    drawn = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=target.device)
    func(drawn, *args[1:], **kwargs)
    copy_dense(target, drawn, str(func))
    return target
