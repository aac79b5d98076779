"""Leaving the with block of a pool: what still lives in it becomes plain, or the pool stays open."""

# ruff: noqa: PT012, PT031  (what is tested is how the whole block is left)

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import farpool
from farpool import BudgetError, Dram, FarpoolWarning, Faulty, PagedTensor, Pool, TierError, UnsupportedError
from farpool.available import available_memory
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool import blocks_of
from farpool.tensors import leaving
from tests.tensors.bits import assert_same, tensors_of

LEFT = "the pool was left with"


def make() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.BatchNorm1d(24), nn.Linear(24, 12))
    model[3].weight = nn.Parameter(model[0].weight.detach().clone().t())  # in another order of memory
    model.tied = model[0].weight
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(torch.randn(5, 12, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()


@contextlib.contextmanager
def memory_of(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(leaving, "available_memory", lambda: nbytes)
        yield


def test_training_goes_on_to_the_same_bits_after_the_pool_was_left() -> None:
    plain, left = make(), make()
    expected = torch.optim.AdamW(plain.parameters(), lr=0.01)
    train(plain, expected, range(6))
    with pytest.warns(FarpoolWarning, match=LEFT) as told, Pool("16KiB", dram="1MiB") as pool:
        farpool.offload(left, pool)
        identities = {name: id(tensor) for name, tensor in left.named_parameters()}
        optimizer = torch.optim.AdamW(left.parameters(), lr=0.01)
        train(left, optimizer, range(3))
        gradient = left.tied.grad
    assert len(told) == 1
    assert Path(told[0].filename).name == "test_leaving.py"
    assert pool.closed
    assert {name: id(tensor) for name, tensor in left.named_parameters()} == identities
    assert left.tied is left[0].weight
    assert left.tied.grad is gradient
    for name, tensor in tensors_of(left).items():
        assert type(tensor) in (torch.Tensor, nn.Parameter), name
    for state in optimizer.state.values():
        assert all(type(value) is torch.Tensor for value in state.values())
    train(left, optimizer, range(3, 6))
    for name, tensor in tensors_of(plain).items():
        assert_same(tensors_of(left)[name], tensor, name)
    assert_same(
        [value for state in optimizer.state.values() for value in state.values()],
        [value for state in expected.state.values() for value in state.values()],
    )


def test_aliases_stay_aliases() -> None:
    with pytest.warns(FarpoolWarning, match=LEFT), Pool("16KiB", dram="1MiB") as pool:
        whole = pool.from_tensor(torch.arange(6.0))
        window = whole.detach()[2:4]
    window.zero_()
    assert type(whole) is type(window) is torch.Tensor
    assert_same(whole, torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0, 5.0]))


def test_a_pool_in_which_nothing_lives_is_left_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Pool("16KiB", dram="1MiB") as pool:
            model = farpool.offload(make(), pool)
            model(torch.ones(5, 12)).sum().backward()
            farpool.restore(model)
            scratch = pool.zeros(10)
            del scratch
        with Pool("16KiB", dram="1MiB") as other:
            held = blocks_of(other).allocate(100)
    assert pool.closed
    assert other.closed
    assert held.nbytes == 100


def test_what_does_not_fit_into_memory_stays_in_an_open_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    model, expected = make(), make()
    nbytes = sum(tensor.nbytes for tensor in {id(t): t for t in tensors_of(model).values()}.values())
    pool = Pool("16KiB", dram="1MiB")
    with memory_of(monkeypatch, nbytes), pytest.raises(BudgetError, match=r"80 %.*stays open") as caught, pool:
        farpool.offload(model, pool)
    assert caught.value.budget < nbytes <= caught.value.needed
    assert not pool.closed
    assert_same(model(torch.ones(5, 12)), expected(torch.ones(5, 12)))
    with memory_of(monkeypatch, 2 * caught.value.needed), pytest.warns(FarpoolWarning, match=LEFT), pool:
        pass
    assert pool.closed
    for name, tensor in tensors_of(expected).items():
        assert_same(tensors_of(model)[name], tensor, name)


def test_an_error_on_its_way_is_raised_with_a_note_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool("16KiB", dram="1MiB")
    with memory_of(monkeypatch, 1000), pytest.raises(KeyError, match="mine") as caught, pool:
        model = farpool.offload(make(), pool)
        raise KeyError("mine")
    assert ["stays open" in note for note in caught.value.__notes__] == [True]
    assert not pool.closed
    assert_same(model[0].weight, make()[0].weight)
    farpool.restore(model)
    gc.collect()
    pool.close()


def test_an_error_on_its_way_does_not_cost_the_model() -> None:
    with pytest.warns(FarpoolWarning, match=LEFT), pytest.raises(KeyboardInterrupt), Pool("16KiB", dram="1MiB") as pool:
        model = farpool.offload(make(), pool)
        outputs = model(torch.ones(5, 12))
        raise KeyboardInterrupt
    assert pool.closed
    assert_same(model[0].weight, make()[0].weight)
    del outputs


@pytest.mark.filterwarnings("error::farpool.FarpoolWarning")
def test_a_warning_that_is_an_error_closes_the_pool_and_hides_no_other_error() -> None:
    with pytest.raises(FarpoolWarning, match=LEFT), Pool("16KiB", dram="1MiB") as pool:
        model = farpool.offload(make(), pool)
    assert pool.closed
    assert type(model[0].weight) is nn.Parameter
    with pytest.raises(KeyError) as caught, Pool("16KiB", dram="1MiB") as pool:
        farpool.offload(model, pool)
        raise KeyError("mine")
    assert LEFT in caught.value.__notes__[0]
    assert pool.closed


def test_a_live_graph_costs_its_backward_pass_and_nothing_else() -> None:
    model, expected = make(), make()
    with pytest.warns(FarpoolWarning, match=LEFT), Pool("16KiB", dram="1MiB") as pool:
        farpool.offload(model, pool)
        outputs = model(torch.ones(5, 12))
        view = model[0].weight.t()
    assert pool.closed
    assert type(view) is PagedTensor
    with pytest.raises((UnsupportedError, farpool.PoolClosedError)):
        outputs.sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(farpool.PoolClosedError):
        view + 1
    assert_same(outputs, expected(torch.ones(5, 12)))
    for module in (model, expected):
        module(torch.ones(5, 12)).sum().backward()
    for name, tensor in tensors_of(expected).items():
        assert_same(tensors_of(model)[name], tensor, name)


def test_a_sum_that_saves_no_operand_gives_an_error_and_not_a_lost_gradient() -> None:
    with pytest.warns(FarpoolWarning, match=LEFT), Pool("16KiB", dram="1MiB") as pool:
        bias = nn.Parameter(pool.from_tensor(torch.ones(3)))
        total = (bias + 1).sum()
    with pytest.raises(UnsupportedError, match="between forward and backward"):
        total.backward()
    assert bias.grad is None


def test_bytes_that_only_a_tensor_with_history_has_keep_the_pool_open() -> None:
    pool = Pool("16KiB", dram="1MiB")
    with pytest.raises(UnsupportedError, match="stays open"), pool:
        weight = nn.Parameter(pool.from_tensor(torch.ones(3)))
        running = pool.zeros(3)
        running.add_(weight)
    assert not pool.closed
    assert_same(running, torch.ones(3))
    assert type(weight) is PagedTensor
    del running
    with pytest.warns(FarpoolWarning, match=LEFT), pool:
        pass
    assert type(weight) is nn.Parameter


def test_a_read_error_in_the_middle_loses_nothing() -> None:
    tier = Faulty(Dram("1MiB"), seed=1)
    model, expected = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]), None
    expected = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    pool = Pool("32KiB", tiers=[tier], prefetch=False)
    with pytest.raises(TierError) as caught, pool:
        farpool.offload(model, pool)
        order: list[str] = []
        read_into = tier.read_into

        def failing(*args: object, **kwargs: object) -> object:
            order.append("read")
            if len(order) > 40:
                raise TierError("broken", tier="dram")
            return read_into(*args, **kwargs)

        tier.read_into = failing
    del tier.read_into
    kinds = {name: type(parameter) for name, parameter in model.named_parameters()}
    assert {PagedTensor, nn.Parameter} == set(kinds.values())
    left = sum(kind is PagedTensor for kind in kinds.values())
    assert f"{left} of 16 tensors" in caught.value.__notes__[-1]
    assert not pool.closed
    with pytest.warns(FarpoolWarning, match=LEFT), pool:
        pass
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter
        assert_same(parameter, expected[name], name)


