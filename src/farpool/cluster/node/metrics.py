"""Turns the node's counters into metrics for Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from farpool._native import NodeServer
from farpool.cluster.node.reloads import LastReload
from farpool.cluster.wire.frames import Op, Status

__all__ = ["NodeCollector"]


class Source(Protocol):
    """Interface to the counters of a node; `Node` implements it."""

    name: str

    def stats(self) -> Mapping[str, int | float]:
        """Return the node's counters by name; empty while the node does not run."""
        ...

    def tenants(self) -> Mapping[int, Mapping[str, int]]:
        """Return the counters of each tenant, by the tenant's number."""
        ...

    def bandwidth(self) -> Mapping[int, tuple[float, int, int]]:
        """Return share, guarantee and cap of each tenant for which they were set."""
        ...

    def keys(self) -> Mapping[str, Mapping[str, int]]:
        """Return the counters of each access key in the keys file, by the key's name."""
        ...

    def refusals(self) -> Mapping[int, Mapping[int, int]]:
        """Return how many requests were refused, by tenant and then by status."""
        ...

    def latencies(self) -> Mapping[int, tuple[list[int], float]]:
        """Return a histogram of reply times for each operation: the counts of its buckets, and the sum in seconds."""
        ...

    def certificates(self) -> Mapping[str, float]:
        """Return, by file name, when the certificates in use expire, in seconds since 1970."""
        ...

    def last_reload(self) -> LastReload:
        """Return the time and the outcome of the node's last attempt to read its keys and certificate."""
        ...


