"""Events that follow from changes of the registry.

Each change of an entry gives the same event, whichever manager reports it and wherever its stream begins. So a client
can continue its stream at any manager.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from farpool.abc.registry import Changes, Entry
from farpool.cluster.leases.records import LEASE, ORDERS, LeaseRecord, OrderRecord
from farpool.cluster.leases.records import decode as decode_lease
from farpool.cluster.manager.records import ALARMS, IDENTITIES, LEADER, RUNNING, TOKENS, AlarmRecord, ManagerRecord
from farpool.cluster.manager.records import decode as decode_manager
from farpool.cluster.members.records import ALIVE, RECORD, AliveRecord, MemberRecord
from farpool.cluster.members.records import decode as decode_member
from farpool.cluster.names.records import NameRecord, name_of
from farpool.cluster.names.records import decode as decode_name
from farpool.errors import RegistryDamagedError

__all__ = ["EVENTS", "Event", "RecentSteps", "Step", "step_of", "steps_of"]

_NAME = "name/"


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Attributes
    ----------
    kind : str
        Kind, such as ``member.joined``.
    data : dict
        Fields of the event.
    """

    kind: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Step:
    """The events of one transaction of the registry.

    Attributes
    ----------
    revision : int
        Revision of the transaction.
    events : tuple of Event
        The events, perhaps none.
    credentials : frozenset of str
        Keys of tokens and identities that the transaction changed.
    """

    revision: int
    events: tuple[Event, ...]
    credentials: frozenset[str] = frozenset()


def _member_record(entry: Entry) -> Event:
    identity = entry.key.removeprefix(RECORD)
    if entry.deleted:
        return Event("member.left", {"identity": identity})
    record = msgspec.to_builtins(decode_member(entry, MemberRecord))
    names = ("name", "addresses", "weight", "full_weight", "labels", "media", "version", "draining")
    kind = "member.draining" if record["draining"] else "member.changed"
    return Event(kind, {"identity": identity, **{name: record[name] for name in names}})


def _member_process(entry: Entry) -> Event:
    fields: dict[str, Any] = {"identity": entry.key.removeprefix(ALIVE)}
    if entry.deleted:
        return Event("member.suspect", fields)
    alive = decode_member(entry, AliveRecord)
    fields["process"] = alive.process
    if not alive.ready:
        return Event("member.returning" if alive.returns else "member.joining", fields)
    return Event("member.active" if alive.returns else "member.joined", fields)


def _name(entry: Entry) -> Event:
    name = name_of(entry.key.removeprefix(_NAME))
    if entry.deleted:
        return Event("name.deleted", {"name": name})
    record = decode_name(entry.value, NameRecord, entry.key)
    kind = "name.published" if record.publication else "name.unpublished"
    fields = {"version": record.version, "nbytes": record.nbytes, "objects": record.objects, "writer": record.writer}
    return Event(kind, {"name": name, **fields})


def _lease(entry: Entry) -> Event | None:
    lease = entry.key.removeprefix(LEASE)
    if entry.deleted:
        return Event("lease.ended", {"lease": lease})
    record = decode_lease(entry.key, entry.value, LeaseRecord)
    if record.change == "renewed":
        return None  # there are many, and they are of no use to others
    terms = record.terms
    fields: dict[str, Any] = {
        "lease": lease,
        "tenant": terms.tenant,
        "holder": terms.holder,
        "bytes": terms.bytes,
        "medium": terms.medium,
        "redundancy": terms.redundancy,
        "epoch": record.epoch,
        "extents": len(record.extents),
    }
    if record.change == "wanted-back":
        fields["wanted_back"] = [[one.member, one.number, one.reclaim_by] for one in record.extents if one.reclaim_by]
    return Event(f"lease.{record.change}", fields)


def _order(entry: Entry) -> Event:
    member, _, name = entry.key.removeprefix(ORDERS).partition("/")
    lease, _, extent = name.rpartition("-")
    if not extent.isdecimal():
        raise RegistryDamagedError(f"the registry's key {entry.key!r} names no extent; delete it", key=entry.key)
    fields: dict[str, Any] = {"member": member, "lease": lease, "extent": int(extent)}
    if entry.deleted:
        return Event("extent.freed", fields)
    record = decode_lease(entry.key, entry.value, OrderRecord)
    return Event("extent.ended", {**fields, "tenant": record.tenant, "bytes": record.bytes, "reason": record.reason})


