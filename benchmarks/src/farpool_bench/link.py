"""The link of a benchmark: a throttled DRAM tier, or the real link between host and device."""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal, Self

import torch

from farpool import Dram, Pool, Throttled
from farpool.memory.pager.belady import Moved, belady_moves, total_of
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import Stats
from farpool.memory.tape import TapeFile
from farpool.memory.tiers import Extent
from farpool.observe.tape_trace import read_trace
from farpool_bench.harness import Row
from farpool_bench.measure import Rival, median_ratio


@contextmanager
def core_for_link(device: str) -> Iterator[int]:
    """Context in which the CPU computes with all cores but one, left for the link; yields the number of threads.

    A link between machines, or to a GPU, costs no computing. Its stand-in copies with a core of this machine;
    without one of its own it would hold up each parallel operation for as long as it copies.
    """
    before = torch.get_num_threads()
    threads = before if device == "cuda" else max(1, (os.cpu_count() or 1) - 1)
    torch.set_num_threads(threads)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)


def lower_tier(nbytes: int, rate: float | None) -> Dram | Throttled:
    """Host memory of `nbytes` bytes behind a link of `rate` bytes per second each way; None sets no limit."""
    memory = Dram(nbytes)
    return memory if rate is None else Throttled(memory, read_bandwidth=rate, write_bandwidth=rate)


