"""The driver with an observer in Python, as debug mode has one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from farpool._native import Driver, Grant, Layout, Memory, Queue
from farpool.memory.pager import Access, Mode, Move, Pager, Transfer
from farpool.memory.pager.use import Use
from farpool.memory.tiers import Dram
from tests.pager.harness import SimulatedSpace

BLOCK = 1024


class Noting:
    """Notes what it is told, and raises where the test wants it."""

    def __init__(self) -> None:
        self.notes: list[object] = []
        self.failing = ""
        self.accesses: list[Access] = []

    def _note(self, what: str, *details: object) -> None:
        self.notes.append((what, *details) if details else what)
        if self.failing == what:
            self.failing = ""
            raise InterruptedError(what)

    def starting(self, commands: Sequence[Transfer | Move]) -> None:
        self.commands = commands
        self._note("starting", *[type(command).__name__ for command in commands])

    def moved(self, move: Move) -> None:
        assert any(move is command for command in self.commands)
        self._note("moved")

    def ended(self, transfer: int, failed: bool) -> None:
        self._note("ended", failed)

    def granted(self, access: Access, uses: Sequence[Use], op: str) -> None:
        assert access.granted
        self.accesses.append(access)
        self._note("granted", op, len(uses))

    def released(self, access: Access) -> None:
        assert access.granted, "the pager does not know it yet"
        assert access is self.accesses[-1]
        self._note("released")

    def raise_findings(self) -> None:
        self._note("raise_findings")

    def take(self) -> list[object]:
        notes, self.notes = self.notes, []
        return notes


class Rig:
    """A driver over an arena with room for one block, and two blocks."""

    def __init__(self) -> None:
        self.arena = Memory(BLOCK)
        self.tier = Dram("64KiB")
        self.tier.open()
        self.noting = Noting()
        self.pager = Pager(BLOCK, [SimulatedSpace(1 << 16)], prefetch=False)
        self.queue = Queue()
        self.driver = Driver(
            self.pager, self.queue, self.arena.address, [self.tier.port], 20.0, lambda *wait: None, self.noting
        )
        first = self.pager.create([BLOCK, BLOCK])
        self.storages = [SimpleNamespace(layout=Layout(first + i, 1, 0, BLOCK, BLOCK, False)) for i in range(2)]

    def acquire(self, number: int, mode: Mode = Mode.OVERWRITE) -> Grant:
        grant = self.driver.acquire([Use(self.storages[number], 0, BLOCK, mode)], "test.op", False, True)
        assert grant is not None
        return grant


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_debug_mode_asks_for_attention_at_each_access(rig: Rig) -> None:
    use = Use(rig.storages[0], 0, BLOCK, Mode.OVERWRITE)
    assert rig.driver.attention
    assert rig.driver.acquire([use], "test.op", False, False) is None
    assert not rig.noting.notes


def test_an_observer_is_told_of_each_step_in_order(rig: Rig) -> None:
    rig.driver.release(rig.acquire(0))
    assert rig.noting.take() == [("granted", "test.op", 1), "released", "raise_findings"]
    rig.driver.release(rig.acquire(1))
    ended = ("ended", False)
    assert rig.noting.take() == [
        ("starting", "Transfer", "Transfer"), ended, ended, ("granted", "test.op", 1), "released", "raise_findings",
    ]  # fmt: skip


def test_a_move_inside_an_access_is_announced_and_made(rig: Rig) -> None:
    grant = rig.acquire(0)
    memoryview(rig.arena)[:4] = b"abcd"
    rig.noting.take()
    with rig.driver:
        rig.driver.move(0, 2, 4)
    assert rig.noting.take() == [("starting", "Move"), "moved"]
    assert bytes(memoryview(rig.arena)[:6]) == b"ababcd"
    rig.driver.release(grant)


@pytest.mark.parametrize("failing", ["starting", "ended", "granted", "released", "raise_findings"])
def test_after_an_error_of_an_observer_nothing_is_pinned_and_the_driver_works(rig: Rig, failing: str) -> None:
    rig.driver.release(rig.acquire(0))
    rig.noting.failing = failing
    with pytest.raises(InterruptedError, match=failing):
        rig.driver.release(rig.acquire(1))
    assert rig.driver.granted == 0
    for storage in rig.storages:
        assert rig.pager.block(storage.layout.first).pins == 0
    memoryview(rig.arena)[:BLOCK] = bytes(BLOCK)
    for number in (1, 0, 1):
        rig.driver.release(rig.acquire(number, Mode.WRITE))
    assert rig.driver.granted == 0


def test_a_closed_driver_tells_an_observer_nothing_more(rig: Rig) -> None:
    grant = rig.acquire(0)
    rig.noting.take()
    with rig.driver:
        rig.driver.close()
    rig.driver.release(grant)
    assert rig.driver.granted == 0
    assert not rig.noting.notes
