"""Metrics of stores for Prometheus: how nodes answer a program, and the outcome of a repair sweep.

Only a sweep over all nodes can count the copies of each object.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farpool.errors import StoreClosedError

if TYPE_CHECKING:
    from farpool.cluster.store.repair import Repaired
    from farpool.cluster.store.store import Store

__all__ = ["StoreCollector", "repair_metrics"]


class StoreCollector(Collector):
    """Turns the states of stores' nodes into metrics whenever Prometheus asks for them. It asks no node.

    Parameters
    ----------
    **stores : Store
        The stores. The name of each argument becomes the value of the metrics' label ``store``. Give all stores of a
        process to one collector. A store that was closed has no metrics.

    Examples
    --------
    >>> prometheus_client.REGISTRY.register(StoreCollector(weights=store))
    """

    def __init__(self, **stores: Store) -> None:
        self._stores = stores

    def collect(self) -> Iterator[Metric]:
        """Yield the present values of the metrics that docs/store.md describes."""
        labels = ["store", "node"]
        failing = GaugeMetricFamily(
            "farpool_store_node_failing_seconds", "Seconds since the node failed; 0 if it works", labels=labels
        )
        slow = GaugeMetricFamily(
            "farpool_store_node_slow_seconds",
            "Seconds that a slow node took to answer reads when it became slow; 0 for other nodes",
            labels=labels,
        )
        slowed = CounterMetricFamily(
            "farpool_store_node_slowed", "Times that the store has begun to read last from the node", labels=labels
        )
        for name, store in self._stores.items():
            try:
                members = store._open().members
            except StoreClosedError:
                continue
            for member in members:
                own = [name, member.name]
                failing.add_metric(own, member.status()[0])
                slow.add_metric(own, member.pace.seconds)
                slowed.add_metric(own, member.pace.times_slow)
        yield from (failing, slow, slowed)


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