class Copier:
    """Background load that copies bytes over a link as a pool would during a computation.

    On the CPU copies take memory bandwidth and cache from computing; this shows how much.
    """

    _PIECE, _PIECES = 4 << 20, 32
    """Bytes of one copy, and the number of them that the link's far side holds: more than a cache."""

    def __init__(self, rate: float) -> None:
        self._tier = lower_tier(self._PIECES * self._PIECE, rate)
        self._memory = bytearray(self._PIECES * self._PIECE)
        self._extents: list[Extent] = []

    def __enter__(self) -> Self:
        self._tier.open()
        pieces = memoryview(self._memory)
        for start in range(0, len(pieces), self._PIECE):
            extent = self._tier.reserve(self._PIECE)
            self._tier.write_from(extent, pieces[start : start + self._PIECE])  # untouched memory would be read faster
            self._extents.append(extent)
        return self

    def __exit__(self, *error: object) -> None:
        self._tier.close()

    def while_copying(self, work: Callable[[], float], nbytes: int) -> float:
        """Run `work` and return its result, while at most `nbytes` bytes are copied."""
        ended = threading.Event()

        def copy() -> None:
            view = memoryview(self._memory)
            for number in range(-(-nbytes // self._PIECE)):
                if ended.is_set():
                    return
                piece = number % self._PIECES
                self._tier.read_into(self._extents[piece], view[piece * self._PIECE : (piece + 1) * self._PIECE])

        with ThreadPoolExecutor(1, "farpool-copier") as executor:
            copying = executor.submit(copy)
            try:
                result = work()
            finally:
                ended.set()
        copying.result()  # raises what went wrong
        return result


def link_rate(nbytes: int) -> float:
    """Bytes per second from page-locked host memory to the CUDA device, in copies of `nbytes`."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    copies = max(8, (1 << 30) // nbytes)
    rates: list[float] = []
    for _ in range(5):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        stop = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(copies):
            device.copy_(host, non_blocking=True)
        stop.record()
        stop.synchronize()
        rates.append(copies * nbytes / (start.elapsed_time(stop) / 1e3))
    return statistics.median(rates)


def fetched(stats: Stats) -> int:
    """Bytes that came into the fast tier."""
    return sum(link.nbytes for link in stats.links if link.target == stats.fast.name)


def written(stats: Stats) -> int:
    """Bytes that left the fast tier."""
    return sum(link.nbytes for link in stats.links if link.source == stats.fast.name)


class Pooled:
    """Steps in a pool. Each timed one follows an untimed one, because the pool could fetch while the others ran.

    `step` does one step and returns its seconds; it calls its argument between phases, if it has several.
    """

    def __init__(self, pool: Pool, step: Callable[[Callable[[], None]], float]) -> None:
        self.step = step
        self.seconds: list[float] = []
        self.stalled: list[float] = []
        self.read: list[list[int]] = []
        self.written: list[list[int]] = []
        self._pool = pool

    def clear(self) -> None:
        """Forget all samples."""
        for samples in (self.seconds, self.stalled, self.read, self.written):
            samples.clear()

    def measure(self) -> None:
        """Do an untimed and a timed step, and count the bytes that move in each phase of the latter."""
        self.step(lambda: None)
        ends = [self._pool.stats()]
        self.seconds.append(self.step(lambda: ends.append(self._pool.stats())))
        ends.append(self._pool.stats())
        self.stalled.append(ends[-1].stall_seconds - ends[0].stall_seconds)
        self.read.append([fetched(after) - fetched(before) for before, after in pairwise(ends)])
        self.written.append([written(after) - written(before) for before, after in pairwise(ends)])

    def moved(self, direction: Literal["read", "written"], phase: slice = slice(None)) -> int:
        """Median of the bytes that a timed step moved, in all its phases or in some."""
        moves = self.read if direction == "read" else self.written
        return round(statistics.median(sum(one[phase]) for one in moves))

    def row(
        self, transfer: float, resident: Sequence[float], with_copies: Sequence[float], rivals: Sequence[Rival]
    ) -> Row:
        """Make the part of a row that compares the pool and its rivals with the limit of each round.

        The limit is the time on the link, or of the resident model while as many bytes are copied, if that is longer.
        """
        limits = [max(seconds, transfer) for seconds in with_copies or resident]
        return Row(
            moved_bytes=self.moved("read"),
            transfer_seconds=transfer,
            resident_seconds=tuple(resident),
            paged_seconds=tuple(self.seconds),
            stall_seconds=statistics.median(self.stalled),
            efficiency=median_ratio(limits, self.seconds),
            equal=True,
            peers=tuple(rival.row(self.seconds, limits) for rival in rivals),
            beside_copies_seconds=tuple(with_copies) or None,  # none on a GPU, where copies cost no computing
        )


_STEPS, _LEAD, _TAIL = 7, 2, 1
"""Numbers of steps: all recorded ones, the first ones before the steady state, the last ones after the counted ones."""


def fewest_by_phase(pool: Pool, step: Callable[[Callable[[], None]], object]) -> tuple[Moved, ...]:
    """Bytes that each phase of a step moves in steady state under Belady's rule (the block needed last leaves first).

    `pool` holds the step's tensors. The step has run before, makes the same accesses each time, and calls its
    argument between phases.
    """
    events: list[Event] = []
    ends = [0]
    """Number of accesses before the first phase and at the end of each."""

    def note_end() -> None:
        ends.append(sum(event.kind == "compute" for event in events))

    end_subscription = pool.subscribe(events.append)
    with tempfile.TemporaryDirectory(prefix="farpool-") as folder:
        path = Path(folder, "steps.tape")
        with pool.record(path):
            for _ in range(_STEPS):
                step(note_end)
                note_end()
        accesses = read_trace(TapeFile(path)).blocks
    end_subscription()
    lengths = [end - start for start, end in pairwise(ends)]
    phases = len(lengths) // _STEPS
    if sum(lengths) != len(accesses) or lengths != lengths[:phases] * _STEPS:
        raise ValueError(f"{len(accesses)} accesses in {_STEPS} steps, in phases of {lengths}: they are not alike")
    moves = iter(belady_moves(accesses, pool.fast))
    moved = [total_of(list(islice(moves, length))) for length in lengths]
    steady = moved[_LEAD * phases : -_TAIL * phases]
    steps = len(steady) // phases
    totals = [total_of(steady[phase::phases]) for phase in range(phases)]
    return tuple(Moved(total.fetched // steps, total.written // steps) for total in totals)


_GAP_S = 1e-4
"""Bars with less time between them are drawn as one."""
_LANES = {"reading": "fetch", "writing": "writeback", "computing": "compute", "waiting": "stall"}


def record_strip(pool: Pool, step: Callable[[Callable[[], None]], object], passes: int) -> Row:
    """Record some steps in a row, after one that is left out; each is marked, and its phases as it calls its argument.

    The row has the length in seconds, the seconds of the marks, and the beginning and end of each bar by lane.
    """
    events: list[Event] = []
    marks: list[float] = []

    def mark() -> None:
        marks.append(time.monotonic())

    step(lambda: None)
    end_subscription = pool.subscribe(events.append)
    for _ in range(passes):
        mark()
        step(mark)
    stop = time.monotonic()
    end_subscription()
    start = marks[0]
    lanes = {name: _bars(events, kind, start, stop) for name, kind in _LANES.items()}
    return Row(
        seconds=stop - start,
        marks=tuple(round(one - start, 5) for one in marks),
        lanes=Row({name: bars for name, bars in lanes.items() if bars}),
    )


def _bars(events: Sequence[Event], kind: str, start: float, stop: float) -> tuple[tuple[float, float], ...]:
    bars: list[tuple[float, float]] = []
    for event in sorted((event for event in events if event.kind == kind), key=lambda event: event.time):
        left, right = max(event.time, start) - start, min(event.time + event.duration, stop) - start
        if right <= left:
            continue
        if bars and left - bars[-1][1] < _GAP_S:
            bars[-1] = (bars[-1][0], max(bars[-1][1], right))
        else:
            bars.append((left, right))
    return tuple((round(left, 5), round(right, 5)) for left, right in bars)
