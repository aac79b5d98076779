"""Under the virtual clock, a program with prefetching is never slower than without by more than two percent."""

from __future__ import annotations

import random
from collections import deque

import pytest

from farpool.memory.pager import Mode, Pager, Run
from farpool_bench.prefetch import KINDS, pattern
from tests.pager.harness import SimulatedSpace
from tests.pager.virtual_executor import Link, VirtualExecutor

CHUNK = 20
SEEDS = [range(4), *(pytest.param(range(n, n + CHUNK), marks=pytest.mark.slow) for n in range(0, 200, CHUNK))]
"""Of each kind: a thousand programs in all."""
ACCESSES = 800
BLOCK = 256
BANDWIDTH = 256e6
"""A block takes a microsecond."""


def seconds(kind: str, seed: int, *, prefetch: bool, late: int | None = None) -> float:
    """Virtual seconds that a program takes after its blocks have been filled.

    `late`: after how many accesses the pager is told when the program computed; None: at once, by the clock.
    """
    rng = random.Random(f"{kind} {seed}")
    count = rng.randint(17, 80)
    sizes = [BLOCK] * count if rng.random() < 0.5 else [64 * rng.randint(1, 8) for _ in range(count)]
    capacity = max(int(sum(sizes) * rng.choice([0.2, 0.3, 0.5, 0.7, 0.9])), 16 * max(sizes)) // 64 * 64
    link = Link(rng.choice([0.0, 1e-7]), BANDWIDTH)
    executor = VirtualExecutor(bytearray(capacity), [bytearray(1 << 17)], [(link, link)])
    pager = Pager(capacity, [SimulatedSpace(1 << 17)], prefetch=prefetch, late=late is not None)
    untold: deque[tuple[int, float, float]] = deque()
    compute = rng.choice([0.0, 0.02, 0.1, 0.3, 1.0, 3.0]) * 1e-6
    spread = rng.choice([0.0, 1.0])
    writes = rng.choice([0.0, 0.0, 0.3])
    blocks = [pager.create([size]) for size in sizes]
    for block in blocks:
        access(pager, executor, Run(block, 1, Mode.OVERWRITE), 0.0)
    start = executor.now
    for index in pattern(kind, rng, count, ACCESSES):
        mode = Mode.WRITE if rng.random() < writes else Mode.READ
        pause = compute * (1 + spread * (rng.random() - 0.5))
        untold.append(access(pager, executor, Run(blocks[index], 1, mode), pause))
        while late is not None and len(untold) > late:
            pager.ran(*untold.popleft())
    return executor.now - start


def access(pager: Pager, executor: VirtualExecutor, run: Run, compute: float) -> tuple[int, float, float]:
    """Returns its ordinal, and when the program computed."""
    grant = pager.request([run], executor.now)
    pump(pager, executor)
    while not grant.granted:
        assert executor.wait(1.0), "nothing is under way and the access is not granted"
        pump(pager, executor)
    start = executor.now
    executor.sleep(compute)
    ran = grant.ordinal, start, executor.now
    pager.release(grant)
    pump(pager, executor)
    return ran


def pump(pager: Pager, executor: VirtualExecutor) -> None:
    while True:
        commands = pager.take_commands()
        executor.start(commands)
        finished = executor.poll()
        for done in finished:
            pager.completed(done.id, done.start, done.end)
        if finished:
            pager.proceed(executor.now)
        executor.expedite(pager.take_raised())
        if not finished and not commands:
            return


@pytest.mark.parametrize("late", [None, pytest.param(20, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seeds", SEEDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_prefetching_costs_at_most_two_percent(kind: str, seeds: range, late: int | None) -> None:
    slower = {}
    for seed in seeds:
        demand = seconds(kind, seed, prefetch=False)
        ratio = seconds(kind, seed, prefetch=True, late=late) / demand if demand else 1.0
        if ratio > (1.02 if late is None else 1.05):  # what is learned late is unlearned late
            slower[seed] = round(ratio, 4)
    assert not slower, f"{kind}: seed -> time with prefetching over time without"


def test_prefetching_pays_where_the_program_computes() -> None:
    """So that the test above cannot be passed by doing nothing."""
    times = {}
    for prefetch in (False, True):
        link = Link(0.0, BANDWIDTH)
        executor = VirtualExecutor(bytearray(16 * BLOCK), [bytearray(1 << 17)], [(link, link)])
        pager = Pager(16 * BLOCK, [SimulatedSpace(1 << 17)], prefetch=prefetch)
        blocks = [pager.create([BLOCK]) for _ in range(64)]
        for block in blocks:
            access(pager, executor, Run(block, 1, Mode.OVERWRITE), 0.0)
        for _ in range(12):
            start = executor.now
            for block in blocks:
                access(pager, executor, Run(block, 1, Mode.READ), 1e-6)
        times[prefetch] = executor.now - start
    assert times[True] < 0.65 * times[False]
