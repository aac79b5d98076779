"""One pager run in a process of its own: time per access, and memory per block.

Run as ``python -m farpool.bench.pager_run blocks history accesses``; prints a `PagerRun` as JSON. The blocks lie in
one lower tier behind a simulated link, a quarter of them fit into the arena, and transfers take virtual time. No bytes
are moved: what is measured is the pager, and this simulation round it.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat

import msgspec

from farpool.bench.resize_run import resident_bytes
from farpool.pager import Kind, Mode, Pager, Run, Transfer
from farpool.tiers import Extent
from farpool.tiers.space import ExtentSpace

__all__ = ["PagerRun"]

_BLOCK = 4096
_SHARE = 4
"""The arena holds this part of the blocks."""
_CHUNK = 1000
"""Blocks of one storage; accesses of one sample."""
_LINK = 1e-6
"""Virtual seconds that a block takes on the link, and that the program computes between two accesses."""


@dataclass(frozen=True, slots=True)
class PagerRun:
    """What one run measured.

    Attributes
    ----------
    blocks : int
    history : int
        Accesses that the tape remembers.
    nbytes : int
        Growth of the process's resident set by pager and blocks.
    history_bytes : int
        Growth while a tape is filled by accesses to a thousand blocks.
    loop, shuffled : tuple of float
        Processor seconds of an access, one sample for each thousand: block after block over and over; picked at random.
    """

    blocks: int
    history: int
    nbytes: int
    history_bytes: int
    loop: tuple[float, ...]
    shuffled: tuple[float, ...]


class _Space:
    """The bookkeeping of a tier, without one."""

    def __init__(self, capacity: int) -> None:
        self._extents = ExtentSpace("simulated", capacity, _BLOCK)

    def reserve(self, nbytes: int, cls: str) -> int | None:
        return self._extents.reserve(nbytes).offset

    def free(self, offset: int, nbytes: int, cls: str) -> None:
        self._extents.free(Extent(offset, nbytes))


class _Program:
    """A pager, a program that accesses one block at a time, and a link in virtual time."""

    def __init__(self, blocks: int, history: int) -> None:
        self.pager = Pager(blocks * _BLOCK // _SHARE, [_Space(blocks * _BLOCK)], ("bytes",), history=history)
        self.now = 0.0
        self._free = {Kind.FETCH: 0.0, Kind.WRITE_BACK: 0.0}
        self._ends: dict[int, float] = {}
        self._under_way = {
            Kind.FETCH: deque[tuple[float, float, int]](),
            Kind.WRITE_BACK: deque[tuple[float, float, int]](),
        }
        """By direction, in order: end, beginning and number of each transfer."""
        for start in range(0, blocks, _CHUNK):
            self.pager.create([_BLOCK] * min(_CHUNK, blocks - start), "bytes")

    def access(self, block: int, mode: Mode) -> None:
        """One access, waited for."""
        self.now += _LINK
        self._complete()
        access = self.pager.request([Run(block, 1, mode)], self.now)
        self._start()
        while not access.granted:
            if access.error is not None:
                raise access.error
            self.now = min(transfers[0][0] for transfers in self._under_way.values() if transfers)
            self._complete()
            self.pager.proceed(self.now)
            self._start()
        self.pager.release(access)
        self._start()

    def _start(self) -> None:
        for command in self.pager.take_commands():
            if not isinstance(command, Transfer):
                continue
            begin = max([self.now, self._free[command.kind], *(self._ends.get(n, 0.0) for n in command.after)])
            end = begin + (_LINK if command.pieces else 0.0)
            self._free[command.kind] = self._ends[command.id] = end
            self._under_way[command.kind].append((end, begin, command.id))
        self.pager.take_raised()

    def _complete(self) -> None:
        ended = []
        for transfers in self._under_way.values():
            while transfers and transfers[0][0] <= self.now:
                ended.append(transfers.popleft())
        for end, begin, number in sorted(ended):
            del self._ends[number]
            self.pager.completed(number, begin, end)


def _samples(program: _Program, blocks: Iterator[int], accesses: int) -> tuple[float, ...]:
    samples = []
    for _ in range(0, accesses, _CHUNK):
        chosen = list(islice(blocks, min(_CHUNK, accesses)))
        start = time.thread_time()
        for block in chosen:
            program.access(block, Mode.READ)
        samples.append((time.thread_time() - start) / len(chosen))
    return tuple(samples)


def _measure(blocks: int, history: int, accesses: int) -> PagerRun:
    # What a first run of the code takes (caches of the interpreter, the allocator's first pages) is not the blocks'.
    small = _Program(_CHUNK, history)
    for block in range(_CHUNK):
        small.access(block, Mode.OVERWRITE)
    before = resident_bytes()
    for block in islice(chain.from_iterable(repeat(range(_CHUNK))), 2 * history):
        small.access(block, Mode.READ)
    history_bytes = resident_bytes() - before
    del small

    before = resident_bytes()
    program = _Program(blocks, history)
    for block in range(blocks):
        program.access(block, Mode.OVERWRITE)
    turns = chain.from_iterable(repeat(range(blocks)))
    if blocks <= history:  # else the loop is longer than the tape, which then foretells nothing
        for block in islice(turns, 2 * blocks):
            program.access(block, Mode.READ)
    loop = _samples(program, turns, accesses)
    generator = random.Random(0)
    picked = (generator.randrange(blocks) for _ in repeat(None))
    shuffled = _samples(program, picked, accesses)
    return PagerRun(blocks, history, resident_bytes() - before, history_bytes, loop, shuffled)


if __name__ == "__main__":
    _blocks, _history, _accesses = (int(argument) for argument in sys.argv[1:])
    sys.stdout.write(msgspec.json.encode(_measure(_blocks, _history, _accesses)).decode() + "\n")
