"""The context ``with farpool.paged(pool)``, in which factory functions and modules make paged tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from farpool.memory.pool import Pool
from farpool.memory.pool.block_pool import BlockPool
from farpool.tensors.arena import device_of, is_device
from farpool.tensors.arguments import inside_of
from farpool.tensors.factories import allocate, from_tensor, shape_of
from farpool.tensors.geometry import contiguous_strides, is_strided
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.pretrained import entered, is_loading, wrap_transformers
from farpool.tensors.transfer import fill_dense

__all__ = ["paged"]

# as_tensor, asarray and from_numpy may share memory with their argument, so they stay plain.
_FACTORIES: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.arange,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.linspace,
        torch.logspace,
        torch.normal,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.range,
        torch.scalar_tensor,
        torch.tensor,
        torch.tril_indices,
        torch.triu_indices,
    )
)
_FILLED: dict[Callable[..., Any], int | None] = {torch.empty: None, torch.zeros: 0, torch.ones: 1}
_FILLED_OPTIONS = frozenset(("size", "dtype", "device", "requires_grad"))


class _PagedMode(TorchFunctionMode):
    def __init__(self, pool: BlockPool) -> None:
        super().__init__()
        self._pool = pool
        self._entered: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> _PagedMode:
        wrap_transformers()
        into = entered(self._pool)
        into.__enter__()
        # A list, because one object may be entered several times.
        self._entered.append(into)
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        filled = func in _FILLED
        if not filled and func not in _FACTORIES:
            return func(*args, **options)
        wrap_transformers()  # it may have been imported since
        if is_loading():
            return func(*args, **options)
        device, asked = device_of(self._pool), options.get("device")
        if (asked is not None and not is_device(asked, device)) or options.get("out") is not None:
            return func(*args, **options)
        if filled and _FILLED_OPTIONS.issuperset(name for name, value in options.items() if value is not None):
            return self._fill(_FILLED[func], args, options)
        if func is not torch.normal:
            options = {**options, "device": device}
        result = func(*args, **{**options, "requires_grad": False} if "requires_grad" in options else options)
        if not isinstance(result, torch.Tensor) or not is_strided(result) or result.device != device:
            return result
        tensor = from_tensor(self._pool, result)
        return tensor.requires_grad_() if options.get("requires_grad") else tensor

    def _fill(self, value: int | None, args: tuple[Any, ...], options: dict[str, Any]) -> PagedTensor:
        # No memory of the tensor's size is taken outside the pool, so it may be larger than the machine's free memory.
        size = shape_of(args if args else (options["size"],))
        tensor = allocate(self._pool, size, contiguous_strides(size), options.get("dtype") or torch.get_default_dtype())
        if value is not None:
            fill_dense(tensor, value, "farpool.paged")
        return tensor.requires_grad_() if options.get("requires_grad") else tensor


def paged(pool: Pool) -> AbstractContextManager[Any]:
    """A context manager inside which new tensors live in a pool.

    Results of factory functions (``torch.zeros``, ``torch.randn``, ``torch.tensor``, ...) on the pool's device are
    paged, and so are the parameters of modules that are made in the context. Random tensors have the same bits as in
    plain torch with the same seed. If transformers' ``from_pretrained`` loads a model in the context, the model is
    paged as `farpool.from_pretrained` would page it. The context affects only the thread that enters it.

    Parameters
    ----------
    pool : Pool
        Pool that holds the tensors.
    """
    return _PagedMode(inside_of(pool, "paged"))
