"""Rules for operations whose results view an argument although the schema does not say so, and for simple views."""

from __future__ import annotations

from typing import Any

import torch

from farpool._native import Calls
from farpool.tensors.calls import calls
from farpool.tensors.dispatch import rule
from farpool.tensors.factories import materialize
from farpool.tensors.paged_tensor import PagedTensor
from farpool.tensors.viewing import view

_aten = torch.ops.aten


_ALIASES = (_aten.detach.default, _aten.alias.default, _aten.lift.default, _aten.lift_fresh.default)


@rule(*_ALIASES)
def _same(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PagedTensor:
    source: PagedTensor = args[0]
    return PagedTensor.over(source._footprint)


for _alias in _ALIASES:
    calls.learn(_alias, _alias._op, str(_alias), Calls.Kind.ALIAS)


@rule(
    _aten._unsafe_view.default,
    _aten._reshape_alias.default,
    _aten.unsafe_split.Tensor,
    _aten.unsafe_split_with_sizes.default,
    _aten.unsafe_chunk.default,
)
def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return view(func, args, kwargs, args[0])


@rule(_aten.as_strided_copy.default)
def _as_strided_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    # It reads its argument's whole storage, not only the viewed bytes.
    return materialize(_aten.as_strided.default(*args, **kwargs)).contiguous()


@rule(_aten.as_strided_scatter.default)
def _as_strided_scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, source = args[0], args[1]
    if type(target) is not PagedTensor:
        return NotImplemented
    nbytes = target._storage.nbytes // target.itemsize * target.itemsize
    whole = PagedTensor(target._storage, target._arena, target.dtype, (nbytes // target.itemsize,), (1,))
    plain = materialize(whole).as_strided(target.size(), target.stride(), target.storage_offset())
    return func(plain, source, *args[2:], **kwargs)
