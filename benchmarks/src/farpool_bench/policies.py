"""Misses of eviction policies on a trace of requests, and the speed at which they decide.

A cache of each size is simulated under each policy: a request for an object that is not there is a miss, and brings the
object in. A trace is a file (CSV, or libCacheSim's oracleGeneral) or generated: Zipf's law over 5,000 objects. Belady's
policy knows the future; where all objects have one size, no policy has fewer misses. Requests a second are those of one
core, in processor time, with the lookup of the object and everything that the policy does; the median of several runs.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from farpool._native import CacheSimulation, RequestTrace, policy_names
from farpool.errors import ConfigError
from farpool.observe.tables import Table
from farpool.sizes import format_size, parse_size
from farpool_bench import request_traces

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Run", "Settings", "figures", "run", "table"]

_CHUNK = 1 << 20
"""Requests simulated between two reports of progress; an interrupt waits for as many."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Choice of trace, policies and cache sizes.

    Attributes
    ----------
    device : str
        ``cpu``: policies compute nothing on a device.
    trace : Path or None
        The file to read; None generates a trace.
    sizes : tuple of str
        Sizes of the cache; empty for halves, quarters and so on of the bytes of all objects.
    policies : tuple of str
        Names; empty for all.
    rounds : int
        Runs of each, for the speed; their counts are equal.
    requests : int
        Length of the trace that is generated.
    """

    device: str = "cpu"
    trace: Path | None = None
    sizes: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    rounds: int = 3
    requests: int = 1_000_000

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(rounds=1, requests=20_000)


@dataclass(frozen=True, slots=True)
class Run:
    """Results of one policy with one size of the cache.

    Attributes
    ----------
    misses, bytes_missed : int
        Requests for objects that were not in the cache, and the sum of their sizes.
    requests_per_second : float
        Median over the runs.
    seconds : tuple of float
        Processor time of each run.
    """

    policy: str
    size: int
    misses: int
    bytes_missed: int
    requests_per_second: float
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of all policies and sizes on one trace.

    Attributes
    ----------
    trace : str
        Name of the file, or how the trace was generated.
    requests, objects : int
        Length of the trace, and different objects in it.
    nbytes, footprint : int
        Sum of the sizes of all requests, and of all different objects.
    left_out : int
        Requests of 0 bytes: there is nothing to keep.
    """

    trace: str
    requests: int
    objects: int
    nbytes: int
    footprint: int
    left_out: int
    runs: tuple[Run, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Simulate each policy with each size of the cache.

    Raises
    ------
    ConfigError
        The trace cannot be read, or a policy or a size is wrong.
    """
    policies = settings.policies or policy_names()
    for name in policies:
        if name not in policy_names():
            raise ConfigError(f"policy {name!r} is not known; expected one of {', '.join(policy_names())}")
    sizes = [parse_size(size, "size") for size in settings.sizes]
    if settings.trace is not None:
        progress("Reading the trace", 0, 1)
        trace, named = request_traces.read(settings.trace), settings.trace.name
        progress("Reading the trace", 1, 1)
    else:
        ids = request_traces.generate("zipf", settings.requests)
        trace, named = RequestTrace(ids, request_traces.object_sizes(ids)), "generated: Zipf's law over 5,000 objects"
    footprint = trace.footprint()
    sizes = sizes or [max(1, footprint >> shift) for shift in range(7, 0, -1)]
    runs = []
    nbytes = 0
    total = len(trace) * len(sizes) * settings.rounds
    for name in policies:
        done = 0
        for size in sizes:
            seconds = []
            for _ in range(settings.rounds):
                cache = CacheSimulation(name, size)
                taken = 0.0
                for first in range(0, len(trace), _CHUNK):
                    start = time.thread_time()
                    cache.run(trace, first, first + _CHUNK)
                    taken += time.thread_time() - start
                    progress(name, done + cache.requests, total)
                seconds.append(taken)
                done += len(trace)
            nbytes = cache.bytes
            speed = len(trace) / max(statistics.median(seconds), 1e-9)
            runs.append(Run(name, size, cache.misses, cache.bytes_missed, speed, tuple(seconds)))
    return Outcome(named, len(trace), trace.objects(), nbytes, footprint, trace.left_out, tuple(runs))


def table(outcome: Outcome) -> Group:
    """Table of misses and speed of each policy, one size of the cache after the other."""
    about = (
        f"{outcome.trace}: {outcome.requests:,} requests for {outcome.objects:,} objects of "
        f"{format_size(outcome.footprint)} in all"
    )
    if outcome.left_out:
        about += f"; {outcome.left_out:,} requests of 0 bytes were left out"
    made = Table()
    made.add_names("cache")
    made.add_names("policy")
    made.add_figures("misses", "of all", "bytes missed", "of all", "million/s")
    for size in sorted({one.size for one in outcome.runs}):
        for number, one in enumerate(one for one in outcome.runs if one.size == size):
            made.add_row(
                format_size(size) if number == 0 else "",
                one.policy,
                f"{one.misses:,}",
                f"{one.misses / outcome.requests:.1%}",
                format_size(one.bytes_missed),
                f"{one.bytes_missed / outcome.nbytes:.1%}",
                f"{one.requests_per_second / 1e6:.1f}",
            )
        made.add_section()
    return Group(Text(about), made)


def figures(outcome: Outcome) -> dict[str, Figure]:
    """Figure of the miss ratio against the size of the cache, for each policy."""
    from farpool_bench.figures import COLOURS, new_figure

    figure, axes = new_figure("size of the cache, MiB", "misses, share of requests")
    for number, name in enumerate(dict.fromkeys(one.policy for one in outcome.runs)):
        runs = sorted((one for one in outcome.runs if one.policy == name), key=lambda one: one.size)
        axes.plot(
            [one.size / (1 << 20) for one in runs],
            [one.misses / outcome.requests for one in runs],
            ("o-", "s--", "^:")[number // len(COLOURS) % 3],
            color=COLOURS[number % len(COLOURS)],
            markersize=4,
            label=name,
        )
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.legend(ncols=2)
    return {f"Miss-ratio curve of {outcome.trace}.": figure}
