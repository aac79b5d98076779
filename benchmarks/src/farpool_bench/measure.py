"""Tools for fair comparisons: samples taken in turn, ratios of pairs, rivals that may be missing, warm memory."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

from farpool.errors import FarpoolError
from farpool.sizes import format_size
from farpool_bench.harness import Progress, Row

_PAGE = 4096
_PeerT = TypeVar("_PeerT")


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


def median_difference(ours: Sequence[float], other: Sequence[float]) -> float:
    """Median of the differences of samples taken side by side."""
    return statistics.median(a - b for a, b in zip(ours, other, strict=True))


def quantile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that is at least as large as a share of all samples, such as 0.99 of them.

    Raises
    ------
    ValueError
        There are no samples.
    """
    if not samples:
        raise ValueError("expected at least one sample")
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


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


def in_turn(
    works: Sequence[Callable[[], float]], rounds: int, step: str, progress: Progress
) -> list[tuple[float, ...]]:
    """Take samples of several works in turn, and return the samples of each work, round by round.

    The order of the works changes with each round.
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
    """Orders in which each follows each other equally often (Williams, 1949): each burdens all others alike."""
    zigzag = [(step + 1) // 2 if step % 2 else -(step // 2) for step in range(count)]
    orders = [[(place + shift) % count for place in zigzag] for shift in range(count)]
    return orders if count % 2 == 0 else [*orders, *(order[::-1] for order in orders)]


def mean_seconds(work: Callable[[], object], repeats: int = 1) -> float:
    """Seconds for one call of `work`, the mean of `repeats` in a row."""
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - start) / repeats


def median_call(work: Callable[[], object], seconds: float) -> float:
    """Seconds of a call of `work`, the median of as many as there are in `seconds`, after one that is not counted."""
    work()
    taken: list[float] = []
    start = before = time.perf_counter()
    while before - start < seconds or not taken:
        work()
        now = time.perf_counter()
        taken.append(now - before)
        before = now
    return statistics.median(taken)


def processor_seconds(pid: int) -> float:
    """Processor time in seconds that another process has used, all of its threads together."""
    return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid makes it


def resident_bytes(pid: int | None = None) -> int:
    """Bytes of a process's resident set, shared memory included; of this process by default."""
    with open(f"/proc/{'self' if pid is None else pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm(memory: memoryview) -> None:
    """Write to each page, so that its first use pays for no page fault; the content is lost."""
    flat = memory.cast("B")
    flat[::_PAGE] = bytes(len(range(0, len(flat), _PAGE)))


@dataclass(slots=True)
class Rival:
    """A rival that is timed in turn with farpool; without `work` it cannot run, and `remark` is the reason."""

    name: str
    work: Callable[[], float] | None
    remark: str = ""
    comparable: bool = True  # it does the same work over the same link
    samples: list[float] = field(default_factory=list)

    def sample(self) -> float:
        """Take a sample: its seconds, or NaN if it cannot run or has failed."""
        taken = math.nan
        if self.work is not None:
            try:
                taken = self.work()
            except (FarpoolError, OSError) as error:
                self.work, self.remark = None, str(error)
        self.samples.append(taken)
        return taken

    def row(self, ours: Sequence[float], limits: Sequence[float] | None = None) -> Row:
        """Make its row: the median of its times over farpool's, so above 1 farpool is faster.

        With `limits` of each round the row also has the median of the limit over its time.
        """
        seconds = tuple(self.samples) if self.work else None
        ratio = median_ratio(seconds, ours) if seconds and self.comparable else None
        remark = self.remark or None
        if limits is None:
            return Row(name=self.name, seconds=seconds, ratio=ratio, remark=remark)
        efficiency = median_ratio(limits, seconds) if seconds and self.comparable else None
        return Row(name=self.name, seconds=seconds, speedup=ratio, efficiency=efficiency, remark=remark)


def race(
    bench: Any, what: str, nbytes: int, batch: int, way: str, ours: Callable[[], float], rivals: Sequence[Rival] = ()
) -> Row:
    """Time an operation of farpool in turn with rivals that do the same work, in seconds for one object.

    `what` names the operation, `batch` is the number of objects in one call, and `way` farpool's transport.
    """
    step = f"{what} {format_size(nbytes)}, {way}"
    mine = in_turn([ours, *(rival.sample for rival in rivals)], bench.rounds, step, bench.progress)[0]
    others = tuple(rival.row(mine) for rival in rivals)
    return Row(what=what, nbytes=nbytes, batch=batch, way=way, ours=mine, others=others)


def opened(
    stack: ExitStack, make: Callable[[], AbstractContextManager[_PeerT]] | None, reason: str
) -> tuple[_PeerT | None, str]:
    """Start a peer if it is installed; None and the reason if it is not, or does not start."""
    if make is None:
        return None, reason
    try:
        return stack.enter_context(make()), ""
    except (FarpoolError, OSError) as error:
        return None, str(error)
