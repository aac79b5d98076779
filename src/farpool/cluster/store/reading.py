"""Finding objects: ask the nodes of a key in their order until one has it (docs/store.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from farpool._native import looked_up, lookup_requests
from farpool.abc.objects import Payload
from farpool.cluster.store.cluster import is_away, share_of
from farpool.cluster.store.messages import Ask, ObjectInfo, seconds_left
from farpool.cluster.wire.frames import Op, Status
from farpool.cluster.wire.refusals import refusal
from farpool.errors import ChecksumError, NodeError, ReplicationError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.store.snapshot import Snapshot
    from farpool.cluster.wire.channel import Channel

__all__ = ["fetch", "listing", "look_up", "probe", "read_many", "read_memory"]


@dataclass(slots=True, eq=False)
class _Search:
    """Search for one key: the nodes that may have it, and the answers of the others."""

    number: int
    key: bytes
    view: Snapshot
    sources: list[Member] = field(default_factory=list)
    missing: set[Member] = field(default_factory=set)
    failures: dict[Member, Exception] = field(default_factory=dict)
    size: int | None = None

    def retry(self, view: Snapshot) -> None:
        """Begin another attempt with the present members; nodes that were away count as not asked."""
        self.view = view
        for member in self.away():
            del self.failures[member]

    def note(self, ask: Ask, answer: Reply | Exception) -> None:
        """Record why a node did not return the object."""
        member = ask.member
        if isinstance(answer, Exception):
            self.failures[member] = answer
        elif answer.status == Status.MISSING:
            self.missing.add(member)
        else:
            said = answer.meta.decode(errors="replace")
            self.failures[member] = refusal(answer.status, said, member.name, Op(ask.op))

    def unasked(self) -> list[Member]:
        """Return, in their order, the nodes from which there is no failure or negative answer yet."""
        order = self.view.order(self.key)
        return [member for member in order if member not in self.missing and member not in self.failures]

    def away(self) -> list[Member]:
        """Return the nodes that could not be asked."""
        return [member for member, failure in self.failures.items() if is_away(failure)]

    def absent(self, copies: int) -> bool:
        """Return True if no node has the object: nodes that are away or were never met cannot have all its copies."""
        others = any(not is_away(failure) for failure in self.failures.values())
        return not others and len(self.away()) + len(self.view.strangers) < copies

    def failure(self, cluster: Cluster) -> Exception:
        """Return the error that says why the object cannot be found or read."""
        worst = [failure for failure in self.failures.values() if not is_away(failure)]
        if worst:
            return worst[0]
        errors: list[Exception] = [*self.failures.values(), *cluster.unmet(self.view.strangers)]
        if cluster.copies == 1:
            return errors[0]
        reasons = "; ".join(dict.fromkeys(map(str, errors)))
        return ReplicationError(
            f"{self.key!r}: nodes cannot be asked, and they may be all that have a copy of it ({reasons})"
        )


def fetch(
    cluster: Cluster,
    keys: Sequence[bytes],
    targets: Sequence[Payload | None],
    deadline: float,
    op: Op = Op.GET,
    meta: bytes = b"",
    first: tuple[Ask, Reply | Exception] | None = None,
    patient: bool = True,
) -> list[tuple[Member, Reply] | Exception | None]:
    """Ask for objects: first the node of highest rank for each key, then the nodes that answer that they have it.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : sequence of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Buffers for the payloads.
    deadline : float
        By the monotonic clock. Nodes that fail are asked again until then, if the answer depends on them.
    op : Op
        ``GET``, or another operation on one object (``STAT``, ``PIN``).
    meta : bytes
        Bytes that precede the key in the request.
    first : tuple of Ask and Reply or Exception, optional
        Request that was already sent to the node of highest rank for the only key, and its answer.
    patient : bool
        Ask nodes that fail again; False to make one attempt.

    Returns
    -------
    list of tuple, None or Exception
        The node and its reply, None if there is no such object, or the error if that could not be found out.
    """
    outcomes: list[tuple[Member, Reply] | Exception | None] = [None] * len(keys)
    view = cluster.view(deadline)
    if first is not None:
        asks, answers = [first[0]], [first[1]]
    else:
        asks = [Ask(view.first(key), op, meta + key, 0, None, into) for key, into in zip(keys, targets, strict=True)]
        answers = cluster.ask(asks, share_of(deadline, last=len(view.members) == 1))
    searches: list[_Search] = []
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        if not isinstance(answer, Exception) and answer.status == Status.DONE:
            outcomes[number] = ask.member, answer
        else:
            search = _Search(number, keys[number], view)
            searches.append(search)
            search.note(ask, answer)
    if searches:
        _search(cluster, searches, outcomes, targets, deadline, op, meta, patient)
    return outcomes


def _search(
    cluster: Cluster,
    searches: list[_Search],
    outcomes: list[tuple[Member, Reply] | Exception | None],
    targets: Sequence[Payload | None],
    deadline: float,
    op: Op,
    meta: bytes,
    patient: bool,
) -> None:
    """Ask the other nodes for objects that the first node did not return, and enter the outcomes; see `fetch`."""
    while searches:
        _find_sources(cluster, searches, deadline)
        while asked := [search for search in searches if search.sources]:
            asks = [Ask(one.sources.pop(0), op, meta + one.key, 0, None, targets[one.number]) for one in asked]
            answers = cluster.ask(asks, share_of(deadline, last=False))
            for search, ask, answer in zip(asked, asks, answers, strict=True):
                if not isinstance(answer, Exception) and answer.status == Status.DONE:
                    outcomes[search.number] = ask.member, answer
                    searches.remove(search)
                else:
                    search.note(ask, answer)
        for search in searches:
            absent = search.absent(cluster.copies)
            outcomes[search.number] = None if absent else search.failure(cluster)
        searches = [
            search
            for search in searches
            if outcomes[search.number] is not None and all(map(is_away, search.failures.values()))
        ]
        if not searches or not patient or not cluster.wait(deadline):
            break
        view = cluster.view(deadline)
        for search in searches:
            search.retry(view)


def _find_sources(cluster: Cluster, searches: Sequence[_Search], deadline: float) -> None:
    """Ask the other nodes which of the keys they have, each node once for all keys."""
    wanted: dict[Member, list[_Search]] = defaultdict(list)
    for search in searches:
        for member in search.unasked():
            wanted[member].append(search)
    keys = {member: [one.key for one in own] for member, own in wanted.items()}
    found = probe(cluster, keys, deadline)
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
    for search in searches:
        if len(search.sources) > 1:
            search.sources.sort(key=search.view.order(search.key).index)


@dataclass(slots=True)
class Probed:
    """Answer of a node to a probe: the size of each key's value or None, and the positions of keys without a value."""

    sizes: list[int | None]
    missing: list[int]


