"""Calls for caches, for which a late answer is worth as much as none: one attempt, within a time of their own.

A node that fails is left alone until it has answered a probe (`member.py`), so that only the first call
after a failure waits for it. What fails has its error in the place of its result; the rest of a batch is done.
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
    from farpool.cluster.store.upkeep import Upkeep

__all__ = ["BestEffort"]


class BestEffort:
    """One attempt at each object, within a stated time; errors are returned in the places of results. Thread-safe.

    When a call returns, nothing writes into the caller's buffers any more.

    Parameters
    ----------
    opened : callable
        Returns the nodes of the store; raises `StoreClosedError` once it is closed.
    upkeep : Upkeep or None
        Told of what was read, where a store has several copies.
    """

    def __init__(self, opened: Callable[[], Cluster], upkeep: Upkeep | None) -> None:
        self._opened = opened
        self._upkeep = upkeep

    def is_mapped(self) -> bool:
        """Return True if all nodes are met and mapped, so that lookups ask them only for what they do not have."""
        cluster = self._opened()
        return not cluster.strangers and all(member.channel.reader is not None for member in cluster.members)

    def lookup(self, keys: list[bytes], timeout: float) -> Sequence[int | Exception | None]:
        """Find out which keys have a value.

        Parameters
        ----------
        keys : list of bytes
            The keys, of 1 to 256 bytes.
        timeout : float
            Seconds that it may take.

        Returns
        -------
        sequence of int, None or Exception
            Bytes of each value, None where there is none, or the error for which that is not known.

        Raises
        ------
        StoreClosedError
            The store is closed.
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
            Seconds that it may take.

        Returns
        -------
        sequence of int, None or Exception
            Bytes of each value, which is whole and verified in its target; None where there is none; or the error for
            which it could not be read (`ValueError`: the target is smaller than the value). The bytes of targets
            without a value are unspecified.

        Raises
        ------
        StoreClosedError
            The store is closed.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        deadline = time.monotonic() + timeout
        try:
            found, readers = read_many(cluster, keys, targets, deadline)
            values = cast("list[int | Exception | None]", found)
            for node, numbers in readers.items():
                self._note(node, keys, numbers)
            if None in values:
                left = [number for number, value in enumerate(values) if value is None]
                answers = fetch(cluster, [keys[n] for n in left], [targets[n] for n in left], deadline, patient=False)
                for number, answer in zip(left, answers, strict=True):
                    if answer is None or isinstance(answer, Exception):
                        values[number] = answer
                    else:
                        node, reply = answer
                        values[number] = reply.nbytes
                        self._note(node, keys, [number])
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
            Seconds that it may take.
        about : About
            Properties of them.

        Returns
        -------
        sequence of PutOutcome or Exception
            For each, if it was stored or there already, or why it was not stored.

        Raises
        ------
        StoreClosedError
            The store is closed.
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
                # Only where they lie; a node that may not keep them for this tenant has them all the same.
                touch = TOUCH.pack(about.ttl_ms, 1)
                nodes = cluster.reachable(deadline)
                cluster.ask([Ask(node, Op.TOUCH, touch + key) for key, _ in items for node in nodes], deadline)
            return outcomes
        except (FarpoolError, OSError) as error:
            return [error] * len(items)

    def hold_many(self, keys: Sequence[bytes], ttl_ms: int, timeout: float) -> Sequence[Hold | Exception | None]:
        """Keep objects from being evicted, where they lie, for a limited time; no bytes travel.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        ttl_ms : int
            Milliseconds after which the nodes let them go by themselves.
        timeout : float
            Seconds that the call may take.

        Returns
        -------
        sequence of Hold, None or Exception
            Argument for `release_many`; None where there is no such object.
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
                    node, reply = answer
                    offset, _, _, number = PLACE.unpack(reply.meta)
                    held.append((node, offset, reply.serial, number))
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        return held

    def release_many(self, holds: Sequence[Hold], timeout: float) -> None:
        """Let objects go that are held. A node that cannot be reached lets them go after their time."""
        cluster = self._opened()
        asks = [Ask(node, Op.UNPIN, UNPIN.pack(offset, pin), serial) for node, offset, serial, pin in holds]
        cluster.ask(asks, time.monotonic() + timeout)

    def drop_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[int | Exception]:
        """Drop values on all nodes that can be reached; return for each how many copies went, or an error."""
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        try:
            deadline = time.monotonic() + timeout
            nodes = cluster.reachable(deadline)
            answers = cluster.ask([Ask(node, Op.DROP, key) for key in keys for node in nodes], deadline)
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        dropped: list[int | Exception] = []
        for place in range(len(keys)):
            own = answers[place * len(nodes) : (place + 1) * len(nodes)]
            errors: list[Exception] = [one for one in own if isinstance(one, Exception)]
            for node, one in zip(nodes, own, strict=True):
                if not isinstance(one, Exception) and one.status not in (Status.DONE, Status.MISSING):
                    said = one.meta.decode(errors="replace")
                    errors.append(refusal(one.status, said, cluster.members[node].name, Op.DROP))
            done = sum(not isinstance(one, Exception) and one.status == Status.DONE for one in own)
            dropped.append(errors[0] if errors else done)
        return dropped

    def demote_many(self, keys: Sequence[bytes], timeout: float) -> Sequence[Demotion | Exception | None]:
        """Move values out of the memory of all nodes that can be reached, into their NVMe files.

        They are found as before, and come back into memory when they are read again.

        Parameters
        ----------
        keys : sequence of bytes
            The keys.
        timeout : float
            Seconds that the call may take: a file takes only so much at a time.

        Returns
        -------
        sequence of Demotion, Exception or None
            What became of each; where its copies fared differently, that of one which stays. None if there is none.

        Raises
        ------
        StoreClosedError
            The store is closed.
        """
        cluster = self._opened()
        if (dark := _dark(cluster)) is not None:
            return [dark] * len(keys)
        deadline = time.monotonic() + timeout
        demoted: list[list[Demotion | Exception]] = [[] for _ in keys]
        try:
            left = [(place, node) for place in range(len(keys)) for node in cluster.reachable(deadline)]
            while left:
                full: list[tuple[int, int]] = []
                answers = cluster.ask([Ask(node, Op.DEMOTE, keys[place]) for place, node in left], deadline)
                for (place, node), answer in zip(left, answers, strict=True):
                    if isinstance(answer, Exception):
                        demoted[place].append(answer)
                    elif answer.status == Status.FULL:
                        full.append((place, node))
                    elif answer.status in _DEMOTED:
                        demoted[place].append(_DEMOTED[answer.status])
                    elif answer.status != Status.MISSING:
                        said = answer.meta.decode(errors="replace")
                        demoted[place].append(refusal(answer.status, said, cluster.members[node].name, Op.DEMOTE))
                left = full
                if left and time.monotonic() + _DEMOTING > deadline:
                    for place, _ in left:
                        demoted[place].append(Demotion.FULL)
                    break
                if left:
                    time.sleep(_DEMOTING)
        except (FarpoolError, OSError) as error:
            return [error] * len(keys)
        return [min(own, key=_rank_of_demotion, default=None) for own in demoted]

    def _note(self, node: int, keys: Sequence[bytes], numbers: Sequence[int]) -> None:
        """Tell the upkeep which of the keys a node was read for."""
        if self._upkeep is not None:
            for number in numbers:
                self._upkeep.note(keys[number], node)


def _dark(cluster: Cluster) -> Exception | None:
    """Return an error if no node has ever been reached and all are being probed: a call would only wait."""
    if len(cluster.strangers) == len(cluster.members) and all(member.is_failing for member in cluster.members):
        return NodeError("no node has been reached yet; all are being probed", node=cluster.members[0].name)
    return None


_DEMOTING = 0.005
"""Seconds after which a node is asked again whose file takes no more at the moment."""
_DEMOTED: dict[int, Demotion] = {
    Status.DONE: Demotion.LOWER,
    Status.BUSY: Demotion.PINNED,
    Status.UNKNOWN: Demotion.NO_LOWER_TIER,
    Status.BAD_REQUEST: Demotion.NO_LOWER_TIER,  # a node of a version without this operation
    Status.TOO_LARGE: Demotion.FULL,
}


def _rank_of_demotion(outcome: Demotion | Exception) -> int:
    """Order what became of copies: those that stay in memory count first, then those that went, then errors."""
    return 2 if isinstance(outcome, Exception) else int(outcome is Demotion.LOWER)
