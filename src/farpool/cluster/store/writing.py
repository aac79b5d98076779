"""Put, touch and drop objects, with as many copies as the store has (docs/store.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool._native import crc32c
from farpool.abc.objects import Payload, PutOutcome, Touched
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.cluster.store.cluster import is_away, share_of
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.snapshot import is_draining
from farpool.cluster.wire.frames import PRESENT, Op, Status
from farpool.cluster.wire.refusals import refusal
from farpool.errors import (
    AccessDeniedError,
    KeyConflictError,
    NodeError,
    ObjectTooLargeError,
    ReplicationError,
)

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["everywhere", "put"]


@dataclass(slots=True)
class _Put:
    """State of a put under way: the nodes that may take it, and the answers so far."""

    key: bytes
    payload: Payload
    view: Snapshot
    waiting: list[Member]
    confirmed: int = 0
    present: list[Reply] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    away: dict[Member, Exception] = field(default_factory=dict)
    answered: set[bytes] = field(default_factory=set)  # identities, because a node that moves must not count twice

    def next_nodes(self, copies: int) -> list[Member]:
        """Take the next waiting nodes, one for each confirmation that is missing."""
        lacking = copies - self.confirmed
        nodes, self.waiting = self.waiting[:lacking], self.waiting[lacking:]
        return nodes

    def is_waiting(self, copies: int) -> bool:
        """Return True if nodes that are away, or had not been met when it began, are enough to confirm it later."""
        return 0 < copies - self.confirmed <= len(self.away) + len(self.view.strangers)

    def retry(self, view: Snapshot, copies: int) -> list[Member]:
        """Take nodes to ask in another attempt: those that have not answered."""
        if not self.is_waiting(copies):
            return []
        self.view = view
        self.waiting = [one for one in view.places(self.key) if one.identity not in self.answered]
        self.away.clear()
        return self.next_nodes(copies)

    def note(self, member: Member, answer: Reply | Exception) -> None:
        """Record a node's answer."""
        if isinstance(answer, Exception) and is_away(answer):
            self.away[member] = answer
            return
        self.answered.add(member.identity)
        if isinstance(answer, Exception):
            self.refused.append(answer)
        elif answer.status in (Status.DONE, Status.PRESENT):
            self.confirmed += 1
            if answer.status == Status.PRESENT:
                self.present.append(answer)
        else:
            said = answer.meta.decode(errors="replace")
            self.refused.append(refusal(answer.status, said, member.name, Op.PUT, nbytes_of(self.payload)))

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
        if self.is_waiting(copies) or not errors:
            errors += [*self.away.values(), *cluster.unmet(self.view.strangers)]
        if not errors:
            takers = sum(not is_draining(member) for member in self.view.met)
            errors = [NodeError(f"{takers} of the store's members take objects, expected {copies}")]
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
        Require that a copy which a node already has is of the same size and checksum.
    patient : bool
        Ask nodes that fail again; False to make one attempt with each.

    Returns
    -------
    list of PutOutcome or Exception
        Outcome of each put.
    """
    copies = cluster.copies
    view = cluster.view(deadline)
    orders: list[list[Member]] = []
    asks: list[Ask] = []
    for key, payload in items:
        order = view.places(key)
        orders.append(order)
        meta = head + key
        for member in order[:copies]:
            asks.append(Ask(member, Op.PUT, meta, 0, payload))
    epoch = cluster.epoch.value
    # All at the same time. Connections to nodes on this host take large payloads through memory.
    answers = cluster.ask(asks, share_of(deadline, last=len(view.members) == copies))
    if len(asks) == copies * len(items):  # enough nodes have been met
        for answer in answers:
            if isinstance(answer, Exception) or answer.status != Status.DONE:
                break
        else:
            if cluster.epoch.value == epoch:
                return [PutOutcome.STORED] * len(items)
    puts = [_Put(key, payload, view, order[copies:]) for (key, payload), order in zip(items, orders, strict=True)]
    asked = [(one, member) for one, order in zip(puts, orders, strict=True) for member in order[:copies]]
    while True:
        for (one, member), answer in zip(asked, answers, strict=True):
            one.note(member, answer)
        asked = [(one, member) for one in puts for member in one.next_nodes(copies)]
        if not asked:
            if not patient or not any(one.is_waiting(copies) for one in puts) or not cluster.wait(deadline):
                if cluster.epoch.value != epoch:  # some copies may belong to the earlier epoch, and are gone then
                    return put(cluster, items, head, deadline, check=check, patient=patient)
                return [one.outcome(cluster, check=check) for one in puts]
            view = cluster.view(deadline)
            asked = [(one, member) for one in puts for member in one.retry(view, copies)]
        last = not any(one.waiting for one in puts)
        asks = [Ask(member, Op.PUT, head + one.key, 0, one.payload) for one, member in asked]
        answers = cluster.ask(asks, share_of(deadline, last=last))


def everywhere(
    cluster: Cluster,
    op: Op,
    metas: Sequence[bytes],
    deadline: float,
    *,
    copies: int = 1,
    seen: Sequence[Mapping[bytes, int]] | None = None,
) -> Touched:
    """Send an operation on objects to all nodes, or only to the nodes in `seen`.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    op : Op
        The operation.
    metas : sequence of bytes
        For each object the packed arguments of the operation, then the object's key.
    deadline : float
        By the monotonic clock. Until then nodes are asked again about objects for which no node has answered.
    copies : int
        Number of nodes on which the operation has to succeed. If it does, refusals by other nodes are ignored.
    seen : sequence of mapping, optional
        For each object the mark of each copy, by the identity of its node; an earlier touch returned them
        (`Touched.marks`). A node does the operation only if its copy still has that mark.

    Raises
    ------
    NodeError
        No node could be asked by the deadline, or a node refuses the operation.
    """
    done, marks = [0] * len(metas), [dict[bytes, int]() for _ in metas]
    left = list(range(len(metas)))
    complete, refused, away = True, list[int](), set[str]()
    usual = (Status.DONE, Status.MISSING) if seen is None else (Status.DONE, Status.MISSING, Status.UNKNOWN)
    while left:
        view = cluster.reachable(deadline)
        asked = [[one for one in view.met if seen is None or one.identity in seen[number]] for number in left]
        asks = [
            Ask(member, op, metas[number], seen[number][member.identity] if seen is not None else 0)
            for number, some in zip(left, asked, strict=True)
            for member in some
        ]
        answers = iter(cluster.ask(asks, share_of(deadline, last=len(view.met) == 1)))
        unknown, failures = [], []
        for number, some in zip(left, asked, strict=True):
            answered = [(member, next(answers)) for member in some]
            replies = [(member, answer) for member, answer in answered if not isinstance(answer, Exception)]
            marks[number] = {one.identity: reply.serial for one, reply in replies if reply.status == Status.DONE}
            done[number] = len(marks[number])
            if seen is not None and any(reply.status == Status.UNKNOWN for _, reply in replies):
                refused.append(number)
            if done[number] < copies:
                for member, reply in replies:
                    if reply.status not in usual:
                        raise refusal(reply.status, reply.meta.decode(errors="replace"), member.name, op)
            if replies or not some:
                silent = _names(view, view.by_identity if seen is None else seen[number], [one for one, _ in replies])
                if seen is None:
                    silent |= {member.name for member in view.strangers}
                complete = complete and not silent
                away |= silent
                away.update(one.name for one, reply in replies if reply.status == Status.DONE and not reply.serial)
            else:
                unknown.append(number)
                failures += [answer for _, answer in answered if isinstance(answer, Exception)]
        if (left := unknown) and (not all(map(is_away, failures)) or not cluster.wait(deadline)):
            raise failures[0]
    return Touched(done, complete, marks, refused, frozenset(away))


def _names(view: Snapshot, expected: Iterable[bytes], answered: Collection[Member]) -> set[str]:
    """Return the addresses of expected nodes that did not answer; the identity of a node that is no member any more."""
    known = {identity: view.by_identity.get(identity) for identity in expected}
    return {one.name if one else identity.hex() for identity, one in known.items() if one not in answered}
