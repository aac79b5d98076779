"""Changes to torch that paged tensors need, applied once when `farpool.tensors` is imported."""

from __future__ import annotations

import functools
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.nn.utils.parametrize as _parametrize
import torch.optim.optimizer as _optimizer
import torch.utils._foreach_utils as _foreach

from farpool.errors import UnsupportedError
from farpool.tensors import compilation, optimizers, savers
from farpool.tensors.factories import materialize
from farpool.tensors.identity import reduce_for_process
from farpool.tensors.paged_storage import PagedStorage
from farpool.tensors.paged_tensor import NATIVE_DATA, PagedTensor, describe

__all__ = ["apply"]

_native_set: Any = torch._C.TensorBase.set_
_native_set_original: Any = _parametrize._maybe_set


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # torch's own setter would give the plain tensor the geometry of a paged one but no memory, and reading it would
    # crash.
    if type(value) is PagedTensor and type(tensor) is not PagedTensor:
        raise UnsupportedError(
            f"a plain tensor cannot view {describe(value)}, whose bytes move: use plain.copy_(paged), or "
            "plain.data = pool.materialize(paged)"
        )
    NATIVE_DATA.__set__(tensor, value)


def _set(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    # If a geometry is given, torch takes the source's storage before it dispatches, and a paged source has no memory.
    for value in (*args, *kwargs.values()):
        if isinstance(value, PagedStorage):
            raise UnsupportedError(
                f"set_() would make a tensor view {value}, whose bytes move: use tensor.copy_(paged), or "
                "plain.set_(pool.materialize(paged))"
            )
        if type(value) is PagedTensor and type(tensor) is not PagedTensor:
            raise UnsupportedError(
                f"set_() would make a plain tensor view {describe(value)}, whose bytes move: use plain.copy_(paged), "
                "or plain.set_(pool.materialize(paged))"
            )
    result: torch.Tensor = _native_set(tensor, *args, **kwargs)
    return result


def _set_original(original: torch.Tensor, value: torch.Tensor) -> None:
    # A parametrization keeps the object of the parameter that it replaces, and sets its first values. It has made these
    # values only for this purpose, so no other tensor needs to share their memory, and a paged parameter can copy them.
    if type(original) is PagedTensor:
        original.data = value
    elif type(value) is PagedTensor:
        original.data = materialize(value)
    else:
        _native_set_original(original, value)


def _module_cpu(module: torch.nn.Module) -> torch.nn.Module:
    # `cpu()` of a paged tensor returns a plain copy. `cpu()` of a module calls ``to("cpu")`` instead, which leaves a
    # paged tensor on the CPU in its pool.
    moved: torch.nn.Module = module._apply(  # type: ignore[no-untyped-call]
        lambda tensor: tensor.to("cpu") if type(tensor) is PagedTensor else tensor.cpu()
    )
    return moved


def apply() -> None:
    """Apply all changes to torch; a second call changes nothing."""
    if "data" not in vars(torch.Tensor):
        torch.Tensor.data = property(NATIVE_DATA.__get__, _set_data, doc=NATIVE_DATA.__doc__)  # type: ignore[assignment]
    if "set_" not in vars(torch.Tensor):
        torch.Tensor.set_ = _set  # type: ignore[method-assign, assignment]
    # Optimizers choose an implementation by the exact type; a paged parameter gets the one for plain parameters.
    for kinds in (_optimizer._foreach_supported_types, _foreach._foreach_supported_types):
        if PagedTensor not in kinds:
            kinds.append(PagedTensor)
    _parametrize._maybe_set = _set_original  # type: ignore[assignment]
    torch.nn.Module.cpu = functools.wraps(torch.nn.Module.cpu)(_module_cpu)  # type: ignore[method-assign, assignment]
    compilation.apply()
    optimizers.apply()
    savers.apply()
    ForkingPickler.register(PagedTensor, reduce_for_process)
