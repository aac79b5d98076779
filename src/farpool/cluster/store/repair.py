"""Repair: carries out what a `RepairEngine` decides, with the members of a store.

`repair` does one sweep in the thread of its caller, and the bytes travel through this program. `Repairs` goes on until
it is closed: it follows members and their changes, and members copy from each other directly.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from farpool.abc.membership import MemberInfo, MemberState
from farpool.closing import Closing
from farpool.cluster.repair.engine import RepairEngine
from farpool.cluster.repair.messages import (
    Action,
    Check,
    CopyOrder,
    DropOrder,
    Held,
    ListPage,
    Outcome,
    Settings,
    Unmended,
)
from farpool.cluster.repair.rate import Bucket
from farpool.cluster.store.driver import probe
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.plan import is_away
from farpool.cluster.store.reading import require_few
from farpool.cluster.store.upkeep import copy
from farpool.cluster.wire.features import COPY_ORDERS
from farpool.cluster.wire.frames import HEAD, KEPT, STATED, Op, Status
from farpool.errors import FarpoolError, NodeError, ProtocolError, QuotaExceededError

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.wire.channel import Channel

__all__ = ["Repaired", "Repairs", "Unmended", "repair"]

_SWEEP = Settings(
    follows=False, grace=0.0, rebalances=False, pages_max=1, tries_max=2, first_pause=0.02, left_max=None, pressure=0.0
)
"""A sweep asks each member once, and counts those that do not answer as lost."""
_WORKERS = 8
_POLL_S = 1.0
"""Seconds between two requests for a member's changes."""
_TTL_MIN_MS = 60_000
"""Milliseconds that an object has to live for `Repairs` to look at it."""
_REST_S = 0.5
"""Longest time without a look at the members."""

