"""Finding objects: the nodes of a key are asked in their order until one has it (docs/store.md)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
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
    from farpool.cluster.wire.channel import Channel

__all__ = ["fetch", "listing", "look_up", "probe", "read_many", "read_memory"]


@dataclass(slots=True, eq=False)
class _Search:
    """Search for one key: the nodes that may have it, and the answers of the others."""

    number: int
    key: bytes
    order: list[int]
    sources: list[int]
    missing: set[int] = field(default_factory=set)
    failures: dict[int, Exception] = field(default_factory=dict)
    size: int | None = None

    def retry(self, cluster: Cluster, deadline: float) -> None:
        """Count nodes that were away as not asked."""
        self.order = cluster.order(self.key, deadline)
        for node in self.away():
            del self.failures[node]

    def note(self, ask: Ask, answer: Reply | Exception, name: str) -> None:
        """Record why a node did not return the object."""
        if isinstance(answer, Exception):
            self.failures[ask.node] = answer
        elif answer.status == Status.MISSING:
            self.missing.add(ask.node)
        else:
            said = answer.meta.decode(errors="replace")
            self.failures[ask.node] = refusal(answer.status, said, name, Op(ask.op))

    def unasked(self) -> list[int]:
        """Return the nodes that have not said that they lack the object, and have not failed."""
        return [node for node in self.order if node not in self.missing and node not in self.failures]

    def away(self) -> list[int]:
        """Return the nodes that could not be asked."""
        return [node for node, failure in self.failures.items() if is_away(failure)]

    def absent(self, cluster: Cluster) -> bool:
        """Return True if no node has the object: too few are away, or were not met before, to hold all copies."""
        others = any(not is_away(failure) for failure in self.failures.values())
        unmet = len(cluster.members) - len(self.order)
        return not others and len(self.away()) + unmet < cluster.copies

    def failure(self, cluster: Cluster) -> Exception:
        """Return the error that says why the object cannot be found or read."""
        worst = [failure for failure in self.failures.values() if not is_away(failure)]
        if worst:
            return worst[0]
        errors: list[Exception] = [*self.failures.values(), *cluster.unmet(self.order)]
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
) -> list[tuple[int, Reply] | Exception | None]:
    """Ask for objects: the first rank of each key, then whichever node says that it has it.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : sequence of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Places for the payloads.
    deadline : float
        By the monotonic clock. Nodes that fail are asked again until then, where the answer depends on them.
    op : Op
        ``GET``, or another operation on one object (``STAT``, ``PIN``).
    meta : bytes
        Bytes that precede the key in the request.
    first : tuple of Ask and Reply or Exception, optional
        Request that the first rank of the only key has been sent already, and its answer.
    patient : bool
        Ask nodes that fail again; False to make one attempt.

    Returns
    -------
    list of tuple, None or Exception
        The node and its reply, None where there is no such object, or why that cannot be known.
    """
    outcomes: list[tuple[int, Reply] | Exception | None] = [None] * len(keys)
    if first is not None:
        asks, answers = [first[0]], [first[1]]
    else:
        asks = [
            Ask(cluster.order(key, deadline)[0], op, meta + key, 0, None, into)
            for key, into in zip(keys, targets, strict=True)
        ]
        answers = cluster.ask(asks, share_of(deadline, last=len(cluster.members) == 1))
    searches: list[_Search] = []
    for number, (ask, answer) in enumerate(zip(asks, answers, strict=True)):
        if not isinstance(answer, Exception) and answer.status == Status.DONE:
            outcomes[number] = ask.node, answer
        else:
            search = _Search(number, keys[number], cluster.order(keys[number], deadline), [])
            searches.append(search)
            search.note(ask, answer, cluster.members[ask.node].name)
    while searches:
        _find_sources(cluster, searches, deadline)
        while asked := [search for search in searches if search.sources]:
            asks = [Ask(one.sources.pop(0), op, meta + one.key, 0, None, targets[one.number]) for one in asked]
            answers = cluster.ask(asks, share_of(deadline, last=False))
            for search, ask, answer in zip(asked, asks, answers, strict=True):
                if not isinstance(answer, Exception) and answer.status == Status.DONE:
                    outcomes[search.number] = ask.node, answer
                    searches.remove(search)
                else:
                    search.note(ask, answer, cluster.members[ask.node].name)
        for search in searches:
            absent = search.absent(cluster)
            outcomes[search.number] = None if absent else search.failure(cluster)
        searches = [
            search
            for search in searches
            if outcomes[search.number] is not None and all(map(is_away, search.failures.values()))
        ]
        if not searches or not patient or not cluster.wait(deadline):
            break
        for search in searches:
            search.retry(cluster, deadline)
    return outcomes


def _find_sources(cluster: Cluster, searches: Sequence[_Search], deadline: float) -> None:
    """Ask the other nodes which of the keys they have, each node once for all keys."""
    wanted: dict[int, list[_Search]] = defaultdict(list)
    for search in searches:
        for node in search.unasked():
            wanted[node].append(search)
    keys = {node: [one.key for one in own] for node, own in wanted.items()}
    found = probe(cluster, keys, deadline)
    for node, own in wanted.items():
        answer = found[node]
        for place, search in enumerate(own):
            if isinstance(answer, Exception):
                search.failures[node] = answer
            elif answer.sizes[place] is None:
                search.missing.add(node)
            else:
                search.sources.append(node)
                search.size = answer.sizes[place]
    for search in searches:
        search.sources.sort(key=search.order.index)


@dataclass(slots=True)
class Probed:
    """Answer of a node to a probe: the bytes of each key's value, None where there is none, and the places of those."""

    sizes: list[int | None]
    missing: list[int]


