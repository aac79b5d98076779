"""The link of a benchmark: a throttled DRAM tier, or the one between host and device as it is."""

from __future__ import annotations

import statistics

import torch

from farpool import Dram, Throttled
from farpool.stats import Stats

__all__ = ["fetched", "link_rate", "lower_tier", "written"]


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