@pytest.mark.usefixtures("thawed")
@pytest.mark.slow
def test_frozen_objects_are_found() -> None:
    with pytest.warns(FarpoolWarning, match=LEFT), Pool("16KiB", dram="1MiB") as pool:
        model = farpool.offload(make(), pool)
        gc.freeze()
    assert type(model[0].weight) is nn.Parameter


def test_a_thread_that_uses_the_pool_meanwhile_does_not_hold_up_the_end() -> None:
    stop = threading.Event()

    def use() -> None:
        with contextlib.suppress(farpool.PoolClosedError):
            while not stop.wait(0.001):
                blocks.release(blocks.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)]))

    with Pool("16KiB", dram="1MiB", timeout=20) as pool:
        blocks = blocks_of(pool)
        tensor, storage = pool.from_tensor(torch.arange(5000.0)), blocks.allocate(1000)
        thread = threading.Thread(target=use)
        thread.start()
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert pool.closed
    assert_same(tensor, torch.arange(5000.0))


def test_a_closed_pool_is_left_without_a_word() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Pool("16KiB", dram="1MiB") as pool:
            model = farpool.offload(make(), pool)
            pool.close(materialize=True)
        with pool:
            pass
    assert type(model[0].weight) is nn.Parameter


def test_memory_is_what_the_narrowest_control_group_leaves(tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert available_memory(tmp_path) == 4000 << 10
    write("proc/self/cgroup", "4:cpu,memory:/old\n0::/jobs/mine\n")
    assert available_memory(tmp_path) == 4000 << 10, "the groups are not mounted"
    for group, most, current in (("", "max", 10**9), ("jobs", "3000000", 2_000_000), ("jobs/mine", "max", 1_000_000)):
        write(f"sys/fs/cgroup/{group}/memory.max", most)
        write(f"sys/fs/cgroup/{group}/memory.current", str(current))
        write(f"sys/fs/cgroup/{group}/memory.stat", "anon 5\ninactive_file 500000\n")
    assert available_memory(tmp_path) == 1_500_000
    for name, text in (("limit_in_bytes", "900000"), ("usage_in_bytes", "1000000")):
        write(f"sys/fs/cgroup/memory/memory.{name}", text)
    write("sys/fs/cgroup/memory/memory.stat", "cache 7\ntotal_inactive_file 300000\n")
    assert available_memory(tmp_path) == 200_000, "a group of a container, mounted as the root"
    write("sys/fs/cgroup/memory/memory.usage_in_bytes", "9000000")
    assert available_memory(tmp_path) == 0


def test_memory_of_this_machine_is_a_plausible_number() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


class Keeper(nn.Module):
    """A module that keeps a view of its weight as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.kept = self.layer.weight.t()
        return values @ self.kept


def failing_loss(model: nn.Linear) -> None:
    turned = model.weight.t()
    raise ValueError(f"the loss of {list(turned.size())} is not finite")


def test_a_refused_close_names_the_view_and_the_variable_that_a_traceback_keeps() -> None:
    model = nn.Linear(4, 4)
    pool = Pool("16KiB", dram="1MiB")
    farpool.offload(model, pool)
    with pytest.raises(ValueError, match="not finite") as failed:
        failing_loss(model)
    with pytest.raises(UnsupportedError, match=r"'weight' \[4, 4\] is a view.* with history") as refused:
        pool.close(materialize=True)
    said = str(refused.value)
    assert "the variable 'turned' of failing_loss() (test_leaving.py, line" in said
    assert "traceback" in said
    assert type(model.weight) is PagedTensor
    del failed, refused
    gc.collect()
    pool.close(materialize=True)
    assert type(model.weight) is nn.Parameter


def test_a_refused_close_names_the_attribute_or_the_key_that_holds_the_view() -> None:
    model = Keeper()
    pool = Pool("16KiB", dram="1MiB")
    farpool.offload(model, pool)
    model(torch.ones(1, 4))
    with pytest.raises(UnsupportedError, match=r"held by the attribute 'kept' of a Keeper$"):
        pool.close(materialize=True)
    del model.kept
    by_name = {"turned": model.layer.weight.t()}
    with pytest.raises(UnsupportedError, match=r"held by a dict, under the key 'turned'$"):
        pool.close(materialize=True)
    by_name.clear()
    mine = model.layer.weight.t()
    with pytest.raises(UnsupportedError, match="held by a variable of a running function"):
        pool.close(materialize=True)
    del mine
    pool.close(materialize=True)
    assert type(model.layer.weight) is nn.Parameter
