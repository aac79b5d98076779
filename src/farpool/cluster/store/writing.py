"""Put, touch and drop objects, with the redundancy of the store (docs/store.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from farpool._native import crc32c
from farpool.abc.objects import Payload, PutOutcome, Touched
from farpool.abc.redundancy import Redundancy
from farpool.cluster.store.arguments import nbytes_of, parts_of
from farpool.cluster.store.driver import run
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import Pause, Plan, Send, is_away, may_recover, share_of
from farpool.cluster.store.snapshot import is_draining
from farpool.cluster.wire.frames import PRESENT, Op, Status
from farpool.errors import AccessDeniedError, KeyConflictError, NodeError, ObjectTooLargeError, ReplicationError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["everywhere", "put", "targets"]

# Each put would look up the members of the enums again.
_PUT, _STORED = Op.PUT, PutOutcome.STORED
_DONE, _PRESENT, _MISSING = Status.DONE, Status.PRESENT, Status.MISSING


@dataclass(slots=True)
class _Put:
    """State of a put under way: the members that may store a part of the object, and the answers so far."""

    key: bytes
    payload: Payload
    redundancy: Redundancy
    view: Snapshot
    confirmed: set[int] = field(default_factory=set)
    present: list[Reply] = field(default_factory=list)
    refused: list[Exception] = field(default_factory=list)
    away: dict[Member, Exception] = field(default_factory=dict)
    answered: set[bytes] = field(default_factory=set)  # identities, because a node that moves must not count twice
    has_more: bool = False  # other members may take a part if the ones that are asked now do not

    def placed(self) -> int:
        """Return the number of parts in the first requests.

        This is less than the number of all parts if the redundancy found too few members for the key.
        """
        return min(self.redundancy.parts, len(self.redundancy.place(self.key, self.view.places(self.key))))

    def next_asks(self, head: bytes) -> list[tuple[int, Ask]]:
        """Return, for each unconfirmed part, its index and a request that offers it to the next member in the order."""
        lacking = self.redundancy.missing(self.confirmed)
        order = targets(self.key, self.view, self.redundancy)
        waiting = [one for one in order if one.identity not in self.answered and one not in self.away]
        members = waiting[: len(lacking)]
        self.has_more = len(waiting) > len(members)
        if not members:
            return []
        parts = self.redundancy.encode(self.payload)
        asks = zip(lacking, members, strict=False)  # there may be too few members
        return [(part, Ask(member, Op.PUT, head + self.key, 0, parts[part])) for part, member in asks]

    def is_waiting(self) -> bool:
        """Return True if too few members have confirmed the put, but unreachable members may still confirm it.

        Unreachable members did not answer this put, or had no contact with this store yet.
        """
        confirmed = len(self.confirmed)
        return not self.redundancy.enough(confirmed) and self.redundancy.enough(
            confirmed + len(self.away) + len(self.view.strangers)
        )

    def retry(self, view: Snapshot) -> None:
        """Begin another attempt with the present members, except the members that have answered already."""
        self.view = view
        self.away.clear()

    def note(self, part: int, ask: Ask, given: Reply | Exception) -> None:
        """Record a member's answer."""
        answer = decoded(ask, given, (Status.DONE, Status.PRESENT))
        if isinstance(answer, Exception):
            if is_away(answer):
                self.away[ask.member] = answer
                return
            self.refused.append(answer)
        else:
            self.confirmed.add(part)
            if answer.status == Status.PRESENT:
                self.present.append(answer)
        self.answered.add(ask.member.identity)

    def outcome(self, *, check: bool) -> PutOutcome | Exception:
        """Return the outcome of the put, or the error with which it failed."""
        if not self.redundancy.enough(len(self.confirmed)):
            return self._too_few()
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

    def _too_few(self) -> Exception:
        parts = self.redundancy.parts
        errors = list(self.refused)
        if self.is_waiting() or not errors:
            errors += [*self.away.values(), *[member.absence() for member in self.view.strangers]]
        if not errors:
            takers = sum(not is_draining(member) for member in self.view.met)
            errors = [NodeError(f"{takers} of the store's members take objects, expected {parts}")]
        same = type(errors[0])
        if parts == 1 or (
            issubclass(same, AccessDeniedError | ObjectTooLargeError) and all(type(error) is same for error in errors)
        ):
            return errors[0]
        reasons = "; ".join(dict.fromkeys(str(error) for error in errors))
        return ReplicationError(f"{self.key!r}: {len(self.confirmed)} of {parts} nodes confirmed the put ({reasons})")


