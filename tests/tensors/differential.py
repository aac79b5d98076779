"""Runs a function with plain operands and with paged ones, and compares everything that it gives to the last bit.

The operands are paged one at a time, and then all at once: what torch does for a tensor subclass may depend on which
operand is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves

from farpool import BudgetError, UnsupportedError
from farpool.tensors.factories import from_tensor, materialize
from farpool.tensors.geometry import is_strided
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

__all__ = ["DifferError", "Mode", "UnstableError", "compare", "same_bits"]

_BYTES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types that PyTorch cannot compare."""


class Mode(StrEnum):
    """Way of differentiating what is compared."""

    BACKWARD = "backward"
    TWICE = "backward through backward"
    FORWARD = "forward mode"
    INFERENCE = "inference mode"


class DifferError(AssertionError):
    """Raised if a call gives other bits with a paged operand."""


class UnstableError(Exception):
    """Raised if a call with plain operands gives other bits when it is repeated."""


@dataclass(frozen=True)
class _Calls:
    function: Callable[..., Any]
    values: Sequence[Any]
    mode: Mode

    def run(self, paged: Collection[int]) -> list[Any]:
        """Results, derivatives and what became of the operands, with the operands at these positions paged."""
        pool = EvilPool(fast=1 << 20)
        operands = [self._operand(pool, value, index in paged) for index, value in enumerate(self.values)]
        torch.manual_seed(1)
        found = _MODES[self.mode](self.function, operands)
        return [_plain(value) for value in (*found, *_tensors(operands))]

    def _operand(self, pool: EvilPool, value: Any, paged: bool) -> Any:
        if not isinstance(value, torch.Tensor) or not is_strided(value):
            return value
        copy = from_tensor(pool, value.detach())  # by way of a pool also if it is to be plain: strides are equal then
        copy = copy if paged else materialize(copy)
        return copy.requires_grad_() if value.requires_grad and self.mode is not Mode.FORWARD else copy


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _plain(value: Any) -> Any:
    if value is None:
        return None
    if value.is_nested:
        return [item.detach() for item in value.unbind()]
    dense = value.detach() if value.layout is torch.strided else value.detach().to_dense()
    return materialize(dense).view(torch.uint8) if dense.dtype in _BYTES else materialize(dense)


def _backward(function: Callable[..., Any], operands: Sequence[Any], *, twice: bool = False) -> list[Any]:
    results = _tensors(function(*operands))
    inputs = [value for value in _tensors(operands) if value.requires_grad]
    gradients = _gradients(results, inputs, create_graph=twice)
    second = _gradients([value for value in gradients if value is not None], inputs) if twice else []
    return [*results, *gradients, *second]


def _gradients(results: Sequence[Any], inputs: Sequence[Any], *, create_graph: bool = False) -> list[Any]:
    results = [value for value in results if value.requires_grad]
    if not results or not inputs:
        return []
    torch.manual_seed(2)
    # The first one is negative: products of zeros and a negative gradient have a sign.
    weights = [-torch.randn_like(materialize(value.detach())) for value in results]
    return list(torch.autograd.grad(results, inputs, weights, create_graph=create_graph, allow_unused=True))


def _forward(function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    with forward_ad.dual_level():
        duals = [
            forward_ad.make_dual(value, torch.randn_like(materialize(value)))
            if isinstance(value, torch.Tensor) and value.is_floating_point()
            else value
            for value in operands
        ]
        pairs = [forward_ad.unpack_dual(value) for value in _tensors(function(*duals))]
        return [value for pair in pairs for value in pair]


def _inference(function: Callable[..., Any], operands: Sequence[Any]) -> list[Any]:
    with torch.inference_mode():
        return _tensors(function(*operands))


_MODES: dict[Mode, Callable[[Callable[..., Any], Sequence[Any]], list[Any]]] = {
    Mode.BACKWARD: _backward,
    Mode.TWICE: lambda function, operands: _backward(function, operands, twice=True),
    Mode.FORWARD: _forward,
    Mode.INFERENCE: _inference,
}


def same_bits(actual: Any, expected: Any) -> bool:
    """Return True if both have the same structure and bits."""
    try:
        assert_same(actual, expected)
    except AssertionError:
        return False
    return True


def compare(
    function: Callable[..., Any], values: Sequence[Any], mode: Mode = Mode.BACKWARD, *, operands_max: int = 4
) -> Counter[str]:
    """Compare a call with each operand paged, and with all of them, to the same call with plain ones.

    Parameters
    ----------
    function : callable
        Takes the values, and returns tensors in any structure.
    values : sequence
        Operands; those that are no strided tensors are passed as they are.
    operands_max : int
        The number of operands that are paged one at a time.

    Returns
    -------
    Counter
        The number of calls with the same bits (``same``), refused ones (``refused``), those with operands larger than
        the pool, and ``not plain either`` if torch itself cannot run the call.

    Raises
    ------
    DifferError
        A paged operand changes bits.
    UnstableError
        The plain call does not repeat its own bits.
    """
    calls = _Calls(function, values, mode)
    try:
        expected, repeated = calls.run(()), calls.run(())
    except Exception:
        return Counter(("not plain either",))
    if not same_bits(repeated, expected):
        raise UnstableError
    places = [index for index, value in enumerate(values) if isinstance(value, torch.Tensor) and is_strided(value)]
    choices = {(place,) for place in places[:operands_max]} | {tuple(places)}
    outcomes: Counter[str] = Counter()
    for paged in sorted(choices - {()}):
        try:
            result = calls.run(paged)
        except UnsupportedError:
            outcomes["refused"] += 1
        except BudgetError:
            outcomes["larger than the pool"] += 1
        except Exception as error:
            raise DifferError(f"an error in {mode} with operands {paged} paged: {error!r}") from error
        else:
            if not same_bits(result, expected):
                raise DifferError(f"other bits in {mode} with operands {paged} paged")
            outcomes["same"] += 1
    return outcomes
