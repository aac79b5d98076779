"""Metrics of the outcome of a repair sweep. Only a sweep over all nodes can count the copies of each object."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from farpool.cluster.store.repair import Repaired

__all__ = ["repair_metrics"]


def repair_metrics(repaired: Repaired) -> bytes:
    """Return the metrics of a sweep in Prometheus' text format, for a file that a textfile collector reads."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Sweep(repaired, time.time()))
    return generate_latest(registry)


class _Sweep(Collector):
    def __init__(self, repaired: Repaired, ended: float) -> None:
        self._repaired = repaired
        self._ended = ended

    def collect(self) -> Iterator[Metric]:
        repaired = self._repaired
        for name, text, value in (
            ("objects", "Objects that the last repair found", repaired.objects),
            ("endangered_objects", "Objects with too few copies before the last repair", repaired.endangered),
            ("objects_below_copies", "Objects with too few copies after the last repair", len(repaired.left)),
            ("repaired_bytes", "Bytes that the last repair copied", repaired.nbytes),
            ("repair_timestamp_seconds", "End of the last repair that reached its end", self._ended),
        ):
            yield GaugeMetricFamily(f"farpool_store_{name}", text, value=value)
