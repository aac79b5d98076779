"""Views of paged tensors. The geometry of a view is computed on the meta device once, and then cached."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import PoolClosedError, UnsupportedError
from farpool.tensors.footprint import Footprint
from farpool.tensors.geometry import element_range, meta_view
from farpool.tensors.lazy import lazy_bits
from farpool.tensors.paged_tensor import PagedTensor, describe
from farpool.tensors.schema import signature_of

__all__ = ["change_geometry", "check_open", "view", "view_like"]


def _on_meta(value: Any) -> Any:
    if type(value) is PagedTensor:
        return meta_view(value)
    if type(value) is list or type(value) is tuple:
        return [meta_view(item) if type(item) is PagedTensor else item for item in value]
    return value


def _footprint_like(source: PagedTensor, shape: torch.Tensor) -> Footprint:
    if element_range(shape)[1] * shape.itemsize > source._storage.nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(shape.size())}, strides {list(shape.stride())}, storage offset "
            f"{shape.storage_offset()} are out of bounds for the storage of {describe(source)}, "
            f"which has {source._storage.nbytes} bytes"
        )
    return Footprint(
        source._storage,
        source._arena,
        shape.dtype,
        shape.size(),
        shape.stride(),
        int(shape.storage_offset()),
        conj=shape.is_conj(),
        neg=shape.is_neg(),
    )


def view_like(source: PagedTensor, shape: torch.Tensor) -> PagedTensor:
    """A view of the storage of `source` with the geometry of `shape`."""
    return PagedTensor.over(_footprint_like(source, shape))


def _key(func: Any, args: tuple[Any, ...]) -> Any:
    """The cache key of a view, here and in the native core: the operation and its arguments after the first."""
    if len(args) == 1:
        return func._op
    return (func._op, *[tuple(value) if type(value) is list else value for value in args[1:]])


def view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], source: PagedTensor) -> Any:
    """Run an operation whose results view `source`."""
    if source._storage.pool.closed:
        check_open(source)
    footprint = source._footprint
    key = _key(func, args) if not kwargs and signature_of(func).view_of_numbers else None
    found = footprint.views.get(key) if key is not None else None
    if found is None:
        with lazy_bits():
            shapes = func(
                *[_on_meta(value) for value in args], **{name: _on_meta(value) for name, value in kwargs.items()}
            )
            if isinstance(shapes, torch.Tensor):
                found = _footprint_like(source, shapes)
            else:
                found = tuple(_footprint_like(source, shape) for shape in shapes)
        if key is not None:
            footprint.remember_view(key, found)
    if type(found) is Footprint:
        return PagedTensor.over(found)
    return [PagedTensor.over(one) for one in found]  # type: ignore[union-attr]


def change_geometry(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that changes the geometry of its first argument in place."""
    target = args[0]
    if type(target) is not PagedTensor:
        raise UnsupportedError(f"{func} would make a plain tensor view paged memory: use plain.copy_(paged)")
    check_open(target)
    shape = func(meta_view(target), *args[1:], **kwargs)
    target.rebind(view_like(target, shape))
    return target


def check_open(tensor: PagedTensor) -> None:
    """Raise if the tensor's pool is closed.

    Raises
    ------
    PoolClosedError
    """
    if tensor._storage.pool.closed:
        raise PoolClosedError(f"the pool of {describe(tensor)} is closed")
