"""The checker of copies: a device of host memory whose work ends late, and what goes wrong when a wait is left out."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from farpool import _native
from farpool.memory.debug.checked_device import CheckedDevice
from farpool.memory.pager import Kind, Piece, Transfer
from farpool.memory.pager.executor.base import Done
from farpool.memory.pager.executor.staged import StagedExecutor, _Job
from farpool.memory.tiers import Dram

_BLOCK = 1024


class Work:
    """What the program has queued: it ends after somebody has asked for it a number of times."""

    def __init__(self, asks: int) -> None:
        self.asks = asks


class LateCopy:
    def __init__(self, work: Work | None, what: tuple[int, int, int], mute: int) -> None:
        self._work = work
        self._what = what
        self._mute = mute

    def done(self) -> bool:
        if self._mute > 0:
            self._mute -= 1
            raise RuntimeError("the device does not answer")
        if self._work is not None and self._work.asks > 0:
            self._work.asks -= 1
            return False
        _native.memmove(*self._what)
        return True


class LateDevice:
    """Copies wait for the work in front of their fence."""

    waits = True

    def __init__(self, arena: int) -> None:
        self._arena = arena
        self.failing_place = -1
        self.mute = 0
        """How often each copy raises when it is asked whether it has ended."""

    def begin_thread(self) -> None: ...

    def note_use(self) -> None: ...

    def fence(self) -> Work:
        return Work(20)

    def passed(self, fence: object) -> bool:
        assert isinstance(fence, Work)
        return fence.asks <= 0

    def move(self, source: int, target: int, nbytes: int) -> None:
        raise AssertionError("nothing is moved here")

    def _copy(self, target: int, source: int, nbytes: int, fence: object) -> LateCopy:
        assert isinstance(fence, Work)
        return LateCopy(fence if self.waits else None, (target, source, nbytes), self.mute)

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> LateCopy:
        if place == self.failing_place:
            raise RuntimeError("copy failed")
        return self._copy(self._arena + place, host, nbytes, fence)

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> LateCopy:
        return self._copy(host, self._arena + place, nbytes, fence)


class HastyDevice(LateDevice):
    """Ignores fences."""

    waits = False


class ForgetfulDevice(CheckedDevice):
    """Has its copies wait for the first fence that it ever made."""

    first: object = None

    def fence(self) -> object:  # type: ignore[override]
        self.first = self.first or super().fence()
        return self.first


class CarelessExecutor(StagedExecutor):
    """Gives staging memory back when the copies out of it have been started."""

    def _start_copies(self, job: _Job) -> None:
        super()._start_copies(job)
        self._space.free(job.staging)
        job.staging = -1


class Rig:
    def __init__(
        self,
        device: type[LateDevice] = LateDevice,
        checked: type[CheckedDevice] = CheckedDevice,
        executor: type[StagedExecutor] = StagedExecutor,
    ) -> None:
        self.arena, self.staging = _native.Memory(1 << 14), _native.Memory(_BLOCK)
        self.inner = device(self.arena.address)
        self.device = checked(self.inner)
        self.tier = Dram("64KiB")
        self.tier.open()
        self.executor = executor(self.device, self.staging.address, _BLOCK, [self.tier.port])

    def run(self, *transfers: Transfer) -> dict[int, Done]:
        self.executor.start(transfers)
        ended: dict[int, Done] = {}
        while len(ended) < len(transfers):
            assert self.executor.wait(10), "no transfer ended in time"
            ended.update({done.id: done for done in self.executor.poll()})
        return ended

    def findings(self) -> str:
        return "; ".join(map(str, self.device.findings))


def fetch(number: int, place: int) -> Transfer:
    return Transfer(number, Kind.FETCH, number, (Piece(0, number * _BLOCK, place, _BLOCK),), (), True)


def write_back(number: int, place: int) -> Transfer:
    return Transfer(number, Kind.WRITE_BACK, number, (Piece(0, number * _BLOCK, place, _BLOCK),), (), False)


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    rigs: list[Rig] = []
    yield rigs
    for rig in rigs:
        assert rig.executor.close(10)
        rig.tier.close()


def test_copies_that_wait_are_in_order(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    ctypes.memset(rig.arena.address, 7, 4 * _BLOCK)
    for place in range(4):
        rig.device.used([(place * _BLOCK, _BLOCK)])
        rig.run(write_back(place, place * _BLOCK))
    rig.run(*[fetch(place, (8 + place) * _BLOCK) for place in range(4)])
    assert not rig.findings()
    assert ctypes.string_at(rig.arena.address + 8 * _BLOCK, 4 * _BLOCK) == b"\7" * (4 * _BLOCK)


@pytest.mark.parametrize("transfer", [fetch(1, 0), write_back(1, 0)], ids=["in", "out"])
def test_a_device_that_ignores_a_fence_is_found(rigs: list[Rig], transfer: Transfer) -> None:
    rigs.append(rig := Rig(HastyDevice))
    rig.run(transfer)
    assert "ended before the program's work that it was to wait for" in rig.findings()


def test_a_copy_with_a_fence_older_than_the_last_use_of_its_range_is_found(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(checked=ForgetfulDevice))
    rig.run(fetch(1, 0))
    rig.device.used([(2 * _BLOCK, _BLOCK)])
    rig.run(fetch(2, 0))
    assert not rig.findings()
    rig.run(write_back(3, 2 * _BLOCK))
    assert "does not wait for the access to [2048, 3072)" in rig.findings()


def test_staging_memory_that_is_given_away_too_early_is_found(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(executor=CarelessExecutor))
    rig.run(*[fetch(number, number * _BLOCK) for number in range(6)])
    assert f"uses host memory at {rig.staging.address:#x} before the copy to arena range" in rig.findings()


def test_host_memory_in_which_another_transfer_is_still_at_its_tier_is_found(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    host = rig.staging.address
    rig.device.tier_leg(1, host, 512)
    rig.device.tier_leg(2, host + 512, 512)
    rig.device.tier_leg_ended(1)
    rig.device.tier_leg(3, host, 512)
    assert not rig.findings()
    rig.device.tier_leg(4, host + 256, 512)
    assert [str(finding) for finding in rig.device.findings] == [
        f"transfer 4 uses host memory in which transfer {number} is still at its tier" for number in (2, 3)
    ]


def test_a_failed_copy_leaves_the_staging_memory_to_the_other_copies_of_its_transfer(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    rig.inner.failing_place = 0
    half = _BLOCK // 2
    two = Transfer(1, Kind.FETCH, 1, (Piece(0, half, 4 * _BLOCK, half), Piece(0, 0, 0, half)), (), True)
    ended = rig.run(two, *[fetch(number, number * _BLOCK) for number in range(5, 9)])
    assert isinstance(ended[1].error, RuntimeError)
    assert all(ended[number].error is None for number in range(5, 9))
    assert not rig.findings()


def test_a_copy_that_does_not_tell_whether_it_has_ended_keeps_its_staging_memory(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig())
    rig.inner.mute = 3
    ended = rig.run(*[fetch(number, number * _BLOCK) for number in range(6)])
    assert all(done.error is None for done in ended.values())
    assert not rig.findings()
