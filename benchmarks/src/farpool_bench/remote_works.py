"""Users of a store and of plain memory, and the parts of the benchmark of remote memory that have no rivals."""

from __future__ import annotations

import contextlib
import random
import resource
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
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
from farpool_bench.measure import resident_bytes
from farpool_bench.users import Ring, User


def counters(store: Store) -> dict[str, Any]:
    """Counters of the store's only node."""
    (node,) = store.nodes()
    if node.stats is None:
        raise FarpoolError(f"the node {node.node} does not report its counters: {node.error}")
    return node.stats


class StoreUser(User):
    """A user of a store that moves several objects in a call."""

    def __init__(self, store: Store, ring: Ring) -> None:
        super().__init__("farpool", ring)
        self.store = store

    def remove(self) -> None:
        for key in self.ring.keys:
            self.store.drop(key)

    def put(self, part: slice) -> None:
        self.check(self.store.put_many(zip(self.ring.keys[part], self.ring.payloads[part], strict=True)))

    def get(self, part: slice) -> None:
        self.store.get_into_many(zip(self.ring.keys[part], self.ring.buffers[part], strict=True))

    def find(self) -> int:
        return self.store.lookup(self.ring.keys).leading

    def check(self, outcomes: Sequence[PutOutcome]) -> None:
        """Raise FarpoolError unless all objects were put."""
        if any(outcome is not PutOutcome.STORED for outcome in outcomes):
            raise FarpoolError("farpool: an object that was dropped before is still there")

    def look(self) -> None:
        """Pin each object once, and check its last byte without a copy."""
        for key, payload in zip(self.ring.keys, self.ring.payloads, strict=True):
            with self.store.pin(key) as pinned:
                if pinned.view[-1] != payload[-1] or not pinned.is_mapped:
                    raise FarpoolError(f"farpool: the pinned object {key!r} is not the one that was put, or not mapped")


class OneByOneUser(StoreUser):
    """A user that moves one object in a call."""

    def put(self, part: slice) -> None:
        pairs = zip(self.ring.keys[part], self.ring.payloads[part], strict=True)
        self.check([self.store.put(key, payload) for key, payload in pairs])

    def get(self, part: slice) -> None:
        for key, buffer in zip(self.ring.keys[part], self.ring.buffers[part], strict=True):
            self.store.get_into(key, buffer)


class BytesUser(OneByOneUser):
    """A user that gets each object as bytes of its own."""

    def get(self, part: slice) -> None:
        self.keep(part, [self.store.get(key) for key in self.ring.keys[part]])


class MemoryUser(User):
    """A user of plain memory with places for the objects, between which and the ring one thread copies."""

    def __init__(self, ring: Ring, places: Sequence[memoryview]) -> None:
        super().__init__("memcpy", ring)
        self._places = places

    def remove(self) -> None:
        pass

    def put(self, part: slice) -> None:
        for place, payload in zip(self._places[part], self.ring.payloads[part], strict=True):
            place[:] = payload

    def get(self, part: slice) -> None:
        for buffer, place in zip(self.ring.buffers[part], self._places[part], strict=True):
            buffer[:] = place

    def find(self) -> int:
        return len(self._places)


_PAYLOAD = 64
_BATCH = 1000
_TIMEOUT_S = 30.0
_ROOM = 512
"""Bytes of the node's memory for each object, which is more than enough."""


