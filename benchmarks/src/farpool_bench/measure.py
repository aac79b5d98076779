"""Tools for fair comparisons: samples taken in turn, ratios of pairs, warm memory."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence

__all__ = ["in_turn", "mean_seconds", "median_interval", "median_ratio", "resident_bytes", "warm"]

_PAGE = 4096


def median_ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """Median of the ratios of samples taken side by side.

    Raises
    ------
    ValueError
        There are no samples, or not as many of the one as of the other.
    """
    if not ours or len(ours) != len(other):
        raise ValueError(f"expected as many samples of both, at least one; got {len(ours)} and {len(other)}")
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def in_turn(
    works: Sequence[Callable[[], float]], rounds: int, step: str, progress: Callable[[str, int, int], None]
) -> list[tuple[float, ...]]:
    """Take samples of several things in turn; who goes first and who follows whom changes with each round.

    Parameters
    ----------
    works : sequence of callable
        Each runs once and returns a sample.
    rounds : int
        Samples of each.
    step : str
        Name of this for `progress`.
    progress : callable
        Told the step, the number of rounds that are done, and `rounds`.

    Returns
    -------
    list of tuple of float
        The samples of each, round by round.
    """
    progress(step, 0, rounds)
    samples: list[list[float]] = [[] for _ in works]
    orders = _orders(len(works))
    for number in range(rounds):
        for which in orders[number % len(orders)]:
            samples[which].append(works[which]())
        progress(step, number + 1, rounds)
    return [tuple(of_one) for of_one in samples]


def _orders(count: int) -> list[list[int]]:
    """Orders in which each follows each other equally often (Williams, 1949): what one leaves behind burdens all."""
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(count)]
    orders = [[(place + shift) % count for place in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


def mean_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds for one call of `work`, the mean of `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def resident_bytes(pid: int | None = None) -> int:
    """Bytes of a process's resident set, shared memory included; of this process by default."""
    with open(f"/proc/{'self' if pid is None else pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm(memory: memoryview) -> None:
    """Write to each page, so that its first use pays for no page fault; the content is lost."""
    flat = memory.cast("B")
    flat[::_PAGE] = bytes(len(range(0, len(flat), _PAGE)))


def median_interval(samples: Sequence[float]) -> tuple[float, float]:
    """Ends of a 95 % confidence interval of the median, which are two of the samples; needs no distribution.

    With fewer than six samples it is all of their range, which is less than 95 % then.
    """
    ordered = sorted(samples)
    count, outside, cut = len(ordered), 0.0, 0
    while (outside := outside + 2 * math.comb(count, cut) * 0.5**count) <= 0.05:
        cut += 1
    cut = max(0, cut - 1)
    return ordered[cut], ordered[count - 1 - cut]
