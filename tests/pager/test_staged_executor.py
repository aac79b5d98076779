"""Staged transfers, with host memory in the place of a GPU: copies end late, and some cannot be started."""

from __future__ import annotations

import ctypes
import math
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from farpool import _native
from farpool.memory.pager import Kind, Move, Piece, Transfer
from farpool.memory.pager.executor.base import Done
from farpool.memory.pager.executor.staged import StagedExecutor
from farpool.memory.tiers import Dram
from tests.pager.host_device import HostDevice


class Rig:
    def __init__(self, seed: int) -> None:
        self.arena, self.staging = _native.Memory(1 << 16), _native.Memory(1 << 13)
        self.device = HostDevice(self.arena.address, seed)
        self.tier = Dram("1MiB")
        self.tier.open()
        self.executor = StagedExecutor(self.device, self.staging.address, self.staging.nbytes, [self.tier.port])

    def finish(self, count: int) -> dict[int, Done]:
        ended: dict[int, Done] = {}
        while len(ended) < count:
            assert self.executor.wait(10), "no transfer ended in time"
            ended.update({done.id: done for done in self.executor.poll()})
        return ended

    def fill(self, place: int, data: bytes) -> None:
        ctypes.memmove(self.arena.address + place, data, len(data))

    def read(self, place: int, nbytes: int) -> bytes:
        return ctypes.string_at(self.arena.address + place, nbytes)


@pytest.fixture(params=range(5))
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(request.param)
    yield rig
    assert rig.executor.close(10)
    assert not any(thread.name == "farpool-staging" for thread in threading.enumerate())
    rig.tier.close()


def test_bytes_go_out_and_come_back_through_less_staging_than_they_are(rig: Rig) -> None:
    blocks = [random.Random(i).randbytes(2000 + i) for i in range(20)]
    for i, data in enumerate(blocks):
        rig.fill(i * 3072, data)
    out = [
        Transfer(i + 1, Kind.WRITE_BACK, i, (Piece(0, i * 4096, i * 3072, len(data)),), (), False)
        for i, data in enumerate(blocks)
    ]
    rig.executor.start(out)
    assert all(done.error is None for done in rig.finish(20).values())
    rig.fill(0, bytes(1 << 16))
    back = [
        Transfer(i + 100, Kind.FETCH, i, (Piece(0, i * 4096, (19 - i) * 3072, len(data)),), (), i % 2 == 0)
        for i, data in enumerate(blocks)
    ]
    rig.executor.start(back)
    rig.executor.expedite([119])
    assert all(done.error is None for done in rig.finish(20).values())
    for i, data in enumerate(blocks):
        assert rig.read((19 - i) * 3072, len(data)) == data


def test_a_range_is_filled_only_after_its_old_bytes_have_reached_their_tier(rig: Rig) -> None:
    old, new = b"o" * 4000, b"n" * 4000
    extent = rig.tier.reserve(4000)
    rig.tier.write_from(extent, memoryview(new))
    rig.fill(0, old)
    rig.executor.start(
        [
            Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 8192, 0, 4000),), (), False),
            Transfer(2, Kind.FETCH, 2, (Piece(0, extent.offset, 0, 4000),), (1,), True),
            Transfer(3, Kind.FETCH, 3, (), (1,), False),
        ]
    )
    assert all(done.error is None for done in rig.finish(3).values())
    assert rig.read(0, 4000) == new
    rig.executor.start([Transfer(4, Kind.FETCH, 1, (Piece(0, 8192, 8192, 4000),), (), True)])
    rig.finish(1)
    assert rig.read(8192, 4000) == old


def test_what_comes_after_a_failure_is_cancelled_and_the_old_bytes_stay(rig: Rig) -> None:
    rig.fill(0, b"o" * 1000)
    rig.device.failures = 1.0
    rig.executor.start(
        [
            Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 0, 1000),), (), False),
            Transfer(2, Kind.FETCH, 2, (Piece(0, 4096, 0, 1000),), (1,), True),
        ]
    )
    ended = rig.finish(2)
    assert isinstance(ended[1].error, RuntimeError)
    assert ended[2].cancelled
    assert rig.read(0, 1000) == b"o" * 1000


def test_what_comes_after_a_failure_is_cancelled_although_nobody_has_polled_it_yet(rig: Rig) -> None:
    rig.fill(0, b"o" * 1000)
    rig.device.failures = 1.0
    rig.executor.start([Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 0, 1000),), (), False)])
    assert rig.executor.wait(10)
    rig.device.failures = 0.0
    rig.executor.start([Transfer(2, Kind.FETCH, 2, (Piece(0, 4096, 0, 1000),), (1,), True)])
    rig.executor.start([Transfer(3, Kind.FETCH, 3, (), (2,), True)])
    ended = rig.finish(3)
    assert isinstance(ended[1].error, RuntimeError)
    assert ended[2].cancelled
    assert ended[3].cancelled
    assert rig.read(0, 1000) == b"o" * 1000
    rig.executor.start([Transfer(4, Kind.FETCH, 2, (Piece(0, 4096, 0, 1000),), (1,), True)])
    assert rig.finish(1)[4].error is None


