"""Modules whose weights are computed before each forward pass, and modules that native code holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, spectral_norm

import farpool
from farpool import PagedTensor, UnsupportedError
from tests.tensors.bits import assert_same, tensors_of
from tests.tensors.evil_pool import EvilPool

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def pruned(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 0.2)
    prune.random_unstructured(layer, "bias", 0.3)


COMPUTED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": lambda layer: nn.utils.weight_norm(layer),
    "spectral_norm": lambda layer: spectral_norm(layer),
    "prune": pruned,
}


def make(change: Callable[[nn.Module], Any]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    change(model[0])
    change(model[2])
    return model


@pytest.mark.parametrize("name", COMPUTED)
def test_a_model_with_computed_weights_moves_in_and_out_and_trains_to_the_same_bits(name: str, evil: EvilPool) -> None:
    plain, moved = (make(COMPUTED[name]) for _ in range(2))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, moved)]
    moves = {1: lambda: farpool.offload(moved, evil), 3: lambda: farpool.restore(moved)}
    for step in range(5):
        for model in (plain, moved):
            model(torch.ones(2, 6))  # leaves weights behind whose graph holds the parameters
        move = moves.get(step)
        if move is not None:
            before = moved[0].weight.detach().clone()
            move()
            assert_same(moved[0].weight, before)
        for model, optimizer in zip((plain, moved), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
        for key, tensor in tensors_of(plain).items():
            assert type(tensors_of(moved)[key]) is (PagedTensor if 1 <= step < 3 else type(tensor)), key
            assert_same(tensors_of(moved)[key], tensor, key)


def test_a_module_that_has_never_run_is_not_refused(evil: EvilPool) -> None:
    for change in COMPUTED.values():
        plain, paged = make(change), farpool.offload(make(change), evil)
        assert_same(paged(torch.ones(2, 6)), plain(torch.ones(2, 6)))


MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.ones(1, 3)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_module_that_a_scripted_one_holds_is_refused_and_the_remedy_works(name: str, evil: EvilPool) -> None:
    layer = nn.Linear(3, 3)
    expected = layer(torch.ones(2, 3)).detach()
    for move in (lambda: farpool.offload(layer, evil), lambda: farpool.restore(layer)):
        made = MAKERS[name](layer)
        before = type(layer.weight)
        with pytest.raises(
            UnsupportedError, match=r"weight is held by native code .*drop what was made of it"
        ) as caught:
            move()
        assert "graph" not in str(caught.value)
        assert type(layer.weight) is before
        assert_same(made(torch.ones(2, 3)), expected)
        del made, caught
        gc.collect()
        move()
        assert type(layer.weight) is not before


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_scripted_after_the_offload_computes_with_paged_tensors(name: str, evil: EvilPool) -> None:
    layer = nn.Linear(3, 3)
    expected = layer(torch.ones(2, 3))
    expected.sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    farpool.offload(layer, evil)
    made = MAKERS[name](layer)
    with pytest.raises(UnsupportedError, match=r"scripted.*drop it and give the module"):
        farpool.offload(made, evil)
    outputs = made(torch.ones(2, 3))
    outputs.sum().backward()
    assert_same(outputs, expected)
    assert type(layer.weight.grad) is PagedTensor
    assert_same(layer.weight.grad, gradient)


def test_a_graph_is_named_where_there_is_one(evil: EvilPool) -> None:
    layer = nn.Linear(3, 3)
    layer.register_buffer("scale", torch.ones(3))
    output = layer(torch.ones(1, 3, requires_grad=True))
    with pytest.raises(UnsupportedError, match="weight is held by an autograd graph: drop the outputs") as caught:
        farpool.offload(layer, evil)
    assert "native" not in str(caught.value)
    output = torch.ones(3, requires_grad=True) * layer.scale
    with pytest.raises(UnsupportedError, match=r"scale is held by an autograd graph.*or held by native code"):
        farpool.offload(layer, evil)
    del output
    farpool.offload(layer, evil)
    assert type(layer.scale) is PagedTensor
