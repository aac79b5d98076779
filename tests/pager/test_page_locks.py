"""Page-locking of tiers' memory, and the transfers that then take one leg."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from farpool import FarpoolWarning, _native
from farpool.ledger import Ledger
from farpool.memory.debug.checked_device import CheckedDevice
from farpool.memory.pager import Kind, Piece, Transfer
from farpool.memory.pager.executor.base import Done
from farpool.memory.pager.executor.page_locks import PageLocks
from farpool.memory.pager.executor.staged import StagedExecutor
from farpool.memory.tiers import Dram, Mapped, Throttled, Tier, Verified
from tests.pager.host_device import HostDevice

CHUNK = 1 << 16
SIZE = 5 * CHUNK + CHUNK // 2


class Locker:
    """Notes what is locked; refuses more than `most` bytes, and does nothing while it is held up."""

    def __init__(self, most: int = 1 << 40) -> None:
        self.most = most
        self.locked: dict[int, int] = {}
        self.free = threading.Event()
        self.free.set()

    def lock(self, address: int, nbytes: int) -> None:
        assert self.free.wait(10)
        if sum(self.locked.values()) + nbytes > self.most:
            raise OSError("no more")
        self.locked[address] = nbytes

    def unlock(self, address: int) -> None:
        del self.locked[address]


class Rig:
    def __init__(self, locker: Locker, tier: Tier | None = None, seed: int = 0) -> None:
        self.locker = locker
        self.tier = tier or Dram(SIZE)
        self.tier.open()
        self.ledger = Ledger()
        self.locks = PageLocks(locker, [self.tier], self.ledger, CHUNK)
        self.arena, self.staging = _native.Memory(1 << 20), _native.Memory(1 << 13)
        self.inner = HostDevice(self.arena.address, seed)
        self.device = CheckedDevice(self.inner)
        port = self.tier.port  # type: ignore[attr-defined]
        self.executor = StagedExecutor(self.device, self.staging.address, self.staging.nbytes, [port], self.locks)

    def run(self, *transfers: Transfer) -> dict[int, Done]:
        self.executor.start(transfers)
        ended: dict[int, Done] = {}
        while len(ended) < len(transfers):
            assert self.executor.wait(10), "no transfer ended in time"
            ended.update({done.id: done for done in self.executor.poll()})
        return ended

    def lock(self, nbytes: int) -> None:
        self.locks.parts(0, 0, nbytes)
        within(lambda: self.locks.parts(0, 0, nbytes) is not None)

    def staged(self) -> list[bool]:
        """For each copy so far, whether it went through staging memory."""
        start = self.staging.address
        return [start <= host < start + self.staging.nbytes for host, _, _ in self.inner.started]

    def close(self) -> None:
        assert self.executor.close(10)
        assert not self.device.findings
        self.tier.close()


def within(true: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig(Locker())
    yield rig
    rig.close()
    assert not rig.locker.locked


def write_back(number: int, offset: int, place: int, nbytes: int, *after: int) -> Transfer:
    return Transfer(number, Kind.WRITE_BACK, number, (Piece(0, offset, place, nbytes),), after, False)


def fetch(number: int, offset: int, place: int, nbytes: int, *after: int) -> Transfer:
    return Transfer(number, Kind.FETCH, number, (Piece(0, offset, place, nbytes),), after, True)


def test_memory_is_mapped_and_what_stands_before_it_is_not() -> None:
    with Dram("64KiB") as tier:
        assert isinstance(tier, Mapped)
        data = random.Random(1).randbytes(1000)
        tier.reserve(4096)
        extent = tier.reserve(1000)
        tier.write_from(extent, memoryview(data))
        place = _native.Memory(1000)
        _native.memmove(place.address, tier.address(extent.offset), 1000)
        assert bytes(memoryview(place)) == data
    assert not isinstance(Verified(Dram("64KiB")), Mapped)
    assert not isinstance(Throttled(Dram("64KiB"), 1e9, 1e9), Mapped)


def test_locks_are_taken_in_order_as_far_as_they_are_wanted_and_never_beyond_the_end(rig: Rig) -> None:
    assert rig.locks.parts(0, CHUNK, 10) is None
    within(lambda: rig.locks.parts(0, CHUNK, 10) is not None)
    start = rig.tier.address(0)  # type: ignore[attr-defined]
    assert rig.locker.locked == {start: CHUNK, start + CHUNK: CHUNK}
    rig.lock(SIZE)
    assert sum(rig.locker.locked.values()) == SIZE
    assert rig.locker.locked[start + 5 * CHUNK] == CHUNK // 2


def test_what_is_locked_is_on_the_ledger_until_it_is_unlocked() -> None:
    rig = Rig(Locker())
    rig.lock(CHUNK + 1)
    within(lambda: rig.ledger.total(tier="dram").page_locked == 2 * CHUNK)
    rig.close()
    assert not rig.locker.locked
    assert not rig.ledger.accounts()


def test_parts_of_an_extent_lie_in_one_locked_range_each(rig: Rig) -> None:
    rig.lock(SIZE)
    start = rig.tier.address(0)  # type: ignore[attr-defined]
    assert rig.locks.parts(0, CHUNK - 64, 2 * CHUNK) == [
        (start + CHUNK - 64, 64),
        (start + CHUNK, CHUNK),
        (start + 2 * CHUNK, CHUNK - 64),
    ]
    assert rig.locks.parts(0, CHUNK, CHUNK) == [(start + CHUNK, CHUNK)]


@pytest.mark.parametrize("seed", range(3))
def test_locked_memory_is_copied_from_and_to_in_one_leg(seed: int) -> None:
    rig = Rig(Locker(), seed=seed)
    rig.lock(SIZE)
    blocks = [random.Random(i).randbytes(3000 + i) for i in range(60)]  # some lie across two chunks
    for i, data in enumerate(blocks):
        memoryview(rig.arena)[i * 4096 : i * 4096 + len(data)] = data
    out = [write_back(i + 1, i * 4096, i * 4096 + 0, len(data)) for i, data in enumerate(blocks)]
    back = [fetch(i + 101, i * 4096, (100 + i) * 4096, len(data), i + 1) for i, data in enumerate(blocks)]
    ended = rig.run(*out, *back)
    assert all(done.error is None and not done.cancelled for done in ended.values())
    for i, data in enumerate(blocks):
        assert bytes(memoryview(rig.arena)[(100 + i) * 4096 : (100 + i) * 4096 + len(data)]) == data
    assert not any(rig.staged())
    rig.close()


def test_an_extent_that_is_larger_than_the_staging_memory_is_copied_all_the_same(rig: Rig) -> None:
    rig.lock(SIZE)
    data = random.Random(2).randbytes(2 * CHUNK)
    memoryview(rig.arena)[: len(data)] = data
    rig.run(write_back(1, CHUNK // 2, 0, len(data)), fetch(2, CHUNK // 2, 4 * CHUNK, len(data), 1))
    assert bytes(memoryview(rig.arena)[4 * CHUNK : 4 * CHUNK + len(data)]) == data
    assert len(rig.inner.started) == 6


def test_until_its_memory_is_locked_a_transfer_goes_through_staging_memory() -> None:
    rig = Rig(Locker())
    rig.locker.free.clear()
    memoryview(rig.arena)[:1000] = b"a" * 1000
    rig.run(write_back(1, 0, 0, 1000))
    assert rig.staged() == [True]
    rig.locker.free.set()
    within(lambda: rig.locks.parts(0, 0, 1000) is not None)
    rig.run(fetch(2, 0, 4096, 1000))
    assert rig.staged() == [True, False]
    assert bytes(memoryview(rig.arena)[4096:5096]) == b"a" * 1000
    rig.close()


def test_a_fetch_into_a_range_waits_for_the_direct_write_back_out_of_it(rig: Rig) -> None:
    rig.lock(SIZE)
    memoryview(rig.arena)[:1000] = b"n" * 1000
    rig.run(write_back(1, 8192, 0, 1000))
    memoryview(rig.arena)[:1000] = b"o" * 1000
    rig.run(write_back(2, 0, 0, 1000), fetch(3, 8192, 0, 1000, 2))
    rig.run(fetch(4, 0, 8192, 1000))
    assert bytes(memoryview(rig.arena)[:1000]) == b"n" * 1000
    assert bytes(memoryview(rig.arena)[8192:9192]) == b"o" * 1000


def test_after_a_failed_direct_write_back_the_bytes_are_still_in_place(rig: Rig) -> None:
    rig.lock(SIZE)
    memoryview(rig.arena)[:1000] = b"o" * 1000
    rig.inner.failures = 1.0
    ended = rig.run(write_back(1, 0, 0, 1000), fetch(2, 8192, 0, 1000, 1))
    assert isinstance(ended[1].error, RuntimeError)
    assert ended[2].cancelled
    assert bytes(memoryview(rig.arena)[:1000]) == b"o" * 1000


def test_what_is_demanded_does_not_stand_behind_all_that_is_fetched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farpool.memory.pager.executor.staged._COPY_BYTES_MAX", 8192)
    rig = Rig(Locker())
    rig.lock(SIZE)
    rig.inner.held = True
    ahead = [Transfer(i, Kind.FETCH, i, (Piece(0, i * 4096, i * 4096, 4096),), (), False) for i in range(1, 9)]
    rig.executor.start(ahead)
    within(lambda: len(rig.inner.started) == 2)
    rig.executor.start([fetch(20, 20 * 4096, 20 * 4096, 4096)])
    within(lambda: len(rig.inner.started) == 3)
    assert rig.inner.started[2][1] == 20 * 4096
    rig.executor.expedite([7])
    within(lambda: len(rig.inner.started) == 4)
    assert rig.inner.started[3][1] == 7 * 4096
    rig.inner.held = False
    within(lambda: len(rig.inner.started) == 9)
    rig.close()


def test_where_locking_is_refused_one_warning_is_given_and_the_rest_is_staged() -> None:
    rig = Rig(Locker(most=2 * CHUNK))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rig.run(write_back(1, 3 * CHUNK, 0, 1000), write_back(2, 4 * CHUNK, 2048, 1000))
        within(lambda: bool(caught))
        rig.run(write_back(3, 4 * CHUNK, 2048, 1000), write_back(4, CHUNK, 4096, 1000))
        rig.close()
    assert [warning.category for warning in caught] == [FarpoolWarning]
    assert "dram: only 128 KiB of its 352 KiB can be page-locked (no more)" in str(caught[0].message)
    assert rig.staged() == [True, True, True, False]


def test_a_tier_behind_a_wrapper_is_staged_and_never_locked() -> None:
    rig = Rig(Locker(), Verified(Dram(SIZE)))
    memoryview(rig.arena)[:1000] = b"a" * 1000
    rig.run(write_back(1, 0, 0, 1000))
    rig.run(fetch(2, 0, 4096, 1000))
    assert rig.staged() == [True, True]
    assert not rig.locker.locked
    rig.close()
