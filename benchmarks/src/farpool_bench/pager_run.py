"""Child process that measures one run of the pager: time per access, and memory per block.

Run as ``python -m farpool_bench.pager_run blocks history accesses``; prints a `PagerRun` as JSON. The blocks lie in
one lower tier behind a simulated link, a quarter of them fit into the arena, and transfers take virtual time. No bytes
are moved: what is measured is the pager, and this simulation round it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from farpool._native import SimulatedProgram
from farpool_bench.measure import resident_bytes

__all__ = ["PagerRun"]

_CHUNK = 1000
"""Number of accesses in one sample."""


@dataclass(frozen=True, slots=True)
class PagerRun:
    """Results of one run of the pager.

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


def _samples(run: Callable[[int], None], accesses: int) -> tuple[float, ...]:
    samples = []
    for done in range(0, accesses, _CHUNK):
        count = min(_CHUNK, accesses - done)
        start = time.thread_time()
        run(count)
        samples.append((time.thread_time() - start) / count)
    return tuple(samples)


def _measure(blocks: int, history: int, accesses: int) -> PagerRun:
    # Memory that a first run of the code takes (the allocator's first pages) must not count as the blocks'.
    small = SimulatedProgram(_CHUNK, history)
    small.fill()
    before = resident_bytes()
    small.loop(2 * history)
    history_bytes = resident_bytes() - before
    del small

    before = resident_bytes()
    program = SimulatedProgram(blocks, history)
    program.fill()
    if blocks <= history:  # else the loop is longer than the tape, which then foretells nothing
        program.loop(2 * blocks)
    loop = _samples(program.loop, accesses)
    shuffled = _samples(program.shuffled, accesses)
    return PagerRun(blocks, history, resident_bytes() - before, history_bytes, loop, shuffled)


if __name__ == "__main__":
    _blocks, _history, _accesses = (int(argument) for argument in sys.argv[1:])
    sys.stdout.write(msgspec.json.encode(_measure(_blocks, _history, _accesses)).decode() + "\n")
