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
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Any, ClassVar

from farpool.sizes import format_size
from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row, told
from farpool_bench.render import COLOURS, INK, Grid, new_figure
from farpool_bench.worker import run_child

_SHORT_ACCESSES = 1024
"""Length of the history while memory is measured."""


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
            (resized,) = (run_child("growth_child", one) for one in told(self.progress, "Resizing", [self.fast]))
            return resized
        powers = range(math.ceil(math.log10(self.least)), math.ceil(math.log10(self.most)))
        sizes = sorted({self.least, self.most, *(10**power for power in powers)})
        history = _SHORT_ACCESSES if case == "memory" else self.history
        return [
            run_child("growth_child", blocks, history, self.accesses)
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
                loop=time.loop,  # processor seconds of an access, one sample for each thousand
                shuffled=time.shuffled,
            )
            for memory, more, time in zip(slim, further, timed, strict=True)
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
        time, axes = new_figure("blocks", "microseconds of an access")
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
            "Processor time of the pager for one access: median.": time,
            "Memory of the pager over the number of blocks, without the history; dotted: 200 bytes.": memory,
        }
