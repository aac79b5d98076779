"""Histories of names are linearizable: writers and readers of the production code over the simulated registry."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType, SimpleNamespace

import pytest
from typing_extensions import Buffer

from farpool.abc.objects import Touched
from farpool.abc.registry import Entry
from farpool.cluster.names import Names, holds, names, sending, watch, writer
from farpool.cluster.roles import session
from farpool.errors import (
    NameHeldError,
    NameLostError,
    NameMissingError,
    NameMovedError,
    RegistryAwayError,
    RegistryError,
)
from farpool.sim.linearizability import UNKNOWN, Call, Cas, Register, linearized
from farpool.sim.network import Network, Process
from farpool.sim.registry import RegistryServer, SimulatedRegistry
from farpool.sim.scheduler import Killed, Scheduler
from farpool.sim.standins import virtual_time

MODULES: list[ModuleType] = [holds, names, sending, watch, writer, session]
NODE = b"node"


class Shelf:
    """Objects with marks, as one node keeps them; every call succeeds at once."""

    confirming = 1

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._objects: dict[str, bytes] = {}
        self._ends: dict[str, float | None] = {}  # None: kept
        self._marks: dict[str, int] = {}
        self._number = 0

    def _mark(self, key: str) -> None:
        self._number += 1
        self._marks[key] = self._number

    def _expire(self) -> None:
        for key in [key for key, end in self._ends.items() if end is not None and end <= self._scheduler.now]:
            del self._objects[key], self._ends[key], self._marks[key]

    def put_many(
        self, items: Iterable[tuple[str, Buffer]], /, *, ttl: float | None = None, check: bool = False
    ) -> None:
        self._expire()
        assert ttl is not None
        for key, value in items:
            if key not in self._objects:
                self._objects[key] = bytes(value)
                self._ends[key] = self._scheduler.now + ttl
                self._mark(key)

    def touch_many(
        self,
        keys: Iterable[str],
        ttl: float | None,
        /,
        *,
        keep: bool | None = None,
        seen: Sequence[Mapping[bytes, int]] | None = None,
    ) -> Touched:
        self._expire()
        copies, marks, refused = [], [], []
        for place, key in enumerate(keys):
            is_there = key in self._objects
            is_kept = is_there and self._ends[key] is None
            if is_there and seen is not None and seen[place].get(NODE) != self._marks[key] and not (keep and is_kept):
                refused.append(place)
                is_there = False
            if is_there:
                self._touch(key, ttl, keep, is_kept=is_kept)
            copies.append(int(is_there))
            marks.append({NODE: self._marks[key]} if is_there else {})
        return Touched(copies, True, marks, refused)

    def _touch(self, key: str, ttl: float | None, keep: bool | None, *, is_kept: bool) -> None:
        end = self._ends[key]
        if keep:
            if not is_kept:
                self._ends[key] = None
                self._mark(key)
        elif keep is False:
            assert ttl is not None
            self._ends[key] = self._scheduler.now + ttl
            self._mark(key)
        elif end is not None and ttl is not None and end < self._scheduler.now + ttl:
            self._ends[key] = self._scheduler.now + ttl
            self._mark(key)

    def get(self, key: str, /) -> bytes | None:
        self._expire()
        return self._objects.get(key)

    def get_into_many(self, pairs: Iterable[tuple[str, Buffer]], /) -> list[int | None]:
        raise NotImplementedError


class Programs:
    """Processes that publish and read one name, with messages that are lost and processes that crash."""

    def __init__(self, seed: int, *, loss: float, hold: float = 0.0) -> None:
        self.chance, self.hold = random.Random(seed), hold
        self.scheduler = Scheduler()
        self.network = Network(self.scheduler, seed)
        self.server = RegistryServer(lambda: self.scheduler.now, lambda revision, operations: None)
        self.shelf = Shelf(self.scheduler)
        self.calls: list[Call] = []
        self.values: dict[int, set[bytes]] = {}
        self.ended = self.reads = 0
        for number in range(4):
            program = Program(self, f"program{number}")
            for way in ((program.name, "registry"), ("registry", program.name)):
                link = self.network.link(*way)
                link.losses, link.loss = 1, loss
            for _ in range(self.chance.randint(0, 2)):
                program.crashes[self.chance.randint(1, 150)] = self.chance.uniform(0.1, 5.0)
            program.start()

    def run(self) -> tuple[int, ...] | None:
        tokens = SimpleNamespace(token_hex=lambda count: self.chance.randbytes(count).hex())
        with pytest.MonkeyPatch.context() as patch, virtual_time(self.scheduler, MODULES):
            patch.setattr(sending, "secrets", tokens)
            try:
                assert self.scheduler.run(2000.0, lambda: self.ended == 4)
            finally:
                self.scheduler.close()
        return linearized(self.calls, Register())


class Program(Process):
    def __init__(self, programs: Programs, name: str) -> None:
        super().__init__(name, programs.scheduler)
        self.programs = programs
        self.turns = 10
        self.number = 0

    def begin(self) -> None:
        self.spawn("program", self.work)

    def work(self) -> None:
        registry = SimulatedRegistry(self.programs.server, self.programs.network, self, timeout=2.0)
        # Without a time to hold old versions, sweeps release them at once.
        hold = self.programs.hold
        opened = Names(self.programs.shelf, registry, writer=self.name, hold=hold, lease=3.0, timeout=2.0)
        while self.turns:
            self.turns -= 1
            self.scheduler.sleep(self.programs.chance.uniform(0.0, 0.5))
            version = self.read(registry)
            if version is not None and self.programs.chance.random() < 0.7:
                self.publish(opened, version)
        self.programs.ended += 1

    def read(self, registry: SimulatedRegistry) -> int | None:
        """Read the name's version and value, with names that know nothing of before."""
        begun = self.scheduler.now
        try:
            with Names(self.programs.shelf, registry, hold=0.0, lease=3.0, timeout=2.0) as fresh:
                try:
                    with fresh.open("weights") as reader:
                        version, value = reader.info.version, reader.read()
                        is_held = reader.held
                except NameMissingError:
                    version, value, is_held = 0, b"", True
        except RegistryError:
            return None
        except NameLostError:
            # The registry did not confirm the hold in time, so a sweep may release the version a second later.
            assert self.scheduler.now - begun > 2.0
            return None
        # A hold is a transaction of its own: the version was current at some time of the call.
        self.programs.calls.append(Call(begun, self.scheduler.now, None, version or None))
        if version and is_held:
            assert value in self.programs.values[version], "a version has a value that was not published as it"
            self.programs.reads += 1
        return version

    def publish(self, opened: Names, expect: int) -> None:
        self.number += 1
        value = f"{self.name} {self.number}".encode()
        self.programs.values.setdefault(expect + 1, set()).add(value)
        begun, argument = self.scheduler.now, Cas(expect or None, expect + 1)
        result: bool | None = None
        try:
            made = opened.publish("weights", value, expect=expect)
            assert made.version == expect + 1
            result = True
        except NameMovedError as error:
            if error.version == expect:
                return  # its lease ended, and nothing was published
            result = False
        except NameHeldError:
            return
        except RegistryAwayError as error:
            if not error.uncertain:
                return
        except Killed:
            self.programs.calls.append(Call(begun, self.scheduler.now, argument, UNKNOWN))
            raise
        self.programs.calls.append(Call(begun, self.scheduler.now, argument, UNKNOWN if result is None else result))


@pytest.mark.parametrize("seed", range(15))
def test_histories_of_names_are_linearizable(seed: int) -> None:
    programs = Programs(seed, loss=0.05 if seed % 2 else 0.0)
    assert programs.run() is not None, programs.calls
    assert len(programs.calls) > 20


def test_readers_that_remember_earlier_versions_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Names._entry
    remembered: list[Entry | None] = []

    def entry_of(self: Names, quoted: str) -> tuple[Entry | None, bool]:
        if self._context.registry.now % 2 < 1 or not remembered:  # type: ignore[attr-defined]
            remembered[:] = [original(self, quoted)[0]]
        return remembered[0], False

    monkeypatch.setattr(Names, "_entry", entry_of)
    assert any(Programs(seed, loss=0.0, hold=60.0).run() is None for seed in range(5))
