"""Operations of farpool for the remote memory benchmark; most take a sample, in seconds for one object."""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from farpool._native import Connection
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import PutOutcome, Store
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op
from farpool.errors import FarpoolError
from farpool_bench.harness import Progress, Row, told
from farpool_bench.measure import kept, median_call, resident_bytes, seconds_each
from farpool_bench.ring import Ring


def counters(store: Store) -> dict[str, Any]:
    """Counters of the store's only node."""
    (node,) = store.nodes()
    if node.stats is None:
        raise FarpoolError(f"the node {node.node} does not report its counters: {node.error}")
    return node.stats


def publish(store: Store, ring: Ring) -> None:
    """Put the ring's objects into the store."""
    store.put_many(list(zip(ring.keys, ring.payloads, strict=True)))


def get(store: Store, ring: Ring, seconds: float) -> float:
    """Get the ring's objects one by one, as bytes."""
    taken, found = kept(lambda: [store.get(key) for key in ring.keys], seconds_each, len(ring), seconds)
    ring.check("farpool", found)
    return taken


def get_into(store: Store, ring: Ring, batch: int, seconds: float) -> float:
    """Get objects into the ring's buffers, one by one (batch 1) or in calls with `batch` objects."""
    ring.wipe()
    taken = seconds_each(_reading(store, ring, batch), len(ring), seconds)
    ring.check("farpool")
    return taken


def put(store: Store, ring: Ring, batch: int, seconds: float) -> float:
    """Put the ring's objects, which are dropped before each turn, off the clock, and read back at the end."""
    pairs = list(zip(ring.keys, ring.payloads, strict=True))
    taken, turns = 0.0, -1  # the first turn is not counted
    while taken < seconds or turns < 1:
        for key in ring.keys:
            store.drop(key)
        start = time.perf_counter()
        if batch == 1:
            outcomes = [store.put(key, payload) for key, payload in pairs]
        else:
            outcomes = []
            for at in range(0, len(pairs), batch):
                outcomes += store.put_many(pairs[at : at + batch])
        turns += 1
        taken = 0.0 if turns == 0 else taken + time.perf_counter() - start
        if any(outcome is not PutOutcome.STORED for outcome in outcomes):
            raise FarpoolError("farpool: an object that was dropped before is still there")
    ring.wipe()
    store.get_into_many(zip(ring.keys, ring.buffers, strict=True))
    ring.check("farpool")
    return taken / (turns * len(ring))


def lookup(store: Store, ring: Ring, seconds: float) -> float:
    """Look up all of the ring's keys in one call; seconds of a call in the median."""
    taken, found = kept(lambda: store.lookup(ring.keys), median_call, seconds)
    if found.leading != len(ring) or set(found.sizes) != {ring.nbytes}:
        raise FarpoolError("farpool: an object that was put is missing, or has another size")
    return taken


def view(store: Store, ring: Ring, seconds: float) -> float:
    """Pin each object, look at it without a copy, and let go of it."""
    return seconds_each(partial(look, store, ring), len(ring), seconds)


def look(store: Store, ring: Ring) -> None:
    """Pin each object once and check its last byte."""
    for key, payload in zip(ring.keys, ring.payloads, strict=True):
        with store.pin(key) as pinned:
            if pinned.view[-1] != payload[-1] or not pinned.is_mapped:
                raise FarpoolError(f"farpool: the pinned object {key!r} is not the one that was put, or not mapped")


def memcpy(source: memoryview, ring: Ring, seconds: float) -> float:
    """Copy the ring's payloads, which are put into `source` one after another, to its buffers."""
    parts = [source[at : at + ring.nbytes] for at in range(0, len(ring) * ring.nbytes, ring.nbytes)]
    for part, payload in zip(parts, ring.payloads, strict=True):
        part[:] = payload
    pairs = list(zip(ring.buffers, parts, strict=True))

    def work() -> None:
        for buffer, part in pairs:
            buffer[:] = part

    ring.wipe()
    taken = seconds_each(work, len(ring), seconds)
    ring.check("memcpy")
    return taken


def _reading(store: Store, ring: Ring, batch: int) -> Callable[[], object]:
    pairs = list(zip(ring.keys, ring.buffers, strict=True))
    parts = [pairs[at : at + batch] for at in range(0, len(pairs), batch)]

    def one_by_one() -> None:
        for key, buffer in pairs:
            store.get_into(key, buffer)

    def together() -> None:
        for part in parts:
            store.get_into_many(part)

    return one_by_one if batch == 1 else together


_PAYLOAD = 64
_BATCH = 1000
_DEADLINE = 30.0
_ROOM = 512
"""Bytes of the node's memory for each object, which is more than enough."""


def grow(sizes: tuple[int, ...], rounds: int, gets: int, progress: Progress) -> Row:
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
            for objects in told(progress, "Many objects", sizes):
                _publish(tcp, published, objects)
                published = objects
                _warm(mapped, objects)
                points.append(_time(mapped, tcp, objects, rounds, gets))
            grown = resident_bytes(node.pid) - before
            counted = counters(tcp)["index_bytes"]
    key = len(_key(0))
    return Row(
        points=tuple(points),
        payload=_PAYLOAD,
        key=key,
        index_bytes=counted / published,  # of each object, as the node counts them
        # Growth of the node's resident set for each object: index, headers, padding, all but payload and key.
        resident_bytes=grown / published - _PAYLOAD - key,
    )


def connect_many(node: RunningNode, count: int, progress: Progress) -> Row:
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
    seconds = {"open_seconds": (opened - start) / count, "answer_seconds": (answered - opened) / (2 * count)}
    return Row(connections=count, **seconds)


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


def _time(mapped: Store, tcp: Store, objects: int, rounds: int, gets: int) -> Row:
    source = random.Random(objects)
    samples: dict[str, list[float]] = {"mapped": [], "tcp": []}
    for _ in range(rounds):
        numbers = [source.randrange(objects) for _ in range(2 * gets)]
        for name, store in (("mapped", mapped), ("tcp", tcp)):
            samples[name].append(_gets(store, numbers))
    return Row(objects=objects, mapped=tuple(samples["mapped"]), tcp=tuple(samples["tcp"]))


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
