"""A pool over a simulated CUDA driver: host memory stands in for the device's, everything else is what a GPU has."""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farpool import ConfigError, Dram, FarpoolWarning, Nvme, TierError, TierTimeoutError, UnsupportedError, _native
from farpool.ledger import Ledger
from farpool.memory.debug import HostMemory, Watch
from farpool.memory.pager import Mode, Pager
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool import block_pool as block_pools
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.pool.device import FastTier, device_queue, staging_bytes
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from tests.block_pools import block_pool
from tests.fake_cuda import FakeCuda

FAST, BLOCK, BLOCKS = 1 << 16, 1 << 12, 48
LOST = 719


class Machine:
    """What a pool opens instead of a GPU."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.fake = FakeCuda()
        self.fake.reset(seed, seed % 4)
        self.stream = 0
        self.ledger: Ledger | None = None

    def open(self, config: PoolConfig, tiers: Sequence[Tier], ledger: Ledger) -> FastTier:
        assert isinstance(config.fast, int)
        arena = HostArena(config.fast)
        self.ledger = ledger
        staging = staging_bytes(config.fast)
        queue = device_queue(_native.Cuda(0, str(self.fake.path)), staging, 0, tiers, ledger)

        def watch(pager: Pager) -> Watch:
            return Watch(pager, HostMemory(arena))

        booked = {"page_locked": staging}
        return FastTier(arena, queue, arena.release, watch, booked, lambda: self.stream)


@pytest.fixture(params=range(4))
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    gc.collect()  # what earlier tests have left uses the device
    machine = Machine(request.param)
    monkeypatch.setattr("farpool.memory.pool.block_pool.open_device", machine.open)
    yield machine
    assert not machine.fake.violations()
    assert machine.ledger is not None
    assert machine.ledger.total(owner="page locks").page_locked == 0


def run_program(pool: BlockPool, machine: Machine, seed: int, steps: int) -> None:
    """Writes to blocks and looks at them, in a loop with some noise.

    The host stands in for the kernels, so it waits for what the stream waits for.
    """
    source = random.Random(seed)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    contents: list[bytes | None] = [None] * BLOCKS
    view = pool.arena.view()  # type: ignore[union-attr]
    for step in range(steps):
        index = step % BLOCKS if source.random() < 0.9 else source.randrange(BLOCKS)
        known = contents[index]
        mode = Mode.OVERWRITE if known is None or source.random() < 0.3 else Mode.READ
        access = pool.acquire([Use(storages[index], 0, BLOCK, mode)])
        machine.fake.synchronize(machine.stream)
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


def within(condition: object, what: str) -> None:
    """Wait until the pool's threads have done something."""
    assert callable(condition)
    waited = threading.Event()
    for _ in range(6000):
        if condition():
            return
        waited.wait(0.01)
    raise AssertionError(what)


@pytest.mark.parametrize("debug", [False, True])
def test_what_is_read_is_what_was_written(machine: Machine, debug: bool) -> None:
    with block_pool(FAST, [Dram("1MiB")], debug=debug, timeout=60) as pool:
        run_program(pool, machine, machine.seed, 400)
        stats = pool.stats()
        assert stats.evictions > 100
        within(lambda: pool.stats().tiers[0].page_locked > 0, "the tier is not page-locked")
        run_program(pool, machine, machine.seed + 1, 100)
        assert "page locks" in pool.explain()
    assert machine.fake.calls("cuMemcpyHtoDAsync_v2") > 50
    assert machine.fake.calls("cuStreamWaitEvent") > 0


def test_blocks_that_lie_in_a_file_below_go_through_staging_memory(machine: Machine, tmp_path: Path) -> None:
    with block_pool(FAST, [Dram(1 << 16), Nvme(tmp_path / "far.pool", "1MiB")], timeout=60) as pool:
        run_program(pool, machine, machine.seed, 300)
        stats = pool.stats()
        assert stats.tiers[1].page_locked == 0
        assert stats.tiers[1].peak > 0


