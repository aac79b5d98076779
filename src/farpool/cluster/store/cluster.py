"""The nodes of a store: their order for a key, and the one function that sends requests to them.

A key's nodes are ranked by rendezvous hashing over the nodes' identities: copies lie on the first that took them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from farpool._native import TenantEpoch, by_first, exchange, rank
from farpool.cluster.store.member import Member, may_be_stale
from farpool.cluster.store.messages import Ask, object_head
from farpool.cluster.wire.frames import Op
from farpool.errors import AccessDeniedError, ConfigError, NodeError, StoreClosedError

if TYPE_CHECKING:
    from farpool._native import Connection, Reply
    from farpool.abc.objects import Payload
    from farpool.cluster.wire.channel import Channel

__all__ = ["Cluster", "is_away", "share_of"]

_ONCE = frozenset({Op.UNPIN})
"""Operations that must not be sent a second time when it is not known whether they were done."""


def share_of(deadline: float, *, last: bool) -> float:
    """Return the deadline for one node: half of the time left is kept for others unless it is the last to be asked."""
    now = time.monotonic()
    return deadline if last else now + max(0.0, deadline - now) / 2


def is_away(failure: Exception) -> bool:
    """Return True if a node could not be asked but may be later: it did not refuse this program nor send bad bytes."""
    return isinstance(failure, NodeError) and not failure.refused and not isinstance(failure, AccessDeniedError)


class Cluster:
    """The nodes of a store. Thread-safe.

    Parameters
    ----------
    channels : sequence of Channel
        Channels to the nodes.
    copies : int
        Number of nodes that have to confirm a put.
    timeout : float
        Seconds that a call may take.

    Attributes
    ----------
    epoch : TenantEpoch
        The tenant's highest epoch that a node has told.
    head : bytes
        Properties of an object that never expires.
    members : list of Member
        The nodes, in the order in which they were named.
    strangers : list of int
        Numbers of the nodes that have not been met yet, so that their place in the order is not known.
    """

    def __init__(self, channels: Sequence[Channel], copies: int, timeout: float) -> None:
        self.copies = copies
        self.timeout = timeout
        self.head = object_head(0, copies)
        self.epoch = TenantEpoch()
        for channel in channels:
            channel.epoch = self.epoch
        self.members = [Member(channel, self._met) for channel in channels]
        self.strangers = list(range(len(self.members)))
        # The known nodes and the seeds of their ranks: one reference, so that nobody sees one without the other.
        self._ranked: tuple[list[int], list[int]] = ([], [])
        self._unmet: dict[int, NodeError] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def deadline(self) -> float:
        """Return the deadline of a call that begins now, by the monotonic clock."""
        return time.monotonic() + self.timeout

    def order(self, key: bytes, deadline: float) -> list[int]:
        """Return the known nodes in the order of their ranks for a key.

        Raises
        ------
        NodeError
            None of them has ever been reached.
        """
        if self.strangers:
            self._meet(deadline)
        known, seeds = self._ranked
        if len(known) == 1:
            return known
        order = rank(key, seeds)
        return order if len(known) == len(self.members) else [known[place] for place in order]

    # One function without helpers: every put and get goes through it, and a call of Python's costs as much as a lookup.
    def ask(self, asks: Sequence[Ask], deadline: float, *, fresh: bool = False) -> list[Reply | Exception]:
        """Send requests, all at the same time, and wait for the replies.

        Parameters
        ----------
        asks : sequence of Ask
            Several to one node go over one connection, in their order.
        deadline : float
            By the monotonic clock.
        fresh : bool
            Open new connections.

        Returns
        -------
        list of Reply or Exception
            In their order: each reply, or why there is none.
        """
        members = self.members
        began = time.monotonic()
        if len(asks) == 1 and not fresh:  # the way of almost all calls: the node is well, and a connection lies ready
            (one,) = asks
            member = members[one.node]
            if not member.is_failing:
                answer = member.pool.ask(one.op, one.meta, one.serial, one.payload, one.into, deadline)
                if answer is not None:
                    only = [answer]
                    if isinstance(answer, NodeError):
                        self._recover(asks, only, [one.node], began, deadline, fresh=False)
                    return only
        answers: list[Reply | Exception] = [_UNSENT] * len(asks)
        links: dict[int, Connection | NodeError] = {}
        wire: list[tuple[Connection, int, bytes, int, Payload | bytes | None, Payload | None]] = []
        places: list[int] = []
        try:
            for place, ask in enumerate(asks):
                node = ask.node
                link = links.get(node)
                if link is None:
                    member = members[node]
                    if not member.is_failing and not fresh:
                        link = member.pool.take()
                    if link is None:
                        try:
                            link = member.take(share_of(deadline, last=len(asks) == 1), fresh=fresh)
                        except NodeError as error:
                            link = error
                    links[node] = link
                if isinstance(link, NodeError):
                    answers[place] = link
                else:
                    places.append(place)
                    wire.append((link, ask.op, ask.meta, ask.serial, ask.payload, ask.into))
            for place, answer in zip(places, exchange(wire, deadline), strict=True):
                answers[place] = answer
        finally:
            troubled: list[int] = []
            for node, link in links.items():
                if not isinstance(link, NodeError):
                    if link.broken:
                        troubled.append(node)
                    members[node].pool.give(link)
        if troubled:
            self._recover(asks, answers, troubled, began, deadline, fresh=fresh)
        return answers

    def _recover(
        self,
        asks: Sequence[Ask],
        answers: list[Reply | Exception],
        troubled: Sequence[int],
        began: float,
        deadline: float,
        *,
        fresh: bool,
    ) -> None:
        """Repeat, once and on new connections, the requests that broken ones left unanswered, where that may help."""
        again: list[int] = []
        # Who has answered a part of these requests is there, however late the rest is.
        heard = {ask.node for ask, answer in zip(asks, answers, strict=True) if not isinstance(answer, Exception)}
        for place, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
            if ask.node in troubled and isinstance(answer, NodeError):
                if not fresh and may_be_stale(answer) and ask.op not in _ONCE:
                    again.append(place)
                else:
                    silence = 0.0 if ask.node in heard else min(time.monotonic(), deadline) - began
                    self.members[ask.node].failed(answer, silence)
        if again:
            later = self.ask([asks[place] for place in again], deadline, fresh=True)
            for place, answer in zip(again, later, strict=True):
                answers[place] = answer

    def by_first(self, keys: list[bytes], deadline: float) -> dict[int, Sequence[int]]:
        """Group keys, by their numbers, by the node that is the first in their order."""
        if self.strangers:
            self._meet(deadline)
        known, seeds = self._ranked
        if len(known) == 1:
            return {known[0]: range(len(keys))}
        return {known[place]: numbers for place, numbers in enumerate(by_first(keys, seeds)) if numbers}

    def wait(self, deadline: float) -> bool:
        """Wait a little before nodes that have failed are asked again; return False once the deadline has passed.

        Raises
        ------
        StoreClosedError
            The store was closed meanwhile.
        """
        left = deadline - time.monotonic()
        # Too little time for another attempt is waited out: the error of that would only tell of the lack of time.
        if self._closing.wait(min(_PAUSE, max(0.0, left))):
            raise StoreClosedError("this store was closed while a call waited for a node to come back")
        return left > _PAUSE

    def reachable(self, deadline: float) -> list[int]:
        """Return the nodes that have been met, after another attempt to meet the others."""
        if self.strangers:
            self._meet(deadline)
        return list(self._ranked[0])

    def tell_epoch(self, deadline: float) -> None:
        """Exchange epochs with all nodes that can be reached: those that are behind the others learn it."""
        nodes = self.reachable(deadline)
        asks = [Ask(node, Op.PING, b"") for node in nodes]
        before = self.epoch.value
        self.ask(asks, share_of(deadline, last=False))
        if self.epoch.value != before:
            self.ask(asks, share_of(deadline, last=False))

    def unmet(self, known: Collection[int]) -> list[NodeError]:
        """Return an error for each node that is not known to a call: why it could not be asked."""
        return [
            self._unmet.get(number) or NodeError(f"{member.name} was reached too late for this call", node=member.name)
            for number, member in enumerate(self.members)
            if number not in known
        ]

    def close(self) -> None:
        """Close all connections."""
        self._closing.set()
        for member in self.members:
            member.close()

    def _meet(self, deadline: float) -> None:
        """Make contact with nodes that have not been met; keep trying until the deadline while none has been."""
        while True:
            failures: list[NodeError] = []
            for number in list(self.strangers):
                member = self.members[number]
                try:
                    until = share_of(deadline, last=len(self.members) == 1)
                    member.pool.give(member.take(until))
                except NodeError as error:
                    failures.append(error)
                    self._unmet[number] = error
            if self._ranked[0]:
                return
            if not all(map(is_away, failures)) or not self.wait(deadline):
                raise failures[0]

    def _met(self, member: Member) -> None:
        """Rank a node by its identity; refuse a second address of one node, as copies there would be lost together."""
        with self._lock:
            for other in self.members:
                if other is not member and other.identity == member.identity:
                    raise ConfigError(
                        f"{other.name} and {member.name} are the same node; expected each once", setting="nodes"
                    )
            known = [number for number, one in enumerate(self.members) if one.identity]
            seeds = [int.from_bytes(self.members[number].identity[:8], "little") for number in known]
            self._ranked = (known, seeds)
            reader = member.channel.reader
            if reader is not None:
                reader.expect_copies(self.copies)
            self.strangers = [number for number, one in enumerate(self.members) if not one.identity]


_PAUSE = 0.02
"""Seconds between two attempts; a node that has failed is asked again once it has answered a probe."""
_UNSENT = NodeError("the request was not sent")
