"""Checks of arguments. The error for a wrong type names the argument and the call that was probably meant."""

from __future__ import annotations

from typing import Any

import torch

from farpool.errors import ArgumentError
from farpool.memory.pool import Pool, blocks_of
from farpool.memory.pool.block_pool import BlockPool

__all__ = ["inside_of", "require_movable"]


def require_movable(value: Any, call: str) -> None:
    """Raise unless `value` is a module or an optimizer, as ``farpool.offload`` and ``farpool.restore`` require.

    Raises
    ------
    ArgumentError
        The value is neither a module nor an optimizer.
    """
    if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return
    if isinstance(value, torch.Tensor):
        advice = "for a tensor " + (
            "pool.from_tensor(t) makes a paged copy" if call == "offload" else "pool.materialize(t) makes a plain copy"
        )
    elif isinstance(value, dict):
        advice = "call it with the module that the tensors belong to; a paged copy of one tensor is pool.from_tensor(t)"
    elif isinstance(value, Pool):
        advice = (
            "the module comes first, farpool.offload(module, pool)"
            if call == "offload"
            else "call it with the module; pool.close(materialize=True) makes all tensors of a pool plain"
        )
    elif isinstance(value, type) and issubclass(value, torch.nn.Module):
        advice = f"that is the class: make an instance, {value.__name__}(...)"
    else:
        advice = "call it with the model, or with the part of it that has the weights"
    raise ArgumentError(
        f"farpool.{call}: the first argument is {_called(value)}, expected a torch.nn.Module or an optimizer; {advice}"
    )


def inside_of(value: Any, call: str) -> BlockPool:
    """Check that `value`, an argument of ``farpool.<call>``, is a `Pool`, and return its `BlockPool`.

    Raises
    ------
    ArgumentError
        The value is not a `Pool`.
    """
    if isinstance(value, Pool):
        return blocks_of(value)
    advice = (
        f"make one first, pool = farpool.Pool(fast={value!r})"
        if isinstance(value, int | str) and not isinstance(value, bool)
        else "make one with farpool.Pool(fast=..., dram=...)"
    )
    raise ArgumentError(f"farpool.{call}: the pool is {_called(value)}, expected a farpool.Pool; {advice}")


def _called(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a {type(value).__name__}"
