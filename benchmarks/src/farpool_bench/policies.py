"""Misses of eviction policies on a trace of requests, and the speed at which they decide.

A cache of each size is simulated under each policy: a request for an object that is not there is a miss, and brings the
object in. A trace is a file (CSV, or libCacheSim's oracleGeneral) or generated: Zipf's law over 5,000 objects. Belady's
policy knows the future; if all objects have one size, no policy has fewer misses. Requests a second are measured on one
core, in processor time, with the lookup of the object and everything that the policy does; the median of several runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool._native import CacheSimulation, RequestTrace, policy_names
from farpool.sizes import format_size, parse_size
from farpool_bench import harness, request_traces
from farpool_bench.harness import Figures, Option, Row, check_known, told
from farpool_bench.render import Grid, by_group, plot

_CHUNK = 1 << 20
"""Requests simulated between two reports of progress; an interrupt waits for as many."""
_SIZES = Option("Of the cache, such as 128MiB; repeatable. Default: shares of all objects.", "SIZE", "size")


class Bench(harness.Benchmark):
    """Each policy with each size of the cache."""

    name = "policies"
    limit = "Belady's policy, which knows the future"
    rivals = ("libCacheSim's counts",)
    rows = "runs"
    trace: Annotated[Path | None, Option("CSV (.csv) or oracleGeneral; default: by Zipf's law.", "FILE")] = None
    sizes: Annotated[tuple[str, ...], _SIZES] = ()
    policies: Annotated[tuple[str, ...], Option("Such as sieve; repeatable. Default: all.", "NAME", "policy")] = ()
    rounds: Annotated[int, Option("Runs of each", least=1)] = 3
    requests: int = 1_000_000  # of the trace that is generated
    QUICK: ClassVar = {"rounds": 1, "requests": 20_000}

    def open(self) -> None:
        self._policies = self.policies or policy_names()
        for name in self._policies:
            check_known("policy", name, policy_names())
        sizes = [parse_size(size, "size") for size in self.sizes]
        if self.trace is not None:
            self._name = self.trace.name
            (self._trace,) = map(request_traces.read, told(self.progress, "Reading the trace", [self.trace]))
        else:
            self._name = "generated: Zipf's law over 5,000 objects"
            ids = request_traces.generate("zipf", self.requests)
            self._trace = RequestTrace(ids, request_traces.object_sizes(ids))
        self._footprint = self._trace.footprint()
        self._sizes = sizes or [max(1, self._footprint >> shift) for shift in range(7, 0, -1)]

    def cases(self) -> Iterable[tuple[str, int]]:
        return [(policy, size) for policy in self._policies for size in self._sizes]

    def measure(self, case: tuple[str, int]) -> Row:
        (policy, size), length, rounds = case, len(self._trace), self.rounds
        seconds = []
        for done in range(rounds):
            cache = CacheSimulation(policy, size)
            taken = 0.0
            for first in range(0, length, _CHUNK):
                start = time.thread_time()
                cache.run(self._trace, first, first + _CHUNK)
                taken += time.thread_time() - start
                step = f"{policy}, {format_size(size)}"
                self.progress(step, done * length + cache.requests, rounds * length)
            seconds.append(taken)
        self._nbytes = cache.bytes
        return Row(
            policy=policy,
            size=size,
            misses=cache.misses,
            bytes_missed=cache.bytes_missed,
            requests_per_second=length / max(statistics.median(seconds), 1e-9),
            seconds=tuple(seconds),  # processor time of each run
        )

    def facts(self) -> dict[str, Any]:
        return dict(
            trace=self._name,
            requests=len(self._trace),
            objects=self._trace.objects(),
            nbytes=self._nbytes,  # of all requests
            footprint=self._footprint,  # bytes of all different objects
            left_out=self._trace.left_out,  # requests of 0 bytes: there is nothing to keep
        )

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        size = format_size(outcome.footprint)
        about = f"{outcome.trace}: {outcome.requests:,} requests for {outcome.objects:,} objects of {size} in all"
        if outcome.left_out:
            about += f"; {outcome.left_out:,} requests of 0 bytes were left out"
        yield about
        rows: list[Any] = []
        for size, runs in sorted(by_group(outcome.runs, lambda one: one.size).items()):
            for number, one in enumerate(runs):
                shares = {"missed": one.misses / outcome.requests, "of_bytes": one.bytes_missed / outcome.nbytes}
                rows.append(Row(one, cache="" if number else format_size(size), **shares))
            rows.append([])
        columns = (
            "=cache {cache}|=policy {policy}|misses {misses:,}|of all {missed:.1%}|bytes missed {bytes_missed:size}"
        )
        yield Grid.of("", columns + "|of all {of_bytes:.1%}|million/s {requests_per_second:1e-6*.1f}", rows)

    @staticmethod
    def figures(outcome: Any) -> Figures:
        lines = {}
        for policy, found in by_group(outcome.runs, lambda one: one.policy).items():
            runs = sorted(found, key=lambda one: one.size)
            shares = [one.misses / outcome.requests for one in runs]
            lines[policy] = [one.size / (1 << 20) for one in runs], shares
        labels = "size of the cache, MiB", "misses, share of requests"
        figure, axes = plot(*labels, lines, legend={"ncols": 2})
        axes.set_xscale("log", base=2)
        return {f"Miss-ratio curve of {outcome.trace}.": figure}
