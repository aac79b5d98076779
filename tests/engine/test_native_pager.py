"""The native pager beside the engine in Python: the same calls, the same commands in the same order.

Each program is random by its seed. It makes, drops and accesses storages in loops and at random, from several threads
that wait at once, with tables, sources, tiers that are full, transfers that fail, and budgets that change; transfers
end in any order that their dependencies allow. After each call both sides must have answered alike.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from farpool._native import ExtentAllocator, Pager
from farpool.engine import Engine, Mode, Move, Piece, Run, TooLargeError, Transfer
from farpool.engine.messages import NoRoomError
from farpool.engine.tape import Tape

CLASSES = ("weights", "gradient", "bytes")
CHUNK = 50
PROGRAMS = 2500


class Space:
    """Bookkeeping of a tier that is filled in the same way on both sides."""

    def __init__(self, capacity: int) -> None:
        self.extents = ExtentAllocator(capacity, 64)

    def reserve(self, nbytes: int, cls: str) -> int | None:
        offset = self.extents.alloc(nbytes)
        return None if offset < 0 else offset

    def free(self, offset: int, nbytes: int, cls: str) -> None:
        self.extents.free(offset)


@dataclass(eq=False)
class Pair:
    """One access on both sides."""

    here: object
    there: object
    runs: list[Run]


@dataclass
class Both:
    """Engine and pager, driven alike."""

    rng: random.Random
    engine: Engine
    pager: Pager
    now: float = 0.0
    open: dict[int, Transfer] = field(default_factory=dict)
    storages: list[tuple[int, int]] = field(default_factory=list)
    retired: list[tuple[int, int]] = field(default_factory=list)
    waiting: list[Pair] = field(default_factory=list)
    granted: list[Pair] = field(default_factory=list)
    sources: int = 0
    log: list[object] = field(default_factory=list)

    # ---- calls ----

    def create(self, sizes: list[int], cls: str) -> None:
        first = self.engine.create(sizes, cls)
        assert self.pager.create(sizes, cls) == first
        self.storages.append((first, len(sizes)))

    def drop(self, first: int, count: int) -> None:
        self.storages.remove((first, count))
        self.engine.retire(first, count)
        self.pager.retire(first, count)
        self.retired.append((first, count))

    def collect(self) -> None:
        kept = []
        for first, count in self.retired:
            gone = self.engine.forget(first, count)
            assert self.pager.forget(first, count) == gone
            if not gone:
                kept.append((first, count))
        self.retired = kept

    def adopt(self, block: int, size: int) -> None:
        able = self.engine.can_adopt(block)
        assert self.pager.can_adopt(block) == able
        if able:
            half = size // 128 * 64
            for place, nbytes in [(0, half), (half, size - half)] if half and self.rng.random() < 0.5 else [(0, size)]:
                piece = Piece(self.sources, 4096 + place, place, nbytes)
                self.engine.adopt(block, piece)
                self.pager.adopt(block, *piece)

    def request(self, runs: list[Run]) -> Pair | None:
        answers = []
        for side in (self.engine, self.pager):
            try:
                answers.append(side.request(runs, self.now))
            except TooLargeError as error:
                answers.append(error.args)
        if isinstance(answers[0], tuple):
            assert answers[0] == answers[1]
            return None
        pair = Pair(answers[0], answers[1], runs)
        self.waiting.append(pair)
        return pair

    def release(self, pair: Pair) -> None:
        self.granted.remove(pair)
        go_on = self.rng.random() < 0.95
        self.engine.release(pair.here, go_on=go_on)
        self.pager.release(pair.there, go_on=go_on)

    def abandon(self, pair: Pair) -> None:
        self.waiting.remove(pair)
        self.engine.abandon(pair.here)
        self.pager.abandon(pair.there)

    def resize(self, capacity: int) -> None:
        answers = []
        for side in (self.engine, self.pager):
            try:
                answers.append(side.resize(capacity))
            except (NoRoomError, OSError) as error:
                answers.append((type(error), error.args))
        assert answers[0] == answers[1]

    def end_one(self, failure_rate: float) -> None:
        ready = [t for t in self.open.values() if not any(before in self.open for before in t.after)]
        if not ready:
            return
        transfer = self.rng.choice(ready[:4])
        del self.open[transfer.id]
        if transfer.pieces and self.rng.random() < failure_rate:
            error = OSError(f"transfer {transfer.id}")
            for other in [t for t in self.open.values() if transfer.id in t.after]:
                self.cancel(other)
            self.engine.failed(transfer.id, error)
            self.pager.failed(transfer.id, error)
        else:
            start = max(0.0, self.now - self.rng.random() * 1e-5)
            self.engine.completed(transfer.id, start, self.now)
            self.pager.completed(transfer.id, start, self.now)
        self.compare()
        self.engine.proceed(self.now)
        self.pager.proceed(self.now)

    def cancel(self, transfer: Transfer) -> None:
        if self.open.pop(transfer.id, None) is not None:
            for other in [t for t in self.open.values() if transfer.id in t.after]:
                self.cancel(other)

    # ---- comparing ----

    def take(self) -> None:
        commands, others = self.engine.take_commands(), self.pager.take_commands()
        assert commands == others
        self.log += commands
        for command in commands:
            if not isinstance(command, Move):
                self.open[command.id] = command
        assert self.engine.take_raised() == self.pager.take_raised()

    def compare(self) -> None:
        engine, pager = self.engine, self.pager
        for pair in self.waiting[:]:
            here, there = pair.here, pair.there
            assert here.granted == there.granted, pair.runs
            assert (type(here.error), here.error and here.error.args) == (
                type(there.error),
                there.error and there.error.args,
            )
            if here.granted:
                assert here.places == there.places
                self.waiting.remove(pair)
                self.granted.append(pair)
            elif here.error is not None:
                self.waiting.remove(pair)
        counters = engine.counters
        assert {name: getattr(counters, name) for name in counters.__slots__} == {
            name: getattr(pager.counters, name) for name in counters.__slots__
        }
        assert engine.arena.used == pager.used
        assert engine.arena.capacity == pager.capacity
        assert engine.still == pager.still
        assert engine.tape.divergences == pager.divergences
        assert engine._residency.ahead_bytes == pager.ahead_bytes

    def compare_whole(self) -> None:
        engine, pager = self.engine, self.pager
        assert engine.resident() == pager.resident()
        assert list(engine.transfers.values()) == pager.transfers()
        assert engine.blocks.used() == pager.blocks()
        for block in engine.blocks.used():
            row = pager.block(block)
            for column in ("size", "place", "copy", "next_use", "last_use", "pins", "name", "tier", "state", "dirty"):
                assert getattr(row, column) == getattr(engine.blocks, column)[block], (block, column)
            assert engine.blocks.class_of(block) == pager.class_of(block)


def make(seed: int) -> Both:
    rng = random.Random(seed)
    capacity = rng.choice([4096, 8192, 12_288, 16_384, 40_960])
    tiers = rng.choice([[1 << 20], [1 << 14, 1 << 20], [1 << 13, 1 << 14], [None, 1 << 20]])
    history = rng.choice([24, 64, 1 << 12, 1 << 18])
    prefetch = rng.random() < 0.85
    engine = Engine(
        capacity,
        [None if size is None else Space(size) for size in tiers],
        CLASSES,
        tape=Tape(history),
        prefetch=prefetch,
    )
    pager = Pager(
        capacity,
        [None if size is None else Space(size) for size in tiers],
        CLASSES,
        alignment=64,
        history=history,
        prefetch=prefetch,
    )
    both = Both(rng, engine, pager)
    both.sources = engine.add_source()
    assert pager.add_source() == both.sources
    return both


def make_storage(both: Both, largest: int) -> None:
    rng = both.rng
    count = rng.choice([1, 1, 1, 1, 2, 3, 5])
    sizes = [64 * rng.randint(1, largest)] * (count - 1) + [rng.randint(1, 64 * largest)]
    both.create(sizes, rng.choice(CLASSES))
    if rng.random() < 0.2:
        first, _ = both.storages[-1]
        for block, size in enumerate(sizes, first):
            both.adopt(block, size)


def runs_of(rng: random.Random, storages: list[tuple[int, int]], table: tuple[int, int] | None) -> list[Run]:
    if table is not None:
        first, count = table
        rows = sorted(rng.sample(range(count), min(count, rng.randint(1, 6))))
        mode = rng.choice([Mode.READ, Mode.READ, Mode.WRITE])
        return [Run(first + row, 1, mode, first) for row in rows]
    runs = []
    for first, count in storages:
        low = rng.randrange(count) if rng.random() < 0.3 else 0
        length = rng.randint(1, count - low) if rng.random() < 0.3 else count - low
        runs.append(Run(first + low, length, rng.choice([Mode.READ] * 5 + [Mode.WRITE, Mode.WRITE, Mode.OVERWRITE])))
    return runs


def run_program(seed: int) -> Both:
    both = make(seed)
    rng = both.rng
    failure_rate = rng.choice([0.0, 0.0, 0.0, 0.02, 0.1])
    wild = rng.choice([0.0, 0.05, 0.3, 1.0])
    threads = rng.choice([1, 1, 1, 2, 4])
    largest = rng.choice([2, 4, 16])
    eagerness = rng.choice([0.3, 0.7, 0.95])
    pauses = rng.choice([(0.0, 1e-6), (1e-5, 1e-4), (1e-6, 1e-3)])
    for _ in range(rng.randint(3, 40)):
        make_storage(both, largest)
    table: tuple[int, int] | None = None
    if rng.random() < 0.3:
        rows = rng.randint(8, 60)
        both.create([128] * rows, "weights")
        table = both.storages.pop()
    loop: list[list[Run]] = []
    step = 0
    for _ in range(rng.choice([120, 250])):
        both.collect()
        chance = rng.random()
        if chance < 0.03 and len(both.storages) < 60:
            make_storage(both, largest)
        elif chance < 0.05 and len(both.storages) > 2:
            both.drop(*rng.choice(both.storages))
            loop = []
        elif chance < 0.06:
            both.resize(rng.choice([4096, 8192, 12_288, 16_384, 40_960, both.pager.capacity]))
        elif chance < 0.07 and both.waiting:
            both.abandon(rng.choice(both.waiting))
        else:
            if not loop:
                length = rng.randint(2, 14)
                loop = []
                for _ in range(length):
                    chosen = rng.sample(both.storages, min(len(both.storages), rng.choice([1, 1, 2, 3])))
                    loop.append(runs_of(rng, chosen, table if rng.random() < 0.2 else None))
                step = 0
            if rng.random() < wild / 10:
                chosen = rng.sample(both.storages, min(len(both.storages), rng.randint(1, 3)))
                runs = runs_of(rng, chosen, table if rng.random() < 0.3 else None)
            else:
                runs = loop[step % len(loop)]
                step += 1
            if runs:
                both.request(runs)
        both.take()
        both.compare()
        both.now += rng.uniform(*pauses)
        while both.waiting and (len(both.waiting) >= threads or rng.random() < 0.5):
            if not both.open and both.granted:
                both.release(rng.choice(both.granted))
            elif both.open:
                both.now += rng.uniform(0, 1e-6)
                both.end_one(failure_rate)
            else:
                break  # only a change of the budget, or giving up, goes on from here
            both.take()
            both.compare()
        if both.waiting and not both.open and not both.granted:
            both.abandon(both.waiting[0])
            both.take()
            both.compare()
        while both.granted and rng.random() < eagerness:
            both.release(rng.choice(both.granted))
            both.take()
            both.compare()
        while both.open and rng.random() < 0.6:
            both.end_one(failure_rate)
            both.take()
            both.compare()
        if rng.random() < 0.1:
            both.compare_whole()
    both.compare_whole()
    return both


def run_loop(seed: int) -> Both:
    """A loop over many small storages, now and then another one: what fetching ahead is for."""
    both = make(seed)
    rng = both.rng
    failure_rate = rng.choice([0.0, 0.0, 0.01])
    wild = rng.choice([0.0, 0.0, 0.02, 0.2])
    transient = rng.choice([0.0, 0.0, 0.3])
    pause = rng.choice([1e-6, 1e-5, 1e-4])
    for _ in range(rng.randint(30, 90)):
        count = rng.choice([1, 1, 1, 3])
        both.create([64 * rng.choice([4, 4, 4, 8])] * count, "weights")
    loops = [[rng.randrange(len(both.storages)) for _ in range(rng.randint(20, 60))] for _ in range(2)]
    if rng.random() < 0.7:
        loops[0] = list(range(len(both.storages)))
    writes = rng.choice([0.0, 0.3])
    born: list[tuple[int, int]] = []
    for turn in range(8):
        for index in loops[turn % 4 == 3]:
            if rng.random() < wild:
                index = rng.randrange(len(both.storages))
            both.collect()
            first, count = both.storages[index]
            runs = [
                Run(first, count, Mode.OVERWRITE if turn == 0 else Mode.WRITE if rng.random() < writes else Mode.READ)
            ]
            if rng.random() < transient and len(born) < 8:
                both.create([256], "gradient")
                born.append(both.storages.pop())
                runs.append(Run(born[-1][0], 1, Mode.OVERWRITE))
            both.request(runs)
            both.take()
            both.compare()
            while both.waiting and both.open:
                both.now += rng.uniform(0, 1e-6)
                both.end_one(failure_rate)
                both.take()
                both.compare()
            while both.open and rng.random() < 0.7:
                both.now += pause * rng.random()
                both.end_one(failure_rate)
                both.take()
                both.compare()
            both.now += pause
            for pair in both.granted[:]:
                both.release(pair)
                both.take()
                both.compare()
        while born:
            both.storages.append(born[-1])
            both.drop(*born.pop())
        if rng.random() < 0.1:
            both.resize(rng.choice([8192, 16_384, both.pager.capacity]))
            both.take()
            both.compare()
        both.compare_whole()
    return both


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(CHUNK, PROGRAMS, CHUNK))]
)
def test_both_give_the_same_commands_in_the_same_order(first: int) -> None:
    moved = prefetched = written = 0
    for seed in range(first, first + CHUNK):
        try:
            both = run_loop(seed) if seed % 3 == 0 else run_program(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error
        moved += sum(isinstance(command, Move) for command in both.log)
        prefetched += both.pager.counters.prefetches
        written += both.pager.counters.write_backs
    assert moved > 100
    assert prefetched > 100
    assert written > 100
