"""Accesses of what lies ready: granted at once, counted, and respected by whoever needs the room."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading

import pytest

from farpool import Dram, PoolClosedError, TierError, TierTimeoutError
from farpool._native import Grant
from farpool.abc.tier import Extent
from farpool.memory.pager import Mode, State
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tiers.wrapper import WrapperTier
from tests.block_pools import block_pool

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE
BLOCK = 16 << 10
SECONDS = 20.0


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCK)


def access(pool: BlockPool, storage: Storage, mode: Mode) -> Grant:
    return pool.acquire([Use(storage, 0, storage.nbytes, mode)], "test")


def write(pool: BlockPool, storage: Storage, data: bytes) -> None:
    granted = access(pool, storage, OVERWRITE)
    pool.arena.view()[granted.offsets[0] : granted.offsets[0] + len(data)] = data
    pool.release(granted)


def read(pool: BlockPool, storage: Storage) -> bytes:
    granted = access(pool, storage, READ)
    data = bytes(pool.arena.view()[granted.offsets[0] : granted.offsets[0] + storage.nbytes])
    pool.release(granted)
    return data


def filled_pool(storages: int, timeout: float = SECONDS) -> tuple[BlockPool, list[Storage]]:
    """A pool of 16 blocks with this many."""
    pool = block_pool(16 * BLOCK, [Dram(64 * BLOCK)], timeout=timeout)
    made = [pool.allocate(BLOCK) for _ in range(storages)]
    for seed, storage in enumerate(made):
        write(pool, storage, content(seed))
    return pool, made


def test_each_access_of_what_lies_ready_is_a_hit() -> None:
    pool, storages = filled_pool(8)
    with pool:
        before = pool.stats()
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed)
        after = pool.stats()
        assert (after.accesses - before.accesses, after.hits - before.hits) == (8, 8)


def test_what_is_written_where_it_lies_survives_eviction() -> None:
    pool, storages = filled_pool(8)
    with pool:
        write(pool, storages[3], content(99))
        others = [pool.allocate(BLOCK) for _ in range(40)]
        for seed, storage in enumerate(others):
            write(pool, storage, content(100 + seed))
        assert pool.stats().evictions > 20
        assert read(pool, storages[3]) == content(99)
        assert [read(pool, storage) for storage in others] == [content(100 + seed) for seed in range(40)]


def test_a_clean_block_that_is_written_is_written_back() -> None:
    pool, storages = filled_pool(8)
    with pool:
        for _ in range(2):
            pool.resize(2 * BLOCK)
            pool.resize(16 * BLOCK)
            for seed, storage in enumerate(storages):
                assert read(pool, storage) == content(seed)  # now clean
        write(pool, storages[0], content(77))
        pool.resize(2 * BLOCK)
        assert read(pool, storages[0]) == content(77)


@pytest.mark.parametrize("change", ["evict", "shrink"])
def test_whoever_needs_the_room_waits_for_those_who_hold_it(change: str) -> None:
    pool, storages = filled_pool(16)
    with pool:
        held = [access(pool, storage, READ) for storage in storages]
        extra = pool.allocate(BLOCK)
        done = threading.Event()

        def make_room() -> None:
            if change == "evict":
                write(pool, extra, content(1000))
            else:
                pool.resize(8 * BLOCK)
            done.set()

        thread = threading.Thread(target=make_room)
        thread.start()
        assert not done.wait(0.5)
        for seed, grant in enumerate(held):
            assert bytes(pool.arena.view()[grant.offsets[0] : grant.offsets[0] + BLOCK]) == content(seed)
            pool.release(grant)
        assert done.wait(SECONDS)
        thread.join(SECONDS)
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]


def test_waiting_for_room_that_others_hold_has_an_end() -> None:
    pool, storages = filled_pool(16, timeout=0.3)
    with pool:
        held = [access(pool, storage, READ) for storage in storages]
        extra = pool.allocate(BLOCK)
        with pytest.raises(TierTimeoutError, match="operands that other threads hold"):
            write(pool, extra, content(1000))
        with pytest.raises(TierTimeoutError):
            pool.resize(8 * BLOCK)
        for grant in held:
            pool.release(grant)
        write(pool, extra, content(1000))
        assert read(pool, extra) == content(1000)
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]


def test_nothing_is_granted_in_a_forked_child() -> None:
    pool, storages = filled_pool(8)
    with pool:
        child = os.fork()
        if child == 0:
            try:
                read(pool, storages[0])
            except PoolClosedError:
                os._exit(7)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 7
        assert read(pool, storages[0]) == content(0)


class FailingReads(WrapperTier):
    """A tier whose reads fail when told to."""

    fail = False

    def read_into(self, extent: Extent, into: memoryview) -> None:
        if self.fail:
            raise TierError("told to fail")
        super().read_into(extent, into)


def test_a_block_that_was_placed_and_never_written_is_not_read() -> None:
    """The access that would have overwritten it is refused when its place is ready: the copy below is the content."""
    tier = FailingReads(Dram(64 * BLOCK))
    with block_pool(16 * BLOCK, [tier], timeout=SECONDS) as pool:
        storages = [pool.allocate(BLOCK) for _ in range(8)]
        for seed, storage in enumerate(storages):
            write(pool, storage, content(seed))
        pool.resize(2 * BLOCK)
        pool.resize(16 * BLOCK)
        placed, failed = [s for s in storages if pool.pager.block(s.first).state == State.ABSENT][:2]
        tier.fail = True
        with pytest.raises(TierError):
            pool.acquire([Use(placed, 0, BLOCK, OVERWRITE), Use(failed, 0, BLOCK, READ)], "test")
        tier.fail = False
        assert pool.pager.block(placed.first).state == State.RESIDENT
        assert read(pool, placed) == content(storages.index(placed))


def test_subscribers_and_recordings_see_every_access() -> None:
    pool, storages = filled_pool(8)
    with pool:
        events: list[str] = []
        stop = pool.subscribe(lambda event: events.append(event.kind))
        for storage in storages:
            read(pool, storage)
        stop()
        assert events.count("compute") == 8


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_threads_that_read_and_threads_that_evict_never_see_wrong_bytes(seed: int) -> None:
    pool, storages = filled_pool(12)
    errors: list[BaseException] = []
    until = threading.Event()

    def readers(number: int) -> None:
        rng = random.Random(seed * 10 + number)
        try:
            while not until.is_set():
                index = rng.randrange(12)
                assert read(pool, storages[index]) == content(index)
        except BaseException as error:
            errors.append(error)

    with pool:
        threads = [threading.Thread(target=readers, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for turn in range(4):
            burst = [pool.allocate(BLOCK) for _ in range(10)]
            for index, storage in enumerate(burst):
                write(pool, storage, content(turn * 10 + index))
            assert all(read(pool, storage) == content(turn * 10 + index) for index, storage in enumerate(burst))
            del burst, storage
            for index in range(100):
                read(pool, storages[index % 12])
        until.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert not errors


def test_threads_that_race_with_closing_keep_their_operands_or_get_an_error() -> None:
    for _ in range(20):
        pool, storages = filled_pool(8)
        ended: list[int] = []
        working = threading.Barrier(4)

        def work(pool: BlockPool, storage: Storage, ended: list[int], working: threading.Barrier) -> None:
            working.wait(SECONDS)
            with contextlib.suppress(PoolClosedError):
                while True:
                    grant = access(pool, storage, READ)
                    assert len(bytes(pool.arena.view()[grant.offsets[0] : grant.offsets[0] + BLOCK])) == BLOCK
                    pool.release(grant)
            ended.append(1)

        threads = [threading.Thread(target=work, args=(pool, each, ended, working)) for each in storages[:3]]
        for thread in threads:
            thread.start()
        working.wait(SECONDS)
        pool.__exit__(None, None, None)
        for thread in threads:
            thread.join(SECONDS)
        assert len(ended) == 3


def test_a_pool_that_is_dropped_with_transfers_under_way_does_no_harm() -> None:
    """Its ports live until the queue's threads are done with them."""
    code = """
import gc
import farpool
from farpool import Dram, PoolConfig, Throttled
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use

def use():
    pool = BlockPool(PoolConfig.make("4MiB", [Throttled(Dram("64MiB"), write_bandwidth=3e5)], timeout=0.3))
    for _ in range(12):
        storage = pool.allocate(900 << 10)
        try:
            pool.release(pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)], "fill"))
        except farpool.TierTimeoutError:
            break
        kept.append(storage)
    assert pool.pager.under_way

kept = []
use()
kept.clear()
gc.collect()
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
