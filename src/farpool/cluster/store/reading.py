"""Reads objects from mapped memory, or by requests to nodes if the mapped memory does not have them (docs/store.md)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast, overload

from farpool.abc.objects import Payload
from farpool.cluster.store.driver import probe, run
from farpool.cluster.store.messages import Ask, ObjectInfo, seconds_left
from farpool.cluster.store.plan import share_of
from farpool.cluster.store.searching import Found, Search, find, measure
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import ChecksumError, FarpoolWarning, NodeError, ReplicationError

if TYPE_CHECKING:
    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member
    from farpool.cluster.wire.channel import Channel

__all__ = ["fetch", "listing", "look_up", "read_many", "read_one", "require_few"]

_GET, _DONE = Op.GET, Status.DONE  # because each read would look up the members of the enums again
_COPIES_OFFSET = 8
"""Offset of the number of copies in an object's head."""


@overload
def read_one(cluster: Cluster, key: bytes, into: None) -> bytes | None: ...
@overload
def read_one(cluster: Cluster, key: bytes, into: Payload) -> int | None: ...
def read_one(cluster: Cluster, key: bytes, into: Payload | None) -> bytes | int | None:
    """Read one value. Return its bytes, or its size if `into` received it; None if there is no value.

    Nearly all reads find the value in mapped memory, or at the node of highest rank for the key (`snapshot.py`). So
    this function tries these two before it makes a plan.
    """
    deadline = time.monotonic() + cluster.timeout
    view = cluster.snapshot
    if not view.is_settled:
        view = cluster.view(deadline)
    member = view.first(key)
    found = _from_memory(member.channel, key, into, deadline)
    if found is not None:
        if cluster.on_read is not None:
            cluster.on_read(key, member)
        return found
    ask = Ask(member, _GET, key, 0, None, into)
    answers = cluster.ask((ask,), share_of(deadline, last=len(view.members) == 1))
    answer = answers[0]
    if not isinstance(answer, Exception) and answer.status == _DONE:
        _warn_of_others(cluster, key, answer)
        return _taken(cluster, key, member, answer, into)
    # The members may have changed while the request was under way.
    plan = find(cluster.view(deadline), cluster.redundancy, [key], [into], first=(ask, answer))
    (outcome,) = run(cluster, plan, deadline)
    if isinstance(outcome, Exception):
        raise outcome
    if outcome is None:
        return None
    member, reply = outcome
    _warn_of_others(cluster, key, reply)
    return _taken(cluster, key, member, reply, into)


def read_many(
    cluster: Cluster, keys: list[bytes], targets: Sequence[Payload | None], deadline: float, *, patient: bool = True
) -> list[bytes | int | Exception | None]:
    """Read many values at the same time.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    targets : sequence of memoryview, tuple of them, or None
        Buffers for the values; None for new bytes.
    deadline : float
        Time of `time.monotonic` by which the call must end.
    patient : bool
        True to repeat requests to nodes that failed; False to make one attempt.

    Returns
    -------
    list of bytes, int, Exception or None
        For each key its value, or the value's size if a target received it; None if the key has no value; an error if
        reading failed.
    """
    values: list[bytes | int | Exception | None] = [None] * len(keys)
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
            found = [_from_memory(channel, key, into, deadline) for key, into in zip(own, places, strict=True)]
        for number, one in zip(numbers, found, strict=True):
            values[number] = one
            if cluster.on_read is not None and one is not None and not isinstance(one, Exception):
                cluster.on_read(keys[number], member)
    left = [number for number, value in enumerate(values) if value is None]
    if left:
        plan = find(cluster.view(deadline), cluster.redundancy, [keys[n] for n in left], [targets[n] for n in left])
        for number, outcome in zip(left, run(cluster, plan, deadline, patient=patient), strict=True):
            if outcome is None or isinstance(outcome, Exception):
                values[number] = outcome
            else:
                member, reply = outcome
                if patient:  # caches do not care
                    _warn_of_others(cluster, keys[number], reply)
                values[number] = _taken(cluster, keys[number], member, reply, targets[number])
    return values


def _from_memory(channel: Channel, key: bytes, into: Payload | None, deadline: float) -> bytes | int | None:
    """Read a value from a node's memory without a request for the value; return None if a request is necessary.

    Return the bytes of the value, or its size if `into` received it.
    """
    try:
        reader = channel.reader
        if reader is not None:
            found = reader.get(key) if into is None else reader.get_into(key, into)
            return None if found is None else found[0]
        # A fabric fills one buffer at a time.
        if channel.one_sided is not None and not isinstance(into, tuple):
            copied = channel.one_sided.get(key, deadline, into)
            if copied is not None:
                return copied[0] if into is None else copied[2]
    except (ChecksumError, NodeError):  # another copy may be whole, and a request may work
        return None
    return None


