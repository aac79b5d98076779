"""Factories of paged tensors, and the copies between paged and plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.arena import arena_views, device_of
from farpool.tensors.geometry import contiguous_strides, dense_strides, is_strided, plain_empty, row_bytes_of
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.transfer import copy_dense, fill_dense, flat, streamable

if TYPE_CHECKING:
    from farpool.memory.pager.storage import Storage, StorageOwner

__all__ = [
    "allocate",
    "class_of_moments",
    "empty",
    "enters",
    "from_tensor",
    "full",
    "materialize",
    "moved_in",
    "ones",
    "shape_of",
    "store",
    "to_cpu",
    "zeros",
]


def allocate(
    pool: StorageOwner,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    *,
    cls: str = "weights",
    name: str = "",
) -> PagedTensor:
    """Make a paged tensor with unspecified values in a new storage. Size and stride must be dense."""
    elements = 0 if 0 in size else 1 + sum((extent - 1) * step for extent, step in zip(size, stride, strict=True))
    row_bytes = row_bytes_of(size, stride, dtype.itemsize)
    storage = pool.allocate(elements * dtype.itemsize, cls=cls, row_bytes=row_bytes, name=name)
    return PagedTensor(storage, arena_views(pool), dtype, size, stride)


def class_of_moments(parameter: PagedTensor) -> str:
    """The class of blocks for a parameter's moments, and for other tensors that are made like a paged tensor.

    The moments of an embedding table get the table's class, so they are cut into blocks like the table. A step with a
    sparse gradient then reads and writes only blocks with rows that the gradient names. If the table has a dense
    gradient, its moments get the class "optimizer".
    """
    cls = parameter._storage.cls
    if cls == "embedding":
        grad = parameter.grad if parameter.is_leaf else None
        return "optimizer" if grad is not None and grad.layout is torch.strided else "embedding"
    return "optimizer" if cls in ("weights", "expert", "gradient") else cls


def shape_of(shape: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """The shape from a factory's arguments, which are separate sizes or one sequence of sizes."""
    if len(shape) == 1 and isinstance(shape[0], Sequence):
        return tuple(shape[0])
    return tuple(shape)  # type: ignore[arg-type]


