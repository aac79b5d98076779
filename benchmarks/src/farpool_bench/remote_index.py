"""Measurements with many objects or connections: a node's memory for each object, and times of gets and answers."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

from farpool._native import Connection
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op
from farpool.errors import FarpoolError
from farpool_bench.measure import resident_bytes
from farpool_bench.remote_works import counters

__all__ = ["Crowd", "Growth", "Index", "connect_many", "grow"]

_PAYLOAD = 64
_BATCH = 1000
_DEADLINE = 30.0
_ROOM = 512
"""Bytes of the node's memory for each object, which is more than enough."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Seconds for a get of one object among many, picked at random; one sample for each round.

    Attributes
    ----------
    objects : int
        Number of objects on the node.
    mapped, tcp : tuple of float
        Samples by transport.
    """

    objects: int
    mapped: tuple[float, ...]
    tcp: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """Costs of objects on a node, in time and memory.

    Attributes
    ----------
    points : tuple of Growth
        From few to many objects.
    payload, key : int
        Bytes of an object and of its key.
    index_bytes : float
        Bytes of the index for each object, as the node counts them.
    resident_bytes : float
        Growth of the node's resident set for each object, payload and key aside: index, headers, padding, all else.
    """

    points: tuple[Growth, ...]
    payload: int
    key: int
    index_bytes: float
    resident_bytes: float


@dataclass(frozen=True, slots=True)
class Crowd:
    """Results for many connections to one node at once.

    Attributes
    ----------
    connections : int
        Number of connections, all of which answered while all were open.
    open_seconds : float
        Seconds to open one, handshake included.
    answer_seconds : float
        Seconds from a request to the reply, on one connection after another.
    """

    connections: int
    open_seconds: float
    answer_seconds: float


def grow(sizes: tuple[int, ...], rounds: int, gets: int, progress: Callable[[str, int, int], None]) -> Index:
    """Publish more and more objects on a new node, and time gets after each step."""
    capacity = (16 << 20) + _ROOM * sizes[-1]
    with running_node(dram=str(capacity)) as node:
        address = node.address
        with Store(address, transport="tcp") as tcp, Store(address, transport="mapped") as mapped:
            tcp.put(_key(-1), bytes(_PAYLOAD))
            tcp.get(_key(-1))
            mapped.get(_key(-1))
            before = resident_bytes(node.pid)
            points = []
            published = 0
            for step, objects in enumerate(sizes):
                progress("Many objects", step, len(sizes))
                _publish(tcp, published, objects)
                published = objects
                _warm(mapped, objects)
                points.append(_time(mapped, tcp, objects, rounds, gets))
            grown = resident_bytes(node.pid) - before
            counted = counters(tcp)["index_bytes"]
            progress("Many objects", len(sizes), len(sizes))
    key = len(_key(0))
    return Index(tuple(points), _PAYLOAD, key, counted / published, grown / published - _PAYLOAD - key)


def connect_many(node: RunningNode, count: int, progress: Callable[[str, int, int], None]) -> Crowd:
    """Open `count` connections to a node and ping on each of them, in two rounds."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    address = parse_address(node.address, "node")
    connections: list[Connection] = []
    session = 0
    try:
        start = time.perf_counter()
        for _ in range(count):
            dialled = dial(address, "data", session=session, deadline=time.monotonic() + _DEADLINE)
            session = dialled.welcome.session
            fd = dialled.socket.detach()
            connections.append(
                Connection(fd, dialled.node, tenant=dialled.welcome.tenant, credential=dialled.credential, spin=0.0)
            )
            progress("Many connections", len(connections), count)
        opened = time.perf_counter()
        for connection in (*connections, *connections):
            connection.exchange(Op.PING, b"", time.monotonic() + _DEADLINE)
        answered = time.perf_counter()
    finally:
        for connection in connections:
            connection.close()
    return Crowd(count, (opened - start) / count, (answered - opened) / (2 * count))


def _key(number: int) -> bytes:
    return b"%016x" % (number & (1 << 64) - 1)


def _payload(number: int) -> bytes:
    return number.to_bytes(8, "little") * (_PAYLOAD // 8)


def _publish(store: Store, start: int, end: int) -> None:
    for at in range(start, end, _BATCH):
        store.put_many([(_key(number), _payload(number)) for number in range(at, min(end, at + _BATCH))])


def _warm(mapped: Store, objects: int) -> None:
    """Read all objects once, so that no page is mapped for the first time while the clock runs."""
    for number in range(objects):
        mapped.get(_key(number))


def _time(mapped: Store, tcp: Store, objects: int, rounds: int, gets: int) -> Growth:
    source = random.Random(objects)
    samples: dict[str, list[float]] = {"mapped": [], "tcp": []}
    for _ in range(rounds):
        numbers = [source.randrange(objects) for _ in range(2 * gets)]
        for name, store in (("mapped", mapped), ("tcp", tcp)):
            samples[name].append(_gets(store, numbers))
    return Growth(objects, tuple(samples["mapped"]), tuple(samples["tcp"]))


def _gets(store: Store, numbers: list[int]) -> float:
    """Seconds for a get; the first half of the gets, which finds caches filled by others, does not count."""
    keys = [_key(number) for number in numbers]
    half = len(keys) // 2
    found = [store.get(key) for key in keys[:half]]
    start = time.perf_counter()
    found += [store.get(key) for key in keys[half:]]
    taken = time.perf_counter() - start
    if found != [_payload(number) for number in numbers]:
        raise FarpoolError("farpool: an object was read with other bytes than were put")
    return taken / (len(keys) - half)
