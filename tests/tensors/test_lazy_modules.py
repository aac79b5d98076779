"""Lazy modules in a pool: plain until their tensors have shapes, paged from their first forward pass on."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool, PoolFullError, PoolMixError, UnsupportedError
from tests.tensors.bits import assert_same, tensors_of
from tests.tensors.evil_pool import EvilPool

pytestmark = pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LazyConv1d(4, 3), nn.LazyBatchNorm1d(), nn.Flatten(), nn.Linear(24, 6), nn.LazyLinear(5), nn.Linear(5, 2)
    )


def inputs(step: int = 0) -> torch.Tensor:
    return torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(step))


def run(model: nn.Module, steps: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    outputs = []
    for step in range(steps):
        outputs.append(model(inputs(step)))
        outputs[-1].square().sum().backward()
    return [output.detach() for output in outputs]


def paged_names(model: nn.Module) -> set[str]:
    return {name for name, tensor in tensors_of(model).items() if type(tensor) is PagedTensor}


def assert_alike(moved: nn.Module, plain: nn.Module) -> None:
    found, expected = tensors_of(moved), tensors_of(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same(found[name], tensor, name)


def test_lazy_modules_become_paged_at_their_first_forward_pass_and_train_to_the_same_bits(evil: EvilPool) -> None:
    plain, moved = make(), make()
    assert farpool.offload(moved, evil) is moved
    assert paged_names(moved) == {
        *("1.num_batches_tracked", "3.weight", "3.bias", "5.weight", "5.bias"),
    }
    weight = moved[4].weight
    assert_same(run(moved), run(plain))
    assert moved[4].weight is weight
    assert type(moved[4]) is nn.Linear
    assert not moved[4]._forward_pre_hooks
    assert paged_names(moved) == set(tensors_of(moved))
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (plain, moved)]
    for _ in range(2):
        for model, optimizer in zip((plain, moved), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            run(model, 2)
    assert_alike(moved, plain)
    farpool.restore(moved)
    assert not paged_names(moved)
    assert_same(run(moved), run(plain))


def test_bytes_count_against_the_pool_from_the_first_forward_pass_on() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.LazyLinear(256))
    with Pool("256KiB", dram="1MiB", timeout=20) as pool:
        farpool.offload(model, pool)
        assert sum(one.live for one in pool.stats().classes) == 8 * 64 * 4 + 64 * 4
        model(torch.ones(1, 8))
        assert sum(one.live for one in pool.stats().classes) == (8 * 64 + 64 + 64 * 256 + 256) * 4
        farpool.restore(model)


def test_a_first_forward_pass_without_room_changes_nothing_and_can_be_repeated() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.LazyLinear(512))
    with Pool("64KiB", dram="128KiB", timeout=20) as pool:
        farpool.offload(model, pool)
        other = pool.zeros(20 << 10)
        for _ in range(2):
            with pytest.raises(PoolFullError):
                model(torch.ones(1, 8))
            assert paged_names(model) == {"0.weight", "0.bias"}
        del other
        with torch.no_grad():
            model[1].weight.fill_(3)
        with pytest.raises(farpool.BudgetError):  # it lives in the pool now, larger than the budget
            model(torch.ones(1, 8))
        assert paged_names(model) == set(tensors_of(model))
        farpool.restore(model)
    assert_same(model[1].weight, torch.full((512, 64), 3.0))


@pytest.mark.parametrize("assign", [False, True])
def test_a_lazy_module_loads_a_state_dict_after_the_offload(assign: bool, evil: EvilPool) -> None:
    source = make()
    run(source, 2)
    plain, moved = make(), farpool.offload(make(), evil)
    for model in (plain, moved):
        assert (
            str(model.load_state_dict(copy.deepcopy(source.state_dict()), assign=assign))
            == "<All keys matched successfully>"
        )
    assert_same(run(moved), run(plain))
    assert_alike(moved, plain)
    assert {"4.weight", "4.bias", "1.running_mean", "1.running_var", "0.weight"} <= paged_names(moved)


def test_a_paged_module_loads_the_state_dict_of_a_lazy_one_as_plain_modules_do(evil: EvilPool) -> None:
    moved = farpool.offload(make(), evil)
    run(moved)
    fresh = make()
    fresh.load_state_dict(moved.state_dict())
    run(fresh)
    with pytest.raises(RuntimeError, match="load an uninitialized parameter into an initialized one"):
        moved.load_state_dict(make().state_dict())


def test_a_restored_module_stays_plain_at_its_first_forward_pass(evil: EvilPool) -> None:
    plain, moved = make(), make()
    farpool.restore(farpool.offload(moved, evil))
    assert not paged_names(moved)
    assert all(
        len(part._forward_pre_hooks) == len(other._forward_pre_hooks) for part, other in zip(moved, plain, strict=True)
    )
    assert_same(run(moved), run(plain))
    assert not paged_names(moved)


def test_a_module_whose_pool_is_closed_stays_plain_at_its_first_forward_pass() -> None:
    plain, moved = make(), make()
    with Pool("64KiB", dram="1MiB", timeout=20) as pool:
        farpool.offload(moved, pool)
        pool.close(materialize=True)
    assert_same(run(moved), run(plain))
    assert not paged_names(moved)
    assert not moved[4]._forward_pre_hooks


def test_a_module_waits_for_one_pool_at_a_time(evil: EvilPool) -> None:
    moved, other = farpool.offload(nn.Sequential(nn.LazyLinear(3)), evil), EvilPool()
    with pytest.raises(PoolMixError, match=r"0 goes into another pool .* farpool.restore"):
        farpool.offload(moved, other)
    assert farpool.offload(moved, evil) is moved
    assert len(moved[0]._forward_pre_hooks) == 2  # torch's own, and one for both calls
    farpool.offload(farpool.restore(moved), other)
    moved(torch.ones(2, 4))
    assert moved[0].weight._storage.pool is other


def test_a_lazy_module_on_another_device_is_refused_at_once(evil: EvilPool) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2, device="meta"))
    with pytest.raises(UnsupportedError, match=r"1\.weight is on meta, the pool on cpu"):
        farpool.offload(module, evil)
    assert not paged_names(module)


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: torch.load(saved(module), weights_only=False),
}


def saved(module: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("kind", COPIES)
def test_a_copy_of_a_module_that_has_never_run_is_paged_unless_it_went_through_a_file(
    kind: str, evil: EvilPool
) -> None:
    plain = nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(3))  # torch copies no UninitializedBuffer
    moved = farpool.offload(copy.deepcopy(plain), evil)
    copied = COPIES[kind](moved)
    for model in (plain, copied, moved):
        run(model)
        assert_alike(model, plain)
    assert paged_names(copied) == (set(tensors_of(copied)) if kind == "deepcopy" else set())
    assert paged_names(moved) == set(tensors_of(moved))
    assert copied[0].weight is not moved[0].weight


class ByHand(nn.Module):
    """A module that gives its tensors their shapes itself, and one of them only in its second pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()
        self.register_buffer("scale", nn.UninitializedBuffer())
        self.passes = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.passes == 0:
                self.weight.materialize((values.size(-1),))
                self.weight.fill_(2)
            if self.passes == 1:
                self.scale.materialize((values.size(-1),))
                self.scale.fill_(3)
        self.passes += 1
        return values * self.weight if self.passes == 1 else values * self.weight * self.scale


def test_a_module_that_initializes_itself_is_paged_before_the_next_pass_and_ties_stay(evil: EvilPool) -> None:
    model = nn.ModuleList([ByHand(), ByHand()])
    model[1].weight = model[0].weight
    model[1].passes = 1
    farpool.offload(model, evil)
    values = torch.ones(4)
    assert_same(model[0](values), 2 * values)
    assert_same(model[0](values), 6 * values)
    assert not paged_names(model)
    assert_same(model[0](values), 6 * values)
    assert paged_names(model) == {"0.weight", "0.scale"}
    assert_same(model[1](values), 6 * values)
    assert_same(model[1](values), 6 * values)
    assert paged_names(model) == {"0.weight", "0.scale", "1.scale"}  # the weight is named once
    assert model[1].weight is model[0].weight


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_first_forward_pass_may_be_one_without_gradients(mode: Any, evil: EvilPool) -> None:
    plain, moved = make().eval(), farpool.offload(make().eval(), evil)
    for model in (plain, moved):
        torch.manual_seed(1)
        with mode():
            model(inputs())
    for model in (plain, moved):
        with mode():
            model(inputs())
    assert_alike(moved, plain)
    assert paged_names(moved) == set(tensors_of(moved))
