"""Prefetching compared with fetching on demand, also for accesses that cannot be predicted.

Programs of five kinds read blocks from behind a throttled link, with some computing before each access: at random, in
strides, in loops, in loops that branch, and along pointers. Each runs in a pool that fetches ahead and in a
pool that fetches only on demand, pair by pair; every pair is another program. Times are wall-clock times.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count, islice
from typing import Annotated, Any, ClassVar

from farpool_bench import harness
from farpool_bench.harness import Figures, Option, Row
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.render import COLOURS, INK, Grid, new_figure

_ROOM = (0.2, 0.3, 0.5, 0.7)
"""Fractions of the blocks that fit into the fast tier, of which one is chosen at random for each program."""


class Bench(harness.Benchmark):
    """Each kind of program with each amount of computing."""

    name = "prefetch"
    limit = "the same programs with demand fetching"
    rows = "programs"
    pairs: Annotated[int, Option("Programs of each kind", least=1)] = 15
    device: Annotated[str, Option("Where the fast tier is", "cpu|cuda")] = "cpu"
    computes: tuple[float, ...] = (0.1, 1.0)  # computing before each access, over the time of a block on the link
    blocks: int = 64  # of each program
    block_bytes: int = 256 << 10
    accesses: int = 600
    rate: float = 1e9  # bytes per second of the link
    QUICK: ClassVar = {"pairs": 1, "computes": (0.5,), "accesses": 60, "block_bytes": 64 << 10}

    def cases(self) -> Iterable[tuple[str, float]]:
        return [(kind, compute) for kind in KINDS for compute in self.computes]

    def measure(self, case: tuple[str, float]) -> Row:
        kind, compute = case
        works = [partial(self._next, kind, compute, prefetch, count()) for prefetch in (True, False)]
        ahead, on_demand = in_turn(works, self.pairs, f"{kind}, {compute:g}x compute", self.progress)
        ratio = median_ratio(ahead, on_demand)
        return Row(kind=kind, compute=compute, ahead=ahead, on_demand=on_demand, ratio=ratio)

    def facts(self) -> dict[str, Any]:
        return {"device": self.device, "block_bytes": self.block_bytes, "rate": self.rate}

    def _next(self, kind: str, compute: float, prefetch: bool, seeds: count[int]) -> float:
        """Seconds that the next program takes in a new pool, after its blocks have been filled."""
        from farpool import Dram, PoolConfig, Throttled
        from farpool.memory.pager import Mode
        from farpool.memory.pager.use import Use
        from farpool.memory.pool.block_pool import BlockPool

        rng = random.Random(f"{kind} {next(seeds)}")
        room = max(16, int(self.blocks * rng.choice(_ROOM))) * self.block_bytes
        lower = Dram(2 * self.blocks * self.block_bytes)
        link = Throttled(lower, read_bandwidth=self.rate, write_bandwidth=self.rate)
        pause = compute * self.block_bytes / self.rate
        with BlockPool(PoolConfig.make(room, [link], device=self.device, prefetch=prefetch)) as pool:
            storages = [pool.allocate(self.block_bytes) for _ in range(self.blocks)]
            for storage in storages:
                pool.release(pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)], "fill"))
            uses = [[Use(storage, 0, storage.nbytes, Mode.READ)] for storage in storages]
            order = pattern(kind, rng, self.blocks, self.accesses)
            start = time.perf_counter()
            for index in order:
                until = time.perf_counter() + pause
                while time.perf_counter() < until:
                    pass
                pool.release(pool.acquire(uses[index], "read"))
            return time.perf_counter() - start

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "<program {kind}|compute / transfer {compute:g}|on demand {on_demand:ms}|with prefetching {ahead:ms}"
        title = "Time with prefetching over time without: median over the programs"
        yield Grid.of(title, columns + "|ratio {ratio:.3f}", outcome.programs)
        yield f"{outcome.device}, blocks of {outcome.block_bytes >> 10} KiB over {outcome.rate / 1e9:g} GB/s"

    @staticmethod
    def figures(outcome: Any) -> Figures:
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


def pattern(kind: str, rng: random.Random, blocks: int, length: int) -> list[int]:
    """Generate the numbers of the blocks that a program of a kind accesses, in order."""
    return list(islice(KINDS[kind](rng, blocks), length))


def _random(rng: random.Random, blocks: int) -> Iterator[int]:
    while True:
        yield rng.randrange(blocks)


def _strided(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks at a steady step, which starts from a new place now and then."""
    step, at = rng.choice([1, 1, 2, 3, 5, 7]), rng.randrange(blocks)
    while True:
        yield at % blocks
        at = at + step if rng.random() > 0.02 else rng.randrange(blocks)


def _looping(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks in a loop, either round and round, or to and fro like forward and backward passes."""
    order = rng.sample(range(blocks), blocks)
    if rng.random() < 0.5:
        order += order[::-1]
    while True:
        yield from order


def _branching(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks of a common part, followed by one of several branches, chosen at random."""
    common = rng.sample(range(blocks), rng.randint(2, max(3, blocks // 2)))
    branches = [rng.sample(range(blocks), rng.randint(2, max(3, blocks // 3))) for _ in range(rng.randint(3, 6))]
    while True:
        yield from common
        yield from rng.choice(branches)


def _chase(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks along a random permutation, starting again after some hops."""
    following = rng.sample(range(blocks), blocks)
    hops = rng.choice([blocks, 20, 50, 10**9])
    at = rng.randrange(blocks)
    while True:
        for _ in range(hops):
            yield at
            at = following[at]
        at = rng.randrange(blocks)


KINDS = {
    "random": _random,
    "strided": _strided,
    "looping": _looping,
    "branching": _branching,
    "pointer-chasing": _chase,
}
"""Kinds of programs, with generators of their accesses."""
