"""Pools that are closed, with and without tensors in them."""

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
from farpool import Dram, Nvme, Pool, PoolClosedError, UnsupportedError
from farpool.memory.pool import blocks_of
from tests.process.pitfalls.compare import assert_usable, churn, plain, randn, refused, same, state_of
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
    pool = Pool("64KiB", dram="1MiB")
    module, tensor = farpool.offload(model(), pool), pool.from_tensor(randn(4, 3))
    blocks_of(pool).force_close()  # that of a Pool would take the tensors along
    return module, tensor, pool


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
    pool = Pool("64KiB", dram="1MiB")
    module, tensor = farpool.offload(model(), pool), pool.from_tensor(randn(4, 3))
    values = (tensor, tensor[1:], module[0].weight, module[0].weight[1:], tensor[0, 0])
    blocks_of(pool).force_close()
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
    with refused(None, (PoolClosedError, UnsupportedError)):
        loss.backward()
    expected = model()
    expected(randn(4, 12))
    same(state_of(module), state_of(expected))


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
    same(tensor, randn(4))


@scenario()
def the_pool_file_is_gone_after_close() -> None:
    path = Path("far.pool")
    with Pool("64KiB", [Nvme(path, "1MiB")]) as pool:
        tensor = pool.from_tensor(randn(30_000))
        churn(pool)
        assert path.exists()
        same(tensor, randn(30_000))
    assert not path.exists()


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