def _taken(cluster: Cluster, key: bytes, member: Member, reply: Reply, into: Payload | None) -> bytes | int:
    """Record that a value was read from a node; return the value, or its size if `into` received it."""
    if cluster.on_read is not None:
        cluster.on_read(key, member)
    return reply.payload or b"" if into is None else reply.nbytes


def _warn_of_others(cluster: Cluster, key: bytes, reply: Reply) -> None:
    """Warn once if an object was put with another number of copies than this store makes."""
    if cluster.has_warned:
        return
    copies, expected = reply.meta[_COPIES_OFFSET], cluster.redundancy.parts
    if copies != expected:
        cluster.has_warned = True
        warnings.warn(
            f"{key!r} was put with replicas={copies}, this store has replicas={expected}: it looks for and mends that "
            "many copies",
            FarpoolWarning,
            stacklevel=4,
        )


def fetch(
    cluster: Cluster,
    keys: Sequence[bytes],
    deadline: float,
    op: Op = Op.GET,
    meta: bytes = b"",
    *,
    patient: bool = True,
) -> list[Found]:
    """Get objects from nodes, or do another operation on each object. `find` describes the parameters."""
    plan = find(cluster.view(deadline), cluster.redundancy, keys, [None] * len(keys), op, meta)
    return run(cluster, plan, deadline, patient=patient)


def look_up(
    cluster: Cluster, keys: list[bytes], deadline: float, *, patient: bool = True
) -> Sequence[int | Exception | None]:
    """Find out which keys have a value, and return the sizes of the values.

    For each key, the node of highest rank is asked first. Other nodes are asked only if that node has no value or
    fails.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    keys : list of bytes
        The keys.
    deadline : float
        Time of `time.monotonic` by which the call must end.
    patient : bool
        True to repeat requests to nodes that failed, and to raise an error if the nodes that failed may have all copies
        of a value. False to make one attempt, and to return an error in place of a size.

    Returns
    -------
    sequence of int, None or Exception
        Size of each key's value in bytes, None if the key has no value; an error if the search failed.

    Raises
    ------
    NodeError, ReplicationError
        The nodes that cannot be asked may have all copies of a value.
    """
    sizes: list[int | Exception | None] = [None] * len(keys)
    view = cluster.view(deadline)
    groups = view.by_first(keys)
    whole = len(groups) == 1  # then one answer is the whole result
    wanted = {member: keys if whole else [keys[number] for number in own] for member, own in groups.items()}
    found = probe(cluster, wanted, share_of(deadline, last=len(view.members) == 1))
    searches: list[Search] = []
    for member, numbers in groups.items():
        answer = found[member]
        if isinstance(answer, Exception):
            searches += [Search(number, keys[number], view, failures={member: answer}) for number in numbers]
            continue
        if whole:
            sizes = cast("list[int | Exception | None]", answer.sizes)
        else:
            for number, size in zip(numbers, answer.sizes, strict=True):
                sizes[number] = size
        if answer.missing and len(view.members) > 1:  # or else no other member can have the object
            lacking = [numbers[place] for place in answer.missing]
            searches += [Search(number, keys[number], view, missing={member}) for number in lacking]
    if searches:
        run(cluster, measure(searches, sizes, cluster.redundancy, patient=patient), deadline, patient=patient)
    return sizes


def listing(cluster: Cluster, prefix: bytes, deadline: Callable[[], float]) -> Iterator[tuple[Member, ObjectInfo]]:
    """Yield each copy of the objects whose keys begin with `prefix`: the member that has it, and its description.

    An object that is put or dropped during the iteration may or may not be among them.

    Raises
    ------
    NodeError, ReplicationError
        The nodes that cannot be asked may have all copies of some object.
    """
    cluster.tell_epoch(deadline())  # because requests for a listing do not contain the epoch
    view = cluster.reachable(deadline())
    failures = [member.absence() for member in view.strangers]
    require_few(cluster, failures)
    for member in view.met:
        try:
            for page in _pages_of(member, prefix, deadline):
                for key, _, nbytes, ttl, pins, copies, kept in page:
                    yield member, ObjectInfo(key, nbytes, seconds_left(ttl), copies, pins, bool(kept))
        except NodeError as error:
            failures.append(error)
            require_few(cluster, failures)


def require_few(cluster: Cluster, failures: Sequence[NodeError]) -> None:
    """Raise an error if so many nodes have failed that they may have all copies of some object."""
    if not cluster.redundancy.enough(len(failures)):
        return
    if cluster.redundancy.parts == 1:
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