def probe(
    cluster: Cluster, wanted: Mapping[Member, list[bytes]], deadline: float, *, use: bool = False
) -> dict[Member, Probed | Exception]:
    """Ask each node which of its keys it has.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    wanted : mapping of Member to list of bytes
        The keys for each node.
    deadline : float
        By the monotonic clock.
    use : bool
        Count the probe as a use of the objects, so that they stay longer.

    Returns
    -------
    dict of Member to Probed or Exception
        Answer of each node, or the error if it gave none.
    """
    found: dict[Member, Probed | Exception] = {}
    asks: list[Ask] = []
    asked: list[tuple[Probed, list[int]]] = []
    for member, keys in wanted.items():
        reader = member.channel.reader
        probed = Probed([None] * len(keys), list(range(len(keys))))
        if reader is not None:
            probed = Probed(*reader.lookup(keys, visit=use))
        found[member] = probed
        if probed.missing:
            for meta, places in lookup_requests(keys, probed.missing, use):
                asks.append(Ask(member, Op.LOOKUP, meta))
                asked.append((probed, places))
            probed.missing = []
    if not asks:
        return found
    answers = cluster.ask(asks, share_of(deadline, last=len(wanted) == 1))
    for ask, (probed, places), answer in zip(asks, asked, answers, strict=True):
        member = ask.member
        if isinstance(answer, Exception):
            found[member] = answer
        elif answer.status != Status.DONE:
            found[member] = refusal(answer.status, answer.meta.decode(errors="replace"), member.name, ask.op)
        else:
            try:
                probed.missing += looked_up(answer.meta, places, probed.sizes, member.name)
            except NodeError as error:
                found[member] = error
    return found


def look_up(
    cluster: Cluster, keys: list[bytes], deadline: float, *, patient: bool = True
) -> Sequence[int | Exception | None]:
    """Find out which keys have a value.

    For each key the node of highest rank is asked first, and the other nodes only if that node has no value.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    deadline : float
        By the monotonic clock.
    patient : bool
        True to ask nodes that fail again, and to raise an error if the nodes that failed may have all copies of a
        value. False to make one attempt, and to return an error in place of a size.

    Returns
    -------
    sequence of int, None or Exception
        Size of each key's value in bytes, None if it has no value, or the error if that could not be found out.

    Raises
    ------
    NodeError, ReplicationError
        The nodes that cannot be asked may have all copies of a value.
    """
    sizes: list[int | Exception | None] = [None] * len(keys)
    view = cluster.view(deadline)
    groups = view.by_first(keys)
    whole = len(groups) == 1  # then one answer is the whole result
    wanted = {member: keys if whole else [keys[n] for n in own] for member, own in groups.items()}
    found = probe(cluster, wanted, deadline)
    searches: list[_Search] = []
    for member, numbers in groups.items():
        answer = found[member]
        if isinstance(answer, Exception):
            lacking = numbers
        else:
            # If there is one node only, no other can have the object.
            lacking = [numbers[place] for place in answer.missing] if len(view.members) > 1 else []
            if whole:
                sizes = cast("list[int | Exception | None]", answer.sizes)
            else:
                for number, size in zip(numbers, answer.sizes, strict=True):
                    sizes[number] = size
        for number in lacking:
            search = _Search(number, keys[number], view)
            if isinstance(answer, Exception):
                search.failures[member] = answer
            else:
                search.missing.add(member)
            searches.append(search)
    if searches:
        _look_up_others(cluster, searches, sizes, deadline, patient=patient)
    return sizes


