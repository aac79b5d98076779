"""Putting and dropping objects, with as many copies as the store has (docs/store.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool._native import crc32c
from farpool.abc.objects import Payload, PutOutcome, Touched
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.cluster.store.cluster import is_away, share_of
from farpool.cluster.store.messages import Ask
from farpool.cluster.wire.frames import PRESENT, Op, Status
from farpool.cluster.wire.refusals import refusal
from farpool.errors import (
    AccessDeniedError,
    KeyConflictError,
    ObjectTooLargeError,
    ReplicationError,
)

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster

__all__ = ["everywhere", "put"]


@dataclass(slots=True)
class _Put:
    """State of a put under way: nodes that have confirmed, nodes still to be asked, and the errors of others."""

    key: bytes
    payload: Payload
    known: list[int]
    waiting: list[int]
    confirmed: int = 0
    present: list[Reply] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    away: dict[int, Exception] = field(default_factory=dict)

    def next_nodes(self, copies: int) -> list[int]:
        """Take as many waiting nodes as there are confirmations missing."""
        lacking = copies - self.confirmed
        nodes, self.waiting = self.waiting[:lacking], self.waiting[lacking:]
        return nodes

    def is_waiting(self, cluster: Cluster) -> bool:
        """Return True if enough nodes are away, or had not been met when it began, to confirm it after all."""
        unmet = len(cluster.members) - len(self.known)
        return 0 < cluster.copies - self.confirmed <= len(self.away) + unmet

    def retry(self, cluster: Cluster, deadline: float) -> list[int]:
        """Take nodes to ask once more: those that were away, and those that have been met since."""
        if not self.is_waiting(cluster):
            return []
        order = cluster.order(self.key, deadline)
        self.waiting = [node for node in order if node in self.away or node not in self.known]
        self.known = order
        self.away.clear()
        return self.next_nodes(cluster.copies)

    def note(self, node: int, answer: Reply | Exception, name: str) -> None:
        """Record a node's answer."""
        if isinstance(answer, Exception):
            if is_away(answer):
                self.away[node] = answer
            else:
                self.refused.append(answer)
        elif answer.status in (Status.DONE, Status.PRESENT):
            self.confirmed += 1
            if answer.status == Status.PRESENT:
                self.present.append(answer)
        else:
            said = answer.meta.decode(errors="replace")
            self.refused.append(refusal(answer.status, said, name, Op.PUT, nbytes_of(self.payload)))

    def outcome(self, cluster: Cluster, *, check: bool) -> PutOutcome | Exception:
        """Return the outcome of the put, or the error with which it failed."""
        if self.confirmed < cluster.copies:
            return self._too_few(cluster)
        if check and self.present:
            crc = 0
            for part in parts_of(self.payload):
                crc = crc32c(part, crc)
            for reply in self.present:
                there, there_crc, _ = PRESENT.unpack_from(reply.meta)
                if (there, there_crc) != (nbytes_of(self.payload), crc):
                    return KeyConflictError(
                        f"{self.key!r} has a value of {there} bytes with CRC32C {there_crc:#010x}; this one has "
                        f"{nbytes_of(self.payload)} bytes with CRC32C {crc:#010x}. A key is written once: drop it "
                        "first, or use another key"
                    )
        return PutOutcome.PRESENT if self.present else PutOutcome.STORED

    def _too_few(self, cluster: Cluster) -> Exception:
        copies = cluster.copies
        errors = list(self.refused)
        if self.is_waiting(cluster):
            errors += [*self.away.values(), *cluster.unmet(self.known)]
        same = type(errors[0])
        if copies == 1 or (
            issubclass(same, AccessDeniedError | ObjectTooLargeError) and all(type(error) is same for error in errors)
        ):
            return errors[0]
        reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
        return ReplicationError(f"{self.key!r}: {self.confirmed} of {copies} nodes confirmed the put ({reasons})")


