"""The node's counters for Prometheus, as metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

__all__ = ["NodeCollector"]

Stats = Mapping[str, int | float]
Tenants = Mapping[int, Mapping[str, int]]
Keys = Mapping[str, Mapping[str, int]]

_GAUGES = {
    "capacity": ("capacity_bytes", "Bytes that the node may lend"),
    "used": ("used_bytes", "Bytes in use for objects, their tables and leases"),
    "backed": (
        "backed_bytes",
        "Memory of objects, their holes and tables, and leases, with what is on its way to the NVMe file",
    ),
    "taken": ("taken_bytes", "Shared memory that the node's files take, as the system tells it"),
    "process": ("process_bytes", "Memory of the node's process beside its files"),
    "lent": ("lent_bytes", "Bytes of leases"),
    "leases": ("leases", "Leases"),
    "objects": ("objects", "Objects"),
    "object_bytes": ("object_bytes", "Bytes of objects"),
    "index_bytes": ("index_bytes", "Bytes of the indexes of objects"),
    "adopted": ("adopted_objects", "Objects taken over from an earlier start"),
    "nvme_capacity": ("nvme_capacity_bytes", "Bytes of the NVMe file"),
    "nvme_used": ("nvme_used_bytes", "Bytes in use of the NVMe file"),
    "nvme_leaving": (
        "nvme_leaving_bytes",
        "Memory of objects on their way to the NVMe file, beside what the node may lend",
    ),
    "nvme_objects": ("nvme_objects", "Objects whose payload lies in the NVMe file"),
    "connections": ("connections", "Open data connections"),
    "sessions": ("sessions", "Programs that hold something or are connected"),
    "half_open": ("half_open_connections", "Connections whose handshake is under way"),
}
_OF_TENANTS = {
    "objects": ("objects", "Published objects of a tenant"),
    "used": ("used_bytes", "Bytes that a tenant uses for objects, their tables and leases"),
    "backed": ("backed_bytes", "Memory of a tenant that counts against what the node may lend"),
    "taken": ("taken_bytes", "Shared memory that a tenant's files take, as the system tells it"),
    "lent": ("lent_bytes", "Bytes of a tenant's leases"),
    "share": ("share_bytes", "Bytes within which nobody else evicts a tenant's objects"),
    "pins": ("pins", "Pins of a tenant"),
    "preparations": ("preparations", "Unfinished publishes of a tenant"),
    "leases": ("leases", "Leases of a tenant"),
    "connections": ("connections", "Connections of a tenant"),
}
_COUNTERS_OF_TENANTS = {
    "searches": ("searches", "Keys looked for in the index of a tenant"),
    "gets": ("gets", "Objects that a tenant asked for over a connection"),
    "hits": ("hits", "Objects that a tenant asked for over a connection and that were there"),
}
_OF_KEYS = {
    "held": ("held_bytes", "Bytes that an access key holds in leases, pins and unfinished publishes"),
    "pins": ("pins", "Pins of an access key"),
    "preparations": ("preparations", "Unfinished publishes of an access key"),
    "leases": ("leases", "Leases of an access key"),
    "connections": ("connections", "Connections of an access key"),
}
_COUNTERS = {
    "gets": ("gets", "Objects asked for over a connection"),
    "hits": ("hits", "Objects asked for over a connection and found"),
    "puts": ("puts", "Objects put"),
    "drops": ("drops", "Objects dropped by programs"),
    "evictions": ("evictions", "Objects forgotten to make room"),
    "demotions": ("demotions", "Objects moved from memory to the NVMe file"),
    "promotions": ("promotions", "Objects moved from the NVMe file back to memory"),
    "expired": ("expired", "Objects whose time was over"),
    "bytes_in": ("received_bytes", "Bytes received over data connections, frames included"),
    "bytes_out": ("sent_bytes", "Bytes sent over data connections, frames included"),
    "checksum_errors": ("checksum_errors", "Payloads that were not what was sent"),
    "bad_frames": ("bad_frames", "Connections ended because of a frame that is none"),
    "refused": ("refused_connections", "Connections refused in the handshake"),
}


class NodeCollector(Collector):
    """Turns a node's counters into metrics whenever they are asked for.

    Parameters
    ----------
    stats : callable
        Returns the counters by name; nothing while there are none.
    tenants : callable
        Returns what each tenant has; nothing while there are none.
    keys : callable
        Returns what each access key of the keys file holds; nothing while there are none. No other names become labels.
    node : str
        The node's name; a label of every metric.
    """

    def __init__(
        self, stats: Callable[[], Stats], tenants: Callable[[], Tenants], keys: Callable[[], Keys], node: str
    ) -> None:
        self._stats = stats
        self._tenants = tenants
        self._keys = keys
        self._node = node

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if not stats:  # the node is starting or stopping
            return
        for name, (metric, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            gauge.add_metric([self._node], stats[name])
            yield gauge
        tenants = self._tenants()
        for name, (metric, text) in _OF_TENANTS.items():
            gauge = GaugeMetricFamily(f"farpool_node_tenant_{metric}", text, labels=["node", "tenant"])
            for tenant, has in tenants.items():
                gauge.add_metric([self._node, str(tenant)], has[name])
            yield gauge
        for name, (metric, text) in _COUNTERS_OF_TENANTS.items():
            counter = CounterMetricFamily(f"farpool_node_tenant_{metric}", text, labels=["node", "tenant"])
            for tenant, has in tenants.items():
                counter.add_metric([self._node, str(tenant)], has[name])
            yield counter
        keys = self._keys()
        for name, (metric, text) in _OF_KEYS.items():
            gauge = GaugeMetricFamily(f"farpool_node_key_{metric}", text, labels=["node", "tenant", "key"])
            for key, has in keys.items():
                gauge.add_metric([self._node, str(has["tenant"]), key], has[name])
            yield gauge
        for name, (metric, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            counter.add_metric([self._node], stats[name])
            yield counter
