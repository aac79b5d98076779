"""Comparing to the last bit, and running the same thing plain and paged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import farpool
from farpool.tensors.factories import materialize

__all__ = ["assert_same", "assert_same_training", "tensors_of"]


def assert_same(actual: Any, expected: Any, what: str = "") -> None:
    """Same structure, shape, dtype and bits. NaNs are equal, whatever their payload; zeros must have the same sign."""
    if isinstance(expected, torch.Tensor):
        actual, expected = materialize(actual), expected.detach()
        assert actual.shape == expected.shape, what
        assert actual.dtype == expected.dtype, what
        left, right = (value.resolve_conj().resolve_neg().contiguous() for value in (actual, expected))
        if left.is_complex():
            left, right = torch.view_as_real(left), torch.view_as_real(right)
        assert torch.equal(left.isnan(), right.isnan()), what
        assert torch.equal(left.nan_to_num(), right.nan_to_num()), what
        if left.is_floating_point():
            assert torch.equal(left.signbit() & ~left.isnan(), right.signbit() & ~right.isnan()), what
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected), what
        for left, right in zip(actual, expected, strict=True):
            assert_same(left, right, what)
    else:
        assert actual == expected, what


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters, buffers and gradients by name."""
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    found.update({f"{name}.grad": p.grad for name, p in module.named_parameters() if p.grad is not None})
    return found


def assert_same_training(
    make: Callable[[], torch.nn.Module], step: Callable[[torch.nn.Module], Any], pool: Any, steps: int = 1
) -> torch.nn.Module:
    """Run `step` on a plain and on an offloaded module; results, parameters, buffers and gradients are the same.

    Returns the offloaded module.
    """
    results = []
    modules = []
    for paged in (False, True):
        torch.manual_seed(0)
        module = make()
        if paged:
            farpool.offload(module, pool)
        torch.manual_seed(1)
        results.append([step(module) for _ in range(steps)])
        modules.append(module)
    assert_same(results[1], results[0], "results")
    plain, paged_tensors = (tensors_of(module) for module in modules)
    assert plain.keys() == paged_tensors.keys()
    for name, value in plain.items():
        assert isinstance(paged_tensors[name], farpool.PagedTensor), name
        assert_same(paged_tensors[name], value, name)
    return modules[1]
