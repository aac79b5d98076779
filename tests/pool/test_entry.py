"""Storages whose bytes go from host memory to lower tiers, past the fast tier."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import random
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool import (
    Dram,
    FarpoolWarning,
    Faulty,
    Nvme,
    PoolClosedError,
    Striped,
    Tier,
    TierError,
    TierTimeoutError,
    Traced,
    Verified,
)
from farpool.abc.tier import Extent
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tape import Content, Create, TapeFile
from tests.block_pools import block_pool

FAST = 1 << 16


class Bytes:
    """Random bytes in host memory."""

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        self.value = random.Random(seed).randbytes(nbytes)
        self.memory = ctypes.create_string_buffer(self.value, nbytes)

    def enter(self, pool: BlockPool, cls: str = "weights") -> Storage | None:
        return pool.enter(ctypes.addressof(self.memory), len(self.value), self, cls=cls, name="entered")


def full_pool(*tiers: object, **settings: object) -> tuple[BlockPool, Storage]:
    """A pool whose fast tier has no room left."""
    pool = block_pool(FAST, tiers, **settings)
    storage = pool.allocate(FAST)
    for start, stop in storage.pieces():
        pool.release(pool.acquire([Use(storage, start, stop, Mode.OVERWRITE)]))
    return pool, storage


def read(pool: BlockPool, storage: Storage) -> bytes:
    view = pool.arena.view()  # type: ignore[union-attr]
    found = b""
    for start, stop in storage.pieces():
        access = pool.acquire([Use(storage, start, stop, Mode.READ)])
        place = access.offsets[0]
        found += bytes(view[place : place + stop - start])
        pool.release(access)
    return found


def reserved(pool: BlockPool) -> list[int]:
    return [tier.reserved for tier in pool.stats().tiers]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 5000, 100_000])
def test_bytes_come_back_as_they_came(nbytes: int, debug: bool) -> None:
    pool, _ = full_pool(Dram("1MiB"), debug=debug)
    with pool:
        source = Bytes(nbytes)
        storage = source.enter(pool)
        assert storage is not None
        pool.pack_at_first_use(storage)
        stats = pool.stats()
        assert stats.write_backs == stats.evictions == 0
        assert read(pool, storage) == source.value
        assert sum(pool.allocation.live.values()) == FAST + nbytes


def test_what_was_not_changed_is_evicted_without_a_write() -> None:
    pool, filler = full_pool(Dram("1MiB"))
    with pool:
        storage = Bytes(FAST).enter(pool)
        assert storage is not None
        del filler
        for _ in range(3):
            assert len(read(pool, storage)) == FAST
        assert pool.stats().write_backs <= 16  # of the blocks that filled the pool


def test_a_fast_tier_with_room_is_filled_first() -> None:
    with block_pool(FAST, [Dram("1MiB")]) as pool:
        assert Bytes(FAST).enter(pool) is None
        assert reserved(pool) == [0]
        assert Bytes(0).enter(pool) is None
        storage = Bytes(FAST + 1).enter(pool)
        assert storage is not None
        assert reserved(pool)[0] >= FAST + 1


def test_a_storage_may_lie_in_two_tiers(tmp_path: Path) -> None:
    pool, _ = full_pool(Dram(1 << 15), Nvme(tmp_path / "far.pool", "1MiB"))
    with pool:
        source = Bytes(100_000)
        storage = source.enter(pool)
        assert storage is not None
        assert all(reserved(pool))
        assert read(pool, storage) == source.value


@pytest.mark.parametrize(
    "make",
    [
        lambda: Verified(Dram("1MiB")),
        lambda: Striped([Dram("1MiB"), Dram("1MiB")], 4096),
        lambda: Verified(Striped([Dram("1MiB"), Dram("1MiB")], 4096)),
        lambda: Traced(Faulty(Dram("1MiB"))),
    ],
)
def test_every_kind_of_tier_reads_what_entered(make: Callable[[], Tier]) -> None:
    pool, filler = full_pool(make())
    with pool:
        for nbytes in (70, 5000, 100_000):
            source = Bytes(nbytes)
            storage = source.enter(pool)
            assert storage is not None
            for _ in range(2):
                assert read(pool, storage) == source.value
        assert pool.live == 2
        del filler


def test_without_room_nothing_is_reserved() -> None:
    pool, _ = full_pool(Dram(1 << 15))
    with pool:
        assert Bytes(100_000).enter(pool) is None
        assert reserved(pool) == [0]
        assert pool.live == 1


def test_bytes_of_dropped_storages_are_free_again() -> None:
    pool, _ = full_pool(Dram("1MiB"))
    with pool:
        for seed in range(50):
            storage = Bytes(100_000, seed).enter(pool)
            assert storage is not None
            del storage
        assert pool.live == 1
        assert reserved(pool) == [0]


def test_if_the_third_write_fails_nothing_is_kept() -> None:
    pool, _ = full_pool(Faulty(Dram("1MiB"), script={2: "fail"}))
    with pool:
        source = Bytes(100_000)
        with pytest.raises(TierError, match=r"tier 'dram': .*on purpose"):
            source.enter(pool)
        assert reserved(pool) == [0]
        assert pool.live == 1
        storage = source.enter(pool)
        assert storage is not None
        assert read(pool, storage) == source.value


def test_a_tier_that_fails_is_passed_over() -> None:
    pool, _ = full_pool(Faulty(Dram("1MiB"), fail_writes=1.0), Dram("1MiB", "second"))
    with pool:
        source = Bytes(100_000)
        storage = source.enter(pool)
        assert storage is not None
        assert reserved(pool)[0] == 0
        assert read(pool, storage) == source.value


def test_a_tier_that_does_not_answer_is_given_up_and_keeps_its_memory() -> None:
    tier = Faulty(Dram("1MiB"), stall=1.0, stall_seconds=60)
    pool, _ = full_pool(tier, timeout=0.2)
    with pytest.raises(TierTimeoutError, match="still under way"):
        Bytes(5000).enter(pool)
    assert reserved(pool)[0] > 0
    with pytest.warns(FarpoolWarning, match="have not ended within"):
        pool.force_close()
    tier.close()  # ends the stall


class _Late(Dram):
    """A tier whose first write waits."""

    def __init__(self) -> None:
        super().__init__("1MiB", "late")
        self.go_on, self.written = threading.Event(), threading.Event()

    def write_from(self, extent: Extent, data: memoryview) -> None:
        assert self.go_on.wait(60)
        super().write_from(extent, data)
        self.written.set()


def test_what_a_late_write_has_held_is_free_after_its_end() -> None:
    tier = _Late()
    pool, _ = full_pool(Faulty(tier), timeout=0.2)
    with pool:
        source = Bytes(5000)
        kept = weakref.ref(source)
        with pytest.raises(TierTimeoutError, match="still under way"):
            source.enter(pool)
        del source
        gc.collect()
        held = reserved(pool)
        assert held[0] > 0
        assert kept() is not None
        with pytest.raises(TierTimeoutError):
            Bytes(5000).enter(pool)  # the first write still runs, and what it holds stays
        assert reserved(pool)[0] == 2 * held[0]
        tier.go_on.set()
        assert tier.written.wait(60)
        limit = time.monotonic() + 20
        while pool._entry.busy and time.monotonic() < limit:
            with contextlib.suppress(TierTimeoutError):  # of a machine with much else to do
                Bytes(5000).enter(pool)
        assert not pool._entry.busy
        gc.collect()
        assert kept() is None
        assert reserved(pool) == [0]


class _Gate(Dram):
    """A tier that says when a write has begun, and lets it wait."""

    def __init__(self) -> None:
        super().__init__("1MiB", "gate")
        self.begun, self.go_on = threading.Event(), threading.Event()

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        super().write_from(extent, data)


def test_closing_the_pool_waits_for_the_write_and_refuses_the_storage() -> None:
    gate = _Gate()
    pool, _ = full_pool(Faulty(gate), timeout=60)
    errors: list[BaseException] = []

    def enter() -> None:
        try:
            Bytes(100_000).enter(pool)
        except PoolClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    assert gate.begun.wait(60)
    closing = threading.Thread(target=pool.force_close)
    closing.start()
    gate.go_on.set()
    for other in (thread, closing):
        other.join(60)
        assert not other.is_alive()
    assert len(errors) == 1


def test_threads_enter_at_the_same_time() -> None:
    pool, _ = full_pool(Dram("8MiB"))
    found: list[tuple[Bytes, Storage]] = []

    def enter(seed: int) -> None:
        for number in range(10):
            source = Bytes(50_000, 100 * seed + number)
            storage = source.enter(pool)
            assert storage is not None
            found.append((source, storage))

    with pool:
        threads = [threading.Thread(target=enter, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 40
        for source, storage in found:
            assert read(pool, storage) == source.value


def test_a_recording_knows_that_the_bytes_are_there(tmp_path: Path) -> None:
    pool, _ = full_pool(Dram("1MiB"))
    with pool:
        recording = pool.record(tmp_path / "a.tape")
        storage = Bytes(5000).enter(pool)
        assert storage is not None
        read(pool, storage)
        recording.close()
    creates = [record for record in TapeFile(tmp_path / "a.tape") if isinstance(record, Create)]
    assert {record.content for record in creates if record.name == "entered"} == {Content.POOL}


def test_an_error_does_not_keep_the_memory_alive() -> None:
    pool, _ = full_pool(Faulty(Dram("1MiB"), fail_writes=1.0))
    with pool:
        source = Bytes(5000)
        owner = weakref.ref(source)
        gc.disable()
        try:
            with contextlib.suppress(TierError):
                source.enter(pool)
            del source
            assert owner() is None
        finally:
            gc.enable()
