"""Rules for operations that need or replace the memory of a tensor, such as ``set_`` and ``pin_memory``."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from farpool.errors import UnsupportedError
from farpool.tensors.dispatch import rule
from farpool.tensors.paged_tensor import PagedTensor, describe

_aten = torch.ops.aten


@rule(
    _aten.set_.default,
    _aten.set_.source_Storage,
    _aten.set_.source_Storage_storage_offset,
    _aten.set_.source_Tensor,
    _aten.set_.source_Tensor_storage_offset,
)
def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    paged = next(value for value in args if type(value) is PagedTensor)
    raise UnsupportedError(
        f"set_() would make a tensor share memory with {describe(paged)}, whose bytes move: "
        "use t.data = other to rebind a paged tensor, or copy_() to copy values"
    )


@rule(_aten.resize_.default, _aten.resize_as_.default)
def _resize(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    size = args[1].size() if isinstance(args[1], torch.Tensor) else args[1]
    if type(target) is not PagedTensor:
        # Only the size of the other tensor matters.
        return target.resize_(size, **kwargs)
    if tuple(size) == tuple(target.size()):
        return target
    raise UnsupportedError(
        f"{describe(target)} cannot be resized to {list(size)}: make a new tensor of that size in the pool, "
        "with pool.empty(...)"
    )


@rule(_aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return False


@rule(_aten._pin_memory.default)
def _pin_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
    raise UnsupportedError(f"{describe(args[0])} cannot be page-locked: use pool.materialize(t).pin_memory()")


@rule(_aten.record_stream.default)
def _record_stream(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # The pool itself makes sure that its memory is reused only after the kernels that use it.
    return None
