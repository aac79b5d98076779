"""A tensor subclass that only unwraps its operands, to measure the cost of torch's dispatch to Python alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["BareTensor", "wrap_parameters"]


class BareTensor(torch.Tensor):
    """A tensor that wraps another one and computes with it; results are plain."""

    _held: torch.Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type[BareTensor], held: torch.Tensor) -> BareTensor:
        self: BareTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=held.device
        )
        self._held = held
        return self

    @staticmethod
    def __torch_dispatch__(  # type: ignore[override]
        func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*[value._held if type(value) is BareTensor else value for value in args], **(kwargs or {}))


def wrap_parameters(module: torch.nn.Module) -> None:
    """Wrap the parameters of a module, which cannot be trained any more."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = BareTensor(parameter.detach())  # type: ignore[assignment]
