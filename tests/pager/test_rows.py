"""Rows of tables picked by data: what stays is measured, by recency or by frequency."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from farpool._native import CacheSimulation, RequestTrace
from farpool.memory.pager import Mode
from tests.pager.harness import World

ROWS, ROOM, BATCH, BATCHES = 4000, 400, 8, 3000
UNIT = 64


def popular(dice: random.Random, exponent: float = 0.9) -> Iterator[int]:
    """Rows whose popularity falls with a power of their rank; the ranks are shuffled."""
    ranked = list(range(ROWS))
    dice.shuffle(ranked)
    weights = list(itertools.accumulate((rank + 1) ** -exponent for rank in range(ROWS)))
    while True:
        yield ranked[bisect.bisect_left(weights, dice.random() * weights[-1])]


def shifting(dice: random.Random) -> Iterator[int]:
    """What is popular changes a few times."""
    while True:
        yield from itertools.islice(popular(dice), BATCH * BATCHES // 4)


def recent(dice: random.Random) -> Iterator[int]:
    """A window that moves on: what was used lately is used again, and nothing else."""
    for number in itertools.count():
        yield (number // (4 * BATCH) + int(dice.expovariate(1 / 250))) % ROWS


def batches(rows: Iterator[int]) -> list[list[int]]:
    return [sorted(set(itertools.islice(rows, BATCH))) for _ in range(BATCHES)]


def missed_by_pool(lookups: list[list[int]]) -> int:
    world = World(ROOM * UNIT, [4 * ROWS * UNIT])
    table = world.create([UNIT] * ROWS)
    for row in range(ROWS):
        world.access([(table + row, 1, Mode.OVERWRITE)])
    counters = world.pager.counters
    before = counters.accesses - counters.hits
    for rows in lookups:
        world.access([(table + row, 1, Mode.READ) for row in rows], table=table)
    counters = world.pager.counters
    return counters.accesses - counters.hits - before


def missed_by(policy: str, lookups: list[list[int]]) -> int:
    requests = [row for rows in lookups for row in rows]
    simulation = CacheSimulation(policy, ROOM * UNIT)
    simulation.run(RequestTrace(requests, [UNIT] * len(requests)), 0, len(requests))
    return simulation.misses


@pytest.mark.parametrize("rows", [popular, pytest.param(shifting, marks=pytest.mark.slow), recent])
def test_rows_miss_about_as_rarely_as_under_the_better_policy(
    rows: Callable[[random.Random], Iterator[int]],
) -> None:
    lookups = batches(rows(random.Random(5)))
    pool = missed_by_pool(lookups)
    by_recency, by_frequency = missed_by("lru", lookups), missed_by("gdsf", lookups)
    assert pool <= 1.03 * min(by_recency, by_frequency)
