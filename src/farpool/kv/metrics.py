"""Metrics of KV caches for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farpool.kv.judge import Judge

__all__ = ["KVCollector"]


class Counted(Protocol):
    """Interface of a cache with counters, implemented by `PrefixCache` and `BlockCache`."""

    @property
    def judge(self) -> Judge: ...
    def stats(self) -> Mapping[str, Any]: ...


class KVCollector(Collector):
    """Turns the counters of caches into metrics whenever Prometheus asks for them.

    Parameters
    ----------
    **caches : PrefixCache or BlockCache
        The caches. The name of each argument becomes the value of the metrics' label ``cache``. Give all caches of a
        process to one collector.

    Examples
    --------
    >>> prometheus_client.REGISTRY.register(KVCollector(chat=cache))
    """

    def __init__(self, **caches: Counted) -> None:
        self._caches = caches

    def collect(self) -> Iterator[Metric]:
        """Yield the present values of the metrics that docs/kv.md describes."""
        blocks = CounterMetricFamily(
            "farpool_kv_blocks",
            "Blocks by step and outcome: done, or the reason why not",
            labels=["cache", "step", "outcome"],
        )
        moved = CounterMetricFamily("farpool_kv_bytes", "Bytes that a step has moved", labels=["cache", "step"])
        decisions = CounterMetricFamily(
            "farpool_kv_decisions", "Requests that could load, by decision", labels=["cache", "decision"]
        )
        saved = GaugeMetricFamily(
            "farpool_kv_saved_seconds",
            "Expected compute time minus load time, of all loads together",
            labels=["cache"],
        )
        gain = GaugeMetricFamily(
            "farpool_kv_gain_ratio",
            "Share of the compute time that loading saves, measured by the hold-out",
            labels=["cache"],
        )
        aside = GaugeMetricFamily(
            "farpool_kv_stands_aside", "1 while the cache computes because loading costs time", labels=["cache"]
        )
        measured = GaugeMetricFamily(
            "farpool_kv_measured_requests", "Recent requests from which the gain was measured", labels=["cache", "arm"]
        )
        for name, cache in self._caches.items():
            for counter, number in cache.stats().items():
                step, _, outcome = counter.partition(".")
                if outcome == "bytes":
                    moved.add_metric([name, step], number)
                elif outcome:
                    blocks.add_metric([name, step, outcome], number)
            judged = cache.judge.stats()
            saved.add_metric([name], judged["saved_seconds"])
            for decision, number in judged["decisions"].items():
                decisions.add_metric([name, decision], number)
            if (of := judged["gain"]) is not None:
                gain.add_metric([name], of["gain"])
                aside.add_metric([name], of["stands_aside"])
                measured.add_metric([name, "load"], of["load_requests"])
                measured.add_metric([name, "hold-out"], of["hold_out_requests"])
        yield from (blocks, moved, decisions, saved, gain, aside, measured)