def put(
    cluster: Cluster,
    items: Sequence[tuple[bytes, Payload]],
    head: bytes,
    deadline: float,
    *,
    check: bool = False,
    patient: bool = True,
) -> list[PutOutcome | Exception]:
    """Write each object to the first nodes of its order that take it.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    items : sequence of tuple
        Keys and payloads.
    head : bytes
        Properties of the objects, as packed by `object_head`.
    deadline : float
        By the monotonic clock. Nodes that fail are asked again until then.
    check : bool
        Require a copy that is there to have the same size and checksum.
    patient : bool
        Ask nodes that fail again; False to make one attempt with each.

    Returns
    -------
    list of PutOutcome or Exception
        Outcome of each put.
    """
    copies = cluster.copies
    orders: list[list[int]] = []
    asked: list[tuple[int, int]] = []
    for number, (key, _) in enumerate(items):
        order = cluster.order(key, deadline)
        orders.append(order)
        for node in order[:copies]:
            asked.append((number, node))
    epoch = cluster.epoch.value
    answers = _write(cluster, items, asked, head, share_of(deadline, last=len(cluster.members) == copies))
    if len(asked) == copies * len(items):  # else too few nodes have been met
        for answer in answers:
            if isinstance(answer, Exception) or answer.status != Status.DONE:
                break
        else:
            if cluster.epoch.value == epoch:
                return [PutOutcome.STORED] * len(items)
    puts = [_Put(key, payload, order, order[copies:]) for (key, payload), order in zip(items, orders, strict=True)]
    while True:
        for (number, node), answer in zip(asked, answers, strict=True):
            puts[number].note(node, answer, cluster.members[node].name)
        asked = [(number, node) for number, one in enumerate(puts) for node in one.next_nodes(copies)]
        if not asked:
            if not patient or not any(one.is_waiting(cluster) for one in puts) or not cluster.wait(deadline):
                if cluster.epoch.value != epoch:  # some copies may be of the earlier epoch, and gone
                    return put(cluster, items, head, deadline, check=check, patient=patient)
                return [one.outcome(cluster, check=check) for one in puts]
            asked = [(number, node) for number, one in enumerate(puts) for node in one.retry(cluster, deadline)]
        last = not any(one.waiting for one in puts)
        answers = _write(cluster, items, asked, head, share_of(deadline, last=last))


def _write(
    cluster: Cluster,
    items: Sequence[tuple[bytes, Payload]],
    asked: Sequence[tuple[int, int]],
    head: bytes,
    deadline: float,
) -> list[Reply | Exception]:
    """Send payloads, all at the same time; connections to nodes on this host take large ones through memory."""
    asks: list[Ask] = []
    for number, node in asked:
        key, payload = items[number]
        asks.append(Ask(node, Op.PUT, head + key, 0, payload))
    return cluster.ask(asks, deadline)


def everywhere(
    cluster: Cluster,
    op: Op,
    metas: Sequence[bytes],
    deadline: float,
    *,
    copies: int = 1,
    seen: Sequence[Mapping[int, int]] | None = None,
) -> Touched:
    """Send an operation on objects to all nodes.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    op : Op
        The operation.
    metas : sequence of bytes
        Arguments and key of each object.
    deadline : float
        By the monotonic clock. Nodes are asked again until then for objects of which no node has said anything.
    copies : int
        Number of nodes on which it has to succeed; refusals by others are then ignored.
    seen : sequence of mapping, optional
        Marks of each object's copies, from an earlier touch. Only the nodes of these copies get a request, and each
        does the operation only if its copy still has that mark.

    Raises
    ------
    NodeError
        No node could be asked by the deadline, or one refuses it.
    """
    done, marks = [0] * len(metas), [dict[int, int]() for _ in metas]
    left = list(range(len(metas)))
    complete, refused, away = True, list[int](), set[int]()
    usual = (Status.DONE, Status.MISSING) if seen is None else (Status.DONE, Status.MISSING, Status.UNKNOWN)
    while left:
        nodes = cluster.reachable(deadline)
        asked = [[node for node in nodes if seen is None or node in seen[number]] for number in left]
        asks = [
            Ask(node, op, metas[number], seen[number][node] if seen is not None else 0)
            for number, some in zip(left, asked, strict=True)
            for node in some
        ]
        answers = iter(cluster.ask(asks, share_of(deadline, last=len(nodes) == 1)))
        unknown, failures = [], []
        for number, some in zip(left, asked, strict=True):
            answered = [(node, next(answers)) for node in some]
            replies = [(node, answer) for node, answer in answered if not isinstance(answer, Exception)]
            marks[number] = {node: reply.serial for node, reply in replies if reply.status == Status.DONE}
            done[number] = len(marks[number])
            if seen is not None and any(reply.status == Status.UNKNOWN for _, reply in replies):
                refused.append(number)
            if done[number] < copies:
                for node, reply in replies:
                    if reply.status not in usual:
                        said = reply.meta.decode(errors="replace")
                        raise refusal(reply.status, said, cluster.members[node].name, op)
            if replies or not some:
                expected = range(len(cluster.members)) if seen is None else seen[number]
                complete = complete and len(replies) == len(expected)
                away.update(set(expected) - {node for node, _ in replies})
                away.update(node for node, mark in marks[number].items() if not mark)
            else:
                unknown.append(number)
                failures += [answer for _, answer in answered if isinstance(answer, Exception)]
        left = unknown
        if left and (not all(map(is_away, failures)) or not cluster.wait(deadline)):
            raise failures[0]
    return Touched(done, complete, marks, refused, frozenset(cluster.members[node].name for node in away))