def grow(bench: Any) -> Row:
    """Publish more and more objects on a new node, and time gets after each step."""
    capacity = (16 << 20) + _ROOM * bench.objects[-1]
    with running_node(dram=str(capacity)) as node:
        address = node.address
        with Store(address, transport="tcp") as tcp, Store(address, transport="mapped") as mapped:
            tcp.put(_key(-1), bytes(_PAYLOAD))
            tcp.get(_key(-1))
            mapped.get(_key(-1))
            before = resident_bytes(node.pid)
            points = []
            published = 0
            for objects in told(bench.progress, "Many objects", bench.objects):
                for at in range(published, objects, _BATCH):
                    tcp.put_many([(_key(one), _payload(one)) for one in range(at, min(objects, at + _BATCH))])
                published = objects
                for number in range(objects):  # so that no page is mapped for the first time while the clock runs
                    mapped.get(_key(number))
                source = random.Random(objects)
                samples = []
                for _ in range(bench.rounds):
                    numbers = [source.randrange(objects) for _ in range(2 * bench.gets)]
                    samples.append([_gets(store, numbers) for store in (mapped, tcp)])
                on_mapped, on_tcp = zip(*samples, strict=True)
                points.append(Row(objects=objects, mapped=on_mapped, tcp=on_tcp))
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
            dialled = dial(address, "data", session=session, deadline=time.monotonic() + _TIMEOUT_S)
            session = dialled.welcome.session
            fd = dialled.socket.detach()
            connections.append(
                Connection(fd, dialled.node, tenant=dialled.welcome.tenant, credential=dialled.credential, spin=0.0)
            )
            progress("Many connections", len(connections), count)
        opened = time.perf_counter()
        for connection in (*connections, *connections):
            connection.exchange(Op.PING, b"", time.monotonic() + _TIMEOUT_S)
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


_NBYTES = 32 << 20
"""Bytes of the value, more than sockets buffer."""
_RESTS_AT = 256 << 10
_REST_TIMEOUT_S = 5.0
_CHUNK = 64 << 10


def measure_overlap(nodes: Sequence[str]) -> Row:
    """Put a value with copies on two nodes, and measure how these overlap, by relays in front of both that count bytes.

    The relay of the node that gets bytes first rests after a few of them, until the other one gets its first byte. So a
    put that finished one node before it began with the next waits for as long as the relay rests, and is found out.
    """
    meter = _Meter()
    with ExitStack() as stack:
        relays = [_relay(stack, node, partial(meter.note, number)) for number, node in enumerate(nodes)]
        store = stack.enter_context(Store(*relays, replicas=2, transport="tcp", timeout=60.0))
        store.put("warm", b"connections are open")
        meter.start()
        store.put("overlap", bytes(_NBYTES))
    return Row(nbytes=_NBYTES, before=meter.before)  # bytes that one node had when the other got its first


class _Meter:
    """Counter of the bytes that the two relays receive.

    `before`: bytes that one relay had received when the other one received its first.
    """

    def __init__(self) -> None:
        self.before = 0
        self._received: list[int] | None = None
        self._rests = True
        self._changed = threading.Condition()

    def start(self) -> None:
        """Start counting the bytes that the relays receive."""
        with self._changed:
            self._received = [0, 0]

    def note(self, number: int, nbytes: int) -> None:
        """Count bytes that a relay has received; block until it may take more."""
        with self._changed:
            received = self._received
            if received is None:
                return
            other = 1 - number
            if received[number] == 0:
                self.before = received[other]
            received[number] += nbytes
            self._changed.notify_all()
            if self._rests and received[number] > _RESTS_AT:
                self._rests = self._changed.wait_for(lambda: received[other] > 0, _REST_TIMEOUT_S)


def _relay(stack: ExitStack, node: str, note: Callable[[int], None]) -> str:
    """Run a TCP relay in front of a node, which reports the bytes sent to the node; return its address."""
    there = parse_address(node)
    server = socket.create_server(("127.0.0.1", 0))
    sockets = [server]

    def pass_on(source: socket.socket, target: socket.socket, report: Callable[[int], None]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                report(len(data))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = server.accept()[0], socket.create_connection((there.host, there.port))
                sockets.extend(ends)
                for one in ends:
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for way in ((*ends, note), (*ends[::-1], lambda nbytes: None)):
                    threading.Thread(target=pass_on, args=way, daemon=True).start()

    def close() -> None:
        for one in sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    stack.callback(close)
    threading.Thread(target=accept, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}"