def empty(pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> PagedTensor:
    """A paged tensor whose values are unspecified.

    Parameters
    ----------
    pool : StorageOwner
        Pool that holds the tensor's bytes.
    *shape : int or sequence of int
        Separate sizes, or one sequence of sizes.
    dtype : torch.dtype, optional
        By default, torch's default dtype.
    """
    size = shape_of(shape)
    return allocate(pool, size, contiguous_strides(size), dtype or torch.get_default_dtype())


def zeros(pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> PagedTensor:
    """A paged tensor of zeros; parameters as for `empty`."""
    tensor = empty(pool, *shape, dtype=dtype)
    fill_dense(tensor, 0, "farpool.zeros")
    return tensor


def ones(pool: StorageOwner, *shape: int | Sequence[int], dtype: torch.dtype | None = None) -> PagedTensor:
    """A paged tensor of ones; parameters as for `empty`."""
    tensor = empty(pool, *shape, dtype=dtype)
    fill_dense(tensor, 1, "farpool.ones")
    return tensor


def full(
    pool: StorageOwner, shape: Sequence[int], value: bool | int | float | complex, dtype: torch.dtype | None = None
) -> PagedTensor:
    """A paged tensor in which each element is `value`. By default it has the dtype that ``torch.full`` chooses."""
    if dtype is None:
        dtype = torch.full((), value).dtype
    tensor = empty(pool, shape, dtype=dtype)
    fill_dense(tensor, value, "farpool.full")
    return tensor


def enters(tensor: torch.Tensor, pool: StorageOwner) -> bool:
    """Return True if `offload` can move a plain tensor into a pool: it is on the pool's device, or in host memory."""
    return tensor.device.type == "cpu" or tensor.device == device_of(pool)


def store(pool: StorageOwner, source: torch.Tensor, op: str, *, cls: str, row_bytes: int, name: str) -> Storage:
    """Make a storage with the bytes of a plain one-dimensional ``uint8`` tensor, for `offload`.

    Bytes in host memory go to the lower tiers past the fast tier, if it is on another device or has no room left. If
    the lower tiers have none either, they go to the fast tier, which may make room there.
    """
    nbytes = source.numel()
    if source.device.type == "cpu":
        entered = pool.enter(source.data_ptr(), nbytes, source, cls=cls, row_bytes=row_bytes, name=name)
        if entered is not None:
            return entered
    storage = pool.allocate(nbytes, cls=cls, row_bytes=row_bytes, name=name)
    copy_dense(PagedTensor(storage, arena_views(pool), torch.uint8, (nbytes,), (1,)), source, op)
    return storage


def moved_in(pool: StorageOwner, tensor: torch.Tensor, op: str, *, cls: str, name: str = "") -> PagedTensor:
    """A paged copy of a plain tensor, as `from_tensor` makes it, by the way of `store`."""
    source = tensor.detach()
    if not streamable(source):
        source = source.clone()
    size, stride = source.size(), dense_strides(source)
    row_bytes = row_bytes_of(size, stride, source.itemsize)
    memory = flat(source).view(torch.uint8)
    storage = store(pool, memory, op, cls=cls, row_bytes=row_bytes, name=name)
    return PagedTensor(storage, arena_views(pool), source.dtype, size, stride)


def from_tensor(pool: StorageOwner, tensor: torch.Tensor, *, cls: str = "weights", name: str = "") -> PagedTensor:
    """A paged copy of a plain or paged tensor, without history. If the tensor is dense, the copy has the same strides.

    Raises
    ------
    UnsupportedError
        The tensor is sparse, quantized, nested, without memory, or on another device than the pool.
    """
    source = tensor.detach()
    if type(source) is not PagedTensor:
        if not is_strided(source):
            raise UnsupportedError(f"a pool holds strided tensors only, not {tensor.layout} on {tensor.device}")
        device = device_of(pool)
        if source.device != device:
            raise UnsupportedError(
                f"a tensor on {tensor.device} cannot enter a pool on {device}: move it there first, with "
                f"t.to({str(device)!r})"
            )
        if not streamable(source):
            source = source.clone()
    elif source._storage.pool is not pool or not streamable(source):
        source = materialize(source)
    paged = allocate(pool, source.size(), dense_strides(source), source.dtype, cls=cls, name=name)
    copy_dense(paged, source, "farpool.from_tensor")
    return paged


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """A plain copy of a paged tensor, without history. A plain tensor is detached and returned without a copy.

    The copy is made block by block, so it may be larger than the fast tier.
    """
    if type(tensor) is not PagedTensor:
        return tensor.detach()
    if not streamable(tensor):
        source = tensor.detach()
        plain = plain_empty(source.size(), dense_strides(source), source.dtype, source.device)
        torch.ops.aten.copy_.default(plain, source)
        return plain
    plain = plain_empty(tensor.size(), tensor.stride(), tensor.dtype, tensor.device)
    copy_dense(plain, tensor, "farpool.materialize")
    return plain


def to_cpu(tensor: PagedTensor) -> torch.Tensor:
    """A plain copy in host memory. Autograd passes the copy's gradient to `tensor`."""
    if torch.is_grad_enabled() and tensor.requires_grad:
        copied: torch.Tensor = _ToCpu.apply(tensor)  # type: ignore[no-untyped-call]
        return copied
    if tensor.device.type == "cpu" or not streamable(tensor):
        return materialize(tensor).cpu()
    plain = plain_empty(tensor.size(), tensor.stride(), tensor.dtype, torch.device("cpu"))
    copy_dense(plain, tensor, "farpool.cpu")
    return plain


class _ToCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: PagedTensor) -> torch.Tensor:
        ctx.device = tensor.device
        return to_cpu(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.to(ctx.device)
