"""The node's counters for Prometheus, at ``/metrics``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from farpool.errors import ConfigError
from farpool.transport.address import Address

__all__ = ["MetricsServer", "NodeCollector"]

Stats = Mapping[str, int | float]

_GAUGES = {
    "capacity": ("capacity_bytes", "Bytes that the node may lend"),
    "used": ("used_bytes", "Bytes in use for objects and leases"),
    "lent": ("lent_bytes", "Bytes of leases"),
    "leases": ("leases", "Leases"),
    "objects": ("objects", "Published objects"),
    "object_bytes": ("object_bytes", "Bytes of published objects"),
    "index_bytes": ("index_bytes", "Bytes of the indexes of published objects"),
    "adopted": ("adopted_objects", "Published objects taken over from an earlier start"),
    "tombstones": ("tombstones", "Deletions that not every replica has confirmed"),
    "nvme_capacity": ("nvme_capacity_bytes", "Bytes of the NVMe file"),
    "nvme_used": ("nvme_used_bytes", "Bytes in use of the NVMe file"),
    "nvme_objects": ("nvme_objects", "Published objects whose payload lies in the NVMe file"),
    "connections": ("connections", "Open data connections"),
    "sessions": ("sessions", "Programs that hold something or are connected"),
}
_COUNTERS = {
    "gets": ("gets", "Objects asked for over a connection"),
    "hits": ("hits", "Objects asked for over a connection and found"),
    "puts": ("puts", "Objects published"),
    "deletes": ("deletes", "Objects deleted"),
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
    node : str
        The node's name; a label of every metric.
    """

    def __init__(self, stats: Callable[[], Stats], node: str) -> None:
        self._stats = stats
        self._node = node

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if not stats:  # the node is starting or stopping
            return
        for name, (metric, text) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            gauge.add_metric([self._node], stats[name])
            yield gauge
        for name, (metric, text) in _COUNTERS.items():
            counter = CounterMetricFamily(f"farpool_node_{metric}", text, labels=["node"])
            counter.add_metric([self._node], stats[name])
            yield counter


class MetricsServer:
    """Serves the metrics over HTTP, in a thread of its own, until closed.

    Parameters
    ----------
    address : Address
        Where to listen; port 0 for any free one.
    collector : NodeCollector
        What to serve.

    Attributes
    ----------
    address : Address
        Where it listens.

    Raises
    ------
    ConfigError
        It cannot listen there.
    """

    def __init__(self, address: Address, collector: NodeCollector) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(address.port, address.host, registry)
        except OSError as error:
            raise ConfigError(
                f"--metrics is {address.host}:{address.port}, where this process cannot listen: {error.strerror}; "
                "choose another port",
                setting="metrics",
            ) from error
        self.address = Address("tcp", address.host, self._server.server_port)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
