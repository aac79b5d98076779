"""Looks at the pool for the leading manager, and writes the alarms that follow from it into the registry.

All managers count how often members are lost, and know the raised alarms. Only the leader asks the members, and only it
writes, in transactions that fail once another manager leads. Members are asked over connections that stay open.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

import msgspec

from farpool.abc.membership import MemberState
from farpool.abc.registry import Delete, Operation, Put, Registry, Watch
from farpool.closing import Closing
from farpool.cluster.manager.alarms import Alarms, Answer, Change, Key, Limits, Repair, Seen
from farpool.cluster.manager.lending import Lending
from farpool.cluster.manager.presence import Presence
from farpool.cluster.manager.records import ALARMS, AlarmRecord, alarm_key, decode, encode
from farpool.cluster.manager.repairs import RepairService
from farpool.cluster.members.records import ALIVE, MemberRecord
from farpool.cluster.node.logs import log
from farpool.cluster.repair.messages import Unmended
from farpool.cluster.roles import HeldRole
from farpool.cluster.tenants.records import FLEET
from farpool.cluster.wire.access import client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.decoding import prepared
from farpool.errors import FarpoolError, RegistryDamagedError, RegistryError

__all__ = ["AlarmWatch", "read_alarms"]

_THREADS = 16
_ADDRESSES_MAX = 3
_CONNECT_TIMEOUT_S = 3.0
_CALL_TIMEOUT_S = 2.0
_END_LOOK_S = 0.2
_CLOCK_CALL_MAX_S = 1.0
"""Longest call whose answer says what the time at the member is."""
_OPERATIONS_MAX = 100
_PROGRESS = ("scans", "mended", "copied", "nbytes", "gone", "failed", "moved", "dropped", "held_back")


def read_alarms(registry: Registry, timeout: float | None = None) -> list[AlarmRecord]:
    """Read the alarms that are raised, by kind and subject. Entries that cannot be read are left out."""
    found = []
    for entry in registry.range(ALARMS, timeout=timeout).entries:
        with suppress(RegistryDamagedError):
            found.append(decode(entry, AlarmRecord))
    return sorted(found, key=lambda one: (one.kind, one.subject))


class AlarmWatch(Closing):
    """Looks at the pool in a thread.

    Parameters
    ----------
    registry : Registry
        The registry.
    presence : Presence
        Tells whether this manager leads.
    lending : Lending
        Knows the members.
    repairs : RepairService or None
        Repair of this manager; None if it does not repair.
    interval : float
        Seconds between two looks. All times of alarms grow with it.
    """

    def __init__(
        self, registry: Registry, presence: Presence, lending: Lending, repairs: RepairService | None, interval: float
    ) -> None:
        self._registry, self._presence, self._lending, self._repairs = registry, presence, lending, repairs
        self._interval = interval
        self._alarms = Alarms(Limits().at(interval))
        self._raised: dict[Key, AlarmRecord] = {}
        self._watch: Watch | None = None
        self._channels: dict[str, Channel] = {}
        self._askers = ThreadPoolExecutor(_THREADS, thread_name_prefix="farpool-manager-look")
        self._trouble = ""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="farpool-manager-alarms", daemon=True)

    @property
    def raised(self) -> Mapping[Key, AlarmRecord]:
        """The alarms that are raised, by kind and subject, as the registry had them at the last look."""
        return self._raised

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread. Questions that are under way end by their own deadlines. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._askers.shutdown(wait=False, cancel_futures=True)
        self._drop_channels(list(self._channels))
        self._stop_watching()

    # Only the thread calls the methods below.

    def _keep(self) -> None:
        while not self._ended.wait(self._interval):
            trouble = ""
            try:
                self._step()
            except Exception as error:  # no alarm would ever be raised again without this thread
                trouble = f"{type(error).__name__}: {error}"
                self._stop_watching()
            if trouble and trouble != self._trouble:
                log("alarms stay as they were", level=logging.ERROR, reason=trouble)
            self._trouble = trouble

    def _step(self) -> None:
        self._count_losses()
        self._raised = {(one.kind, one.subject): one for one in read_alarms(self._registry, _CALL_TIMEOUT_S)}
        leadership, service = self._presence.leadership, self._lending.present
        if leadership is None or service is None:
            self._alarms.rest()
            self._drop_channels(list(self._channels))
            return
        members = service.members()
        answers = self._ask(
            {
                identity: record
                for identity, (record, state) in members.items()
                if record is not None and state not in (None, MemberState.SUSPECT, MemberState.JOINING)
            }
        )
        if self._ended.is_set():
            return
        seen = Seen(
            now=time.monotonic(),
            wall=time.time(),
            manager=self._presence.record.manager,
            members={identity: record.name if record else "" for identity, (record, _) in members.items()},
            answers=answers,
            repairs=self._repair(),
            policy=self._policy(),
        )
        self._write(leadership, self._alarms.look(seen, self._raised))

    def _count_losses(self) -> None:
        """Follow the members' processes. What happened while they could not be followed is not counted."""
        try:
            if self._watch is None:
                revision = self._registry.range(ALIVE, timeout=_CALL_TIMEOUT_S).revision
                self._watch = self._registry.watch(ALIVE, revision)
            for entry in self._watch.next(0).entries:
                if entry.deleted:
                    self._alarms.lost(entry.key.removeprefix(ALIVE), time.monotonic())
        except RegistryError:
            self._stop_watching()
            raise

    def _stop_watching(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            with suppress(Exception):  # the registry may be gone
                watch.close()

    def _policy(self) -> int | None:
        """Return the revision of the registry's policy of tenants; 0 if it has none, and None if it is damaged."""
        try:
            entry = self._registry.get(FLEET, timeout=_CALL_TIMEOUT_S)
        except RegistryDamagedError:
            return None
        return 0 if entry is None else entry.revision

    def _repair(self) -> dict[int, Repair]:
        if self._repairs is None:
            return {}
        statuses = self._repairs.statuses()
        return {tenant: _repair_of(status) for tenant, status in statuses.items() if status["exposure"] is not None}

    def _write(self, leadership: HeldRole, changes: Sequence[Change]) -> None:
        for at in range(0, len(changes), _OPERATIONS_MAX):
            some = changes[at : at + _OPERATIONS_MAX]
            operations: list[Operation] = [
                Delete(alarm_key(*one.key)) if one.record is None else Put(alarm_key(*one.key), encode(one.record))
                for one in some
            ]
            if not leadership.commit([], operations, timeout=_CALL_TIMEOUT_S).succeeded:
                return  # the next look finds the same
            for change in some:
                record = change.record or self._raised.get(change.key)
                level = logging.WARNING if change.record else logging.INFO
                event = "alarm raised" if change.record else "alarm cleared"
                about, text = (record.about, record.text) if record else (change.key[1], "")
                log(event, level=level, alarm=change.key[0], about=about, text=text)
                if change.record:
                    self._raised = {**self._raised, change.key: change.record}
                else:
                    self._raised = {key: one for key, one in self._raised.items() if key != change.key}

    # The members. Each is asked by one thread at a time.

    def _ask(self, members: Mapping[str, MemberRecord]) -> dict[str, Answer]:
        self._drop_channels(self._channels.keys() - members.keys())
        asked = {member: self._askers.submit(self._answer, member, record) for member, record in members.items()}
        # The leader's role is given up only after this thread has ended, so it must not wait for members then.
        while wait(asked.values(), _END_LOOK_S).not_done and not self._ended.is_set():
            pass
        answers = {member: future.result() for member, future in asked.items() if future.done()}
        return {member: answer for member, answer in answers.items() if answer is not None}

    def _answer(self, member: str, record: MemberRecord) -> Answer | None:
        channel = self._channels.get(member)
        if channel is not None:
            with suppress(FarpoolError, msgspec.ValidationError):
                return _stats(channel)
            self._drop_channels([member])  # it has started again, perhaps at another address
        for address in record.addresses[:_ADDRESSES_MAX]:
            if self._ended.is_set():
                break
            # This manager proves who it is as any client does, with its own key or certificate.
            channel = Channel(parse_address(address), key=client_key(), transport="tcp")
            channel.expected = bytes.fromhex(member)
            try:
                channel.connect(time.monotonic() + _CONNECT_TIMEOUT_S)
                answer = _stats(channel)
            except (FarpoolError, msgspec.ValidationError):
                channel.close()
                continue
            self._channels[member] = channel
            if self._ended.is_set():
                channel.close()
            return answer
        return None

    def _drop_channels(self, members: Iterable[str]) -> None:
        for member in list(members):
            channel = self._channels.pop(member, None)
            if channel is not None:
                channel.close()


def _stats(channel: Channel) -> Answer:
    began = time.monotonic()
    found: dict[str, Any] = channel.call("stats", began + _CALL_TIMEOUT_S, tenants=True)
    took = time.monotonic() - began
    tenants = msgspec.convert(found.pop("tenants", None), prepared(dict[int, dict[str, int]] | None))
    counters = {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }
    if took > _CLOCK_CALL_MAX_S:
        counters.pop("clock", None)
    return Answer(time.time() - took / 2, counters, tenants)


def _repair_of(status: Mapping[str, Any]) -> Repair:
    left: list[Unmended] = status["left"]
    return Repair(
        lacking=status["lacking"],
        failed=len(left),
        reason="; ".join(left[0].reasons) if left else "",
        progress=sum(status[name] for name in _PROGRESS),
        copied=status["copied"],
        asked=status["asked"],
        found=status["found"],
    )
