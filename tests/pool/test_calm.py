"""While nothing has to leave, accesses pass without bookkeeping; as soon as something does, they do not."""

from __future__ import annotations

import os
import random
import threading

import pytest

from farpool import Dram, Pool, PoolClosedError, TierError, TierTimeoutError
from farpool.pager import Mode, State
from farpool.pool import Access
from farpool.storage import Storage
from farpool.tiers.base import Extent, Transfer
from farpool.tiers.wrapper import WrapperTier
from farpool.use import Use

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE
BLOCK = 16 << 10
ENOUGH = 300
"""Accesses after which a pool in which everything fits is calm."""
SECONDS = 20.0


def content(seed: int) -> bytes:
    return random.Random(seed).randbytes(BLOCK)


def access(pool: Pool, storage: Storage, mode: Mode) -> Access:
    return pool.acquire([Use(storage, 0, storage.nbytes, mode)], "test")


def write(pool: Pool, storage: Storage, data: bytes) -> None:
    granted = access(pool, storage, OVERWRITE)
    pool.arena.view()[granted.offsets[0] : granted.offsets[0] + len(data)] = data
    pool.release(granted)


def read(pool: Pool, storage: Storage) -> bytes:
    granted = access(pool, storage, READ)
    data = bytes(pool.arena.view()[granted.offsets[0] : granted.offsets[0] + storage.nbytes])
    pool.release(granted)
    return data


def calm_pool(storages: int, timeout: float = SECONDS) -> tuple[Pool, list[Storage]]:
    """A pool of 16 blocks with this many, in which accesses pass."""
    pool = Pool(16 * BLOCK, [Dram(64 * BLOCK)], timeout=timeout)
    made = [pool.allocate(BLOCK) for _ in range(storages)]
    for seed, storage in enumerate(made):
        write(pool, storage, content(seed))
    for turn in range(ENOUGH):
        read(pool, made[turn % storages])
    granted = access(pool, made[0], READ)
    assert granted.passed
    pool.release(granted)
    return pool, made


def test_accesses_pass_once_nothing_has_left_for_a_while_and_are_counted() -> None:
    pool, storages = calm_pool(8)
    with pool:
        before = pool.stats()
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed)
        after = pool.stats()
        assert (after.accesses - before.accesses, after.hits - before.hits) == (8, 8)


def test_what_is_written_in_passing_survives_eviction() -> None:
    pool, storages = calm_pool(8)
    with pool:
        granted = access(pool, storages[3], WRITE)
        assert granted.passed
        pool.arena.view()[granted.offsets[0] : granted.offsets[0] + BLOCK] = content(99)
        pool.release(granted)
        others = [pool.allocate(BLOCK) for _ in range(40)]
        for seed, storage in enumerate(others):
            write(pool, storage, content(100 + seed))
        assert pool.stats().evictions > 20
        assert read(pool, storages[3]) == content(99)
        assert [read(pool, storage) for storage in others] == [content(100 + seed) for seed in range(40)]


def test_a_clean_block_is_not_written_in_passing() -> None:
    """Or the copy below would be taken for current."""
    pool, storages = calm_pool(8)
    with pool:
        pool.resize(2 * BLOCK)
        pool.resize(16 * BLOCK)
        for turn in range(3 * ENOUGH):
            read(pool, storages[turn % 8])
        passed = []
        for _ in range(2):
            for storage in storages:
                granted = access(pool, storage, WRITE)
                passed.append(granted.passed)
                pool.release(granted)
        assert not all(passed[:8])  # those that came back from below were clean
        assert all(passed[8:])


def test_whoever_has_to_evict_waits_for_those_that_have_passed() -> None:
    pool, storages = calm_pool(16)
    with pool:
        inside = access(pool, storages[5], READ)
        assert inside.passed
        extra = pool.allocate(BLOCK)
        done = threading.Event()

        def evict() -> None:
            write(pool, extra, content(1000))
            done.set()

        thread = threading.Thread(target=evict)
        thread.start()
        assert not done.wait(0.5)
        offset = inside.offsets[0]
        assert bytes(pool.arena.view()[offset : offset + BLOCK]) == content(5)
        pool.release(inside)
        assert done.wait(SECONDS)
        thread.join(SECONDS)
        assert read(pool, extra) == content(1000)
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]


def test_a_smaller_budget_waits_for_those_that_have_passed() -> None:
    pool, storages = calm_pool(16)
    with pool:
        inside = access(pool, storages[15], READ)
        assert inside.passed
        done = threading.Event()

        def shrink() -> None:
            pool.resize(8 * BLOCK)
            done.set()

        thread = threading.Thread(target=shrink)
        thread.start()
        assert not done.wait(0.5)
        pool.release(inside)
        assert done.wait(SECONDS)
        thread.join(SECONDS)
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]


def test_nothing_passes_in_a_forked_child() -> None:
    pool, storages = calm_pool(8)
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

    def start_read(self, extent: Extent, into: memoryview) -> Transfer:
        if self.fail:
            raise TierError("told to fail")
        return super().start_read(extent, into)


def test_a_block_that_was_placed_and_never_written_is_not_read_in_passing() -> None:
    """The access that would have overwritten it is refused when its place is ready: the copy below is the content."""
    tier = FailingReads(Dram(64 * BLOCK))
    with Pool(16 * BLOCK, [tier], timeout=SECONDS) as pool:
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
        pool._calm.open = True
        assert read(pool, placed) == content(storages.index(placed))


def test_waiting_for_those_that_have_passed_has_an_end() -> None:
    pool, storages = calm_pool(16, timeout=0.3)
    with pool:
        pool._calm.end()
        pinned = access(pool, storages[1], READ)
        assert not pinned.passed
        pool._calm.open = True
        inside = access(pool, storages[5], READ)
        assert inside.passed
        extra = pool.allocate(BLOCK)
        with pytest.raises(TierTimeoutError, match="1 operations of other threads"):
            write(pool, extra, content(1000))
        with pytest.raises(TierTimeoutError):
            pool.resize(8 * BLOCK)
        pool.release(pinned)  # unpins, and leaves everything where it is
        offset = inside.offsets[0]
        assert bytes(pool.arena.view()[offset : offset + BLOCK]) == content(5)
        pool.release(inside)
        write(pool, extra, content(1000))
        assert read(pool, extra) == content(1000)
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]


def test_subscribers_and_recordings_see_every_access() -> None:
    pool, storages = calm_pool(8)
    with pool:
        events: list[str] = []
        stop = pool.subscribe(lambda event: events.append(event.kind))
        for storage in storages:
            read(pool, storage)
        stop()
        assert events.count("compute") == 8


@pytest.mark.parametrize("seed", range(3))
def test_threads_that_pass_and_threads_that_evict_never_see_wrong_bytes(seed: int) -> None:
    pool, storages = calm_pool(12)
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
            for turn_inside in range(ENOUGH):
                read(pool, storages[turn_inside % 12])
        until.set()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
    assert not errors
