"""A pool over a device with memory of its own: host memory stands in for it, everything else is what a GPU has."""

from __future__ import annotations

import ctypes
import gc
import math
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import ConfigError, Dram, FarpoolWarning, Nvme, TierTimeoutError, _native
from farpool.ledger import Ledger
from farpool.memory.debug import HostMemory, Watch
from farpool.memory.debug.checked_device import CheckedDevice
from farpool.memory.pager import Mode, Pager
from farpool.memory.pager.executor.page_locks import PageLocks
from farpool.memory.pager.executor.staged import StagedExecutor
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool import block_pool as block_pools
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.device import FastTier
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from tests.block_pools import block_pool
from tests.pager.host_device import HostDevice

STAGING, CHUNK = 1 << 14, 1 << 16
FAST, BLOCK, BLOCKS = 1 << 16, 1 << 12, 48


class Locker:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def lock(self, address: int, nbytes: int) -> None:
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


class Machine:
    """What a pool opens instead of a GPU."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.locker = Locker()
        self.ledger: Ledger | None = None

    def open(self, config: PoolConfig, ports: list[_native.Port], tiers: list[Tier], ledger: Ledger) -> FastTier:
        assert isinstance(config.fast, int)
        arena = HostArena(config.fast)
        staging = _native.Memory(STAGING)
        self.staging = range(staging.address, staging.address + STAGING)
        self.inner = HostDevice(arena.address, self.seed)
        self.device = CheckedDevice(self.inner)
        self.ledger = ledger
        locks = PageLocks(self.locker, tiers, ledger, CHUNK)
        executor = StagedExecutor(self.device, staging.address, STAGING, ports, locks)

        def release() -> None:
            arena.release()
            staging.release()

        def watch(pager: Pager) -> Watch:
            return Watch(pager, executor, HostMemory(arena), self.device)

        return FastTier(arena, executor, release, watch, {"page_locked": STAGING})

    def direct(self) -> int:
        return sum(host not in self.staging for host, _, _ in self.inner.started)


@pytest.fixture(params=range(2))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(request.param)
    monkeypatch.setattr("farpool.memory.pool.block_pool.open_device", machine.open)
    yield machine
    assert not machine.device.findings
    assert not machine.locker.locked
    assert machine.ledger is not None
    assert machine.ledger.total(owner="page locks").page_locked == 0


def run_program(pool: BlockPool, seed: int, steps: int) -> None:
    """Writes to blocks and looks at them, in a loop with some noise."""
    source = random.Random(seed)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    contents: list[bytes | None] = [None] * BLOCKS
    view = pool.arena.view()  # type: ignore[union-attr]
    for step in range(steps):
        index = step % BLOCKS if source.random() < 0.9 else source.randrange(BLOCKS)
        known = contents[index]
        mode = Mode.OVERWRITE if known is None or source.random() < 0.3 else Mode.READ
        access = pool.acquire([Use(storages[index], 0, BLOCK, mode)])
        place = access.offsets[0]
        if mode is Mode.OVERWRITE:
            contents[index] = source.randbytes(BLOCK)
            view[place : place + BLOCK] = contents[index]
        else:
            assert bytes(view[place : place + BLOCK]) == known
        pool.release(access)


def use_all(pool: BlockPool, storages: list[Storage], mode: Mode) -> None:
    for storage in storages:
        pool.release(pool.acquire([Use(storage, 0, BLOCK, mode)]))


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_read_is_what_was_written_and_most_of_it_takes_one_leg(machine: Machine, debug: bool) -> None:
    with block_pool(FAST, [Dram("1MiB")], debug=debug, timeout=20) as pool:
        run_program(pool, machine.seed, 400)
        stats = pool.stats()
        assert stats.evictions > 100
        assert stats.tiers[0].page_locked > 0
        assert stats.tiers[0].touched >= stats.tiers[0].page_locked
        assert "page locks" in pool.explain()
    assert machine.direct() > len(machine.inner.started) // 2


def test_blocks_that_lie_in_a_file_below_go_through_staging_memory(machine: Machine, tmp_path: Path) -> None:
    with block_pool(FAST, [Dram(CHUNK), Nvme(tmp_path / "far.pool", "1MiB")], timeout=20) as pool:
        run_program(pool, machine.seed, 300)
        assert pool.stats().tiers[1].page_locked == 0
    assert 0 < machine.direct() < len(machine.inner.started)


def test_the_budget_can_be_lowered_and_raised_again(machine: Machine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=20) as pool:
        for budget in (FAST, FAST // 2, FAST):
            pool.resize(budget)
            run_program(pool, machine.seed, 150)
            assert pool.stats().fast.reserved <= budget


def test_small_storages_are_aligned_as_the_device_aligns_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostArena, "alignment", 512)
    with block_pool(FAST, [Dram("1MiB")], timeout=20) as pool:
        storages = [pool.allocate(nbytes) for nbytes in (40, 100, 64, 4000, 24, 513, 12)]
        for storage in storages:
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            assert access.offsets[0] % 512 == 0
            pool.release(access)
        del storages, storage


def test_a_device_that_answers_again_loses_nothing(machine: Machine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=20) as pool:
        run_program(pool, machine.seed, 150)
        machine.inner.mute = 40
        run_program(pool, machine.seed, 300)
        assert machine.inner.mute == 0


def test_waiting_for_a_device_that_is_lost_ends_and_its_memory_stays_mapped(machine: Machine) -> None:
    pool = block_pool(FAST, tier := [Dram("1MiB")], timeout=0.5)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    use_all(pool, storages, Mode.OVERWRITE)
    machine.inner.mute = math.inf
    with pytest.raises(TierTimeoutError, match="does not report whether its copies have ended") as caught:
        use_all(pool, storages, Mode.READ)
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.warns(FarpoolWarning, match=r"transfers have not ended .*does not answer.* the fast tier, dram"):
        pool.__exit__(None, None, None)
    assert machine.locker.locked, "still page-locked"
    assert pool.closed
    memory = weakref.ref(pool)
    tiers = tier[0]
    del pool, storages, tier, caught
    gc.collect()
    assert memory() is not None, "nothing frees the memory under a copy"
    assert ctypes.string_at(tiers.address(0), BLOCK), "still mapped"
    machine.inner.mute = 0
    left = memory()
    assert left is not None
    assert left._executor.close(20)
    left._lower.close()
    left._device.release()
    block_pools._LEFT_OPEN.remove(left)


def test_a_device_with_a_number_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' is not known; .*set_device"):
        block_pool("1MiB", device="cuda:1")