def _look_up_others(
    cluster: Cluster,
    searches: list[_Search],
    sizes: list[int | Exception | None],
    deadline: float,
    *,
    patient: bool,
) -> None:
    """Ask the other nodes about keys that the first node lacks, and enter the sizes; see `look_up`."""
    while searches:
        _find_sources(cluster, searches, deadline)
        for search in searches:
            if search.sources:
                sizes[search.number] = search.size
        searches = [search for search in searches if not search.sources and not search.absent(cluster.copies)]
        if not patient:
            for search in searches:
                sizes[search.number] = search.failure(cluster)
            return
        for search in searches:
            if not all(map(is_away, search.failures.values())):
                raise search.failure(cluster)
        if searches and not cluster.wait(deadline):
            raise searches[0].failure(cluster)
        if searches:
            view = cluster.view(deadline)
            for search in searches:
                search.retry(view)


def listing(cluster: Cluster, prefix: bytes, deadline: Callable[[], float]) -> Iterator[tuple[Member, ObjectInfo]]:
    """Iterate over the objects whose keys begin with `prefix`, once for each copy, with the node that has it.

    An object that is put or dropped during the iteration may be returned or not.

    Raises
    ------
    NodeError, ReplicationError
        The nodes that cannot be asked may have all copies of some object.
    """
    cluster.tell_epoch(deadline())  # because requests for a listing do not contain the epoch
    view = cluster.reachable(deadline())
    failures = cluster.unmet(view.strangers)
    _require_few(cluster, failures)
    for member in view.met:
        try:
            for page in _pages_of(member, prefix, deadline):
                for key, _, nbytes, ttl, pins, copies, kept in page:
                    yield member, ObjectInfo(key, nbytes, seconds_left(ttl), copies, pins, bool(kept))
        except NodeError as error:
            failures.append(error)
            _require_few(cluster, failures)


def _require_few(cluster: Cluster, failures: Sequence[NodeError]) -> None:
    """Raise if so many nodes have failed that they may have all copies of some object."""
    if len(failures) < cluster.copies:
        return
    if cluster.copies == 1:
        raise failures[0]
    reasons = "; ".join(dict.fromkeys(map(str, failures)))
    raise ReplicationError(
        f"{len(failures)} nodes cannot be asked, and they may be all that have a copy of some object ({reasons})"
    ) from failures[-1]


def _pages_of(member: Member, prefix: bytes, deadline: Callable[[], float]) -> Iterator[list[Any]]:
    after = b""
    while True:
        result: dict[str, Any] = member.call("list", deadline(), after=after, prefix=prefix)
        yield result["objects"]
        after = result["next"]
        if not after:
            return


def read_memory(channel: Channel, key: bytes, into: Payload | None, deadline: float) -> bytes | int | None:
    """Read a value from a node's memory: return its bytes, or its size if they are in `into`; None to ask the node."""
    try:
        reader = channel.reader
        if reader is not None:
            found = reader.get(key) if into is None else reader.get_into(key, into)
            return None if found is None else found[0]
        if channel.one_sided is not None and not isinstance(into, tuple):
            copied = channel.one_sided.get(key, deadline, into)
            if copied is not None:
                return copied[0] if into is None else copied[2]
    except (ChecksumError, NodeError):  # another copy may be whole, and a request may work
        return None
    return None


def read_many(
    cluster: Cluster, keys: list[bytes], targets: Sequence[Payload | None], deadline: float
) -> tuple[list[bytes | int | Exception | None], dict[Member, list[int]]]:
    """Read values without a request, each from the memory of the node of highest rank for its key.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Buffers for the values; None for new bytes.
    deadline : float
        By the monotonic clock.

    Returns
    -------
    list of bytes, int, Exception or None
        For each key its value, or the value's size if it was read into a target; an error if reading failed; None if
        the nodes have to be asked.
    dict of Member to list of int
        By node, the positions of the values that were read there.
    """
    values: list[bytes | int | Exception | None] = [None] * len(keys)
    readers: dict[Member, list[int]] = {}
    for member, numbers in cluster.view(deadline).by_first(keys).items():
        channel = member.channel
        if channel.reader is None and channel.one_sided is None:
            continue
        own, places = keys, targets
        if len(numbers) < len(keys):
            own, places = [keys[n] for n in numbers], [targets[n] for n in numbers]
        found: Sequence[bytes | int | Exception | None]
        if (reader := channel.reader) is not None and None not in places:
            found = reader.get_many_into(own, list(places), deadline)
        else:
            found = [read_memory(channel, key, into, deadline) for key, into in zip(own, places, strict=True)]
        for number, one in zip(numbers, found, strict=True):
            values[number] = one
        readers[member] = [n for n in numbers if values[n] is not None and not isinstance(values[n], Exception)]
    return values, readers
