"""The manager's counters for Prometheus. Reading them asks neither the registry nor a member."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Summary, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from farpool.abc.membership import MemberState
from farpool.cluster.manager.alarms import Kind
from farpool.cluster.manager.manager import Manager

__all__ = ["Metrics"]


class Metrics(Collector):
    """Counters of one manager.

    Parameters
    ----------
    manager : Manager
        The manager.

    Attributes
    ----------
    streams : int
        Open streams of events.
    """

    def __init__(self, manager: Manager) -> None:
        self.streams = 0
        self._manager = manager
        self._registry = CollectorRegistry(auto_describe=False)
        self._requests = Counter(
            "farpool_manager_requests",
            "Requests answered.",
            ("method", "route", "status"),
            registry=self._registry,
        )
        self._seconds = Summary("farpool_manager_request_seconds", "Time of a request.", registry=self._registry)
        self._leases = Counter(
            "farpool_manager_lease_requests",
            "Requests about leases, by their outcome: granted, done, or the reason of the refusal.",
            ("request", "outcome"),
            registry=self._registry,
        )
        self._registry.register(self)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is the path with its parameters' names, so that there are few."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.observe(seconds)

    def lease_answered(self, request: str, outcome: str) -> None:
        """Count a request about leases."""
        self._leases.labels(request, outcome).inc()

    def text(self) -> bytes:
        """Return all counters in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics that follow from the manager's state."""
        manager = self._manager
        gauges = {
            "leader": ("1 on the leading manager.", int(manager.presence.leads)),
            "registry_away": ("1 while the registry does not answer.", int(manager.feed.is_away)),
            "streams": ("Open streams of events.", self.streams),
            "calls": ("Requests to the registry that run or wait.", manager.calls.under_way),
            "audit_failing": ("1 while the audit log cannot be written.", int(not manager.audit.is_ready)),
        }
        for name, (text, value) in gauges.items():
            yield GaugeMetricFamily(f"farpool_manager_{name}", text, value)
        yield CounterMetricFamily("farpool_manager_audit_lines", "Lines in the audit log.", manager.audit.lines)
        yield CounterMetricFamily("farpool_manager_audit_lost", "Lines that were dropped.", manager.audit.lost)
        yield from self._of_leases()
        yield from self._of_alarms()
        states = Tally(info.state for info in manager.members.members())
        members = GaugeMetricFamily("farpool_manager_members", "Members by state.", labels=("state",))
        for state in MemberState:
            members.add_metric([str(state)], states[state])
        yield members

    def _of_alarms(self) -> Iterator[Metric]:
        raised = self._manager.alarms.raised
        kinds = Tally(kind for kind, _ in raised)
        counts = GaugeMetricFamily("farpool_manager_alarms", "Alarms that are raised.", labels=("kind",))
        for kind in [*Kind, *sorted(kinds.keys() - set(Kind))]:  # a later release may know more kinds
            counts.add_metric([str(kind)], kinds[kind])
        yield counts
        since = GaugeMetricFamily(
            "farpool_manager_alarm_start_timestamp_seconds",
            "Time at which an alarm was raised.",
            labels=("kind", "subject", "about"),
        )
        for (kind, subject), record in sorted(raised.items()):
            since.add_metric([kind, subject, record.about], record.since)
        yield since

    def _of_leases(self) -> Iterator[Metric]:
        deliveries = self._manager.deliverer.deliveries
        counters = {
            "orders_delivered": ("Orders to nodes that were carried out.", deliveries.delivered),
            "orders_refused": ("Refusals of orders by nodes.", deliveries.refused),
            "visits_failed": ("Visits of members with orders that failed.", deliveries.failed),
            "strays_ended": ("Extents without a lease that were ended.", deliveries.strays),
        }
        for name, (text, value) in counters.items():
            yield CounterMetricFamily(f"farpool_manager_{name}", text, value)
        service = self._manager.lending.present
        if service is None:
            return
        counts = service.counts()
        yield GaugeMetricFamily("farpool_manager_leases", "Leases.", counts.leases)
        yield GaugeMetricFamily("farpool_manager_orders", "Orders that no node has confirmed.", counts.orders)
        lent = GaugeMetricFamily("farpool_manager_lent_bytes", "Bytes lent, with copies.", labels=("tenant", "medium"))
        for (tenant, medium), size in sorted(counts.lent.items()):
            lent.add_metric([str(tenant), medium], size)
        yield lent
