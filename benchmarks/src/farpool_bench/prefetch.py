"""Prefetching compared with fetching on demand, also where accesses cannot be predicted.

Programs of five kinds read blocks from behind a throttled link, with some computing before each access: at random, in
strides, in loops, in loops that branch, and along pointers. Each runs in a pool that fetches ahead and in one that only
fetches on demand, pair by pair, every pair another program. Times are wall-clock times.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool.observe.tables import Table
from farpool_bench.benchmark import check_device
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.patterns import KINDS, pattern

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Program", "Settings", "figures", "run", "table"]

_ROOM = (0.2, 0.3, 0.5, 0.7)
"""Fractions of the blocks that fit into the fast tier, of which one is chosen at random for each program."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Device of the fast tier.
    pairs : int
        Programs of each kind.
    computes : tuple of float
        Seconds of computing before each access, over those of a block on the link.
    blocks, block_bytes, accesses : int
        Number of blocks, their size, and the number of accesses of each program.
    rate : float
        Bytes per second of the link.
    """

    device: str = "cpu"
    pairs: int = 15
    computes: tuple[float, ...] = (0.1, 1.0)
    blocks: int = 64
    block_bytes: int = 256 << 10
    accesses: int = 600
    rate: float = 1e9

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(pairs=1, computes=(0.5,), accesses=60, block_bytes=64 << 10)


@dataclass(frozen=True, slots=True)
class Program:
    """Results for programs of one kind with one amount of computing.

    Attributes
    ----------
    compute : float
        Seconds of computing before each access, over those of a block on the link.
    ahead, on_demand : tuple of float
        Seconds of each program with and without prefetching.
    ratio : float
        The former over the latter: median over the pairs.
    """

    kind: str
    compute: float
    ahead: tuple[float, ...]
    on_demand: tuple[float, ...]
    ratio: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run, for each kind of program and amount of computing."""

    device: str
    block_bytes: int
    rate: float
    programs: tuple[Program, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Run the programs with and without prefetching.

    Raises
    ------
    ConfigError
        There is no such device.
    """
    check_device(settings.device)
    programs = []
    for kind in KINDS:
        for compute in settings.computes:
            works = [partial(_next, settings, kind, compute, prefetch, count()) for prefetch in (True, False)]
            ahead, on_demand = in_turn(works, settings.pairs, f"{kind}, {compute:g}x compute", progress)
            programs.append(Program(kind, compute, ahead, on_demand, median_ratio(ahead, on_demand)))
    return Outcome(settings.device, settings.block_bytes, settings.rate, tuple(programs))


def _next(settings: Settings, kind: str, compute: float, prefetch: bool, seeds: Iterator[int]) -> float:
    return _seconds(settings, kind, compute, prefetch, next(seeds))


def _seconds(settings: Settings, kind: str, compute: float, prefetch: bool, seed: int) -> float:
    """Seconds that a program takes in a new pool, after its blocks have been filled."""
    from farpool import Dram, PoolConfig, Throttled
    from farpool.memory.pager import Mode
    from farpool.memory.pager.use import Use
    from farpool.memory.pool.block_pool import BlockPool

    rng = random.Random(f"{kind} {seed}")
    room = max(16, int(settings.blocks * rng.choice(_ROOM))) * settings.block_bytes
    lower = Dram(2 * settings.blocks * settings.block_bytes)
    link = Throttled(lower, read_bandwidth=settings.rate, write_bandwidth=settings.rate)
    pause = compute * settings.block_bytes / settings.rate
    with BlockPool(PoolConfig.make(room, [link], device=settings.device, prefetch=prefetch)) as pool:
        storages = [pool.allocate(settings.block_bytes) for _ in range(settings.blocks)]
        for storage in storages:
            pool.release(pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)], "fill"))
        uses = [[Use(storage, 0, storage.nbytes, Mode.READ)] for storage in storages]
        order = pattern(kind, rng, settings.blocks, settings.accesses)
        start = time.perf_counter()
        for index in order:
            until = time.perf_counter() + pause
            while time.perf_counter() < until:
                pass
            pool.release(pool.acquire(uses[index], "read"))
        return time.perf_counter() - start


def table(outcome: Outcome) -> Group:
    """Table with one row for each kind of program and amount of computing."""
    rows = Table("Time with prefetching over time without: median over the programs")
    rows.add_texts("program")
    rows.add_figures("compute / transfer", "on demand", "with prefetching", "ratio")
    for program in outcome.programs:
        rows.add_row(
            program.kind,
            f"{program.compute:g}",
            f"{statistics.median(program.on_demand) * 1e3:.0f} ms",
            f"{statistics.median(program.ahead) * 1e3:.0f} ms",
            f"{program.ratio:.3f}",
        )
    link = f"blocks of {outcome.block_bytes >> 10} KiB over {outcome.rate / 1e9:g} GB/s"
    return Group(rows, Text(f"{outcome.device}, {link}"))


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Figure of the ratio of each pair of programs."""
    from farpool_bench.figures import COLOURS, INK, new_figure

    figure, axes = new_figure("time with prefetching over time without", "")
    names = [f"{program.kind}, {program.compute:g}x" for program in outcome.programs]
    for row, program in enumerate(outcome.programs):
        ratios = [ahead / demand for ahead, demand in zip(program.ahead, program.on_demand, strict=True)]
        axes.plot(ratios, [row] * len(ratios), ".", color=INK, alpha=0.4, markersize=4)
        axes.plot([program.ratio], [row], "o", color=COLOURS[0])
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(1.0, color=INK, linewidth=1)
    return {"Programs in pairs: median (large) and each pair (small); left of 1 prefetching is faster.": figure}
