"""Measurement of random rows picked from a large paged table by `torch.nn.functional.embedding`."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from farpool import Pool, offload
from farpool_bench.overhead_outcome import Rows
from farpool_bench.stack import synchronize

if TYPE_CHECKING:
    from farpool_bench.benchmark import Progress

__all__ = ["measure_rows"]

_WIDTH = 4096
"""Elements of a row, which take 16 KiB."""
_SHARE = 10
"""The table is this many times as large as the budget."""
_WARM, _CALLS = 20, 60


def measure_rows(device: str, count: int, picked: int, progress: Progress) -> Rows:
    """Pick rows of a table of `count` rows at random, `picked` in a call, paged and plain in turn, with one thread."""
    step = f"{picked} random rows of {_WIDTH * 4 >> 10} KiB"
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(count, _WIDTH, generator=generator)
    table = torch.nn.Embedding(count, _WIDTH, _weight=weight.clone()).requires_grad_(False)
    plain, buffer = weight.to(device), torch.empty(picked, _WIDTH, device=device)
    nbytes = weight.nbytes
    seconds: list[float] = []
    thread_seconds: list[float] = []
    index_select: list[float] = []
    equal = True
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Pool(fast=nbytes // _SHARE, dram=nbytes + nbytes // 4, device=device) as pool:
            offload(table, pool)
            for call in range(_WARM + _CALLS):
                progress(step, call, _WARM + _CALLS)
                rows = torch.randint(count, (picked,), generator=generator).to(device)
                synchronize(device)
                start, busy = time.perf_counter(), time.thread_time()
                result = functional.embedding(rows, table.weight)
                synchronize(device)
                seconds.append(time.perf_counter() - start)
                thread_seconds.append(time.thread_time() - busy)
                start = time.perf_counter()
                torch.index_select(plain, 0, rows, out=buffer)
                synchronize(device)
                index_select.append(time.perf_counter() - start)
                equal = equal and torch.equal(result, buffer)
            progress(step, _WARM + _CALLS, _WARM + _CALLS)
            del table
    finally:
        torch.set_num_threads(threads)
    return Rows(
        row_bytes=_WIDTH * 4,
        table_bytes=nbytes,
        budget_bytes=nbytes // _SHARE,
        picked=picked,
        seconds=tuple(seconds[_WARM:]),
        thread_seconds=tuple(thread_seconds[_WARM:]),
        index_select=tuple(index_select[_WARM:]),
        bytes_per_second=picked * _WIDTH * 4 / statistics.median(seconds[_WARM:]),
        thread_seconds_per_row=statistics.median(thread_seconds[_WARM:]) / picked,
        equal=equal,
    )
