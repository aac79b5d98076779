"""The link of a benchmark: a throttled DRAM tier, or the real link between host and device."""

from __future__ import annotations

import os
import statistics
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self

import torch

from farpool import Dram, Throttled
from farpool.memory.pool.stats import Stats
from farpool.memory.tiers import Extent

__all__ = ["Copier", "core_for_link", "fetched", "link_rate", "lower_tier", "written"]


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
    """Background load that copies bytes over a link as a pool would while something computes.

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

    def beside(self, work: Callable[[], float], nbytes: int) -> float:
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
