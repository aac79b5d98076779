"""The link of a benchmark: a throttled DRAM tier, or the one between host and device as it is."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from farpool import Dram, Throttled
from farpool.pool.stats import Stats

__all__ = ["core_for_link", "fetched", "link_rate", "lower_tier", "written"]


@contextmanager
def core_for_link(device: str) -> Iterator[int]:
    """On the CPU, compute with all cores but one; gives the number of threads.

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
