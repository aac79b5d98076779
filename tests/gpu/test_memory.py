"""The memory of a pool on a GPU: page locks, accounts, budget, poison, and its end."""

from __future__ import annotations

import os
import random

import pytest
import torch

import farpool
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool import blocks_of
from tests.block_pools import block_pool
from tests.gpu.programs import batch, build, train, weight_bytes, within

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCK = 1 << 20


def test_page_locks_are_on_the_account_and_gone_when_the_pool_is_closed() -> None:
    model, inputs = build(), batch()
    with torch.no_grad():
        with farpool.Pool(weight_bytes(model) // 4, dram="200MiB", device="cuda") as pool:
            farpool.offload(model, pool)
            model(inputs)
            within(lambda: pool.stats().tiers[0].page_locked >= 64 << 20)
            stats = pool.stats()
            assert stats.tiers[0].page_locked <= 200 << 20
            assert stats.tiers[0].touched >= stats.tiers[0].page_locked
            assert "page locks" in pool.explain()
            assert blocks_of(pool).ledger.total(tier="host", owner="staging").page_locked > 0
            ledger = blocks_of(pool).ledger
            farpool.restore(model)
        assert ledger.total(owner="page locks").page_locked == 0


def test_a_share_is_of_the_gpus_free_memory_and_what_torch_holds_beside_it_is_on_the_account() -> None:
    free, _ = torch.cuda.mem_get_info()
    with farpool.Pool("1%", dram="64MiB", device="cuda") as pool:
        assert pool.fast % 512 == 0
        assert abs(pool.fast - free // 100) < 64 << 20  # the driver may have taken some meanwhile
        ledger = blocks_of(pool).ledger
        plain = torch.zeros(32 << 20, dtype=torch.uint8, device="cuda")
        pool.stats()
        held = ledger.total(tier="hbm", owner="torch")
        assert held.reserved >= held.requested >= plain.nbytes
        assert "hbm          torch" in pool.explain()
        del plain
        pool.stats()
        assert ledger.total(tier="hbm", owner="torch").requested <= held.requested - (32 << 20)
        assert ledger.total(tier="fast").reserved == pool.fast


def test_the_budget_can_be_lowered_and_raised_again_but_not_beyond_what_was_allocated() -> None:
    model, inputs = build(), batch()
    fast = weight_bytes(model) // 2
    with torch.no_grad():
        expected = model(inputs)
        with farpool.Pool(fast, dram="128MiB", device="cuda") as pool:
            farpool.offload(model, pool)
            for budget in (fast, fast // 2, fast):
                pool.resize(budget)
                assert torch.equal(model(inputs), expected)
                assert pool.stats().fast.reserved <= budget
            with pytest.raises(farpool.ConfigError, match="than the arena was made with"):
                pool.resize(2 * fast)
            assert torch.equal(model(inputs), expected)


def test_device_memory_is_given_back_at_the_end_though_the_pool_is_still_referred_to() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with farpool.Pool("64MiB", dram="64MiB", device="cuda") as pool:
        tensor = pool.zeros(1024)
        assert torch.cuda.memory_allocated() >= before + (64 << 20)
        del tensor
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() < before + (1 << 20)
    assert pool.closed


def test_more_than_the_device_has_is_refused_and_nothing_is_kept() -> None:
    before = torch.cuda.memory_allocated()
    with pytest.raises(farpool.ConfigError, match="free memory"):
        farpool.Pool("100TiB", device="cuda")
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(batch() + 1, batch() + 1)


def test_a_random_program_reads_what_it_wrote() -> None:
    source = random.Random(5)
    with block_pool(8 * BLOCK, dram="128MiB", device="cuda", debug=True) as pool:
        arena: torch.Tensor = pool.arena.tensor  # type: ignore[union-attr]
        storages = [pool.allocate(BLOCK // 2) for _ in range(48)]
        contents: dict[int, torch.Tensor] = {}
        for step in range(300):
            index = step % 48 if source.random() < 0.8 else source.randrange(48)
            write = index not in contents or source.random() < 0.3
            access = pool.acquire([Use(storages[index], 0, BLOCK // 2, Mode.OVERWRITE if write else Mode.READ)])
            try:
                bytes_of = arena[access.offsets[0] : access.offsets[0] + BLOCK // 2]
                assert access.offsets[0] % 512 == 0
                if write:
                    contents[index] = torch.randint(0, 255, (BLOCK // 2,), dtype=torch.uint8, device="cuda")
                    bytes_of.copy_(contents[index])
                else:
                    assert torch.equal(bytes_of, contents[index])
            finally:
                pool.release(access)
        assert pool.stats().evictions > 0
        del storages


def test_what_nobody_owns_is_poisoned_in_debug_mode() -> None:
    with block_pool(4 * BLOCK, dram="64MiB", device="cuda", debug=True) as pool:
        arena: torch.Tensor = pool.arena.tensor  # type: ignore[union-attr]
        storage = pool.allocate(BLOCK // 4)
        access = pool.acquire([Use(storage, 0, BLOCK // 4, Mode.OVERWRITE)])
        place = access.offsets[0]
        arena[place : place + BLOCK // 4] = 0
        pool.release(access)
        del storage, access
        assert pool.live == 0
        torch.cuda.synchronize()
        words = arena[place : place + BLOCK // 4].cpu().view(-1, 2)
        assert (words == torch.tensor([0xDB, 0xFF], dtype=torch.uint8)).all()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_training_goes_on_unchanged_when_the_process_forks() -> None:
    plain = build(layers=4)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), steps=4)
    model = build(layers=4)
    with farpool.Pool(weight_bytes(model), dram="256MiB", device="cuda") as pool:
        farpool.offload(model, pool)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = train(model, optimizer, steps=1)
        child = os.fork()
        if child == 0:
            os._exit(0 if pool.closed else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        for seed in range(1, 4):
            loss = model(batch(seed=seed)).square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        farpool.restore(model)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device at most")
def test_a_pool_lies_on_the_device_that_is_current_when_it_is_made() -> None:
    with torch.cuda.device(1):
        pool = farpool.Pool("16MiB", dram="16MiB", device="cuda")
    with pool:
        assert pool.zeros(4).device == torch.device("cuda", 1)
        with pytest.raises(farpool.UnsupportedError, match="cuda:1"):
            pool.from_tensor(torch.zeros(4, device="cuda:0"))
