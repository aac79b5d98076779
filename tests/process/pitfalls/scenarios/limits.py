"""Pools that are too small, full, two, or used twice."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import farpool
from farpool import BudgetError, Dram, Pool, PoolFullError, PoolMixError
from tests.process.pitfalls.compare import assert_usable, may_raise, plain, randn, refused, same, state_of, twin
from tests.process.pitfalls.harness import scenario


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.BatchNorm1d(24), nn.Linear(24, 5))


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
    with may_raise(BudgetError) as refusal:
        module(randn(2, 100))
    if (error := refusal.error) is not None:
        assert isinstance(error, MemoryError)
        assert error.op.startswith("aten."), error.op
        assert error.op in str(error)
        assert "0.weight" in str(error)
        assert f"{error.needed} bytes" in str(error)
        assert error.budget == pool.fast
        needed = error.needed
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
            with may_raise(BudgetError) as refusal:
                same(tensor, expected)
            if (error := refusal.error) is not None:
                assert error.needed > pool.fast, f"the error names a budget that does not work: {error}"
                pool.resize(error.needed)
                same(tensor, expected)