def probe(
    cluster: Cluster, wanted: dict[int, list[bytes]], deadline: float, *, use: bool = False
) -> dict[int, Probed | Exception]:
    """Ask each node which of its keys it has.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    wanted : dict of int to list of bytes
        The keys for each node.
    deadline : float
        By the monotonic clock.
    use : bool
        Count it as a use of what is there, so that it stays longer.

    Returns
    -------
    dict of int to Probed or Exception
        Answer of each node, or the error for which there is none.
    """
    found: dict[int, Probed | Exception] = {}
    asks: list[Ask] = []
    asked: list[tuple[Probed, list[int]]] = []
    for node, keys in wanted.items():
        reader = cluster.members[node].channel.reader
        probed = Probed([None] * len(keys), list(range(len(keys))))
        if reader is not None:
            probed = Probed(*reader.lookup(keys, visit=use))
        found[node] = probed
        if probed.missing:
            for meta, places in lookup_requests(keys, probed.missing, use):
                asks.append(Ask(node, Op.LOOKUP, meta))
                asked.append((probed, places))
            probed.missing = []
    if not asks:
        return found
    answers = cluster.ask(asks, share_of(deadline, last=len(wanted) == 1))
    for ask, (probed, places), answer in zip(asks, asked, answers, strict=True):
        name = cluster.members[ask.node].name
        if isinstance(answer, Exception):
            found[ask.node] = answer
        elif answer.status != Status.DONE:
            found[ask.node] = refusal(answer.status, answer.meta.decode(errors="replace"), name, ask.op)
        else:
            try:
                probed.missing += looked_up(answer.meta, places, probed.sizes, name)
            except NodeError as error:
                found[ask.node] = error
    return found


def look_up(
    cluster: Cluster, keys: list[bytes], deadline: float, *, patient: bool = True
) -> Sequence[int | Exception | None]:
    """Find out which keys have a value: the first rank of each is asked, then the others for what it does not have.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    deadline : float
        By the monotonic clock.
    patient : bool
        Ask nodes that fail again, and raise an error if they may be all that have a copy. False to make one attempt,
        and return errors in the places of their keys.

    Returns
    -------
    sequence of int, None or Exception
        Bytes of each key's value, None where there is none, or the error for which that cannot be known.

    Raises
    ------
    NodeError, ReplicationError
        Nodes cannot be asked that may be all that have a copy.
    """
    sizes: list[int | Exception | None] = [None] * len(keys)
    groups = cluster.by_first(keys, deadline)
    whole = len(groups) == 1  # nothing to be picked out and put together
    found = probe(cluster, {node: keys if whole else [keys[n] for n in own] for node, own in groups.items()}, deadline)
    searches: list[_Search] = []
    for node, numbers in groups.items():
        answer = found[node]
        if isinstance(answer, Exception):
            lacking = numbers
        else:
            # The only node of a store has all that there is.
            lacking = [numbers[place] for place in answer.missing] if len(cluster.members) > 1 else []
            if whole:
                sizes = cast("list[int | Exception | None]", answer.sizes)
            else:
                for number, size in zip(numbers, answer.sizes, strict=True):
                    sizes[number] = size
        for number in lacking:
            search = _Search(number, keys[number], cluster.order(keys[number], deadline), [])
            if isinstance(answer, Exception):
                search.failures[node] = answer
            else:
                search.missing.add(node)
            searches.append(search)
    while searches:
        _find_sources(cluster, searches, deadline)
        for search in searches:
            if search.sources:
                sizes[search.number] = search.size
        searches = [search for search in searches if not search.sources and not search.absent(cluster)]
        if not patient:
            for search in searches:
                sizes[search.number] = search.failure(cluster)
            break
        for search in searches:
            if not all(map(is_away, search.failures.values())):
                raise search.failure(cluster)
        if searches and not cluster.wait(deadline):
            raise searches[0].failure(cluster)
        for search in searches:
            search.retry(cluster, deadline)
    return sizes