def test_moves_come_before_the_transfers_that_follow_them(rig: Rig) -> None:
    rig.fill(0, b"a" * 100 + b"b" * 100)
    rig.executor.start([Move(0, 50, 200), Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 50, 200),), (), False)])
    rig.finish(1)
    rig.executor.start([Transfer(2, Kind.FETCH, 1, (Piece(0, 0, 4096, 200),), (), True)])
    rig.finish(1)
    assert rig.read(4096, 200) == b"a" * 100 + b"b" * 100


def test_fetches_leave_staging_memory_to_what_they_come_after(rig: Rig) -> None:
    blocks = [bytes([number]) * 2000 for number in range(12)]
    for number, data in enumerate(blocks):
        rig.fill(number * 2048, data)
    out = [Transfer(n + 1, Kind.WRITE_BACK, n, (Piece(0, n * 4096, n * 2048, 2000),), (), False) for n in range(12)]
    rig.executor.start(out)
    assert all(done.error is None for done in rig.finish(12).values())
    again = [replace(transfer, id=transfer.id + 100) for transfer in out]
    back = [
        Transfer(n + 201, Kind.FETCH, 20 + n, (Piece(0, n * 4096, (11 - n) * 2048, 2000),), (112 - n,), True)
        for n in range(12)
    ]
    rig.executor.start([*again, *back])
    assert all(done.error is None for done in rig.finish(24).values())
    for number, data in enumerate(blocks):
        assert rig.read((11 - number) * 2048, 2000) == data


def test_what_comes_after_something_cancelled_is_cancelled_too(rig: Rig) -> None:
    rig.fill(0, b"o" * 1000)
    rig.device.failures = 1.0
    rig.executor.start(
        [
            Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 0, 1000),), (), False),
            Transfer(2, Kind.FETCH, 2, (), (1,), True),
            Transfer(3, Kind.FETCH, 3, (Piece(0, 4096, 0, 1000),), (2,), True),
        ]
    )
    ended = rig.finish(3)
    assert isinstance(ended[1].error, RuntimeError)
    assert ended[2].cancelled
    assert ended[3].cancelled
    assert rig.read(0, 1000) == b"o" * 1000


def test_closing_waits_for_copies_under_way_and_starts_no_others(rig: Rig) -> None:
    rig.device.held = True
    rig.executor.start([Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 0, 1000),), (), False)])
    rig.executor.start([Transfer(2, Kind.WRITE_BACK, 2, (Piece(0, 4096, 0, 1000),), (1,), False)])
    deadline = time.monotonic() + 10
    while not rig.device.started:
        assert time.monotonic() < deadline
    assert not rig.executor.close(0.05)
    rig.device.held = False
    assert rig.executor.close(10)
    assert len(rig.device.started) == 1


def test_a_copy_whose_end_cannot_be_told_for_a_while_is_waited_for(rig: Rig) -> None:
    rig.fill(0, b"o" * 1000)
    rig.device.mute = 7
    rig.executor.start([Transfer(1, Kind.WRITE_BACK, 1, (Piece(0, 0, 0, 1000),), (), False)])
    assert rig.finish(1)[1].error is None
    rig.executor.start([Transfer(2, Kind.FETCH, 2, (Piece(0, 0, 4096, 1000),), (), True)])
    assert rig.finish(1)[2].error is None
    assert rig.device.mute == 0
    assert rig.executor.trouble is None
    assert rig.read(4096, 1000) == b"o" * 1000


def test_memory_of_a_copy_whose_end_is_never_told_is_given_to_nobody(rig: Rig) -> None:
    whole = rig.staging.nbytes
    rig.device.mute = math.inf
    rig.executor.start([Transfer(1, Kind.FETCH, 1, (Piece(0, 0, 0, whole),), (), True)])
    rig.executor.start([Transfer(2, Kind.FETCH, 2, (Piece(0, whole, 0, 1000),), (1,), True)])
    rig.executor.start([Transfer(3, Kind.FETCH, 3, (Piece(0, whole, 2 * whole, 1000),), (), True)])
    deadline = time.monotonic() + 10
    while rig.executor.trouble is None:
        assert time.monotonic() < deadline
    assert not rig.executor.wait(0.2)
    assert [copy[1:] for copy in rig.device.started] == [(0, whole)]
    assert not rig.executor.close(0.05)
    rig.device.mute = 0
    assert rig.executor.close(10)
    assert len(rig.device.started) == 1