def targets(key: bytes, view: Snapshot, redundancy: Redundancy) -> Sequence[Member]:
    """Return the members that accept new objects, in the order in which a put under `key` offers parts to them."""
    return redundancy.order(key, view.places(key))


def put(
    cluster: Cluster,
    items: Sequence[tuple[bytes, Payload]],
    head: bytes,
    deadline: float,
    *,
    check: bool = False,
    patient: bool = True,
) -> list[PutOutcome | Exception]:
    """Write the parts of each object: offer them to the members, in the order for the object's key.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    items : sequence of tuple
        Keys and payloads.
    head : bytes
        Properties of the objects, as packed by `object_head`.
    deadline : float
        Time of `time.monotonic` until which requests to failed nodes are repeated.
    check : bool
        Return `KeyConflictError` if a node already has a copy of another size or checksum.
    patient : bool
        True to repeat requests to nodes that failed; False to make one attempt with each node.

    Returns
    -------
    list of PutOutcome or Exception
        Outcome of each put.
    """
    view, redundancy = cluster.snapshot, cluster.redundancy
    parts = redundancy.parts
    if not view.is_settled:
        view = cluster.view(deadline)
    # Read before the requests, because their replies may raise it.
    epoch = cluster.epoch.value
    asks: list[Ask] = []
    for key, payload in items:
        meta = head + key
        encoded = redundancy.encode(payload)
        for number, member in enumerate(redundancy.place(key, view.places(key))):
            asks.append(Ask(member, _PUT, meta, 0, encoded[number]))
    # All at the same time. Connections to nodes on this host take large payloads through memory.
    answers = cluster.ask(asks, share_of(deadline, last=len(view.members) == parts))
    # Nearly all puts end here, so no plan is made for them.
    if len(asks) == parts * len(items):  # enough nodes have been met
        outcomes: list[PutOutcome | Exception] = [_STORED] * len(items)
        for place, answer in enumerate(answers):
            if isinstance(answer, Exception) or answer.status != _DONE:
                if isinstance(answer, Exception) or answer.status != _PRESENT or check:
                    break
                outcomes[place // parts] = PutOutcome.PRESENT
        else:
            if cluster.epoch.value == epoch:
                return outcomes
    puts = [_Put(key, payload, redundancy, view) for key, payload in items]
    run(cluster, _put(puts, head, list(zip(asks, answers, strict=True))), deadline, patient=patient)
    if cluster.epoch.value != epoch:  # some copies may belong to the earlier epoch, and are gone then
        return put(cluster, items, head, deadline, check=check, patient=patient)
    return [one.outcome(check=check) for one in puts]


def _put(puts: Sequence[_Put], head: bytes, first: Sequence[tuple[Ask, Reply | Exception]]) -> Plan[None]:
    """Send parts to other members if their first requests failed.

    `first` has the first requests and their answers, in the order of `puts`.
    """
    pairs = iter(first)
    for one in puts:
        for part, (ask, answer) in enumerate(islice(pairs, one.placed())):
            one.note(part, ask, answer)
    while True:
        asked = [(one, *pair) for one in puts for pair in one.next_asks(head)]
        if not asked:
            waiting = [one for one in puts if one.is_waiting()]
            again = (yield Pause()) if waiting else None
            if again is None:
                return
            for one in waiting:  # another put has its result: a copy that a member took now would belong to none
                one.retry(again)
            continue
        last = not any(one.has_more for one in puts)
        answers: Sequence[Reply | Exception] = yield Send([ask for _, _, ask in asked], last=last)
        for (one, part, ask), answer in zip(asked, answers, strict=True):
            one.note(part, ask, answer)


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
        Time of `time.monotonic` until which requests are repeated for objects about which no node has answered.
    copies : int
        Number of nodes on which the operation must succeed. After that many successes, refusals by other nodes are
        ignored.
    seen : sequence of mapping, optional
        For each object, the mark of each copy, by the identity of the copy's node, as an earlier touch returned the
        marks (`Touched.marks`). A node does the operation only if its copy still has that mark.

    Raises
    ------
    NodeError
        No node could be asked by the deadline, or a node refuses the operation.
    """
    if not metas:  # no node needs to be reached
        return Touched([], True, [], [], frozenset())
    view = cluster.reachable(deadline)
    first: Sequence[Reply | Exception] | None = None
    if seen is None and len(metas) == 1 and not view.strangers:
        # Nearly all drops and touches end here, so no plan is made for them.
        (meta,) = metas
        first = cluster.ask([Ask(member, op, meta) for member in view.met], share_of(deadline, last=len(view.met) == 1))
        found: dict[bytes, int] = {}
        for member, answer in zip(view.met, first, strict=True):
            if isinstance(answer, Exception):
                break
            if answer.status == _DONE:
                found[member.identity] = answer.serial
            elif answer.status != _MISSING:
                break
        else:
            return Touched([len(found)], True, [found], [], _unmarked(view.met, found))
    return run(cluster, _everywhere(view, op, metas, copies, seen, first), deadline, everyone=True)


def _everywhere(
    view: Snapshot,
    op: Op,
    metas: Sequence[bytes],
    copies: int,
    seen: Sequence[Mapping[bytes, int]] | None,
    first: Sequence[Reply | Exception] | None = None,
) -> Plan[Touched]:
    """Send the requests until some node has answered about each object; `first` has the answers of a first attempt."""
    done, marks = [0] * len(metas), [dict[bytes, int]() for _ in metas]
    left = list(range(len(metas)))
    complete, refused, away = True, list[int](), set[str]()
    usual = (Status.DONE, Status.MISSING) if seen is None else (Status.DONE, Status.MISSING, Status.UNKNOWN)
    while left:
        asked = [[one for one in view.met if seen is None or one.identity in seen[number]] for number in left]
        asks = [
            Ask(member, op, metas[number], seen[number][member.identity] if seen is not None else 0)
            for number, some in zip(left, asked, strict=True)
            for member in some
        ]
        answers: Sequence[Reply | Exception] = first or (yield Send(asks, last=len(view.met) == 1))
        first = None
        pairs = iter(zip(asks, answers, strict=True))
        unknown, failures = [], []
        for number, some in zip(left, asked, strict=True):
            answered = list(islice(pairs, len(some)))
            replies = [(ask, answer) for ask, answer in answered if not isinstance(answer, Exception)]
            marks[number] = {ask.member.identity: reply.serial for ask, reply in replies if reply.status == Status.DONE}
            done[number] = len(marks[number])
            if seen is not None and any(reply.status == Status.UNKNOWN for _, reply in replies):
                refused.append(number)
            if done[number] < copies:
                for ask, reply in replies:
                    if isinstance(answer := decoded(ask, reply, usual), Exception):
                        raise answer
            if replies or not some:
                expected = view.by_identity if seen is None else seen[number]
                silent = set[str]()
                if len(replies) < len(expected):
                    silent = _names(view, expected, [ask.member for ask, _ in replies])
                if seen is None and view.strangers:
                    silent |= {member.name for member in view.strangers}
                complete = complete and not silent
                away |= silent
                away |= _unmarked(view.met, marks[number])
            else:
                unknown.append(number)
                failures += [answer for _, answer in answered if isinstance(answer, Exception)]
        if left := unknown:
            again = (yield Pause()) if may_recover(failures) else None
            if again is None:
                raise failures[0]
            view = again
    return Touched(done, complete, marks, refused, frozenset(away))


def _unmarked(members: Iterable[Member], marks: Mapping[bytes, int]) -> frozenset[str]:
    """Return the names of the members whose mark is 0: nodes of an earlier release, which do not notice changes."""
    if 0 not in marks.values():
        return frozenset()
    return frozenset([member.name for member in members if marks.get(member.identity) == 0])


def _names(view: Snapshot, expected: Iterable[bytes], answered: Collection[Member]) -> set[str]:
    """Return the names of the expected nodes that did not answer.

    The name of a member is its address. The name of a node that is no member any more is its identity.
    """
    known = {identity: view.by_identity.get(identity) for identity in expected}
    return {one.name if one else identity.hex() for identity, one in known.items() if one not in answered}