_GAUGES = {
    "state": ("state", "0 if the node takes new objects, 1 while it drains, 2 while it is read-only"),
    "capacity": ("capacity_bytes", "Bytes that the node may lend"),
    "used": ("used_bytes", "Bytes in use for objects, their tables and leases"),
    "backed": (
        "backed_bytes",
        "Memory of objects, their holes and tables, and leases, with objects on their way to the NVMe file",
    ),
    "taken": ("taken_bytes", "Shared memory that the node's files take, as the system tells it"),
    "process": ("process_bytes", "Memory of the node's process without its files"),
    "lent": ("lent_bytes", "Bytes of leases"),
    "leases": ("leases", "Leases"),
    "objects": ("objects", "Objects"),
    "object_bytes": ("object_bytes", "Bytes of objects"),
    "retained_objects": ("retained_objects", "Objects with a priority above 0"),
    "retained_bytes": ("retained_bytes", "Bytes of objects with a priority above 0"),
    "index_bytes": ("index_bytes", "Bytes of the indexes of objects"),
    "adopted": ("adopted_objects", "Objects taken over from an earlier start"),
    "nvme_capacity": ("nvme_capacity_bytes", "Bytes of the NVMe file"),
    "nvme_used": ("nvme_used_bytes", "Bytes in use of the NVMe file"),
    "nvme_leaving": (
        "nvme_leaving_bytes",
        "Memory of objects on their way to the NVMe file, in addition to the bytes that the node may lend",
    ),
    "nvme_budget": ("nvme_wear_budget_bytes", "Bytes that may be written to the NVMe file in a day; 0 without a file"),
    "clock": ("clock_timestamp_seconds", "Time of the node's clock"),
    "nvme_objects": ("nvme_objects", "Objects whose payload is stored in the NVMe file"),
    "connections": ("connections", "Open data connections"),
    "sessions": ("sessions", "Programs that hold something or are connected"),
    "half_open": ("half_open_connections", "Connections whose handshake is under way"),
}
_POOL_GAUGES = {
    "registered": ("registered", "1 if the registry had the node as a member when it last answered, else 0"),
    "registry_silence": ("registry_silence_seconds", "Seconds since the registry last answered"),
    "policy_revision": ("policy_revision", "Revision of the policy of tenants that the node applies; 0 for none"),
    "policy_registry_revision": (
        "policy_registry_revision",
        "Revision of the policy of tenants that the registry had when it last answered; 0 for none",
    ),
    "policy_silence": (
        "policy_silence_seconds",
        "Seconds since the registry last confirmed the policy of tenants that the node applies",
    ),
}
"""Metrics of a node that is a member of a pool."""
_TENANT_GAUGES = {
    "objects": ("objects", "Published objects of a tenant"),
    "used": ("used_bytes", "Bytes that a tenant uses for objects, their tables and leases"),
    "backed": ("backed_bytes", "Memory of a tenant that counts against what the node may lend"),
    "taken": ("taken_bytes", "Shared memory that a tenant's files take, as the system tells it"),
    "lent": ("lent_bytes", "Bytes of a tenant's leases"),
    "share": ("share_bytes", "Bytes below which no other tenant's use evicts a tenant's objects"),
    "burst": ("burst_bytes", "Most bytes that a tenant may use; 0 for no limit"),
    "priority": ("priority", "Priority of a tenant: borrowed bytes of the lowest are evicted first"),
    "pins": ("pins", "Pins of a tenant"),
    "preparations": ("preparations", "Unfinished publishes of a tenant"),
    "leases": ("leases", "Leases of a tenant"),
    "connections": ("connections", "Connections of a tenant"),
    "readers": ("mapped_readers", "Programs that map a tenant's objects and read them without a request"),
}
_TENANT_COUNTERS = {
    "searches": ("searches", "Keys looked for in the index of a tenant"),
    "gets": ("gets", "Objects that a tenant asked for over a connection"),
    "hits": ("hits", "Objects that a tenant asked for over a connection and that were there"),
    "lookups": ("lookups", "Keys that a tenant looked up over a connection"),
    "found": ("lookups_found", "Keys that a tenant looked up over a connection and that were there"),
    "puts": ("puts", "Objects that a tenant put"),
    "bytes_in": ("received_bytes", "Bytes that a tenant sent, over data connections and through publish areas"),
    "bytes_out": ("sent_bytes", "Bytes that a tenant received over data connections"),
    "work": ("work_units", "Work for a tenant; a unit is about the work of moving a byte"),
}
_TENANT_BANDWIDTH = (
    ("share", "Weight of a tenant's turns next to other tenants that have work"),
    ("guarantee_bytes_per_second", "Bytes a second below which a tenant is served first; 0 for none"),
    ("cap_bytes_per_second", "Bytes a second above which a tenant is not served; 0 for none"),
)
_KEY_GAUGES = {
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
    "retained_evictions": ("retained_evictions", "Objects with a priority above 0 that were forgotten to make room"),
    "demotions": ("demotions", "Objects moved from memory to the NVMe file"),
    "promotions": ("promotions", "Objects moved from the NVMe file back to memory"),
    "expired": ("expired", "Objects whose time was over"),
    "nvme_written": ("nvme_written_bytes", "Bytes written to the NVMe file"),
    "full": ("refused_for_room", "Requests refused for want of room, or while the node drains"),
    "bytes_in": ("received_bytes", "Bytes received over data connections, frames included"),
    "bytes_out": ("sent_bytes", "Bytes sent over data connections, frames included"),
    "checksum_errors": ("checksum_errors", "Payloads whose checksum did not match"),
    "bad_frames": ("bad_frames", "Connections ended because of a bad frame"),
    "refused": ("refused_connections", "Connections refused in the handshake"),
    "incompatible": (
        "incompatible_connections",
        "Connections refused because the client or the node has to be upgraded",
    ),
}


