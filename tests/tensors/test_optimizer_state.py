"""Moments that were not made in the pool: loaded, or older than the offload. They are paged, with the same bits."""

from __future__ import annotations

import copy
import gc
import io
import itertools
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool, PoolFullError, PoolMixError, UnsupportedError
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool
from tests.tensors.test_optimizers import FORMS, OPTIMIZERS, make, train

FUSED = ("sgd", "adam", "adamw", "adagrad")
CASES = [
    pytest.param(name, form, when, id=f"{name}-{form}-{when}")
    for name, form, when in itertools.product(
        ("sgd", "adam", "adamw", "adagrad", "rmsprop"), FORMS, ("loaded", "older")
    )
    if form != "fused" or name in FUSED
]


def on_disk(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [
        value
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if key != "step" and isinstance(value, torch.Tensor) and value.size() == parameter.size()
    ]


def assert_same_state(left: torch.optim.Optimizer, right: torch.optim.Optimizer) -> None:
    states = [list(optimizer.state.values()) for optimizer in (left, right)]
    assert_same([list(state.values()) for state in states[0]], [list(state.values()) for state in states[1]])


@pytest.mark.parametrize(("name", "form", "when"), CASES)
def test_training_continues_to_the_same_bits_with_moments_in_the_pool(
    name: str, form: str, when: str, evil: EvilPool
) -> None:
    build = OPTIMIZERS[name]
    plain, paged = make(), make()
    expected, optimizer = (build(module.parameters(), **FORMS[form]) for module in (plain, paged))
    for module, each in ((plain, expected), (paged, optimizer)):
        train(module, each, 2)
    if when == "loaded":
        saved = on_disk(optimizer.state_dict())
        farpool.offload(paged, evil)
        optimizer = build(paged.parameters(), **FORMS[form])
        optimizer.load_state_dict(saved)
        assert moments(optimizer)
        assert all(type(moment) is PagedTensor for moment in moments(optimizer))
        expected.load_state_dict(on_disk(expected.state_dict()))
    else:
        farpool.offload(paged, evil)
    assert_same(train(paged, optimizer, 3), train(plain, expected, 3))
    for moment in moments(optimizer):
        assert type(moment) is PagedTensor
        assert moment._storage.cls == "optimizer"
    assert_same_state(optimizer, expected)
    for left, right in zip(paged.parameters(), plain.parameters(), strict=True):
        assert_same(left, right)


def test_the_account_has_loaded_moments_and_those_that_are_older_than_the_offload(pool: Pool) -> None:
    def optimizer_bytes() -> int:
        return {each.name: each.live for each in pool.stats().classes}.get("optimizer", 0)

    module = make()
    nbytes = 2 * sum(parameter.nbytes for parameter in module.parameters())
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer, 1)
    saved = on_disk(optimizer.state_dict())
    farpool.offload(module, pool)
    assert optimizer_bytes() == 0
    train(module, optimizer, 1)
    assert optimizer_bytes() == nbytes
    del optimizer
    gc.collect()
    assert optimizer_bytes() == 0
    other = torch.optim.AdamW(module.parameters())
    other.load_state_dict(saved)
    assert optimizer_bytes() == nbytes
    del other, saved
    farpool.restore(module)
    gc.collect()
    pool.close()


def test_an_optimizer_is_moved_and_restored_on_request(evil: EvilPool) -> None:
    module = make()
    optimizer = torch.optim.Adam(module.parameters(), amsgrad=True)
    train(module, optimizer, 2)
    before, held = copy.deepcopy(optimizer.state_dict()["state"]), moments(optimizer)
    farpool.offload(module, evil)
    told: list[tuple[int, int]] = []
    assert farpool.offload(optimizer, evil, progress=lambda done, total: told.append((done, total))) is optimizer
    assert told[-1][0] == told[-1][1] == sum(3 * parameter.nbytes for parameter in module.parameters())
    assert len(held) == 18
    assert all(type(moment) is PagedTensor for moment in held), "what the program holds is what the optimizer holds"
    for left, right in zip(optimizer.state_dict()["state"].values(), before.values(), strict=True):
        assert type(left["step"]) is torch.Tensor
        assert_same(list(left.values()), list(right.values()))
    assert farpool.restore(optimizer) is optimizer
    assert all(type(moment) is torch.Tensor for moment in held)
    for left, right in zip(optimizer.state_dict()["state"].values(), before.values(), strict=True):
        assert_same(list(left.values()), list(right.values()))


def test_an_optimizer_of_a_plain_module_or_of_another_pool_is_refused(evil: EvilPool) -> None:
    module = make()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, 1)
    with pytest.raises(UnsupportedError, match=r"offload the module first"):
        farpool.offload(optimizer, evil)
    farpool.offload(module, evil)
    with pytest.raises(PoolMixError, match=r"'0\.weight'.*another pool"):
        farpool.offload(optimizer, EvilPool())
    assert all(type(moment) is torch.Tensor for moment in moments(optimizer))


def test_moments_that_do_not_fit_leave_the_optimizer_as_it_was() -> None:
    with Pool("16KiB", dram="32KiB") as pool:
        module = nn.Sequential(*[nn.Linear(32, 32) for _ in range(5)])
        optimizer = torch.optim.Adam(module.parameters())
        module(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        saved = on_disk(optimizer.state_dict())
        held = moments(optimizer)
        farpool.offload(module, pool)
        with pytest.raises(PoolFullError):
            farpool.offload(optimizer, pool)
        assert all(type(moment) is torch.Tensor for moment in held)
        other = torch.optim.Adam(module.parameters())
        with pytest.raises(PoolFullError):
            other.load_state_dict(saved)
        assert not other.state
        assert_same(
            [list(state.values()) for state in optimizer.state.values()],
            [list(state.values()) for state in saved["state"].values()],
        )
        farpool.restore(module)


class Odd(torch.optim.Optimizer):
    """Keeps state of many kinds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if not self.state[parameter]:
                    flat = torch.zeros(2, *parameter.shape)
                    self.state[parameter] |= {
                        "step": torch.zeros(parameter.shape),
                        "moment": torch.zeros(parameter.shape),
                        "slice": flat[0],
                        "flat": flat,
                        "quantized": torch.zeros(parameter.shape, dtype=torch.uint8),
                        "rows": torch.zeros(parameter.shape[0]),
                        "scale": torch.zeros(()),
                        "history": [torch.zeros(parameter.shape)],
                        "name": "text",
                    }


def test_state_of_unknown_kinds_stays_as_it_is(evil: EvilPool) -> None:
    weight = nn.Parameter(torch.ones(3, 4))
    module = nn.Module()
    module.weight = weight
    optimizer = Odd([weight])
    optimizer.step()
    farpool.offload(module, evil)
    for _ in range(2):
        optimizer.step()
        kinds = {key: type(value) is PagedTensor for key, value in optimizer.state[weight].items()}
        assert [key for key, paged in kinds.items() if paged] == ["moment"]
    state = optimizer.state[weight]
    state["slice"].fill_(1)
    assert_same(state["flat"][0], torch.ones(3, 4))


def test_plain_optimizers_are_left_alone(evil: EvilPool) -> None:
    farpool.offload(make(), evil)
    module = make()
    optimizer = torch.optim.Adam(module.parameters())
    train(module, optimizer, 2)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    train(module, optimizer, 1)
    assert all(type(value) is torch.Tensor for state in optimizer.state.values() for value in state.values())
