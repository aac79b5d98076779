"""The parts of a manager that all requests share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from farpool.abc.registry import Registry
from farpool.closing import Closing
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.manager.access import FailureLimit
from farpool.cluster.manager.alarm_watch import AlarmWatch
from farpool.cluster.manager.alarms import LOOK_INTERVAL_S
from farpool.cluster.manager.audit import AuditLog
from farpool.cluster.manager.calls import Calls
from farpool.cluster.manager.deliverer import Deliverer
from farpool.cluster.manager.feed import Feed, revision_of
from farpool.cluster.manager.lending import Lending
from farpool.cluster.manager.member_stats import MemberAnswers
from farpool.cluster.manager.presence import Presence
from farpool.cluster.manager.records import ManagerRecord
from farpool.cluster.manager.repairs import RepairPolicy, RepairService
from farpool.cluster.members import RegistryMembers
from farpool.cluster.node.logs import log
from farpool.errors import FarpoolError

__all__ = ["Manager", "Settings"]

_Result = TypeVar("_Result")

_REGISTRY_THREADS = 16
_REGISTRY_WAITING_MAX = 256
_MEMBER_THREADS = 16
_MEMBER_WAITING_MAX = 2000
_LEASE_THREADS = 64
"""Requests about leases wait for one transaction together, so that many of them need many threads."""
_LEASE_WAITING_MAX = 1000
_READY_S = 0.5
"""Seconds for which an answer about the registry counts, so that probes without credentials cannot flood it."""
_READY_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a manager.

    Attributes
    ----------
    record : ManagerRecord
        The manager's entry in the registry.
    audit : Path
        File of the audit log.
    is_plain_loopback : bool
        True if the manager listens on loopback, without TLS.
    token_required : bool
        True if users of this host need a token even while there is none.
    ttl : float
        Seconds without a sign of this manager after which another one becomes the leader.
    repair : RepairPolicy or None
        How the manager repairs while it leads; None if it does not repair.
    alarm_interval : float
        Seconds between two looks at the pool for alarms. All times of alarms grow with it.
    """

    record: ManagerRecord
    audit: Path
    is_plain_loopback: bool = True
    token_required: bool = False
    ttl: float = 3.0
    repair: RepairPolicy | None = None
    alarm_interval: float = LOOK_INTERVAL_S


@dataclass
class _Ready:
    revision: int = -1
    until: float = 0.0
    asked: asyncio.Task[int] | None = field(default=None, repr=False)


class Manager(Closing):
    """The parts of a manager: threads for the registry and for members, events, leases, audit log. For one event loop.

    Parameters
    ----------
    registry : Registry
        The registry; its owner closes it after this object.
    settings : Settings
        Settings.
    ended : callable
        Called from any thread if the manager cannot go on, with the reason.
    """

    def __init__(self, registry: Registry, settings: Settings, ended: Callable[[FarpoolError], None]) -> None:
        self.registry, self.settings = registry, settings
        self.end = ended
        self.limit = FailureLimit()
        self._ready = _Ready()
        with ExitStack() as undo:
            self.audit = undo.enter_context(AuditLog(settings.audit))
            self.calls = undo.enter_context(Calls(_REGISTRY_THREADS, _REGISTRY_WAITING_MAX, "farpool-manager"))
            self.member_calls = undo.enter_context(Calls(_MEMBER_THREADS, _MEMBER_WAITING_MAX, "farpool-manager-ask"))
            self.answers = MemberAnswers(self.member_calls)
            self.lease_calls = undo.enter_context(Calls(_LEASE_THREADS, _LEASE_WAITING_MAX, "farpool-manager-leases"))
            self.members = undo.enter_context(RegistryMembers(registry, timeout=1.0, required=False))
            self.presence = undo.enter_context(Presence(registry, settings.record, settings.ttl))
            self.repairs: RepairService | None = None
            if settings.repair is not None:
                service = RepairService(self.members, settings.repair, lambda: self.presence.leads)
                self.repairs = undo.enter_context(service)
            self.feed = undo.enter_context(Feed(registry, self.end))
            self.lending = undo.enter_context(Lending(registry))
            self.deliverer = undo.enter_context(Deliverer(self.lending, self.presence))
            alarms = AlarmWatch(registry, self.presence, self.lending, self.repairs, settings.alarm_interval)
            self.alarms = undo.enter_context(alarms)
            self._undo = undo.pop_all()

    def start(self) -> None:
        """Start the threads. Call this in the event loop."""
        self.feed.start()
        self.presence.start()
        self.lending.start()
        self.deliverer.start()
        self.alarms.start()
        if self.repairs is not None:
            self.repairs.start()
        self.audit.add("started", manager=self.settings.record.manager, address=self.settings.record.address)

    def close(self) -> None:
        """End all parts. Idempotent."""
        self._undo.close()

    async def ask(self, act: Callable[[Registry], _Result]) -> _Result:
        """Call a function with the registry in a thread, and return its result.

        Raises
        ------
        BusyError
            Too many calls wait for a thread.
        """
        return await self.calls.run(lambda: act(self.registry))

    async def lend(self, act: Callable[[LeaseService], _Result]) -> _Result:
        """Call a function with the service of leases in a thread, and return its result.

        Raises
        ------
        BusyError
            Too many calls wait for a thread.
        RegistryAwayError
            The registry could not be read since the manager started.
        """
        return await self.lease_calls.run(lambda: act(self.lending.service))

    async def revision(self) -> int:
        """Return the registry's revision of a moment ago. All callers at the same time share one request to it."""
        ready = self._ready
        if ready.revision >= 0 and time.monotonic() < ready.until:
            return ready.revision
        if ready.asked is None or ready.asked.done():
            ready.asked = asyncio.create_task(self._ask_revision())
        # A caller that goes away must not end the request of the others.
        return await asyncio.shield(ready.asked)

    async def _ask_revision(self) -> int:
        revision = await self.ask(lambda registry: revision_of(registry, _READY_TIMEOUT_S))
        self._ready.revision, self._ready.until = revision, time.monotonic() + _READY_S
        return revision

    async def record(self, event: str, **fields: object) -> None:
        """Write a line into the audit log, and wait for it a short time."""
        written = asyncio.wrap_future(self.audit.add(event, **fields))
        try:
            async with asyncio.timeout(2.0):
                await asyncio.shield(written)
        except (OSError, TimeoutError):
            # The line stays in memory until it can be written, unless too many lines wait.
            log("audit log not written", level=logging.ERROR, reason=self.audit.trouble or "the disk is slow")
            written.add_done_callback(lambda one: one.cancelled() or one.exception())