def test_the_budget_can_be_lowered_and_raised_again(machine: Machine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        for budget in (FAST, FAST // 2, FAST):
            pool.resize(budget)
            run_program(pool, machine, machine.seed, 150)
            assert pool.stats().fast.reserved <= budget


def test_small_storages_are_aligned_as_the_device_aligns_its_own(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HostArena, "alignment", 512)
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(nbytes) for nbytes in (40, 100, 64, 4000, 24, 513, 12)]
        for storage in storages:
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            assert access.offsets[0] % 512 == 0
            pool.release(access)
        del storages, storage


def test_threads_with_streams_of_their_own_see_their_own_bytes(machine: Machine) -> None:
    with block_pool(FAST, [Dram("4MiB")], timeout=60) as pool:
        failed: list[BaseException] = []

        def run(number: int) -> None:
            try:
                run_program(pool, machine, number, 150)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not failed


def test_an_access_on_a_stream_that_is_captured_is_refused_and_changes_nothing(machine: Machine) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
        use_all(pool, storages, Mode.OVERWRITE)
        machine.fake.capture(0, begin=True)
        accesses = pool.stats().accesses
        with pytest.raises(UnsupportedError, match="a CUDA graph is being captured"):
            use_all(pool, storages, Mode.READ)
        assert pool.stats().accesses == accesses
        machine.fake.capture(0, begin=False)
        use_all(pool, storages, Mode.READ)
        del storages


def test_waiting_for_a_device_that_is_lost_ends_and_its_memory_stays_mapped(machine: Machine) -> None:
    pool = block_pool(FAST, tier := [Dram("1MiB")], timeout=0.5)
    storages = [pool.allocate(BLOCK) for _ in range(BLOCKS)]
    use_all(pool, storages, Mode.OVERWRITE)
    machine.fake.set("copies_until_failure", 1)
    with pytest.raises(TierTimeoutError, match="does not report whether its copies have ended") as caught:
        use_all(pool, storages, Mode.READ)
    assert "restart the process" in str(caught.value.__cause__)
    with pytest.warns(FarpoolWarning, match=r"transfers have not ended .*the device is lost.* the fast tier, dram"):
        pool.__exit__(None, None, None)
    assert pool.closed
    memory = weakref.ref(pool)
    tiers = tier[0]
    del pool, storages, tier, caught
    gc.collect()
    assert memory() is not None, "nothing frees the memory under a copy"
    assert ctypes.string_at(tiers.address(0), BLOCK), "still mapped"
    left = memory()
    assert left is not None
    block_pools._LEFT_OPEN.remove(left)
    machine.ledger = Ledger()  # what is locked stays locked


def test_after_an_error_that_leaves_the_bytes_in_doubt_accesses_fail_and_the_pool_can_be_closed(
    machine: Machine,
) -> None:
    with block_pool(FAST, [Dram("1MiB")], timeout=60) as pool:
        storages = [pool.allocate(BLOCK) for _ in range(2)]
        use_all(pool, storages, Mode.OVERWRITE)
        access = pool.acquire([Use(storages[0], 0, BLOCK, Mode.OVERWRITE)])
        machine.fake.fail_call("cuEventRecord", 1, 2)
        with pytest.raises(TierError, match=r"cuEventRecord: .*close the pool, and make a new one"):
            pool.release(access)
        for mode in (Mode.READ, Mode.OVERWRITE):
            with pytest.raises(TierError, match="the end of work on the device was not noted"):
                use_all(pool, storages[1:], mode)
        del storages, access
    # The pool is closed, and nothing waits for it to be collected.
    for taken, given in [
        ("cuMemAlloc_v2", "cuMemFree_v2"),
        ("cuStreamCreate", "cuStreamDestroy_v2"),
        ("cuEventCreate", "cuEventDestroy_v2"),
        ("cuMemHostRegister_v2", "cuMemHostUnregister"),
    ]:
        assert machine.fake.calls(taken) == machine.fake.calls(given) > 0, taken


@pytest.mark.parametrize("call", ["cuMemHostRegister_v2", "cuStreamCreate", "cuMemAlloc_v2", "cuEventCreate"])
def test_a_device_that_refuses_at_the_opening_leaves_nothing_behind(machine: Machine, call: str) -> None:
    machine.fake.fail_call(call, 1, 2)
    with pytest.raises(ConfigError, match=r"the device cannot be used with .* of page-locked host memory: .*free host"):
        block_pool(FAST, [Dram("1MiB")])
    assert machine.fake.calls("cuStreamDestroy_v2") <= machine.fake.calls("cuStreamCreate")
    machine.ledger = machine.ledger or Ledger()


def test_a_device_with_a_number_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(ConfigError, match=r"device: 'cuda:1' is not known; .*set_device"):
        block_pool("1MiB", device="cuda:1")


_ENDING = """
    import sys
    sys.path.insert(0, {root!r})
    from tests.pool.test_device_pool import BLOCK, FAST, Dram, Machine, Mode, Use, block_pool, block_pools
    machine = Machine(3)
    block_pools.open_device = machine.open
    pool = block_pool(FAST, [Dram("1MiB")], timeout=60)
    storages = [pool.allocate(BLOCK) for _ in range(48)]
    for storage in storages:
        pool.release(pool.acquire([Use(storage, 0, BLOCK, Mode.OVERWRITE)]))
    if {fork}:
        import os
        child = os.fork()
        if child == 0:
            del pool, storages
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for storage in storages:
            pool.release(pool.acquire([Use(storage, 0, BLOCK, Mode.READ)]))
    print("done")
"""


@pytest.mark.parametrize("fork", [False, True])
def test_the_interpreter_ends_while_transfers_are_under_way(fork: bool) -> None:
    FakeCuda()  # skips if it is not built
    program = textwrap.dedent(_ENDING.format(root=str(Path(__file__).parents[2]), fork=fork))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
