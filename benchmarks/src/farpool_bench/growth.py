"""Time of the pager per access and memory per block, from few blocks to a million.

Each size runs in a fresh process, on simulated tiers: the blocks lie below, a quarter of them fits into the arena, and
a program reads them one by one, in a loop and then at random. Time is processor time of the pager and of the
simulation round it. Memory is the growth of the process's resident set by the pager with all its tables and by the
bookkeeping of the tier; it is measured with a short history, since the history that the pager remembers (the tape) has
a fixed length and is one constant amount.

Resizing: a pool gives half its budget back while a program goes over twice as many bytes; the process's resident set
after each step shows whether the operating system has got them.
"""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

import msgspec
from rich.console import Group
from rich.text import Text

from farpool.errors import FarpoolError
from farpool.observe.tables import Table
from farpool.sizes import format_size
from farpool_bench.pager_run import PagerRun
from farpool_bench.resize_run import ResizeRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Point", "Settings", "figures", "run", "table"]

_SHORT = 1024
"""Length in accesses of the history while memory is measured."""
_TIMEOUT = 1800.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        ``cpu``: the pager computes nothing on a device.
    least, most : int
        Blocks of the smallest and of the largest run; between them, powers of ten.
    history : int
        Accesses that the pager remembers while time is measured; a pool's own number by default.
    accesses : int
        Measured accesses of each pattern.
    fast : int
        Bytes of the pool that is resized.
    """

    device: str = "cpu"
    least: int = 1_000
    most: int = 1_000_000
    history: int = 1 << 18
    accesses: int = 20_000
    fast: int = 256 << 20

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(most=4_000, history=2048, accesses=1000, fast=8 << 20)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of blocks, ascending."""
        powers = range(math.ceil(math.log10(self.least)), math.ceil(math.log10(self.most)))
        return tuple(sorted({self.least, self.most, *(10**power for power in powers)}))


@dataclass(frozen=True, slots=True)
class Point:
    """Results for one number of blocks.

    Attributes
    ----------
    nbytes : int
        Memory of pager and blocks, without the history.
    further : float or None
        Bytes of each block more than in the point before; None in the first one.
    loop, shuffled : tuple of float
        Processor seconds of an access, one sample for each thousand.
    """

    blocks: int
    nbytes: int
    further: float | None
    loop: tuple[float, ...]
    shuffled: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    history, history_bytes : int
        Accesses that the pager remembers, and the memory that they take.
    """

    history: int
    history_bytes: int
    points: tuple[Point, ...]
    resize: ResizeRun


def run(settings: Settings, progress: Progress) -> Outcome:
    """Run the benchmark in child processes.

    Raises
    ------
    FarpoolError
        One of the processes failed; the message holds what it said.
    """
    sizes = settings.sizes
    progress("Resizing", 0, 1)
    resize = _child("farpool_bench.resize_run", ResizeRun, settings.fast)
    progress("Resizing", 1, 1)
    slim: list[PagerRun] = []
    timed: list[PagerRun] = []
    for step, runs, history in (("Memory", slim, _SHORT), ("Time", timed, settings.history)):
        for number, blocks in enumerate(sizes):
            progress(step, number, len(sizes))
            runs.append(_child("farpool_bench.pager_run", PagerRun, blocks, history, settings.accesses))
        progress(step, len(sizes), len(sizes))
    further = [None, *((b.nbytes - a.nbytes) / (b.blocks - a.blocks) for a, b in pairwise(slim))]
    points = (
        Point(memory.blocks, memory.nbytes, more, time.loop, time.shuffled)
        for memory, more, time in zip(slim, further, timed, strict=True)
    )
    return Outcome(settings.history, timed[0].history_bytes, tuple(points), resize)


def _child(module: str, result: type[_T], *arguments: int) -> _T:
    program = [sys.executable, "-m", module, *map(str, arguments)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise FarpoolError(f"{module} failed (exit code {done.returncode}): {said[-1] if said else 'it said nothing'}")
    return msgspec.json.decode(done.stdout, type=result)


def table(outcome: Outcome) -> Group:
    """Time and memory by number of blocks, then the resident set round the resize."""
    growth = Table("By number of blocks")
    growth.add_figures("blocks", "loop, us", "random, us", "bytes a block", "each further", "with history")
    for point in outcome.points:
        growth.add_row(
            f"{point.blocks:,}",
            f"{statistics.median(point.loop) * 1e6:.1f}",
            f"{statistics.median(point.shuffled) * 1e6:.1f}",
            f"{point.nbytes / point.blocks:,.0f}",
            "" if point.further is None else f"{point.further:,.0f}",
            f"{(point.nbytes + outcome.history_bytes) / point.blocks:,.0f}",
        )
    history = (
        f"history of {outcome.history:,} accesses: {format_size(outcome.history_bytes)}, whatever the number of blocks"
    )
    resize = outcome.resize
    sizes = Table(f"Budget from {format_size(resize.fast)} to {format_size(resize.smaller)} while a program runs")
    sizes.add_texts("step")
    sizes.add_figures("resident set")
    half = len(resize.resident) // 2
    for step, nbytes in enumerate(resize.resident):
        sizes.add_row(f"{step + 1}" + (", the first after the change" if step == half else ""), format_size(nbytes))
    given = f"given back after one step: {resize.given_back:.0%} of the difference"
    return Group(growth, Text(history), sizes, Text(given))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Time and memory against the number of blocks, both axes logarithmic."""
    from farpool_bench.figures import COLOURS, INK, new_figure

    blocks = [point.blocks for point in outcome.points]
    time, axes = new_figure("blocks", "microseconds of an access")
    for label, colour, runs in (
        ("loop", COLOURS[0], [point.loop for point in outcome.points]),
        ("random", COLOURS[1], [point.shuffled for point in outcome.points]),
    ):
        axes.loglog(blocks, [statistics.median(samples) * 1e6 for samples in runs], "o-", color=colour, label=label)
    axes.set_ylim(1, 1000)
    axes.legend()
    memory, axes = new_figure("blocks", "bytes a block")
    axes.loglog(
        blocks, [point.nbytes / point.blocks for point in outcome.points], "o-", color=COLOURS[0], label="all blocks"
    )
    later = [point for point in outcome.points if point.further is not None]
    axes.loglog(
        [point.blocks for point in later],
        [max(point.further or 0.0, 1.0) for point in later],
        "s--",
        color=COLOURS[2],
        label="each further block",
    )
    axes.axhline(200, color=INK, linewidth=1, linestyle=":")
    axes.legend()
    return {
        "Processor time of the pager for one access: median.": time,
        "Memory of the pager over the number of blocks, without the history; dotted: 200 bytes.": memory,
    }