def _leader(entry: Entry) -> Event:
    return Event("manager.no-leader", {}) if entry.deleted else Event("manager.leads", _manager_fields(entry))


def _running(entry: Entry) -> Event:
    if entry.deleted:
        return Event("manager.stopped", {"manager": entry.key.removeprefix(RUNNING)})
    return Event("manager.started", _manager_fields(entry))


def _alarm(entry: Entry) -> Event:
    if entry.deleted:
        kind, _, subject = entry.key.removeprefix(ALARMS).partition("/")
        return Event("alarm.cleared", {"kind": kind, "subject": subject})
    fields: dict[str, Any] = msgspec.to_builtins(decode_manager(entry, AlarmRecord))
    del fields["format"]
    return Event("alarm.raised", fields)


def _manager_fields(entry: Entry) -> dict[str, Any]:
    record = decode_manager(entry, ManagerRecord)
    return {"manager": record.manager, "address": record.address, "process": record.process}


EVENTS: dict[str, Callable[[Entry], Event | None]] = {
    RECORD: _member_record,
    ALIVE: _member_process,
    _NAME: _name,
    LEASE: _lease,
    ORDERS: _order,
    LEADER: _leader,
    RUNNING: _running,
    ALARMS: _alarm,
}
"""Beginnings of keys whose changes are events, and the function that makes the event; None for a change without one."""


def steps_of(changes: Changes) -> Iterable[Step]:
    """Yield a step for each transaction that has events, or that changes tokens or identities."""
    by_revision: dict[int, list[Entry]] = {}
    for entry in changes.entries:
        by_revision.setdefault(entry.revision, []).append(entry)
    for revision, entries in by_revision.items():
        step = step_of(revision, entries)
        if step.events or step.credentials:
            yield step


def step_of(revision: int, entries: Iterable[Entry]) -> Step:
    """Return the events of one transaction. An entry that cannot be read gives the event ``damaged``."""
    events: list[Event] = []
    credentials: set[str] = set()
    for entry in entries:
        if entry.key.startswith((TOKENS, IDENTITIES)):
            credentials.add(entry.key)
        for prefix, make in EVENTS.items():
            if entry.key.startswith(prefix):
                try:
                    event = make(entry)
                    events += [event] if event else []
                except Exception as error:  # whatever it has: no stream could go on after this entry
                    events.append(Event("damaged", {"key": entry.key, "reason": str(error)}))
                break
    return Step(revision, tuple(events), frozenset(credentials))


class RecentSteps:
    """The latest steps, for many readers. Not thread-safe, no I/O.

    Parameters
    ----------
    steps_max : int
        Number of steps to keep.

    Attributes
    ----------
    revision : int
        All steps up to this revision are known; -1 before `begin`.
    since : int
        All steps after this revision are kept.
    """

    def __init__(self, steps_max: int = 4096) -> None:
        self.revision = self.since = -1
        self._steps_max = steps_max
        self._steps: list[Step] = []
        self._revisions: list[int] = []

    def begin(self, revision: int) -> None:
        """Forget all steps, and go on after a revision."""
        self.revision = self.since = revision
        self._steps, self._revisions = [], []

    def add(self, steps: Iterable[Step], revision: int) -> None:
        """Add steps; from now on all steps up to `revision` are known."""
        for step in steps:
            self._steps.append(step)
            self._revisions.append(step.revision)
        self.revision = max(self.revision, revision, *self._revisions[-1:])
        # Twice the number, so that not each call moves the whole list.
        if len(self._steps) > 2 * self._steps_max:
            cut = len(self._steps) - self._steps_max
            self.since = self._revisions[cut - 1]
            del self._steps[:cut], self._revisions[:cut]

    def after(self, revision: int) -> list[Step] | None:
        """Return the steps after a revision; None if some of them are not kept."""
        if self.revision < 0 or revision < self.since:
            return None
        return self._steps[bisect.bisect_right(self._revisions, revision) :]
