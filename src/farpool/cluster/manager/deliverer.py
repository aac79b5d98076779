"""Visits members for the leading manager: gives them orders, and ends extents that no lease names."""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from farpool.abc.registry import Registry
from farpool.closing import Closing
from farpool.cluster.leases.records import LeaseRecord, OrderRecord, decode, lease_key, order_key
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.leases.tickets import Order
from farpool.cluster.manager.deliveries import Deliveries, Held, Reach, Report, Visit
from farpool.cluster.manager.lending import Lending
from farpool.cluster.manager.presence import Presence
from farpool.cluster.node.logs import log
from farpool.cluster.wire.access import client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.decoding import prepared
from farpool.errors import FarpoolError, NodeError, ProtocolError, TicketError

__all__ = ["Deliverer", "order_of"]

_INTERVAL_S = 0.2
_VISITS_MAX = 16
_CONNECT_TIMEOUT_S = 3.0
_VISIT_TIMEOUT_S = 10.0
_ADDRESSES_MAX = 3
_REASON_CHARACTERS_MAX = 256


class _Holding(msgspec.Struct):
    """An entry of a node's answer to ``holdings``."""

    pool_lease: str
    extent: int
    epoch: int
    seconds: float


def order_of(record: OrderRecord) -> Order:
    """Return the order that a node gets for an order in the registry."""
    return Order(
        lease=bytes.fromhex(record.lease),
        member=bytes.fromhex(record.member),
        epoch=record.epoch,
        action="end",
        extents=(record.extent,),
        issued_ms=int(record.issued * 1000),
        reason=record.reason[:_REASON_CHARACTERS_MAX],
    )