def listing(cluster: Cluster, prefix: bytes, deadline: Callable[[], float]) -> Iterator[tuple[int, ObjectInfo]]:
    """Iterate over the objects whose keys begin with `prefix`, once for each copy, with the node that has it.

    Objects that are put or dropped meanwhile may be among them or not.

    Raises
    ------
    NodeError, ReplicationError
        So many nodes cannot be asked that they may be all that have a copy of some object.
    """
    cluster.tell_epoch(deadline())  # requests to list tell none
    nodes = cluster.reachable(deadline())
    failures = cluster.unmet(nodes)
    _require_few(cluster, failures)
    for node in nodes:
        try:
            for page in _pages_of(cluster, node, prefix, deadline):
                for key, _, nbytes, ttl, pins, copies, kept in page:
                    yield node, ObjectInfo(key, nbytes, seconds_left(ttl), copies, pins, bool(kept))
        except NodeError as error:
            failures.append(error)
            _require_few(cluster, failures)


def _require_few(cluster: Cluster, failures: Sequence[NodeError]) -> None:
    """Raise if so many nodes have failed that they may be all that have a copy of some object."""
    if len(failures) < cluster.copies:
        return
    if cluster.copies == 1:
        raise failures[0]
    reasons = "; ".join(dict.fromkeys(map(str, failures)))
    raise ReplicationError(
        f"{len(failures)} nodes cannot be asked, and they may be all that have a copy of some object ({reasons})"
    ) from failures[-1]


def _pages_of(cluster: Cluster, node: int, prefix: bytes, deadline: Callable[[], float]) -> Iterator[list[Any]]:
    after = b""
    while True:
        result: dict[str, Any] = cluster.members[node].call("list", deadline(), after=after, prefix=prefix)
        yield result["objects"]
        after = result["next"]
        if not after:
            return


def read_memory(channel: Channel, key: bytes, into: Payload | None, deadline: float) -> bytes | int | None:
    """Read a value from a node's memory: its bytes, or their number once they are in `into`; None to ask the node."""
    try:
        reader = channel.reader
        if reader is not None:
            found = reader.get(key) if into is None else reader.get_into(key, into)
            return None if found is None else found[0]
        if channel.one_sided is not None and not isinstance(into, tuple):
            copied = channel.one_sided.get(key, deadline, into)
            if copied is not None:
                return copied[0] if into is None else copied[2]
    except (ChecksumError, NodeError):  # another copy may be whole, another way may work
        return None
    return None


def read_many(
    cluster: Cluster, keys: list[bytes], targets: Sequence[Payload | None], deadline: float
) -> tuple[list[bytes | int | Exception | None], dict[int, list[int]]]:
    """Read what lies in the mapped memory of the keys' first ranks.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Places for the values; None for new bytes.
    deadline : float
        By the monotonic clock.

    Returns
    -------
    list of bytes, int, Exception or None
        Each value, or its bytes once they are in its target; why it could not be read; None where the nodes have to be
        asked.
    dict of int to list of int
        By node, the numbers of the values that were read there.
    """
    values: list[bytes | int | Exception | None] = [None] * len(keys)
    readers: dict[int, list[int]] = {}
    for node, numbers in cluster.by_first(keys, deadline).items():
        channel = cluster.members[node].channel
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
        readers[node] = [n for n in numbers if values[n] is not None and not isinstance(values[n], Exception)]
    return values, readers
