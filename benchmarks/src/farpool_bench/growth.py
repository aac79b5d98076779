"""Time of the pager per access and memory per block, from few blocks to a million.

Each size runs in a fresh process, on simulated tiers: the blocks are in the lower one, a quarter of them fits into the
arena, and a program reads them one by one, in a loop and then at random. Time is processor time of the pager and of the
simulation round it. Memory is the growth of the process's resident set by the pager with all its tables and by the
bookkeeping of the tier; it is measured with a short history, since the history that the pager remembers (the tape) has
a fixed length and is one constant amount.

Resizing: a pool gives half its budget back while a program goes over twice as many bytes; the process's resident set
after each step shows whether the operating system has got them.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from farpool._native import SimulatedProgram
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Nvme
from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row, told
from farpool_bench.measure import resident_bytes
from farpool_bench.render import COLOURS, INK, Grid, new_figure
from farpool_bench.worker import run_child

if TYPE_CHECKING:
    from farpool.memory.pager.storage import Storage

_SHORT_ACCESSES = 1024
"""Length of the history while memory is measured."""
_CHUNK = 1000
"""Number of accesses in one sample."""
_STEPS = 4
"""Number of steps before the change of the budget, and after it."""
_STORAGES = 64
"""Number of storages over which twice the budget is spread."""


class Bench(harness.Benchmark):
    """Each number of blocks, and a pool that is resized."""

    name = "growth"
    limit = "itself with fewer blocks, and the operating system's account"
    parts = ("resize", "memory", "time")
    most: Annotated[int, Option("Blocks of the largest pool", least=1000)] = 1_000_000
    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    least: int = 1_000  # blocks of the smallest run; between it and the largest, powers of ten
    history: int = 1 << 18  # accesses that the pager remembers while time is measured; a pool's own number
    accesses: int = 20_000  # measured, of each pattern
    fast: int = 256 << 20  # bytes of the pool that is resized
    QUICK: ClassVar = {"most": 4_000, "history": 2048, "accesses": 1000, "fast": 8 << 20}

    def measure(self, case: str) -> Any:
        if case == "resize":
            (resized,) = (run_child("growth", one) for one in told(self.progress, "Resizing", [self.fast]))
            return resized
        powers = range(math.ceil(math.log10(self.least)), math.ceil(math.log10(self.most)))
        sizes = sorted({self.least, self.most, *(10**power for power in powers)})
        history = _SHORT_ACCESSES if case == "memory" else self.history
        return [
            run_child("growth", blocks, history, self.accesses)
            for blocks in told(self.progress, case.capitalize(), sizes)
        ]

    def outcome(self, found: list[Any]) -> Row:
        resize, slim, timed = found
        further = [None, *((b.nbytes - a.nbytes) / (b.blocks - a.blocks) for a, b in pairwise(slim))]
        points = (
            Row(
                blocks=memory.blocks,
                nbytes=memory.nbytes,  # of pager and blocks, without the history
                further=more,  # bytes of each block more than in the point before
                loop=fast.loop,  # processor seconds of an access, one sample for each thousand
                shuffled=fast.shuffled,
            )
            for memory, more, fast in zip(slim, further, timed, strict=True)
        )
        history = {"history": self.history, "history_bytes": timed[0].history_bytes}
        return Row(**history, points=tuple(points), resize=resize)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        history, resize = outcome.history_bytes, outcome.resize
        columns = "blocks {blocks:,}|loop, us {loop:1e6*.1f}|random, us {shuffled:1e6*.1f}|bytes a block {each:,.0f}"
        columns += "|each further {further:,.0f}|with history {whole:,.0f}"
        rows = [
            Row(point, each=point.nbytes / point.blocks, whole=(point.nbytes + history) / point.blocks)
            for point in outcome.points
        ]
        yield Grid.of("By number of blocks", columns, rows)
        yield f"history of {outcome.history:,} accesses: {format_size(history)}, whatever the number of blocks"
        half = len(resize.resident) // 2
        steps = [
            [f"{step + 1}" + (", the first after the change" if step == half else ""), format_size(nbytes)]
            for step, nbytes in enumerate(resize.resident)
        ]
        title = f"Budget from {format_size(resize.fast)} to {format_size(resize.smaller)} while a program runs"
        yield Grid(title, "<step|resident set", steps)
        yield f"given back after one step: {resize.given_back:.0%} of the difference"

    @staticmethod
    def figures(outcome: Any) -> Figures:
        blocks = [point.blocks for point in outcome.points]
        taken, axes = new_figure("blocks", "microseconds of an access")
        for label, field, colour in (("loop", "loop", COLOURS[0]), ("random", "shuffled", COLOURS[1])):
            medians = [statistics.median(point[field]) * 1e6 for point in outcome.points]
            axes.loglog(blocks, medians, "o-", color=colour, label=label)
        axes.set_ylim(1, 1000)
        axes.legend()
        memory, axes = new_figure("blocks", "bytes a block")
        each = [point.nbytes / point.blocks for point in outcome.points]
        axes.loglog(blocks, each, "o-", color=COLOURS[0], label="all blocks")
        more = [max(point.further or 0.0, 1.0) for point in outcome.points[1:]]
        axes.loglog(blocks[1:], more, "s--", color=COLOURS[2], label="each further block")
        axes.axhline(200, color=INK, linewidth=1, linestyle=":")
        axes.legend()
        return {
            "Processor time of the pager for one access: median.": taken,
            "Memory of the pager over the number of blocks, without the history; dotted: 200 bytes.": memory,
        }


def _samples(run: Callable[[int], None], accesses: int) -> tuple[float, ...]:
    samples = []
    for done in range(0, accesses, _CHUNK):
        count = min(_CHUNK, accesses - done)
        start = time.thread_time()
        run(count)
        samples.append((time.thread_time() - start) / count)
    return tuple(samples)


def _grow(blocks: int, history: int, accesses: int) -> Row:
    """Measure the pager once, in a child process: the blocks are in a lower tier behind a simulated link.

    A quarter of them fit into the arena, and transfers take virtual time. No bytes are moved: the pager is measured,
    and this simulation round it.
    """
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
    nbytes = resident_bytes() - before
    return Row(blocks=blocks, nbytes=nbytes, history_bytes=history_bytes, loop=loop, shuffled=shuffled)


def _resize(fast: int) -> Row:
    """Go over storages of twice the budget `fast`, block by block, in a child process that halves its budget.

    Bytes that do not fit are in a file, which is no memory.
    """
    smaller = fast // 2
    with (
        tempfile.TemporaryDirectory(prefix="farpool-", dir="/var/tmp") as folder,
        BlockPool(PoolConfig.make(fast, [Nvme(Path(folder, "pool"), 3 * fast)])) as pool,
    ):
        storages = [pool.allocate(2 * fast // _STORAGES) for _ in range(_STORAGES)]
        _step(pool, storages, Mode.OVERWRITE)
        resident = []
        for step in range(2 * _STEPS):
            if step == _STEPS:
                pool.resize(smaller)
            _step(pool, storages, Mode.READ)
            resident.append(resident_bytes())
        del storages
    # How much smaller the resident set is after the first step with the smaller budget, over how much smaller that is.
    given_back = (resident[_STEPS - 1] - resident[_STEPS]) / (fast - smaller)
    return Row(fast=fast, smaller=smaller, resident=resident, given_back=given_back)


def _step(pool: BlockPool, storages: list[Storage], mode: Mode) -> None:
    for storage in storages:
        for start, stop in storage.pieces():
            pool.release(pool.acquire([Use(storage, start, stop, mode)]))


def main(*numbers: str) -> None:
    """Measure in a child process, and print the row as JSON."""
    measure = _grow if len(numbers) == 3 else _resize
    print(msgspec.json.encode(measure(*map(int, numbers))).decode())
