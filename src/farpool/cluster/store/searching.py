"""Plans that find objects: they ask the member of highest rank for a key, then the other members (docs/store.md).

The rank of a member for a key is its place in the order of `snapshot.py`; most objects are on the first member.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from farpool.abc.objects import Payload
from farpool.abc.redundancy import Redundancy
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import Pause, Plan, Probe, Probed, Send, is_away, may_recover
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import ReplicationError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot

__all__ = ["Found", "Search", "find", "measure"]

Found = tuple["Member", "Reply"] | Exception | None
"""The member that returned the object, and its reply; None if there is no object; or the error if the search failed."""


@dataclass(slots=True, eq=False)
class Search:
    """Search for the object of one key: members that reported it, members that lack it, and members that failed."""

    number: int
    key: bytes
    view: Snapshot
    sources: list[Member] = field(default_factory=list)
    missing: set[Member] = field(default_factory=set)
    failures: dict[Member, Exception] = field(default_factory=dict)
    size: int | None = None

    def retry(self, view: Snapshot) -> None:
        """Begin another attempt with the present members; forget the failures of members that did not answer."""
        self.view = view
        self.failures = {member: failure for member, failure in self.failures.items() if not is_away(failure)}

    def note(self, ask: Ask, given: Reply | Exception) -> None:
        """Record why a member did not return the object."""
        answer = decoded(ask, given, (Status.MISSING,))
        if isinstance(answer, Exception):
            self.failures[ask.member] = answer
        else:
            self.missing.add(ask.member)

    def unasked(self) -> list[Member]:
        """Return the members that have neither failed nor replied `missing`, in the order for the key."""
        order = self.view.order(self.key)
        return [member for member in order if member not in self.missing and member not in self.failures]

    def absent(self, redundancy: Redundancy) -> bool:
        """Return True if the object certainly does not exist.

        Members that did not answer, or that have not been met yet, may have copies. So the object is certainly absent
        only if these members are too few to have all copies of an object, and if no member refused the request.
        """
        return may_recover(self.failures.values()) and not redundancy.enough(
            len(self.failures) + len(self.view.strangers)
        )

    def failure(self, redundancy: Redundancy) -> Exception:
        """Return the error that says why the object cannot be found or read."""
        for failure in self.failures.values():
            if not is_away(failure):
                return failure
        errors = [*self.failures.values(), *[member.absence() for member in self.view.strangers]]
        if redundancy.parts == 1:
            return errors[0]
        reasons = "; ".join(dict.fromkeys(map(str, errors)))
        return ReplicationError(
            f"{self.key!r}: nodes cannot be asked, and they may be all that have a copy of it ({reasons})"
        )


def find(
    view: Snapshot,
    redundancy: Redundancy,
    keys: Sequence[bytes],
    targets: Sequence[Payload | None],
    op: Op = Op.GET,
    meta: bytes = b"",
    first: tuple[Ask, Reply | Exception] | None = None,
) -> Plan[list[Found]]:
    """Ask for objects: first the member of highest rank for each key, then other members that have the object.

    Parameters
    ----------
    view : Snapshot
        The present members.
    redundancy : Redundancy
        The redundancy of the objects.
    keys : sequence of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Buffers for the payloads.
    op : Op
        ``GET``, or another operation on one object (``STAT``, ``PIN``).
    meta : bytes
        Bytes that precede the key in the request.
    first : tuple of Ask and Reply or Exception, optional
        If there is only one key: a request that was already sent to the key's member of highest rank, and the answer.
    """
    outcomes: list[Found] = [None] * len(keys)
    answers: Sequence[Reply | Exception]
    if first is not None:
        asks, answers = [first[0]], [first[1]]
    else:
        asks = [Ask(view.first(key), op, meta + key, 0, None, into) for key, into in zip(keys, targets, strict=True)]
        answers = yield Send(asks, last=len(view.members) == 1)
    searches: list[Search] = []
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        if not isinstance(answer, Exception) and answer.status == Status.DONE:
            outcomes[number] = ask.member, answer
        else:
            search = Search(number, keys[number], view)
            search.note(ask, answer)
            searches.append(search)
    while searches:
        yield from _find_sources(searches, sizes=False)
        while asked := [search for search in searches if search.sources]:
            asks = [Ask(one.sources.pop(0), op, meta + one.key, 0, None, targets[one.number]) for one in asked]
            answers = yield Send(asks)
            for search, ask, answer in zip(asked, asks, answers, strict=True):
                if not isinstance(answer, Exception) and answer.status == Status.DONE:
                    outcomes[search.number] = ask.member, answer
                    searches.remove(search)
                else:
                    search.note(ask, answer)
        if searches and searches[0].view.slow and any(search.unasked() for search in searches):
            continue  # prompt members said that they have the object and then did not return it: ask the slow ones
        searches = [search for search in searches if not search.absent(redundancy)]
        for search in searches:
            outcomes[search.number] = search.failure(redundancy)
        searches = [search for search in searches if may_recover(search.failures.values())]
        if not searches or (again := (yield Pause())) is None:
            break
        for search in searches:
            outcomes[search.number] = None
            search.retry(again)
    return outcomes


def _find_sources(searches: Sequence[Search], *, sizes: bool) -> Plan[None]:
    """Ask the other members which of the keys they have, each member once for all keys.

    Slow members are asked afterwards, and only for keys that no other member has. If only one can have a single key,
    and its size is not needed, the request for the object itself tells as much and saves a round trip.
    """
    yield from _ask_which(searches, slow=False)
    if searches[0].view.slow and (left := [search for search in searches if not search.sources]):
        if not sizes and len(left) == 1 and len(last := left[0].unasked()) == 1:
            left[0].sources = last
        else:
            yield from _ask_which(left, slow=True)
    for search in searches:
        if len(search.sources) > 1:
            search.sources.sort(key=search.view.order(search.key).index)


def _ask_which(searches: Sequence[Search], *, slow: bool) -> Plan[None]:
    wanted: dict[Member, list[Search]] = defaultdict(list)
    late, later = searches[0].view.slow, False
    for search in searches:
        for member in search.unasked():
            if (member in late) == slow:
                wanted[member].append(search)
            else:
                later = True
    if not wanted:
        return
    keys = {member: [one.key for one in own] for member, own in wanted.items()}
    found: dict[Member, Probed | Exception] = yield Probe(keys, last=len(wanted) == 1 and not later)
    for member, own in wanted.items():
        answer = found[member]
        for place, search in enumerate(own):
            if isinstance(answer, Exception):
                search.failures[member] = answer
            elif answer.sizes[place] is None:
                search.missing.add(member)
            else:
                search.sources.append(member)
                search.size = answer.sizes[place]


def measure(
    searches: list[Search], sizes: list[int | Exception | None], redundancy: Redundancy, *, patient: bool
) -> Plan[None]:
    """Ask the other members about keys that the member of highest rank lacks; store the sizes in `sizes`.

    Parameters
    ----------
    searches : list of Search
        One search for each key that the member of highest rank lacks.
    sizes : list of int, None or Exception
        List that receives the size of each value, at the index `Search.number`. For a key without a value, the entry
        stays None.
    redundancy : Redundancy
        The redundancy of the objects.
    patient : bool
        True to raise an error if members that failed may have the value of a key. False to store the error in `sizes`.
    """
    while searches:
        yield from _find_sources(searches, sizes=True)
        for search in searches:
            sizes[search.number] = search.size
        searches = [search for search in searches if not search.sources and not search.absent(redundancy)]
        errors = [search.failure(redundancy) for search in searches]
        if not patient:
            for search, error in zip(searches, errors, strict=True):
                sizes[search.number] = error
            return
        for search, error in zip(searches, errors, strict=True):
            if not may_recover(search.failures.values()):
                raise error
        if not searches:
            return
        if (again := (yield Pause())) is None:
            raise errors[0]
        for search in searches:
            search.retry(again)
