"""Every module and operator of which PyTorch ships samples has the bits of plain tensors if an operand is paged.

The samples are those of PyTorch's own tests (``torch.testing._internal``). The sweeps compare results, gradients and
what became of the operands, with each operand paged in turn and then all of them. To bound their time they take a part
of the samples, spread evenly: of each operator 6 in float32 and one in each other type, of each module 6 in float32 and
2 in each other type. Of a call with more than 4 operands (5 for operators), the first ones are paged in turn.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_flatten, tree_unflatten

import farpool
from tests.tensors.bits import tensors_of
from tests.tensors.differential import DifferError, UnstableError, compare, same_bits
from tests.tensors.evil_pool import EvilPool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), pytest.mark.filterwarnings("ignore")]

_OTHER_TYPES = (torch.float64, torch.bfloat16, torch.float16, torch.complex64)
_SHARDS = 4
_UNDEFINED = {
    **dict.fromkeys(
        ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"),
        "its values are whatever the memory held",
    ),
    **dict.fromkeys(("resize_", "resize_as_"), "new values are whatever the memory held"),
}
"""Operators that give no values of their own in plain PyTorch, and why."""
_UNSTABLE: dict[str, str] = {}
"""Operators and modules whose plain calls do not repeat their own bits, and why."""
_REFUSED: dict[str, str] = {}
"""Operators and modules that are refused with a paged operand, and why."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _spread(samples: list[Any], count: int) -> list[Any]:
    return samples[:: max(1, len(samples) // count)][:count]


class _Report:
    """What became of the samples, by the name of what they are samples of."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.differ: list[str] = []
        self.refused: set[str] = set()
        self.unstable: set[str] = set()

    def add(self, name: str, what: str, function: Any, values: list[Any], operands_max: int) -> None:
        try:
            found = compare(function, values, operands_max=operands_max)
        except DifferError as error:
            self.differ.append(f"{name} {what}: {error}")
        except UnstableError:
            self.unstable.add(name)
        else:
            self.outcomes += found
            if found["refused"]:
                self.refused.add(name)

    def check(self, same: int) -> None:
        assert not self.differ, "\n".join(self.differ)
        assert self.refused <= _REFUSED.keys(), self.refused
        assert self.unstable <= _UNSTABLE.keys(), self.unstable
        assert self.outcomes["same"] > same, self.outcomes


def _op_samples(op: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[Any, list[Any], Any]]:
    learns = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    torch.manual_seed(0)
    # Plain PyTorch gives LAPACK's gelsy uninitialised pivots, and calls alike differ (pytorch issue 187411).
    samples = [s for s in op.sample_inputs("cpu", dtype, requires_grad=learns) if s.kwargs.get("driver") != "gelsy"]
    for sample in _spread(samples, count):
        values, structure = tree_flatten(((sample.input, *sample.args), sample.kwargs))
        yield op.op, values, structure


def _sweep_operators(ops: list[Any], dtype: torch.dtype, count: int) -> _Report:
    report = _Report()
    for op in ops:
        if op.name in _UNDEFINED or not op.supports_dtype(dtype, "cpu"):
            continue
        for number, (function, values, structure) in enumerate(_op_samples(op, dtype, count)):

            def call(*given: Any, function: Any = function, structure: Any = structure) -> Any:
                args, kwargs = tree_unflatten(given, structure)
                return function(*args, **kwargs)

            report.add(op.name, f"{op.variant_test_name} sample {number} in {dtype}", call, values, 5)
    return report


@pytest.fixture(scope="module")
def op_db() -> list[Any]:
    pytest.importorskip("expecttest", reason="PyTorch's samples of its operators need it")
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_operators_have_the_bits_of_plain_operands(op_db: list[Any], shard: int) -> None:
    _sweep_operators(op_db[shard::_SHARDS], torch.float32, 6).check(same=1000)


@pytest.mark.parametrize("dtype", _OTHER_TYPES, ids=str)
def test_operators_in_other_types_have_the_bits_of_plain_operands(op_db: list[Any], dtype: torch.dtype) -> None:
    _sweep_operators(op_db, dtype, 1).check(same=500)


@pytest.fixture(scope="module")
def module_db() -> list[Any]:
    pytest.importorskip("expecttest", reason="PyTorch's samples of its modules need it")
    from torch.testing._internal.common_modules import module_db

    return list(module_db)


def _made(info: Any, sample: Any, training: bool) -> nn.Module:
    # A copy, because a module may keep the tensors that it is given, and several samples may share one.
    given = copy.deepcopy(sample.constructor_input)
    torch.manual_seed(0)
    module: nn.Module = info.module_cls(*given.args, **given.kwargs)
    return module.train(training)


def _module_samples(info: Any, dtype: torch.dtype, count: int) -> Iterator[tuple[Any, bool]]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        try:
            samples = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=not dtype.is_complex, training=training
            )
        except (RuntimeError, NotImplementedError):  # the samples themselves cannot be made in this type
            continue
        for sample in _spread(list(samples), count):
            yield sample, training


def _offload_changes_bits(info: Any, sample: Any, training: bool) -> bool:
    try:
        expected = _trained(info, sample, training, paged=False)
    except Exception:
        return False  # plain PyTorch cannot run it either
    return not same_bits(_trained(info, sample, training, paged=True), expected)


def _trained(info: Any, sample: Any, training: bool, *, paged: bool) -> list[Any]:
    module = _made(info, sample, training)
    if paged:
        farpool.offload(module, EvilPool(fast=1 << 20))
    torch.manual_seed(1)
    results = module(*sample.forward_input.args, **sample.forward_input.kwargs)
    flat = [value for value in tree_flatten(results)[0] if isinstance(value, torch.Tensor)]
    learned = [value.float().sum() for value in flat if value.requires_grad and not value.is_complex()]
    if learned and any(parameter.requires_grad for parameter in module.parameters()):
        torch.stack(learned).sum().backward()
    return [value.detach() for value in (*flat, *tensors_of(module).values())]


def _sweep_modules(infos: list[Any], dtype: torch.dtype, count: int) -> _Report:
    report = _Report()
    for info in infos:
        for number, (sample, training) in enumerate(_module_samples(info, dtype, count)):
            module = _made(info, sample, training)
            if any(isinstance(value, nn.parameter.UninitializedTensorMixin) for value in module.state_dict().values()):
                continue
            state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            names, inputs = list(state), (sample.forward_input.args, sample.forward_input.kwargs)
            values, structure = tree_flatten(inputs)

            def call(*given: Any, module: Any = module, names: Any = names, structure: Any = structure) -> Any:
                args, kwargs = tree_unflatten(given[len(names) :], structure)
                return functional_call(module, dict(zip(names, given, strict=False)), args, kwargs)

            what = f"sample {number} in {dtype}, {'training' if training else 'eval'}"
            report.add(info.name, what, call, [*state.values(), *values], 4)
            if state and _offload_changes_bits(info, sample, training):
                report.differ.append(f"{info.name} {what}: other bits when offloaded")
    return report


@pytest.mark.parametrize("shard", range(_SHARDS))
def test_modules_have_the_bits_of_plain_parameters(module_db: list[Any], shard: int) -> None:
    _sweep_modules(module_db[shard::_SHARDS], torch.float32, 6).check(same=150)


@pytest.mark.parametrize("dtype", _OTHER_TYPES[:3], ids=str)
def test_modules_in_other_types_have_the_bits_of_plain_parameters(module_db: list[Any], dtype: torch.dtype) -> None:
    _sweep_modules(module_db, dtype, 2).check(same=150)