class NodeCollector(Collector):
    """Turns a node's counters into metrics each time Prometheus asks for them.

    Parameters
    ----------
    source : Source
        The node. Its name is a label of every metric; other labels are numbers of tenants, names of access keys in the
        keys file, and the few operations and reasons of the protocol.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def _node(self) -> str:
        return self._source.name

    def collect(self) -> Iterator[Metric]:
        stats = self._source.stats()
        if not stats:  # the node is starting or stopping
            return
        for name, (metric, text) in {**_GAUGES, **_POOL_GAUGES}.items():
            if name in _POOL_GAUGES and name not in stats:
                continue
            gauge = GaugeMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            gauge.add_metric([self._node], stats[name])
            yield gauge
        tenants = self._source.tenants()
        for name, (metric, text) in _TENANT_GAUGES.items():
            gauge = GaugeMetricFamily(f"farpool_node_tenant_{metric}", text, labels=["node", "tenant"])
            for tenant, has in tenants.items():
                gauge.add_metric([self._node, str(tenant)], has[name])
            yield gauge
        for name, (metric, text) in _TENANT_COUNTERS.items():
            counter = CounterMetricFamily(f"farpool_node_tenant_{metric}", text, labels=["node", "tenant"])
            for tenant, has in tenants.items():
                counter.add_metric([self._node, str(tenant)], has[name])
            yield counter
        yield from self._bandwidth(tenants)
        keys = self._source.keys()
        for name, (metric, text) in _KEY_GAUGES.items():
            gauge = GaugeMetricFamily(f"farpool_node_key_{metric}", text, labels=["node", "tenant", "key"])
            for key, has in keys.items():
                gauge.add_metric([self._node, str(has["tenant"]), key], has[name])
            yield gauge
        for name, (metric, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            counter.add_metric([self._node], stats[name])
            yield counter
        yield self._evictions(tenants)
        yield self._refusals()
        yield self._latencies()
        yield from self._settings()

    def _bandwidth(self, tenants: Mapping[int, Mapping[str, int]]) -> Iterator[Metric]:
        throttled = CounterMetricFamily(
            "farpool_node_tenant_throttled_seconds",
            "Time for which a tenant had requests but no turn, because it was above its cap",
            labels=["node", "tenant"],
        )
        for tenant, has in tenants.items():
            throttled.add_metric([self._node, str(tenant)], has["throttled_us"] / 1e6)
        yield throttled
        bandwidth = self._source.bandwidth()
        for place, (metric, text) in enumerate(_TENANT_BANDWIDTH):
            gauge = GaugeMetricFamily(f"farpool_node_tenant_bandwidth_{metric}", text, labels=["node", "tenant"])
            for tenant, values in bandwidth.items():
                gauge.add_metric([self._node, str(tenant)], values[place])
            yield gauge

    def _evictions(self, tenants: Mapping[int, Mapping[str, int]]) -> Metric:
        counter = CounterMetricFamily(
            "farpool_node_tenant_evictions",
            "Objects of a tenant that were evicted: for room, for room in the NVMe file, or because they were damaged",
            labels=["node", "tenant", "reason"],
        )
        for tenant, has in tenants.items():
            file, damaged = has["evictions_from_file"], has["evictions_of_damaged"]
            for reason, count in (("room", has["evictions"] - file - damaged), ("file", file), ("damaged", damaged)):
                counter.add_metric([self._node, str(tenant), reason], count)
        return counter

    def _refusals(self) -> Metric:
        counter = CounterMetricFamily(
            "farpool_node_tenant_refusals",
            "Requests and calls of a tenant that were refused",
            labels=["node", "tenant", "reason"],
        )
        for tenant, by_status in self._source.refusals().items():
            for status, count in by_status.items():
                counter.add_metric([self._node, str(tenant), Status(status).name.lower()], count)
        return counter

    def _latencies(self) -> Metric:
        histogram = HistogramMetricFamily(
            "farpool_node_operation_seconds",
            "Time from a request's header until its reply was handed to the system",
            labels=["node", "operation"],
        )
        ends = [repr(end) for end in NodeServer.latency_ends] + ["+Inf"]
        known = {op.value: op.name.lower() for op in Op}
        for op, (counts, seconds) in self._source.latencies().items():
            if op in known:  # the node refuses all others, and `_refusals` counts them
                sums = itertools.accumulate(counts)
                histogram.add_metric([self._node, known[op]], list(zip(ends, sums, strict=True)), seconds)
        return histogram

    def _settings(self) -> Iterator[Metric]:
        ends = GaugeMetricFamily(
            "farpool_node_certificate_end_timestamp_seconds",
            "End of a certificate in use; the earliest if a file has several",
            labels=["node", "file"],
        )
        for file, end in self._source.certificates().items():
            ends.add_metric([self._node, file], end)
        yield ends
        last = self._source.last_reload()
        for name, text, value in (
            ("timestamp_seconds", "Last time that the keys and the certificate were read", last.time),
            ("success", "1 if they could be used, 0 if the node kept those from before", float(last.succeeded)),
        ):
            gauge = GaugeMetricFamily(f"farpool_node_last_reload_{name}", text, labels=["node"])
            gauge.add_metric([self._node], value)
            yield gauge
