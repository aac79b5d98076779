"""Pools that are closed, full, too small, two, or used twice."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import farpool
from farpool import BudgetError, Dram, Nvme, Pool, PoolClosedError, PoolFullError, PoolMixError
from tests.process.pitfalls.compare import assert_usable, churn, plain, randn, refused, same, state_of, twin
from tests.process.pitfalls.harness import scenario


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.BatchNorm1d(24), nn.Linear(24, 5))


CLOSED: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "forward": lambda m, t: m(randn(3, 12)),
    "arithmetic": lambda m, t: t + 1,
    "in place": lambda m, t: t.add_(1),
    "item": lambda m, t: t[0, 0].item(),
    "tolist": lambda m, t: t.tolist(),
    "deepcopy": lambda m, t: copy.deepcopy(t),
    "deepcopy of the module": lambda m, t: copy.deepcopy(m),
    "clone": lambda m, t: t.clone(),
    "like": lambda m, t: torch.zeros_like(t),
    "view": lambda m, t: t[1:] + 0,
    "empty view": lambda m, t: t[:0] + 0,
    "backward": lambda m, t: (t.detach().requires_grad_() ** 2).sum().backward(),
    "pickle": lambda m, t: pickle.dumps(t),
    "save": lambda m, t: torch.save(m.state_dict(), "closed.pt"),
    "materialize": lambda m, t: t.pool.materialize(t),
    "restore": lambda m, t: farpool.restore(m),
    "offload": lambda m, t: farpool.offload(nn.Linear(2, 2), t.pool),
    "allocate": lambda m, t: t.pool.zeros(3),
    "stats": lambda m, t: t.pool.stats(),
    "type": lambda m, t: t.double(),
    "data": lambda m, t: setattr(t, "data", torch.zeros(2)),
    "optimizer": lambda m, t: torch.optim.SGD([t.detach().requires_grad_()], lr=0.1).zero_grad() or t.sum(),
    "bool": lambda m, t: bool(t[0, 0]),
    "copied out": lambda m, t: torch.zeros(4, 3).copy_(t),
    "random": lambda m, t: t.normal_(),
    "set": lambda m, t: t.__setitem__(0, 1.0),
    "resize of the pool": lambda m, t: t.pool.resize("32KiB"),
    "new": lambda m, t: (t.new_zeros(2), t + 1),
    "equal": lambda m, t: torch.equal(t, torch.zeros(4, 3)),
}


def _closed() -> tuple[nn.Module, torch.Tensor, Pool]:
    with Pool("64KiB", dram="1MiB") as pool:
        return farpool.offload(model(), pool), pool.from_tensor(randn(4, 3)), pool


@scenario()
def after_close_everything_raises_that_the_pool_is_closed() -> None:
    module, tensor, pool = _closed()
    assert pool.closed
    for name, use in CLOSED.items():
        print(name)
        with refused(None, PoolClosedError, "closed"):
            use(module, tensor)


@scenario()
def a_tensor_of_a_closed_pool_can_be_printed_or_says_that_it_is_closed() -> None:
    with Pool("64KiB", dram="1MiB") as pool:
        module, tensor = farpool.offload(model(), pool), pool.from_tensor(randn(4, 3))
        values = (tensor, tensor[1:], module[0].weight, module[0].weight[1:], tensor[0, 0])
    for show in (repr, str, "{}".format):
        for value in values:
            try:
                text = show(value)
            except PoolClosedError:
                continue
            assert "closed" in text, text
    repr(module)
    assert tensor.shape == (4, 3)
    assert tensor.dtype is torch.float32


@scenario()
def dropping_tensors_of_a_closed_pool_and_closing_again_is_nothing() -> None:
    module, tensor, pool = _closed()
    del module, tensor
    gc.collect()
    pool.close()
    pool.close(materialize=True)
    with pool:
        pass


@scenario()
def a_backward_pass_after_close_raises() -> None:
    with Pool("64KiB", dram="1MiB") as pool:
        module = farpool.offload(model(), pool)
        loss = module(randn(4, 12)).sum()
    with refused(None, PoolClosedError, "closed"):
        loss.backward()


@scenario()
def closing_with_live_tensors_is_refused_and_changes_nothing() -> None:
    pool = Pool("64KiB", dram="1MiB")
    module = farpool.offload(model(), pool)
    with refused(pool, PoolClosedError, "restore", "materialize=True"):
        pool.close()
    assert not pool.closed
    expected = model()
    same(module(randn(4, 12)).detach(), expected(randn(4, 12)).detach())
    farpool.restore(module)
    gc.collect()
    pool.close()
    same(state_of(module), state_of(expected))


@scenario()
def closing_with_materialize_leaves_working_plain_tensors() -> None:
    pool = Pool("64KiB", dram="1MiB")
    module, expected = farpool.offload(model(), pool), model()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (module, expected)]

    def step() -> None:
        for network, optimizer in zip((module, expected), optimizers, strict=True):
            optimizer.zero_grad()
            network(randn(4, 12)).sum().backward()
            optimizer.step()

    step()
    tensor = pool.from_tensor(randn(4, 3))
    view = tensor.detach()[1:].detach()
    identities = [id(p) for p in module.parameters()]
    pool.close(materialize=True)
    assert pool.closed
    assert [id(p) for p in module.parameters()] == identities
    assert all(type(p) is nn.Parameter and type(p.grad) is torch.Tensor for p in module.parameters())
    assert type(tensor) is type(view) is torch.Tensor
    tensor.fill_(2)
    assert bool((view == 2).all()), "a view does not share memory with its base any more"
    step()
    same(state_of(module), state_of(expected))
    same(optimizers[0].state_dict()["state"], optimizers[1].state_dict()["state"])


@scenario()
def closing_with_materialize_while_a_view_or_a_graph_lives_is_refused_or_right() -> None:
    for hold in (lambda t: t[1:], lambda t: (t.requires_grad_() * 2).sum()):
        pool = Pool("64KiB", dram="1MiB")
        tensor = pool.from_tensor(randn(4, 3))
        other = pool.from_tensor(randn(5))
        held = hold(tensor)
        try:
            pool.close(materialize=True)
        except farpool.UnsupportedError:
            assert not pool.closed
            assert type(tensor) is type(other) is farpool.PagedTensor
            same(tensor.detach(), randn(4, 3))
            assert_usable(pool)
        else:
            assert type(tensor) is torch.Tensor
            same(tensor.detach(), randn(4, 3))
        same(held.detach(), hold(randn(4, 3)).detach())


@scenario()
def leaving_with_because_of_an_error_closes_and_shows_that_error() -> None:
    try:
        with Pool("64KiB", dram="1MiB", nvme=None) as pool:
            tensor = pool.from_tensor(randn(4))
            raise KeyError("mine")
    except KeyError:
        pass
    assert pool.closed
    with refused(None, PoolClosedError):
        tensor.sum()


@scenario()
def the_pool_file_is_gone_after_close() -> None:
    path = Path("far.pool")
    with Pool("64KiB", [Nvme(path, "1MiB")]) as pool:
        tensor = pool.from_tensor(randn(30_000))
        churn(pool)
        assert path.exists()
        same(tensor, randn(30_000))
    assert not path.exists()


MIXES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "addition": lambda a, b: a + b,
    "matmul": lambda a, b: a @ b.t(),
    "in place": lambda a, b: a.add_(b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "cat": lambda a, b: torch.cat([a, b]),
    "stack": lambda a, b: torch.stack((b, a)),
    "index_put": lambda a, b: a.index_put_((torch.tensor([0]),), b[0, 0]),
    "foreach": lambda a, b: torch._foreach_add_([a], [b]),
    "lerp": lambda a, b: a.lerp_(b, 0.5),
    "linear": lambda a, b: nn.functional.linear(randn(2, 3), a, b[:, 0]),
}


@scenario(each=MIXES)
def two_pools_in_one_operation_are_refused(pool: Pool, mix: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    with Pool("64KiB", dram="1MiB") as other:
        a, b = pool.from_tensor(randn(4, 3)), other.from_tensor(randn(4, 3, seed=5))
        with refused(pool, PoolMixError):
            mix(a, b)
        assert_usable(other)
        same(a, randn(4, 3))
        same(b, randn(4, 3, seed=5))


@scenario()
def copying_between_pools_is_refused_or_equal(pool: Pool) -> None:
    with Pool("64KiB", dram="1MiB") as other:
        for size in (4, 30_000):
            a, b = pool.from_tensor(randn(size)), other.from_tensor(randn(size, seed=5))
            try:
                a.copy_(b)
            except PoolMixError:
                same(a, randn(size))
            else:
                same(a, randn(size, seed=5))
            assert not torch.equal(pool.from_tensor(b), randn(size))
            same(pool.from_tensor(b), randn(size, seed=5))
            a = b = None


@scenario()
def a_module_in_another_pool_is_refused_and_stays_there(pool: Pool) -> None:
    with Pool("64KiB", dram="1MiB") as other:
        module = farpool.offload(model(), other)
        module.append(nn.Linear(3, 3))
        with refused(pool, PoolMixError):
            farpool.offload(module, pool)
        assert type(module[4].weight) is nn.Parameter
        assert module[0].weight.pool is other
        farpool.restore(module)
        farpool.offload(module, pool)
        same(module[:4].state_dict(), model().state_dict())


@scenario(fast="8KiB")
def operands_beyond_the_budget_name_the_smallest_budget_and_it_works(pool: Pool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))

    expected = make()(randn(2, 100)).detach()
    module = farpool.offload(make(), pool)
    try:
        module(randn(2, 100))
    except BudgetError as error:
        assert isinstance(error, MemoryError)
        assert error.op.startswith("aten."), error.op
        assert error.op in str(error)
        assert "0.weight" in str(error)
        assert f"{error.needed} bytes" in str(error)
        assert error.budget == pool.fast
        needed = error.needed
        error.__traceback__ = None
    else:
        raise AssertionError("a weight of 20000 bytes in a budget of 8192")
    assert_usable(pool)
    same(module.state_dict(), make().state_dict())
    with Pool(needed, dram="1MiB") as exact:
        other = farpool.offload(make(), exact)
        same(other(randn(2, 100)).detach(), expected)
    pool.resize(needed)
    same(module(randn(2, 100)).detach(), expected)
    with Pool(needed - 64, dram="1MiB") as less:
        other = farpool.offload(make(), less)
        with refused(less, BudgetError, "0.weight"):
            other(randn(2, 100))


@scenario(fast="8KiB")
def a_budget_error_in_an_in_place_operation_changes_nothing(pool: Pool) -> None:
    big, small = pool.from_tensor(randn(3000)), pool.from_tensor(randn(1000, seed=4))
    refusals = 0
    for change in (
        lambda t: t.add_(1),
        lambda t: t.mul_(t),
        lambda t: t.copy_(t.sort().values),
        lambda t: t.cumsum_(0),
        lambda t: t.view(60, 50).t().exp_(),
        lambda t: t.scatter_(0, torch.arange(9), 1.0),
        lambda t: t.index_put_((torch.tensor([5, 2999]),), torch.tensor(1.0)),
    ):
        expected = plain(big).clone()
        try:
            change(big)
        except BudgetError as error:
            refusals += 1
            error.__traceback__ = None
        else:
            change(expected)
        assert_usable(pool)
        same(big, expected)
        same(small, randn(1000, seed=4))
    assert refusals
    big.copy_(randn(3000))
    same(big[100:200] + 1, randn(3000)[100:200] + 1)


@scenario(fast="8KiB")
def a_budget_error_in_a_backward_pass_leaves_the_pool_usable(pool: Pool) -> None:
    weight = pool.from_tensor(randn(40, 40)).requires_grad_()
    large = pool.from_tensor(randn(3000)).requires_grad_()
    loss = (weight[:4] * 2).sum() + large[5:9].sum()
    try:
        loss.backward()
    except BudgetError as error:
        error.__traceback__ = None
    del loss
    gc.collect()
    assert_usable(pool)
    same(weight.detach(), randn(40, 40))


@scenario()
def a_full_pool_leaves_the_module_as_it_was() -> None:
    pool = Pool("32KiB", [Dram("32KiB")])
    module = nn.Sequential(*[nn.Linear(40, 40) for _ in range(12)])  # 79 KiB
    module[0].bias.grad = torch.ones(40)
    before = {name: (id(p), p.detach().clone()) for name, p in module.named_parameters()}
    with refused(None, PoolFullError):
        farpool.offload(module, pool)
    assert pool.live == 0
    assert_usable(pool)
    for name, parameter in module.named_parameters():
        assert type(parameter) is nn.Parameter, name
        assert id(parameter) == before[name][0]
        same(parameter.detach(), before[name][1])
    assert type(module[0].bias.grad) is torch.Tensor
    module(randn(2, 40)).sum().backward()
    farpool.offload(module[:3], pool)
    with refused(None, PoolFullError):
        pool.zeros(20_000)
    same(module[:3].state_dict(), {n: v[1] for n, v in before.items() if int(n.partition(".")[0]) < 3})
    pool.close(materialize=True)


@scenario()
def a_pool_that_fills_during_training_stays_usable() -> None:
    pool = Pool("32KiB", [Dram("32KiB")])
    module = farpool.offload(nn.Linear(60, 60), pool)
    kept = []
    with refused(None, PoolFullError):
        for _ in range(10):
            kept.append(module.weight.detach().clone())
    assert 1 <= len(kept) < 6
    same(kept[0], module.weight.detach())
    kept.clear()
    module(randn(2, 60)).sum().backward()
    pool.close(materialize=True)


@scenario()
def a_module_with_a_tensor_that_cannot_be_paged_is_left_as_it_was(pool: Pool) -> None:
    odd: dict[str, Callable[[], torch.Tensor]] = {
        "meta": lambda: torch.empty(3, device="meta"),
        "sparse": lambda: torch.eye(3).to_sparse(),
        "csr": lambda: torch.eye(3).to_sparse_csr(),
        "quantized": lambda: torch.quantize_per_tensor(randn(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([randn(2), randn(3)]),
        "with history": lambda: randn(3).requires_grad_() * 2,
    }
    for name, make in odd.items():
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].register_buffer("odd", make())
        with refused(pool, farpool.UnsupportedError, "1.odd"):
            farpool.offload(module, pool)
        assert all(type(p) is nn.Parameter for p in module.parameters()), name
    assert pool.live == 0


@scenario()
def offloading_and_restoring_twice_changes_nothing(pool: Pool) -> None:
    module, expected = model(), model()
    assert farpool.restore(module) is module
    for _ in range(2):
        assert farpool.offload(module, pool) is module
    storages = {id(p._storage) for p in module.parameters()}
    farpool.offload(module, pool)
    assert {id(p._storage) for p in module.parameters()} == storages
    same(module.state_dict(), expected.state_dict())
    farpool.offload(module[3], pool)
    for _ in range(2):
        assert farpool.restore(module) is module
        assert all(type(p) is nn.Parameter for p in module.parameters())
    same(module.state_dict(), expected.state_dict())
    farpool.restore(nn.ReLU())
    farpool.offload(nn.ReLU(), pool)


@scenario()
def a_part_of_a_module_can_be_offloaded_and_restored(pool: Pool) -> None:
    def program(module: nn.Module) -> Any:
        if isinstance(module[0].weight, farpool.PagedTensor):
            farpool.restore(module[0])
        module(randn(4, 12)).sum().backward()
        return [p.grad for p in module.parameters()]

    twin(pool, model, program)


@scenario()
def restoring_while_a_graph_is_alive_is_refused_or_safe(pool: Pool) -> None:
    module = farpool.offload(model(), pool)
    loss = module(randn(4, 12)).sum()
    try:
        farpool.restore(module)
    except farpool.UnsupportedError:
        loss.backward()
        expected = model()
        expected(randn(4, 12)).sum().backward()
        same(state_of(module), state_of(expected))
    else:
        with refused(pool, farpool.UnsupportedError):
            loss.backward()
        assert all(type(p) is nn.Parameter for p in module.parameters())


@scenario()
def offloading_while_a_graph_is_alive_is_refused_or_safe(pool: Pool) -> None:
    module = model()
    loss = module(randn(4, 12)).sum()
    try:
        farpool.offload(module, pool)
    except farpool.UnsupportedError:
        assert all(type(p) is nn.Parameter for p in module.parameters())
        loss.backward()
    else:
        try:
            loss.backward()
        except (farpool.UnsupportedError, RuntimeError):
            pass
        else:
            expected = model()
            expected(randn(4, 12)).sum().backward()
            same([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()])
    del loss
    module.zero_grad()


@scenario()
def resizing_the_budget_between_steps_keeps_the_bits() -> None:
    def train(module: nn.Module, resize: Callable[[int], None]) -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        for step in range(6):
            resize(step)
            optimizer.zero_grad()
            module(randn(4, 12, seed=step)).pow(2).sum().backward()
            optimizer.step()
        return state_of(module)

    expected = train(model(), lambda step: None)
    sizes = ["64KiB", "24KiB", "200KiB", "16KiB", "64KiB", "1MiB"]
    with Pool("64KiB", dram="1MiB") as pool:
        module = farpool.offload(model(), pool)
        same(train(module, lambda step: pool.resize(sizes[step])), expected)
        farpool.restore(module)


@scenario()
def a_budget_below_the_size_of_a_block_that_exists_is_refused_or_works() -> None:
    with Pool("200KiB", dram="4MiB") as pool:
        small, large = pool.from_tensor(randn(30)), pool.from_tensor(randn(90_000))
        try:
            pool.resize("12KiB")
        except (farpool.ConfigError, BudgetError, PoolFullError):
            assert pool.fast == 200 << 10
        for tensor, expected in ((small, randn(30)), (large, randn(90_000))):
            try:
                same(tensor, expected)
            except BudgetError as error:
                error.__traceback__ = None
                assert error.needed > pool.fast, f"the error names a budget that does not work: {error}"
                pool.resize(error.needed)
                same(tensor, expected)


@scenario()
def a_pool_that_is_never_closed_does_not_disturb_the_end_of_the_process() -> None:
    pool = Pool("64KiB", [Dram("64KiB"), Nvme("left.pool", "1MiB")])
    tensor = pool.from_tensor(randn(30_000))
    churn(pool)
    globals()["_left"] = (pool, tensor)


@scenario()
def a_pool_that_was_dropped_lives_as_long_as_its_tensors() -> None:
    tensor = Pool("64KiB", [Nvme("dropped.pool", "1MiB")]).from_tensor(randn(30_000))
    gc.collect()
    same(tensor, randn(30_000))
    same(tensor[100:200] * 2, randn(30_000)[100:200] * 2)
    tensor.pool.close(materialize=True)
    same(plain(tensor), randn(30_000))
    assert not os.path.exists("dropped.pool")
