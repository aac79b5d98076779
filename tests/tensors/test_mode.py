"""Tensors and modules that are made inside ``paged(pool)``."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor
from farpool.tensors.factories import materialize
from tests.tensors.bits import assert_same, tensors_of
from tests.tensors.evil_pool import EvilPool

FACTORIES: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(3, 4),
    "ones": lambda: torch.ones((3, 4), dtype=torch.int64),
    "full": lambda: torch.full((2, 3), 7),
    "rand": lambda: torch.rand(5, 5),
    "randn": lambda: torch.randn(5, 5, dtype=torch.float64),
    "randint": lambda: torch.randint(0, 9, (7,)),
    "randperm": lambda: torch.randperm(11),
    "normal": lambda: torch.normal(1.0, 2.0, (3, 3)),
    "arange": lambda: torch.arange(2, 9, 3),
    "linspace": lambda: torch.linspace(0, 1, 7),
    "eye": lambda: torch.eye(3),
    "tensor": lambda: torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "scalar": lambda: torch.tensor(3.5),
    "zeros by name": lambda: torch.zeros(size=(2, 2)),
    "on a device": lambda: torch.rand(3, device="cpu"),
    "own generator": lambda: torch.rand(3, generator=torch.Generator().manual_seed(9)),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_paged_tensors_with_the_same_bits(name: str, evil: EvilPool) -> None:
    torch.manual_seed(4)
    expected = FACTORIES[name]()
    torch.manual_seed(4)
    with farpool.paged(evil):
        tensor = FACTORIES[name]()
    assert type(tensor) is PagedTensor
    assert_same(tensor, expected)
    assert type(FACTORIES[name]()) is torch.Tensor


def test_leaves_are_made_with_paged_gradients(evil: EvilPool) -> None:
    with farpool.paged(evil):
        leaves = [torch.ones(3, requires_grad=True), torch.randn(3, requires_grad=True), torch.tensor([1.0])]
    assert [leaf.requires_grad for leaf in leaves] == [True, True, False]
    (leaves[0] * leaves[1]).sum().backward()
    assert type(leaves[0].grad) is PagedTensor


def test_a_module_made_inside_is_paged_and_trains_to_the_same_bits(evil: EvilPool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.BatchNorm1d(4), nn.LSTM(6, 5))

    with farpool.paged(evil):
        paged = make()
    plain = make()
    for module in (plain, paged):
        module(torch.arange(8).view(2, 4))[0].square().sum().backward()
    for name, tensor in tensors_of(plain).items():
        assert type(tensors_of(paged)[name]) is PagedTensor, name
        assert_same(tensors_of(paged)[name], tensor, name)


def test_what_is_not_new_on_the_device_of_the_pool_stays_plain(evil: EvilPool) -> None:
    import numpy as np

    outside, memory = torch.ones(3), np.ones(3, dtype=np.float32)
    with farpool.paged(evil):
        assert type(outside + 1) is torch.Tensor
        assert type(torch.ones(3, device="meta")) is torch.Tensor
        assert type(torch.ones(3, out=outside)) is torch.Tensor
        shared = torch.from_numpy(memory)
        assert type(shared) is torch.Tensor
        assert type(torch.as_tensor(memory)) is torch.Tensor
    memory[0] = 5
    assert shared[0] == 5


def test_what_farpool_does_itself_is_not_affected(evil: EvilPool) -> None:
    layer = nn.Linear(3, 3)
    with farpool.paged(evil):
        tensor = torch.arange(2000.0)
        assert "..." in repr(tensor)
        assert tensor[:2].tolist() == [0.0, 1.0]
        assert type(materialize(tensor)) is torch.Tensor
        assert type(copy.deepcopy(tensor)) is PagedTensor
        assert type(farpool.offload(layer, evil).weight) is PagedTensor
        assert type(farpool.restore(layer).weight) is nn.Parameter
        assert_same(nn.functional.embedding(torch.tensor([1, 0]), tensor.view(4, 500)), tensor.view(4, 500)[:2].flip(0))


def test_only_the_thread_that_enters_is_affected(evil: EvilPool) -> None:
    kinds: list[type] = []
    with farpool.paged(evil):
        thread = threading.Thread(target=lambda: kinds.append(type(torch.ones(3))))
        thread.start()
        thread.join(20)
    assert kinds == [torch.Tensor]
    with pytest.raises(KeyError), farpool.paged(evil):
        raise KeyError
    assert type(torch.ones(3)) is torch.Tensor
