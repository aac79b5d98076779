"""Store calls for caches. A cache cannot use a late answer, so each call makes one attempt and has a timeout.

A node that has failed receives no more requests until it answers a probe (`member.py`), so only the first call after a
failure waits for the node. If the operation fails for one object, the call returns an error in place of that object's
result, and still processes the other objects.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast

from farpool.abc.objects import About, Demotion, Hold
from farpool.cluster.store.driver import run
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import Pause, Plan, Send
from farpool.cluster.store.reading import fetch, look_up, read_many
from farpool.cluster.store.retention import checked_priority, end_session, retain, session_number
from farpool.cluster.store.writing import put
from farpool.cluster.wire.frames import HEAD, PLACE, TOUCH, TTL, UNPIN, Op, Status
from farpool.errors import FarpoolError, NodeError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.abc.objects import Payload, PutOutcome
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["BestEffort"]

ResultT = TypeVar("ResultT")


class BestEffort:
    """Store calls that make one attempt for each object and return errors in place of results. Thread-safe.

    When a call returns, nothing writes into the caller's buffers any more. Every method raises `StoreClosedError` if
    the store is closed.

    Parameters
    ----------
    opened : callable
        Returns the store's `Cluster`; raises `StoreClosedError` if the store is closed.
    """

    def __init__(self, opened: Callable[[], Cluster]) -> None:
        self._opened = opened

    def _attempt(
        self, count: int, timeout: float, call: Callable[[Cluster, float], Sequence[ResultT | Exception]]
    ) -> Sequence[ResultT | Exception]:
        """Return `call(cluster, deadline)`. If it fails, or no node was ever reached, return an error `count` times."""
        cluster = self._opened()
        view = cluster.snapshot
        if not view.met and all(member.is_failing for member in view.members):  # a call would only wait
            if view.members:
                dark = NodeError("no node has been reached yet; all are being probed", node=view.members[0].name)
            else:
                dark = cluster.no_members()
            return [dark] * count
        try:
            return call(cluster, time.monotonic() + timeout)
        except (FarpoolError, OSError) as error:
            return [error] * count

    def is_mapped(self) -> bool:
        """Return True if the memory of all nodes is mapped into this process.

        Lookups then send requests only for keys that have no value in the mapped memory.
        """
        view = self._opened().snapshot
        return view.is_settled and all(member.channel.reader is not None for member in view.members)

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Look up which keys have a value, and the size of each value.

        Parameters
        ----------
        keys : list of bytes
            The keys, of 1 to 256 bytes.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of int, None or Exception
            For each key the size of its value in bytes; None if it has no value; or the error if the lookup failed.
        """
        return self._attempt(
            len(keys), timeout, lambda cluster, deadline: look_up(cluster, keys, deadline, patient=False)
        )

    def get_into_many(
        self, keys: list[bytes], targets: list[Payload], timeout: float
    ) -> Sequence[int | Exception | None]:
        """Read values into buffers, all at the same time.

        Parameters
        ----------
        keys : list of bytes
            The keys.
        targets : list of memoryview or tuple of memoryview
            Memory for each value, contiguous and writable.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of int, None or Exception
            For each key the size in bytes of its value, which is now complete and verified in its target; None if there
            is no value; or the error if the value could not be read (`ValueError`: the target is smaller than the
            value). If no value was read, the bytes of the target are unspecified.
        """

        def get(cluster: Cluster, deadline: float) -> Sequence[int | Exception | None]:
            values = read_many(cluster, keys, targets, deadline, patient=False)
            return cast("list[int | Exception | None]", values)  # bytes come without a target alone

        return self._attempt(len(keys), timeout, get)

    def put_many(
        self, items: Sequence[tuple[bytes, Payload]], timeout: float, about: About
    ) -> Sequence[PutOutcome | Exception]:
        """Store values under keys that have none yet, all at the same time.

        Parameters
        ----------
        items : sequence of tuple
            Each key and its value.
        timeout : float
            Seconds that the call may take.
        about : About
            Properties of the values.

        Returns
        -------
        sequence of PutOutcome or Exception
            For each value the outcome (it was stored, or its key already had a value), or the error if the value could
            not be stored.
        """

        def save(cluster: Cluster, deadline: float) -> Sequence[PutOutcome | Exception]:
            cost_us = min(about.cost_us, 0xFFFFFFFF)
            copies = cluster.redundancy.parts
            head = HEAD.pack(about.ttl_ms, copies, about.kind, 1, cost_us, about.namespace, 0)
            outcomes = put(cluster, items, head, deadline, patient=False)
            if about.keep:
                # Errors are ignored: a node that may not keep objects for this tenant has the copies nevertheless.
                touch = TOUCH.pack(about.ttl_ms, 1)
                met = cluster.reachable(deadline).met
                cluster.ask([Ask(member, Op.TOUCH, touch + key) for key, _ in items for member in met], deadline)
            return outcomes

        return self._attempt(len(items), timeout, save)

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Hold objects for a limited time. Their nodes do not evict them in this time; no values are sent.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        ttl_ms : int
            Milliseconds after which the nodes end the hold by themselves.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of Hold, None or Exception
            For each key the hold, which `release_many` accepts; None if there is no object; or the error if it failed.
        """

        def pin(cluster: Cluster, deadline: float) -> Sequence[Hold | Exception | None]:
            return [
                _hold(*answer) if isinstance(answer, tuple) else answer
                for answer in fetch(cluster, keys, deadline, Op.PIN, TTL.pack(ttl_ms), patient=False)
            ]

        return self._attempt(len(keys), timeout, pin)

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """End holds. A node that cannot be reached, or has left, ends its holds by itself when their time is over."""
        cluster = self._opened()
        known = cluster.snapshot.by_identity
        asks = [
            Ask(known[identity], Op.UNPIN, UNPIN.pack(offset, pin), serial)
            for identity, offset, serial, pin in holds
            if identity in known
        ]
        if asks:
            cluster.ask(asks, time.monotonic() + timeout)

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values on all nodes that can be reached.

        Return, for each key, the number of copies that were dropped, or an error.
        """

        def drop(cluster: Cluster, deadline: float) -> Sequence[int | Exception]:
            met = cluster.reachable(deadline).met
            asks = [Ask(member, Op.DROP, key) for key in keys for member in met]
            pairs = iter(zip(asks, cluster.ask(asks, deadline), strict=True))
            dropped: list[int | Exception] = []
            for _ in keys:
                own = list(islice(pairs, len(met)))
                answers = [decoded(ask, given, (Status.DONE, Status.MISSING)) for ask, given in own]
                # The error of a node that could not be asked comes before a refusal.
                errors = [one for one in (*[given for _, given in own], *answers) if isinstance(one, Exception)]
                done = sum(not isinstance(one, Exception) and one.status == Status.DONE for one in answers)
                dropped.append(errors[0] if errors else done)
            return dropped

        return self._attempt(len(keys), timeout, drop)

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values from memory to the NVMe file, on all nodes that can be reached.

        Later reads still find the values, and bring them back into memory.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        timeout : float
            Seconds that the call may take. If a node accepts no more values until it has written some to its file, the
            call waits and asks the node again.

        Returns
        -------
        sequence of Demotion, Exception or None
            Outcome for each value; None if there is no value. If the copies of a value have different outcomes: the
            outcome of a copy that stays in memory, if there is one; otherwise `Demotion.LOWER`. An error is returned
            only if no copy has an outcome.
        """
        return self._attempt(
            len(keys),
            timeout,
            lambda cluster, deadline: run(cluster, _demote(cluster.reachable(deadline), keys), deadline),
        )

    def retain_many(
        self, keys: Sequence[bytes], priority: int, session: str | bytes | None, ttl_ms: int, timeout: float
    ) -> Sequence[int | Exception]:
        """Give values a priority and a session, on all nodes that can be reached; see `Store.retain`.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        priority : int
            0 to 7; replaces the priority that a value has.
        session : str, bytes or None
            Name of the session; replaces the session that a value has.
        ttl_ms : int
            Milliseconds after which the priority ends; 0 for no end.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of int or Exception
            For each value, the number of copies that have the priority now; or an error if no copy has it.

        Raises
        ------
        ConfigError
            The priority or the session's name is wrong.
        """
        level, number = checked_priority(priority), session_number(session)
        return self._attempt(
            len(keys), timeout, lambda cluster, deadline: retain(cluster, keys, level, number, deadline, ttl_ms=ttl_ms)
        )

    def end_session(self, session: str | bytes, timeout: float) -> int | Exception:
        """End a session on all nodes that can be reached; see `Store.end_session`.

        Return the number of copies that the session has retained, or the error of a node.
        """
        number = session_number(session)

        def end(cluster: Cluster, deadline: float) -> Sequence[int | Exception]:
            ended, failed = end_session(cluster, number, deadline)
            return [failed or ended]

        (outcome,) = self._attempt(1, timeout, end)
        return outcome


def _hold(member: Member, reply: Reply) -> Hold:
    offset, _, _, number = PLACE.unpack(reply.meta)
    return member.identity, offset, reply.serial, number


_DEMOTE_PAUSE_S = 0.005
"""Pause in seconds. After it, the call again asks the nodes whose files accepted no more values."""
_DEMOTED: dict[int, Demotion] = {
    Status.DONE: Demotion.LOWER,
    Status.BUSY: Demotion.PINNED,
    Status.UNKNOWN: Demotion.NO_LOWER_TIER,
    Status.BAD_REQUEST: Demotion.NO_LOWER_TIER,  # a node of a version without this operation
    Status.TOO_LARGE: Demotion.FULL,
}


def _demote(view: Snapshot, keys: Sequence[bytes]) -> Plan[Sequence[Demotion | Exception | None]]:
    """Demote each value on all members. Members whose files accept no more values are asked again after a pause."""
    demoted: list[list[Demotion | Exception]] = [[] for _ in keys]
    left = [(place, Ask(member, Op.DEMOTE, key)) for place, key in enumerate(keys) for member in view.met]
    usual = (*_DEMOTED, Status.FULL, Status.MISSING)
    while left:
        busy: list[tuple[int, Ask]] = []
        answers: Sequence[Reply | Exception] = yield Send([ask for _, ask in left], last=True)
        for (place, ask), given in zip(left, answers, strict=True):
            answer = decoded(ask, given, usual)
            if isinstance(answer, Exception):
                demoted[place].append(answer)
            elif answer.status == Status.FULL:
                busy.append((place, ask))
            elif answer.status != Status.MISSING:
                demoted[place].append(_DEMOTED[answer.status])
        left = busy
        if left and (yield Pause(_DEMOTE_PAUSE_S, meets=False)) is None:
            for place, _ in left:
                demoted[place].append(Demotion.FULL)
            break
    return [min(own, key=_rank_of_demotion, default=None) for own in demoted]


def _rank_of_demotion(outcome: Demotion | Exception) -> int:
    """Return a sort key: 0 for a copy that stays in memory, 1 for a moved copy, 2 for an error."""
    return 2 if isinstance(outcome, Exception) else int(outcome is Demotion.LOWER)
