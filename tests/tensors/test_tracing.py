"""Tracers take addresses or constants out of tensors, so paged ones are refused, and the error says what to do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import farpool
from farpool import UnsupportedError
from farpool.tensors.factories import from_tensor
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

X = torch.linspace(-1, 1, 32).view(4, 8)


@pytest.fixture
def model(pool: farpool.Pool) -> nn.Module:
    torch.manual_seed(0)
    return farpool.offload(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), pool)


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_an_offloaded_module_says_to_restore_it(strict: bool, model: nn.Module) -> None:
    with pytest.raises(UnsupportedError, match=r"'0.weight' \[16, 8\].*farpool\.restore\(module\)"):
        torch.export.export(model, (X,), strict=strict)
    with torch.no_grad():
        expected = model(X)
    program = torch.export.export(farpool.restore(model), (X,), strict=strict)
    assert_same(program.module()(X), expected)


def test_exporting_with_a_paged_input_is_refused(pool: farpool.Pool) -> None:
    with pytest.raises(UnsupportedError, match="plain inputs"):
        torch.export.export(nn.Linear(8, 8), (pool.from_tensor(X),))


def test_exporting_a_plain_module_is_left_alone() -> None:
    plain = nn.Linear(8, 8)
    assert_same(torch.export.export(plain, (X,)).module()(X), plain(X))


@pytest.mark.parametrize("allowed", [False, True])
def test_paged_tensors_under_fake_tensors_are_refused(allowed: bool, evil: EvilPool) -> None:
    paged = from_tensor(evil, X)
    mode = FakeTensorMode(allow_non_fake_inputs=allowed)
    fake = mode.from_tensor(X)
    for function in (
        lambda: paged + 1,
        lambda: paged.t(),
        lambda: paged.clone(),
        lambda: paged.add_(1),
        lambda: nn.functional.linear(fake, paged),
        lambda: mode.from_tensor(paged),
    ):
        with mode, pytest.raises(UnsupportedError, match="materialize"):
            function()
    with pytest.raises(UnsupportedError, match="materialize"):
        nn.functional.linear(fake, paged)
    assert_same(paged, X)
    assert_same(paged.t() + 1, X.t() + 1)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_paged_tensor_does_not_become_a_constant_of_a_trace(mode: str, evil: EvilPool) -> None:
    paged = from_tensor(evil, X)
    with pytest.raises(UnsupportedError, match="materialize"):
        make_fx(lambda x: x @ paged.t() + 1, tracing_mode=mode)(X)


def test_a_trace_of_a_paged_input_has_no_constants(evil: EvilPool) -> None:
    graph = make_fx(lambda x: x @ x.t() + 1)(from_tensor(evil, X))
    assert not dict(graph.named_buffers())
    assert_same(graph(X), X @ X.t() + 1)
    with pytest.raises(UnsupportedError, match="materialize"):
        make_fx(lambda x: x + 1, tracing_mode="fake")(from_tensor(evil, X))


@pytest.mark.filterwarnings("ignore")  # TorchScript is deprecated
@pytest.mark.parametrize("convert", [torch.jit.script, lambda m: torch.jit.trace(m, (X,)), torch.fx.symbolic_trace])
def test_scripted_and_traced_modules_keep_their_bits(convert: Callable[[Any], Any], pool: farpool.Pool) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).eval()
    model = farpool.offload(copy.deepcopy(plain), pool)
    converted, expected = convert(model), convert(plain)
    for _ in range(3):
        pool.from_tensor(torch.full((60000,), torch.nan)).add_(1)
        with torch.no_grad():
            assert_same(converted(X), expected(X))