_LOG = logging.getLogger("farpool.repair")
_Told = Callable[[float], None]
"""Tells the engine the result of an action, at a time of `time.monotonic`."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """Outcome of a repair sweep over all nodes.

    Attributes
    ----------
    objects : int
        Objects that were found.
    endangered : int
        Objects that had too few copies. Copies on draining nodes do not count. If nodes must never evict an object
        (`Store.touch` with ``keep``), a copy counts only if its node never evicts it.
    mended : int
        Endangered objects that have all their copies now.
    nbytes : int
        Bytes that were copied.
    gone : int
        Endangered objects that were dropped, released, evicted or expired while the sweep was under way.
    left : tuple of Unmended
        Endangered objects that still have too few copies.
    """

    objects: int
    endangered: int
    mended: int
    nbytes: int
    gone: int = 0
    left: tuple[Unmended, ...] = ()


def repair(cluster: Cluster, bandwidth: float | None, progress: Callable[[int, int], None] | None = None) -> Repaired:
    """Restore the missing copies of objects that have too few copies; see `Store.repair`."""
    cluster.tell_epoch(cluster.deadline())  # because requests for a listing do not contain the epoch
    view = cluster.reachable(cluster.deadline())
    failures = [member.absence() for member in view.strangers]
    require_few(cluster, failures)
    engine = RepairEngine(cluster.redundancy, _SWEEP, Bucket(bandwidth), Bucket(None))
    hands = _Hands(cluster, engine, directly=False)
    engine.set_members(_infos(cluster, suspects_count=True), time.monotonic())
    engine.scan()
    counts = engine.counts
    while not engine.is_idle:
        actions = list(engine.actions(time.monotonic()))
        for action in actions:
            if progress is not None and isinstance(action, CopyOrder):
                progress(counts.mended + counts.gone + counts.failed, counts.endangered)
            hands.carry_out(action)(time.monotonic())
        failures += hands.list_failures
        hands.list_failures.clear()
        require_few(cluster, failures)
        if not actions:
            now = time.monotonic()
            time.sleep(min(_REST_S, max(0.0, engine.next_time(now) - now)))
    if progress is not None:
        progress(counts.endangered, counts.endangered)
    left = tuple(counts.left.values())
    return Repaired(counts.objects, counts.endangered, counts.mended, counts.nbytes, counts.gone, left)


class Repairs(Closing):
    """Keeps the copies of one tenant's objects, in a thread, until it is closed.

    Parameters
    ----------
    cluster : Cluster
        The members; it is closed with this object.
    settings : Settings
        Settings of the engine.
    nbytes_rate, objects_rate : Bucket
        Bytes and objects that may be copied per second.
    interval : float
        Seconds between two scans, even if no member changes.
    may_act : callable
        Returns True while this process may order copies. While it is False, nothing is ordered, and afterwards
        everything is scanned again.
    """

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        *,
        nbytes_rate: Bucket,
        objects_rate: Bucket,
        interval: float = 3600.0,
        may_act: Callable[[], bool] = lambda: True,
    ) -> None:
        self._cluster = cluster
        self._rates = nbytes_rate, objects_rate
        self._settings = settings
        self._interval = interval
        self._may_act = may_act
        self._scan_at = 0.0
        self._ended = threading.Event()
        self._done: queue.SimpleQueue[_Told] = queue.SimpleQueue()
        # Protects the engine, which `status` reads from other threads.
        self._lock = threading.Lock()
        self._begin()
        self._thread = threading.Thread(target=self._work, name="farpool-repair", daemon=True)
        self._thread.start()

    def status(self) -> dict[str, Any]:
        """Return the work since this process may act, and the cost of each loss by the last scan."""
        with self._lock:
            counts = self._engine.counts
            fields = {name: getattr(counts, name) for name in counts.__slots__ if name != "left"}
            return {
                **fields,
                "waiting": self._engine.waiting,
                "lacking": self._engine.lacking,
                "asked": self._hands.asked,
                "found": self._hands.found,
                "left": list(counts.left.values()),
                "exposure": self._engine.exposure(),
            }

    def close(self) -> None:
        """End the thread. Orders under way end by themselves. Idempotent."""
        self._ended.set()
        self._thread.join()

    def _begin(self) -> None:
        self._engine = RepairEngine(self._cluster.redundancy, self._settings, *self._rates)
        self._hands = _Hands(self._cluster, self._engine, directly=True, may_drop=self._may_act)
        self._changes = _Changes(self._engine)

    def _work(self) -> None:
        acts = False
        with ThreadPoolExecutor(_WORKERS, "farpool-repair") as workers:
            while not self._ended.is_set():
                try:
                    if self._may_act():
                        self._step(workers, begins=not acts)
                        acts = True
                        continue
                    acts = False
                except Exception:
                    # A new engine finds all that there is to do, and this thread must not end.
                    _LOG.exception("the repair of copies begins again after an error")
                    acts = False
                self._ended.wait(_REST_S)
            workers.shutdown(wait=False, cancel_futures=True)
            # Both end the requests that are under way.
            self._hands.close()
            self._cluster.close()

    def _step(self, workers: ThreadPoolExecutor, *, begins: bool) -> None:
        now = time.monotonic()
        with self._lock:
            if begins:
                # All knowledge is out of date, and late outcomes belong to the former engine.
                self._hands.close()
                self._begin()
                self._scan_at = now
            self._engine.set_members(_infos(self._cluster, suspects_count=False), now)
            if now >= self._scan_at:
                self._engine.scan()
                self._scan_at = now + self._interval
            actions = list(self._engine.actions(now))
            until = min(self._engine.next_time(now), now + _REST_S)
        for action in actions:
            workers.submit(self._do, partial(self._hands.carry_out, action))
        for member in self._changes.due(self._cluster, now):
            workers.submit(self._do, partial(self._changes.poll, member, self._cluster.deadline()))
        self._hear(until)

    def _do(self, act: Callable[[], _Told]) -> None:
        try:
            told = act()
        except Exception as error:
            told = partial(_raise, error)  # the thread with the engine begins again
        self._done.put(told)

    def _hear(self, until: float) -> None:
        """Wait for results until a time, and pass all that there are to the engine."""
        with suppress(queue.Empty):
            told = self._done.get(timeout=max(0.001, until - time.monotonic()))
            with self._lock:
                told(time.monotonic())
                while True:
                    self._done.get_nowait()(time.monotonic())


def _raise(error: Exception, now: float) -> None:
    raise error


class _Hands:
    """Carries out the actions of an engine.

    Parameters
    ----------
    cluster : Cluster
        The members.
    engine : RepairEngine
        The engine.
    directly : bool
        True if members copy from each other; False if the bytes travel through this program. They always do if the
        target is of an earlier release, which cannot copy.
    may_drop : callable
        Returns True if copies may be dropped now. It is asked a moment before each drop.

    Attributes
    ----------
    list_failures : list of NodeError
        Errors of members that could not be listed, if the bytes travel through this program.
    asked, found : int
        Keys that were looked up or copied at members, and keys of these that were there; about as many as the members
        have counted.
    """

    def __init__(
        self,
        cluster: Cluster,
        engine: RepairEngine,
        *,
        directly: bool,
        may_drop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.list_failures: list[NodeError] = []
        self.asked = self.found = 0
        self._cluster = cluster
        self._engine = engine
        self._directly = directly
        self._may_drop = may_drop
        self._after: dict[bytes, bytes] = {}
        # A control connection makes one call at a time, and a copy must not hold up lists: so copies have their own.
        self._lanes: defaultdict[bytes, queue.SimpleQueue[Channel]] = defaultdict(queue.SimpleQueue)
        self._channels: set[Channel] = set()
        self._counting = threading.Lock()

    def close(self) -> None:
        """Close the connections for copies, which ends calls that are under way on them."""
        for channel in list(self._channels):
            channel.close()

    def carry_out(self, action: Action) -> _Told:
        """Carry out an action; return a function that tells the engine the result. Raises no error."""
        if isinstance(action, ListPage):
            return self._list(action)
        if isinstance(action, Check):
            return self._check(action)
        return self._copy(action) if isinstance(action, CopyOrder) else self._drop(action)

    def _member(self, identity: bytes) -> Member | None:
        snapshot = self._cluster.snapshot
        found = snapshot.by_identity.get(identity)
        return found or next((one for one in snapshot.strangers if one.info.identity == identity), None)

    def _list(self, action: ListPage) -> _Told:
        engine, identity = self._engine, action.member
        objects: list[Held] | None = None
        is_last = True
        if (member := self._member(identity)) is not None:
            after = b"" if action.is_first else self._after[identity]
            try:
                page: dict[str, Any] = member.call("list", self._cluster.deadline(), after=after, prefix=b"")
                least = _TTL_MIN_MS if self._directly else 0
                objects = [
                    Held(key, nbytes, copies, is_kept=bool(kept))
                    for key, _, nbytes, ttl, _, copies, kept in page["objects"]
                    if not 0 < ttl < least
                ]
                self._after[identity], is_last = page["next"], not page["next"]
            except NodeError as error:
                if not self._directly:
                    self.list_failures.append(error)
        return lambda now: engine.listed(identity, objects, now, is_last=is_last)

    def _check(self, check: Check) -> _Told:
        engine = self._engine
        answers: Sequence[Held | None] | None = None
        if (member := self._member(check.member)) is not None:
            with suppress(FarpoolError):
                answers = self._stated(member, check.keys) if check.is_exact else self._looked_up(member, check.keys)
        return lambda now: engine.checked(check, answers, now)

    def _looked_up(self, member: Member, keys: tuple[bytes, ...]) -> list[Held | None]:
        answer = probe(self._cluster, {member: list(keys)}, self._cluster.deadline())[member]
        if isinstance(answer, Exception):
            raise answer
        with self._counting:
            self.asked += len(keys)
            self.found += sum(size is not None for size in answer.sizes)
        return [None if size is None else Held(key, size) for key, size in zip(keys, answer.sizes, strict=True)]

    def _stated(self, member: Member, keys: tuple[bytes, ...]) -> list[Held | None]:
        found: list[Held | None] = []
        for key, answer in zip(
            keys, self._cluster.ask([Ask(member, Op.STAT, key) for key in keys], self._cluster.deadline()), strict=True
        ):
            if isinstance(answer, Exception):
                raise answer
            held = None
            if answer.status == Status.DONE:
                nbytes, _, _ = STATED.unpack_from(answer.meta)
                _, copies, *_, flags = HEAD.unpack_from(answer.meta, STATED.size)
                held = Held(key, nbytes, copies, is_kept=bool(flags & KEPT))
            found.append(held)
        return found

    def _copy(self, order: CopyOrder) -> _Told:
        engine, silent = self._engine, b""
        source, target = self._member(order.source), self._member(order.target)
        if source is None or target is None:
            silent = order.source if source is None else order.target
            outcome, reason = Outcome.AWAY, "a member has left"
        elif self._directly and not target.lacks(COPY_ORDERS):
            outcome, reason = self._order(order, source, target)
        else:
            # A copy may be large, so it has the time of a call at least.
            copied = copy(self._cluster, order.key, source, target, max(self._cluster.deadline(), time.monotonic()))
            outcome, reason = copied.outcome, copied.reason(source.name, target.name)
            silent = {"source": order.source, "target": order.target}.get(copied.is_away, b"")

        def tell(now: float) -> None:
            if silent:
                engine.unheard(silent, now)
            engine.copied(order.number, outcome, now, reason)

        return tell

    def _order(self, order: CopyOrder, source: Member, target: Member) -> tuple[Outcome, str]:
        """Let the target copy the object from the source."""
        lane = self._lanes[order.target]
        try:
            channel = lane.get_nowait()
        except queue.Empty:
            channel = self._cluster.channel(target.name)
            channel.expected = order.target
            self._channels.add(channel)
        try:
            done: dict[str, Any] = channel.call(
                "copy",
                time.monotonic() + order.timeout,
                key=order.key,
                source=order.source,
                addresses=list(source.info.addresses),
                seconds=order.timeout,
            )
        except NodeError as error:
            if is_away(error):  # the node may have moved
                self._channels.discard(channel)
                channel.close()
                return Outcome.AWAY, str(error)
            lane.put(channel)
            # A node that cannot copy, or may not, is as good as one that does not take the object.
            return Outcome.REFUSED, str(error)
        lane.put(channel)
        with self._counting:  # the target has asked the source
            self.asked += 1
            self.found += done["outcome"] == Outcome.DONE
        return Outcome(done["outcome"]), done["reason"]

    def _drop(self, order: DropOrder) -> _Told:
        engine, done = self._engine, False
        if (member := self._member(order.member)) is not None and self._may_drop():
            (answer,) = self._cluster.ask([Ask(member, Op.DROP, order.key)], self._cluster.deadline())
            done = not isinstance(answer, Exception) and answer.status == Status.DONE
        return lambda now: engine.dropped(order.number, now, done=done)


class _Changes:
    """Asks members for their changes: which copies are gone, and if the members answer at all."""

    def __init__(self, engine: RepairEngine) -> None:
        self._engine = engine
        self._due: dict[bytes, float] = {}
        self._places: dict[bytes, tuple[int, int]] = {}

    def due(self, cluster: Cluster, now: float) -> list[Member]:
        """Return the members that are to be asked now."""
        members = [
            member
            for member in cluster.snapshot.members
            if (identity := member.identity or member.info.identity) and self._due.get(identity, 0.0) <= now
        ]
        for member in members:
            self._due[member.identity or member.info.identity] = math.inf  # until the answer
        return members

    def poll(self, member: Member, deadline: float) -> _Told:
        """Ask a member; return a function that tells the engine about it. Raises no error."""
        engine, identity = self._engine, member.identity or member.info.identity
        life, since = self._places.get(identity, (0, 0))
        try:
            found: dict[str, Any] = member.call("changes", deadline, life=life, since=since)
        except (ProtocolError, QuotaExceededError):
            # It keeps no journal, but it answers. Its losses are found by the next scan.
            found = {"life": 0, "next": 0, "left": 0, "lost": False, "changes": []}
        except NodeError as error:
            silent = is_away(error)
            return lambda now: self._failed(identity, now, silent=silent)
        self._places[identity] = found["life"], found["next"]

        def tell(now: float) -> None:
            self._due[identity] = now if found["left"] else now + _POLL_S
            engine.heard(identity, now)
            if found["lost"] and life:
                engine.scan()
            for kind, _, key, *_ in found["changes"]:
                if key and kind in ("evicted", "damaged"):
                    engine.lost_copy(key, identity, now, evicted=kind == "evicted")

        return tell

    def _failed(self, identity: bytes, now: float, *, silent: bool) -> None:
        self._due[identity] = now + _POLL_S
        if silent:
            self._engine.unheard(identity, now)


def _infos(cluster: Cluster, *, suspects_count: bool) -> list[MemberInfo]:
    """Return the members whose identities are known.

    With `suspects_count`, these are the ones that have been met, and suspect ones are as good as others.
    """
    members = cluster.snapshot.met if suspects_count else cluster.snapshot.members
    infos = [
        replace(member.info, identity=identity)
        for member in members
        if (identity := member.identity or member.info.identity)
    ]
    if suspects_count:
        return [replace(one, state=MemberState.ACTIVE) if one.state is MemberState.SUSPECT else one for one in infos]
    return infos
