"""The part of gpu_check.py that looks into a forward pass: a trace, and the gaps between kernels on the compute stream.

The trace is in the format of Chrome's tracing (chrome://tracing, ui.perfetto.dev), beside the part's file.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_run import Run, fetched

from farpool import Pool, offload

WARM, PASSES = 10, 3
GAPS = 8
"""Number of the longest gaps that are listed."""
SHORT_US = 5.0
"""Gaps below this many microseconds are those between any two kernels, and are not counted."""


class Span(NamedTuple):
    """Some work in a trace: its beginning and end in microseconds, and what it was."""

    start: float
    end: float
    name: str


def spans(trace: dict[str, Any], category: str) -> dict[Any, list[Span]]:
    """The work of a category by stream (on a GPU) or thread, in order; nested work is part of the outer work."""
    found: dict[Any, list[Span]] = {}
    events = [one for one in trace["traceEvents"] if one.get("ph") == "X" and one.get("cat") == category]
    for one in sorted(events, key=lambda one: (one["ts"], -one["dur"])):
        lane = found.setdefault(one.get("args", {}).get("stream", one["tid"]), [])
        end = one["ts"] + one["dur"]
        if not lane or end > lane[-1].end:
            lane.append(Span(one["ts"], end, one["name"]))
    return found


def overlap(span: Span, others: Sequence[Span]) -> float:
    """Microseconds of a span in which some of the others, which are in order, were at work."""
    total, reached = 0.0, span.start
    for other in others[max(0, bisect_right(others, span.start, key=lambda one: one.start) - 1) :]:
        if other.start >= span.end:
            break
        start, end = max(other.start, reached), min(other.end, span.end)
        total, reached = total + max(0.0, end - start), max(reached, end)
    return total


def summary(trace: dict[str, Any], work: str, copies: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """How busy the stream with the most work was, and its longest gaps, by what copies did meanwhile.

    Parameters
    ----------
    trace : dict
        A trace in Chrome's format.
    work, copies : str
        The categories of computing and of copying.
    """
    lanes = spans(trace, work)
    if not lanes:
        raise SystemExit(f"the trace has no work of the category {work!r}")
    stream, lane = max(lanes.items(), key=lambda item: sum(one.end - one.start for one in item[1]))
    moved = sorted(one for lane in spans(trace, copies).values() for one in lane)
    whole = max(one.end for one in lane) - lane[0].start
    gaps: list[tuple[Span, str]] = []
    for before, after in pairwise(lane):
        if after.start - before.end >= SHORT_US:
            gaps.append((Span(before.end, after.start, before.name), after.name))
    idle = sum(gap.end - gap.start for gap, _ in gaps)
    figures = {
        "stream": stream,
        "kernels": len(lane),
        "whole_ms": whole / 1e3,
        "gaps": len(gaps),
        "idle_ms": idle / 1e3,
        "idle_share": idle / whole if whole else 0.0,
        "idle_while_copying_ms": sum(overlap(gap, moved) for gap, _ in gaps) / 1e3,
        "copies": len(moved),
        "copying_ms": sum(one.end - one.start for one in moved) / 1e3,
    }
    longest = sorted(gaps, key=lambda one: one[0].start - one[0].end)[:GAPS]
    listed = [
        {
            "at_ms": (gap.start - lane[0].start) / 1e3,
            "ms": (gap.end - gap.start) / 1e3,
            "copying_ms": overlap(gap, moved) / 1e3,
            "after": gap.name[:80],
            "before": after[:80],
        }
        for gap, after in longest
    ]
    return figures, listed


def read(path: Path) -> dict[str, Any]:
    """Read a trace that may be compressed."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        trace: dict[str, Any] = json.load(file)
    return trace


def profile(run: Run) -> None:
    """Trace passes of a model four times as large as its pool, in steady state."""
    from farpool_bench.stack import Stack, seconds_of

    layers, width, tokens = (8, 128, 64) if run.quick else (24, 2048, 2048)
    model = Stack(layers, width).to(run.device).eval()
    inputs, nbytes = model.inputs(tokens), model.nbytes
    seconds_of(model, inputs, run.device)
    resident, expected = seconds_of(model, inputs, run.device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if run.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with Pool(nbytes // 4, dram=nbytes * 5 // 4, device=run.device) as pool:
        offload(model, pool)
        for _ in range(WARM):
            seconds, outputs = seconds_of(model, inputs, run.device)
        if not torch.equal(outputs, expected):
            raise SystemExit("the outputs differ from the resident model's outputs")
        run.add("forward pass", weight_bytes=nbytes, resident_seconds=resident, paged_seconds=seconds)
        before = fetched(pool)
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(PASSES):
                seconds_of(model, inputs, run.device)
        moved = (fetched(pool) - before) // PASSES
        del model
    path = run.file("trace.json.gz")
    profiler.export_chrome_trace(str(path))
    kinds = ("kernel", "gpu_memcpy") if run.device == "cuda" else ("cpu_op", "user_annotation")
    figures, listed = summary(read(path), *kinds)
    run.add("compute stream", **figures, passes=PASSES, moved_bytes=moved, trace=path.name)
    for gap in listed:
        run.add("gap", **gap)