class Deliverer(Closing):
    """Visits members while this manager leads. All of its work can be done twice, by two managers, without harm.

    Parameters
    ----------
    lending : Lending
        Leases and keys.
    presence : Presence
        Tells whether this manager leads.
    deliveries : Deliveries, optional
        Decides on the visits.

    Attributes
    ----------
    deliveries : Deliveries
        Decides on the visits; other threads may read its counters.
    """

    def __init__(self, lending: Lending, presence: Presence, deliveries: Deliveries | None = None) -> None:
        self.deliveries = deliveries or Deliveries(random.Random(), visits_max=_VISITS_MAX)
        self._lending, self._presence = lending, presence
        self._reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._visitors = ThreadPoolExecutor(_VISITS_MAX, thread_name_prefix="farpool-manager-visit")
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="farpool-manager-orders", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Begin no further visits. Visits that are under way end by their own deadlines. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._visitors.shutdown(wait=False, cancel_futures=True)

    # Only the thread calls the methods below.

    def _keep(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            trouble = ""
            try:
                self._step()
            except Exception as error:  # without this thread, no memory would ever come back
                trouble = f"{type(error).__name__}: {error}"
            if trouble and trouble != self._trouble:
                log("orders wait", level=logging.ERROR, reason=trouble)
            self._trouble = trouble

    def _step(self) -> None:
        service, now = self._lending.present, time.monotonic()
        if service is None:
            return
        for report in self._ended_visits():
            self.deliveries.ended(report, service.names, now)
            if report.error and self.deliveries.failures(report.member) == 1:
                log("orders wait", level=logging.WARNING, member=report.member, reason=report.error)
            for key, reason in report.refused.items():
                log("order refused", level=logging.WARNING, order=key, reason=reason)
        if not self._presence.leads:
            self.deliveries.rest()
            return
        members = {
            member: None if record is None or state is None else Reach(record.addresses, state)
            for member, (record, state) in service.members().items()
        }
        waiting = service.waiting_orders(self.deliveries.orders_max, self.deliveries.held_back(now))
        for visit in self.deliveries.due(waiting, members, now):
            self._visitors.submit(self._visit, service, visit)

    def _ended_visits(self) -> Iterator[Report]:
        while True:
            try:
                yield self._reports.get_nowait()
            except queue.Empty:
                return

    # Threads of their own call the methods below.

    def _visit(self, service: LeaseService, visit: Visit) -> None:
        try:
            report = self._visited(service, visit)
        except Exception as error:  # without a report, the member would never be visited again
            report = Report(visit.member, error=f"{type(error).__name__}: {error}")
        self._reports.put(report)

    def _visited(self, service: LeaseService, visit: Visit) -> Report:
        error = "it has no address"
        for address in visit.addresses[:_ADDRESSES_MAX]:
            # This manager proves who it is as any client does, with its own key or certificate.
            channel = Channel(parse_address(address), key=client_key(), transport="tcp")
            channel.expected = bytes.fromhex(visit.member)
            try:
                channel.connect(time.monotonic() + _CONNECT_TIMEOUT_S)
                return _carry_out(channel, visit, self._lending, service, self._ended)
            except NodeError as failure:
                error = str(failure)
            finally:
                channel.close()
        return Report(visit.member, error=error)


def _carry_out(
    channel: Channel, visit: Visit, lending: Lending, service: LeaseService, ending: threading.Event
) -> Report:
    until = time.monotonic() + _VISIT_TIMEOUT_S
    done: list[OrderRecord] = []
    refused: dict[str, str] = {}
    strays, held, error = 0, None, ""
    try:
        for record in visit.orders:
            if ending.is_set():
                break
            try:
                channel.call("order", until, order=lending.sign(order_of(record)))
                done.append(record)
            except TicketError as refusal:
                refused[record.key] = str(refusal)
        for stray in visit.strays:
            strays += _end_stray(channel, visit.member, stray, lending, until)
        if visit.looks:
            held = tuple(_holdings(channel, until))
    except FarpoolError as failure:
        error = str(failure)
    try:
        # What is not recorded now is ordered again, which does nothing.
        service.confirm_all(done)
    except FarpoolError as failure:
        done, error = [], str(failure)
    return Report(visit.member, len(done), refused, strays, held, error)


def _end_stray(channel: Channel, member: str, stray: Held, lending: Lending, until: float) -> bool:
    """End an extent that no lease has; return False if the registry has a lease or an order for it after all."""
    epoch = _epoch_to_end(lending.registry, member, stray)
    if epoch is None:
        return False
    order = Order(
        lease=bytes.fromhex(stray.lease),
        member=bytes.fromhex(member),
        epoch=epoch,
        action="end",
        extents=(stray.extent,),
        issued_ms=int(time.time() * 1000),
        reason="no lease in the registry has this extent",
    )
    log("stray extent ends", level=logging.WARNING, member=member, lease=stray.lease, extent=stray.extent)
    channel.call("order", until, order=lending.sign(order))
    return True


def _epoch_to_end(registry: Registry, member: str, stray: Held) -> int | None:
    """Return the epoch of an order that ends a stray and no valid ticket; None if it is no stray."""
    lease, order = lease_key(stray.lease), order_key(member, stray.lease, stray.extent)
    entries = {entry.key: entry for entry in registry.range(lease, order).entries}
    if order in entries:
        return None
    if lease not in entries:
        return stray.epoch + 1
    record = decode(lease, entries[lease].value, LeaseRecord)
    if any((one.member, one.number) == (member, stray.extent) for one in record.extents):
        return None
    # A later epoch than the lease's would end the holder's tickets for its other extents here.
    return record.epoch if record.epoch > stray.epoch else None


def _holdings(channel: Channel, until: float) -> Iterator[Held]:
    """Yield the extents that a node has, each once, with the longest claim."""
    found: dict[tuple[str, int], Held] = {}
    after = 0
    while True:
        answer = channel.call("holdings", until, after=after)
        try:
            page = msgspec.convert(answer["holdings"], prepared(list[_Holding]))
            following = msgspec.convert(answer["next"], prepared(int))
        except (KeyError, msgspec.ValidationError) as error:
            raise ProtocolError(f"{channel.name} answered holdings with something else: {error}") from error
        for one in page:
            if one.pool_lease:
                key = one.pool_lease, one.extent
                other = found.get(key, Held(*key, 0, 0.0))
                found[key] = Held(*key, max(one.epoch, other.epoch), max(one.seconds, other.seconds))
        if not following:
            break
        after = following
    yield from found.values()
