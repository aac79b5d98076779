"""Calls for caches, which cannot use a late answer: one attempt, with a timeout for each call.

Calls do not ask a node that has failed until it answers a probe (`member.py`), so only the first call after a failure
waits for it. An object that fails has its error in the place of its result; the rest of a batch is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from farpool.abc.objects import About, Demotion, Hold
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.reading import fetch, look_up, read_many
from farpool.cluster.store.writing import put
from farpool.cluster.wire.frames import HEAD, PLACE, TOUCH, TTL, UNPIN, Op, Status
from farpool.cluster.wire.refusals import refusal
from farpool.errors import FarpoolError, NodeError

if TYPE_CHECKING:
    from farpool.abc.objects import Payload, PutOutcome
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.upkeep import Upkeep

__all__ = ["BestEffort"]


class BestEffort:
    """One attempt for each object, with a timeout; errors are returned in the places of results. Thread-safe.

    When a call returns, nothing writes into the caller's buffers any more. Every method raises `StoreClosedError` if
    the store is closed.

    Parameters
    ----------
    opened : callable
        Returns the nodes of the store; raises `StoreClosedError` once it is closed.
    upkeep : Upkeep or None
        Records which objects were read, if the store has several copies of each.
    """

    def __init__(self, opened: Callable[[], Cluster], upkeep: Upkeep | None) -> None:
        self._opened = opened
        self._upkeep = upkeep

    def is_mapped(self) -> bool:
        """Return True if all nodes are met and mapped, so that lookups ask them only about keys without a value."""
        view = self._opened().snapshot
        return not view.strangers and all(member.channel.reader is not None for member in view.members)

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Find out which keys have a value.

        Parameters
        ----------
        keys : list of bytes
            The keys, of 1 to 256 bytes.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of int, None or Exception
            Size of each value in bytes, None if there is none, or the error if that could not be found out.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        try:
            return look_up(cluster, keys, time.monotonic() + timeout, patient=False)
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)

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
            Size in bytes of each value, which is whole and verified in its target; None if there is no value; or the
            error if it could not be read (`ValueError`: the target is smaller than the value). The bytes of targets
            without a value are unspecified.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        deadline = time.monotonic() + timeout
        try:
            found, readers = read_many(cluster, keys, targets, deadline)
            values = cast("list[int | Exception | None]", found)
            for member, numbers in readers.items():
                self._note(member, keys, numbers)
            if None in values:
                left = [number for number, value in enumerate(values) if value is None]
                answers = fetch(cluster, [keys[n] for n in left], [targets[n] for n in left], deadline, patient=False)
                for number, answer in zip(left, answers, strict=True):
                    if answer is None or isinstance(answer, Exception):
                        values[number] = answer
                    else:
                        member, reply = answer
                        values[number] = reply.nbytes
                        self._note(member, keys, [number])
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        return values

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
            For each value, if it was stored or its key had a value already, or why it was not stored.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(items)
        cost_us = min(about.cost_us, 0xFFFFFFFF)
        head = HEAD.pack(about.ttl_ms, cluster.copies, about.kind, 1, cost_us, about.namespace, 0)
        try:
            deadline = time.monotonic() + timeout
            outcomes = put(cluster, items, head, deadline, patient=False)
            if about.keep:
                # Errors are ignored: a node that may not keep objects for this tenant has the copies nevertheless.
                touch = TOUCH.pack(about.ttl_ms, 1)
                met = cluster.reachable(deadline).met
                cluster.ask([Ask(member, Op.TOUCH, touch + key) for key, _ in items for member in met], deadline)
            return outcomes
        except (FarpoolError, OSError) as error:
            return [error] * len(items)

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Keep objects from being evicted for a limited time; no bytes are sent.

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
            Argument for `release_many`; None if there is no such object.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        held: list[Hold | Exception | None] = []
        try:
            deadline = time.monotonic() + timeout
            targets = [None] * len(keys)
            for answer in fetch(cluster, keys, targets, deadline, Op.PIN, TTL.pack(ttl_ms), patient=False):
                if answer is None or isinstance(answer, Exception):
                    held.append(answer)
                else:
                    member, reply = answer
                    offset, _, _, number = PLACE.unpack(reply.meta)
                    held.append((member.identity, offset, reply.serial, number))
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        return held

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """End holds. A node that cannot be reached, or that has left, ends them after their time."""
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
        """Drop values on all nodes that can be reached; return for each how many copies were dropped, or an error."""
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        try:
            deadline = time.monotonic() + timeout
            met = cluster.reachable(deadline).met
            answers = cluster.ask([Ask(member, Op.DROP, key) for key in keys for member in met], deadline)
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        dropped: list[int | Exception] = []
        for place in range(len(keys)):
            own = answers[place * len(met) : (place + 1) * len(met)]
            errors: list[Exception] = [one for one in own if isinstance(one, Exception)]
            for member, one in zip(met, own, strict=True):
                if not isinstance(one, Exception) and one.status not in (Status.DONE, Status.MISSING):
                    said = one.meta.decode(errors="replace")
                    errors.append(refusal(one.status, said, member.name, Op.DROP))
            done = sum(not isinstance(one, Exception) and one.status == Status.DONE for one in own)
            dropped.append(errors[0] if errors else done)
        return dropped

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values out of the memory of all nodes that can be reached, into their NVMe files.

        Reads find them as before, and bring them back into memory.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        timeout : float
            Seconds that the call may take. A file that is busy takes no more values until it has written some.

        Returns
        -------
        sequence of Demotion, Exception or None
            Outcome for each value; if its copies have different outcomes, one of a copy that stays in memory. None if
            there is no value.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        deadline = time.monotonic() + timeout
        demoted: list[list[Demotion | Exception]] = [[] for _ in keys]
        try:
            met = cluster.reachable(deadline).met
            left = [(place, member) for place in range(len(keys)) for member in met]
            while left:
                full: list[tuple[int, Member]] = []
                answers = cluster.ask([Ask(member, Op.DEMOTE, keys[place]) for place, member in left], deadline)
                for (place, member), answer in zip(left, answers, strict=True):
                    if isinstance(answer, Exception):
                        demoted[place].append(answer)
                    elif answer.status == Status.FULL:
                        full.append((place, member))
                    elif answer.status in _DEMOTED:
                        demoted[place].append(_DEMOTED[answer.status])
                    elif answer.status != Status.MISSING:
                        said = answer.meta.decode(errors="replace")
                        demoted[place].append(refusal(answer.status, said, member.name, Op.DEMOTE))
                left = full
                if left and time.monotonic() + _DEMOTE_PAUSE_S > deadline:
                    for place, _ in left:
                        demoted[place].append(Demotion.FULL)
                    break
                if left:
                    time.sleep(_DEMOTE_PAUSE_S)
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        return [min(own, key=_rank_of_demotion, default=None) for own in demoted]

    def _note(self, member: Member, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Record for the upkeep which of the keys were read from a node."""
        if self._upkeep is not None:
            for number in numbers:
                self._upkeep.note(keys[number], member)


def _dark(cluster: Cluster) -> Exception | None:
    """Return an error if no node has ever been reached and all are being probed: a call would only wait."""
    view = cluster.snapshot
    if not view.met and view.members and all(member.is_failing for member in view.members):
        return NodeError("no node has been reached yet; all are being probed", node=view.members[0].name)
    return None


_DEMOTE_PAUSE_S = 0.005
"""Pause before a node whose file takes no more values at the moment is asked again."""
_DEMOTED: dict[int, Demotion] = {
    Status.DONE: Demotion.LOWER,
    Status.BUSY: Demotion.PINNED,
    Status.UNKNOWN: Demotion.NO_LOWER_TIER,
    Status.BAD_REQUEST: Demotion.NO_LOWER_TIER,  # a node of a version without this operation
    Status.TOO_LARGE: Demotion.FULL,
}


def _rank_of_demotion(outcome: Demotion | Exception) -> int:
    """Order the outcomes of copies: those that stay in memory first, then those that were moved, then errors."""
    return 2 if isinstance(outcome, Exception) else int(outcome is Demotion.LOWER)
