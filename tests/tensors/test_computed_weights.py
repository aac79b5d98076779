"""Modules whose weights are computed before each forward pass, and modules that native code holds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm

import farpool
from farpool import PagedTensor, UnsupportedError
from farpool.tensors.factories import from_tensor
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


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).t()

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu()


class Twice(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Same(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight


def in_a_row(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", Twice())
    parametrize.register_parametrization(layer, "bias", Twice())


PARAMETRIZED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer),
    "matrix_exp": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
    "cayley": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley"),
    "householder": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder"),
    "no trivialization": lambda layer: parametrizations.orthogonal(layer, use_trivialization=False),
    "in a row": in_a_row,
}
REMOVED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": lambda layer: nn.utils.remove_weight_norm(layer),
    "spectral_norm": lambda layer: nn.utils.remove_spectral_norm(layer),
    "prune": lambda layer: [prune.remove(layer, name) for name in ("weight", "bias")],
}


def train(model: nn.Module, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def square() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def assert_alike(moved: nn.Module, plain: nn.Module) -> None:
    found, expected = tensors_of(moved), tensors_of(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor, name)
    assert list(moved.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("name", [*PARAMETRIZED, *[f"older {name}" for name in COMPUTED]])
def test_weights_become_computed_ones_while_they_are_in_a_pool(name: str, evil: EvilPool) -> None:
    older = name.removeprefix("older ") if name.startswith("older ") else ""
    plain, moved = square(), farpool.offload(square(), evil)
    weight = moved[0].weight
    for model in (plain, moved):
        torch.manual_seed(1)
        (COMPUTED[older] if older else PARAMETRIZED[name])(model[0])
        train(model, 2)
    assert_alike(moved, plain)
    if name not in ("weight_norm", "older weight_norm"):  # these make new parameters
        assert any(weight is parameter for parameter in moved.parameters())
        assert type(weight) is PagedTensor
    for model in (plain, moved):
        if older:
            REMOVED[older](model[0])
        else:
            parametrize.remove_parametrizations(model[0], "weight")
        train(model, 1)
    assert_alike(moved, plain)
    farpool.restore(moved)
    assert not any(type(tensor) is PagedTensor for tensor in tensors_of(moved).values())
    for model in (plain, moved):
        train(model, 1)
    assert_alike(moved, plain)


@pytest.mark.parametrize("is_paged", [False, True])
def test_a_parametrized_weight_is_assigned_and_left_as_it_was(is_paged: bool, evil: EvilPool) -> None:
    plain, moved = square(), farpool.offload(square(), evil)
    given = torch.arange(36.0).view(6, 6)
    for model in (plain, moved):
        parametrize.register_parametrization(model[0], "weight", Symmetric())
        model[0].weight = from_tensor(evil, given) if is_paged and model is moved else given
        with parametrize.cached():
            model(torch.ones(1, 6))
    assert_same(moved[0].weight, plain[0].weight)
    assert type(moved[0].parametrizations.weight.original) is PagedTensor
    for model in (plain, moved):
        parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=False)
    assert_alike(moved, plain)


def test_a_plain_parametrized_weight_takes_a_paged_value(evil: EvilPool) -> None:
    layer = nn.Linear(6, 6)
    parametrize.register_parametrization(layer, "bias", Same())
    layer.bias = from_tensor(evil, torch.arange(6.0))
    assert type(layer.parametrizations.bias.original) is nn.Parameter
    assert_same(layer.bias, torch.arange(6.0))


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
            UnsupportedError, match=r"weight is held by native code .*drop the objects that were made from it"
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
    with pytest.raises(UnsupportedError, match=r"scripted.*drop it and pass the original module"):
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
