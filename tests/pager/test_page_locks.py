"""Page-locking of tiers' memory."""

from __future__ import annotations

import random
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import pytest

from farpool import FarpoolWarning, _native
from farpool.ledger import Ledger
from farpool.memory.pager.executor.page_locks import PageLocks
from farpool.memory.tiers import Dram, Mapped, Throttled, Tier, Verified

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
    def __init__(self, locker: Locker, tier: Tier | None = None) -> None:
        self.locker = locker
        self.tier = tier or Dram(SIZE)
        self.tier.open()
        self.ledger = Ledger()
        self.locks = PageLocks(locker, [self.tier], self.ledger, CHUNK)

    def lock(self, nbytes: int) -> None:
        self.locks.parts(0, 0, nbytes)
        within(lambda: self.locks.parts(0, 0, nbytes) is not None)

    def close(self) -> None:
        assert self.locks.close(10)
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


def test_where_locking_is_refused_one_warning_is_given_and_what_is_locked_stays_in_use() -> None:
    rig = Rig(Locker(most=2 * CHUNK))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert rig.locks.parts(0, 4 * CHUNK, 1000) is None
        within(lambda: bool(caught))
        assert rig.locks.parts(0, 4 * CHUNK, 1000) is None
        assert rig.locks.parts(0, CHUNK, 1000) is not None
        rig.close()
    assert [warning.category for warning in caught] == [FarpoolWarning]
    assert "dram: only 128 KiB of its 352 KiB can be page-locked (no more)" in str(caught[0].message)


def test_a_tier_behind_a_wrapper_is_never_locked() -> None:
    rig = Rig(Locker(), Verified(Dram(SIZE)))
    assert rig.locks.parts(0, 0, 1000) is None
    rig.close()
    assert not rig.locker.locked
