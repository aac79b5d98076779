"""offload into lower tiers, past the fast tier: the same bits and aliases, bounded memory, all or nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import farpool
from farpool import ArgumentError, Dram, Faulty, PagedTensor, Pool, PoolFullError, TierError
from farpool.memory.pool.pool import blocks_of
from farpool.memory.tiers.faulty import Fault
from tests.tensors.bits import assert_same, tensors_of

FAST = 1 << 18


class Model(nn.Module):
    """Layers larger than the fast tier together, ties, aliases, and tensors of odd layouts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
        self.table = nn.Embedding(500, 64)
        self.head = nn.Linear(64, 500, bias=False)
        self.head.weight = self.table.weight
        flat = torch.randn(9000)
        self.first = nn.Parameter(flat[:4000].view(40, 100))
        self.second = nn.Parameter(flat[3000:8000].view(100, 50).t(), requires_grad=False)
        self.tail: torch.Tensor
        self.spaced: torch.Tensor
        self.conjugated: torch.Tensor
        self.register_buffer("tail", flat[8500:])
        self.register_buffer("spaced", torch.randn(300, 40)[::3, ::2])
        self.register_buffer("conjugated", torch.randn(2000, dtype=torch.complex64).conj())
        self.register_buffer("flags", torch.rand(5000) < 0.5)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layers(self.table(tokens)) * self.first.sum() + self.second.sum()
        scores: torch.Tensor = self.head(hidden * self.tail.sum() + self.spaced.sum() + self.conjugated.real.sum())
        return scores


TOKENS = torch.arange(12).view(3, 4)


def trained_once(model: Model) -> torch.Tensor:
    output: torch.Tensor = model(TOKENS)
    output.square().mean().backward()
    return output.detach()


def named(model: Model) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def filled(pool: Pool) -> torch.Tensor:
    """Fill the fast tier, so that what comes next goes below."""
    return pool.zeros(FAST // 4)


@pytest.mark.parametrize("debug", [False, True])
def test_the_model_is_the_same_and_nothing_was_evicted_for_it(debug: bool) -> None:
    model, plain = Model(), Model()
    trained_once(model)
    trained_once(plain)
    before = named(model)
    with Pool(FAST, dram="8MiB", debug=debug) as pool:
        filler = filled(pool)
        before_them = pool.stats()
        farpool.offload(model, pool)
        after = pool.stats()
        assert (after.write_backs, after.evictions) == (before_them.write_backs, before_them.evictions)
        assert all(tensor is before[name] for name, tensor in named(model).items())
        for name, tensor in tensors_of(plain).items():
            found = tensors_of(model)[name]
            assert type(found) is PagedTensor
            assert found.stride() == tensor.stride()
            assert_same(found, tensor)
            if tensor.grad is not None:
                assert type(found.grad) is PagedTensor
                assert_same(found.grad, tensor.grad)
        assert model.head.weight is model.table.weight
        assert model.first.untyped_storage() is model.tail.untyped_storage()
        assert_same(trained_once(model), trained_once(plain))
        assert_same(model.table.weight.grad, plain.table.weight.grad)
        assert_same(filler, torch.zeros(FAST // 4))
        farpool.restore(model, device="cpu")
    for name, tensor in tensors_of(plain).items():
        assert type(tensors_of(model)[name]) is not PagedTensor
        assert_same(tensors_of(model)[name], tensor)


def test_no_byte_is_there_twice() -> None:
    """Each tensor's plain memory is given back before the next one enters."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(40)])
    total = sum(tensor.nbytes for tensor in model.state_dict().values())
    with Pool(FAST, dram="8MiB") as pool:
        filler = filled(pool)
        left: list[int] = []

        def progress(done: int, of: int) -> None:
            plain = sum(p.nbytes for p in model.parameters() if not isinstance(p, PagedTensor))
            tier = pool.stats().tiers[0]
            left.append(plain + tier.reserved)
            assert (plain + done, of) == (total, total)

        farpool.offload(model, pool, progress=progress)
        assert len(left) == 80
        assert max(left) <= total + 80 * 64  # an extent is a multiple of 64 bytes
        assert pool.stats().tiers[0].peak <= total + 80 * 64
        assert pool.stats().fast.peak == FAST
        assert_same(filler, torch.zeros(FAST // 4))


@pytest.mark.parametrize("others", [0, 1])
def test_if_a_tier_fails_half_way_the_module_is_as_it_was(others: int) -> None:
    model, plain = Model(), Model()
    trained_once(model)
    trained_once(plain)
    tier = Faulty(Dram("8MiB"))
    tiers = [Faulty(Dram("16KiB", "broken"), fail_writes=1.0)] * others + [tier]
    entered: list[int] = []

    def progress(done: int, of: int) -> None:
        entered.append(done)
        if len(entered) == 4:  # The next tensor is one block: of several, others could fail first, in the broken tier.
            tier._script[tier.operations] = Fault.FAIL

    with Pool(FAST, tiers) as pool:
        blocks = blocks_of(pool)
        filler = filled(pool)
        with pytest.raises(TierError, match="on purpose"):
            farpool.offload(model, pool, progress=progress)
        assert len(entered) == 4
        assert len(tier.injected) == 1
        found = tensors_of(model)
        assert all(type(tensor) is not PagedTensor for tensor in found.values())
        for name, tensor in tensors_of(plain).items():
            assert_same(found[name], tensor)
            if tensor.grad is not None:
                assert_same(found[name].grad, tensor.grad)
        assert blocks.live == 1
        assert_same(filler, torch.zeros(FAST // 4))
        del filler
        assert [stats.reserved for stats in pool.stats().tiers] == [0] * len(tiers)
    assert_same(trained_once(model), trained_once(plain))


def test_a_module_that_no_lower_tier_takes_is_refused_as_it_was() -> None:
    model, plain = Model(), Model()
    with Pool(FAST, dram="64KiB") as pool:
        with pytest.raises(PoolFullError, match="set the size of 'dram'"):
            farpool.offload(model, pool)
        assert pool.stats().tiers[0].reserved == 0
    for name, tensor in tensors_of(plain).items():
        assert type(tensors_of(model)[name]) is not PagedTensor
        assert_same(tensors_of(model)[name], tensor)


def test_moments_go_below_as_weights_do() -> None:
    model, plain = Model(), Model()
    optimizers = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        trained_once(each)
        optimizer.step()
    with Pool(FAST, dram="8MiB") as pool:
        filled(pool)
        farpool.offload(model, pool)
        farpool.offload(optimizers[0], pool)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            trained_once(each)
            optimizer.step()
        for name, tensor in tensors_of(plain).items():
            assert_same(tensors_of(model)[name], tensor)
        farpool.restore(model, device="cpu")
        farpool.restore(optimizers[0], device="cpu")
        assert not any(type(value) is PagedTensor for state in optimizers[0].state.values() for value in state.values())


def test_tensors_become_plain_on_the_cpu_or_the_pools_device_only() -> None:
    model, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(model.state_dict())
    with Pool(FAST, dram="1MiB") as pool:
        farpool.offload(model, pool)
        with pytest.raises(ArgumentError, match=r"'cuda:1'.*'cpu'"):
            farpool.restore(model, device="cuda:1")
        assert type(model.weight) is PagedTensor
        farpool.restore(model)
    assert_same(model.weight, plain.weight)
