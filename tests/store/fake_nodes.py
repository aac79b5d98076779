"""Nodes in this process, as docs/wire.md has them, that can fail in each way a node can."""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from farpool._native import crc32c
from farpool.errors import ChecksumError, NodeError, NodeTimeoutError
from farpool.store import Store
from farpool.store.core import Core
from farpool.transport.frames import Op, Status

__all__ = ["FakeChannel", "FakeNode", "store_over"]


class Contact:
    """What a node says when it is met; another one after each start."""

    def __init__(self, node: str) -> None:
        self.id = node.encode()


@dataclass
class FakeReply:
    status: int
    generation: int = 0
    meta: bytes = b""
    payload: bytes | None = None
    nbytes: int = 0


@dataclass
class Entry:
    generation: int
    payload: bytes
    deleted: bool = False
    expiry: int = 0
    crc: int = 0
    pins: int = 0


@dataclass
class Memory:
    """What a restart may lose."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    floors: dict[int, int] = field(default_factory=dict)
    base_floor: int = 0
    retired: bool = False
    prepared: dict[tuple[int, int], tuple[bytes, int, int]] = field(default_factory=dict)
    written: dict[int, bytes] = field(default_factory=dict)
    offsets: Iterator[int] = field(default_factory=lambda: itertools.count(4096, 1 << 20))


class FakeNode:
    """A node's state.

    Few floors, so that keys share them.
    """

    def __init__(self, name: str, *, floors: int = 2, now: object = None, mapped: bool = False) -> None:
        self.name = name
        self.memory = Memory()
        self.up = True
        self.stopped = False
        self.full = False
        self.denied: frozenset[Op] = frozenset()
        self.lose_replies = 0
        self.mapped = mapped
        self.largest = 1 << 30
        self.backlog: list[tuple[int, bytes, int, bytes | None]] = []
        self.served: list[Op] = []
        self._floors = floors
        self._now = now
        self.contact = Contact(self.name)

    def floor(self, key: bytes) -> int:
        return max(self.memory.base_floor, self.memory.floors.get(crc32c(key) % self._floors, 0))

    def raise_floor(self, key: bytes, generation: int) -> None:
        slot = crc32c(key) % self._floors
        self.memory.floors[slot] = max(self.memory.floors.get(slot, 0), generation)

    def evict(self, key: bytes) -> None:
        entry = self.memory.entries.pop(key, None)
        if entry is not None:
            self.raise_floor(key, entry.generation)

    def restart(self, *, forget: bool, now: int = 0) -> None:
        """As killed and started again; all connections break."""
        self.backlog.clear()
        self.up, self.stopped = True, False
        self.contact = Contact(self.name)
        self.memory.prepared.clear()
        if forget:
            self.memory.retired = True
            self.memory = Memory(base_floor=now << 12)

    def resume(self) -> None:
        """Go on after a stop, with what has come meanwhile."""
        self.stopped = False
        backlog, self.backlog = self.backlog, []
        for request in backlog:
            self.serve(*request)

    def serve(self, op: int, meta: bytes, generation: int, payload: bytes | None) -> FakeReply:
        self.served.append(Op(op))
        if op in self.denied:
            return FakeReply(Status.DENIED)
        match op:
            case Op.GET | Op.STAT | Op.PIN:
                return self._find(op, meta)
            case Op.PUT:
                return self._publish(meta[8:], generation, payload or b"", *struct.unpack_from("<Q", meta))
            case Op.PREPARE:
                nbytes, expiry = struct.unpack_from("<QQ", meta)
                return self._prepare(meta[16:], generation, nbytes, expiry)
            case Op.COMMIT:
                offset, crc, _ = struct.unpack("<QII", meta)
                if (offset, generation) not in self.memory.prepared:
                    return FakeReply(Status.UNKNOWN)
                key, _, expiry = self.memory.prepared.pop((offset, generation))
                assert crc32c(self.memory.written[offset]) == crc
                return self._publish(key, generation, self.memory.written[offset], expiry)
            case Op.ABORT:
                self.memory.prepared.pop((struct.unpack("<Q", meta)[0], generation), None)
                return FakeReply(Status.DONE)
            case Op.DELETE:
                entry = self.memory.entries.get(meta)
                known = self._known(meta)
                if generation <= known:
                    return FakeReply(Status.STALE, known)
                self.memory.entries[meta] = Entry(generation, b"", deleted=True)
                return FakeReply(Status.DONE, 0 if entry is None or entry.deleted else known)
            case Op.TOUCH:
                found = self._find(Op.STAT, meta[8:])
                if found.status == Status.DONE:
                    (self.memory.entries[meta[8:]].expiry,) = struct.unpack_from("<Q", meta)
                return FakeReply(found.status, found.generation)
            case Op.FORGET:
                entry = self.memory.entries.get(meta)
                if entry is not None and entry.deleted and entry.generation == generation:
                    self.evict(meta)
                    return FakeReply(Status.DONE, generation)
                return FakeReply(Status.MISSING, self.floor(meta))
            case Op.UNPIN:
                for entry in self.memory.entries.values():
                    if entry.generation == generation:
                        entry.pins -= 1
                return FakeReply(Status.DONE)
        return FakeReply(Status.BAD_REQUEST, meta=b"unknown operation")

    def _known(self, key: bytes) -> int:
        entry = self.memory.entries.get(key)
        return self.floor(key) if entry is None else entry.generation

    def _find(self, op: int, key: bytes) -> FakeReply:
        entry = self.memory.entries.get(key)
        if entry is None:
            return FakeReply(Status.MISSING, self.floor(key))
        if entry.deleted:
            return FakeReply(Status.DELETED, entry.generation)
        if op == Op.GET:
            return FakeReply(Status.DONE, entry.generation, payload=entry.payload or None, nbytes=len(entry.payload))
        if op == Op.PIN:
            entry.pins += 1
            offset = next(self.memory.offsets)
            self.memory.written[offset] = entry.payload
            return FakeReply(
                Status.DONE, entry.generation, struct.pack("<QQII", offset, len(entry.payload), entry.crc, 0)
            )
        meta = struct.pack("<QQII", len(entry.payload), entry.expiry, entry.crc, entry.pins)
        return FakeReply(Status.DONE, entry.generation, meta)

    def _refused(self, key: bytes, generation: int, nbytes: int) -> FakeReply | None:
        if generation <= self._known(key):
            return FakeReply(Status.STALE, self._known(key))
        if nbytes > self.largest:
            return FakeReply(Status.TOO_LARGE)
        return FakeReply(Status.FULL) if self.full else None

    def _prepare(self, key: bytes, generation: int, nbytes: int, expiry: int) -> FakeReply:
        refused = self._refused(key, generation, nbytes)
        if refused is not None:
            return refused
        offset = next(self.memory.offsets)
        self.memory.prepared[offset, generation] = (key, nbytes, expiry)
        return FakeReply(Status.DONE, generation, struct.pack("<Q", offset))

    def _publish(self, key: bytes, generation: int, payload: bytes, expiry: int) -> FakeReply:
        refused = self._refused(key, generation, len(payload))
        if refused is None:
            self.memory.entries[key] = Entry(generation, payload, expiry=expiry, crc=crc32c(payload))
        return refused or FakeReply(Status.DONE, generation)


class FakeReader:
    """Mapped memory: reads also while the node is stopped or dead."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def get(self, key: bytes) -> tuple[bytes, int] | None:
        entry = None if self._memory.retired else self._memory.entries.get(key)
        if entry is None or entry.deleted:
            return None
        if crc32c(entry.payload) != entry.crc:
            raise ChecksumError("damaged")
        return entry.payload, entry.generation

    def get_into(self, key: bytes, into: memoryview) -> tuple[int, int] | None:
        found = self.get(key)
        if found is None:
            return None
        if into.nbytes < len(found[0]):
            raise ValueError(f"the buffer has {into.nbytes} bytes, the object {len(found[0])}")
        into.cast("B")[: len(found[0])] = found[0]
        return len(found[0]), found[1]

    def view(self, offset: int, nbytes: int) -> memoryview:
        return memoryview(self._memory.written[offset])[:nbytes]

    def write(self, offset: int, payload: memoryview) -> int:
        self._memory.written[offset] = bytes(payload)
        return crc32c(payload)


class FakeConnection:
    def __init__(self, channel: FakeChannel) -> None:
        self._channel = channel
        self._node = channel.node
        self._contact = channel.node.contact
        self._replies: list[FakeReply | None] = []
        self._prepared: set[tuple[int, int]] = set()
        self.broken = False

    @property
    def unanswered(self) -> int:
        return len(self._replies)

    def _break(self, kind: type[NodeError], why: str) -> NodeError:
        self.broken = True
        return kind(f"{self._node.name} {why}", node=self._node.name)

    def send(self, op: int, meta: bytes, deadline: float, *, generation: int = 0, payload: object = None) -> None:
        if self.broken or not self._channel.reachable or self._contact is not self._node.contact:
            raise self._break(NodeError, "reset the connection")
        data = None if payload is None else bytes(payload)  # type: ignore[call-overload]
        if self._node.stopped:
            self._node.backlog.append((op, meta, generation, data))
            self._replies.append(None)
        else:
            before = set(self._node.memory.prepared)
            self._replies.append(self._node.serve(op, meta, generation, data))
            self._prepared |= set(self._node.memory.prepared) - before

    def receive(self, deadline: float, into: memoryview | None = None) -> FakeReply:
        reply = self._replies.pop(0)
        if self._node.lose_replies:
            self._node.lose_replies -= 1
            raise self._break(NodeError, "reset the connection before its reply")
        if not self._channel.reachable or self._contact is not self._node.contact:
            raise self._break(NodeError, "reset the connection")
        if reply is None:
            raise self._break(NodeTimeoutError, "did not answer in time")
        if reply.payload is not None:
            entry = next((e for e in self._node.memory.entries.values() if e.payload is reply.payload), None)
            if entry is not None and crc32c(reply.payload) != entry.crc:
                raise ChecksumError(f"{self._node.name}: the payload is not what was sent")
            if into is not None:
                if into.nbytes < len(reply.payload):
                    raise ValueError(f"the buffer has {into.nbytes} bytes, the object {len(reply.payload)}")
                into.cast("B")[: len(reply.payload)] = reply.payload
                return FakeReply(reply.status, reply.generation, reply.meta, None, reply.nbytes)
        return reply

    def exchange(
        self, op: int, meta: bytes, deadline: float, *, generation: int = 0, payload: object = None,
        into: memoryview | None = None,
    ) -> FakeReply:  # fmt: skip
        self.send(op, meta, deadline, generation=generation, payload=payload)
        return self.receive(deadline, into)

    def close(self) -> None:
        self.broken = True
        for place in self._prepared:
            self._node.memory.prepared.pop(place, None)


class FakeChannel:
    """A client's way to a fake node; `cut` is a partition between the two."""

    def __init__(self, node: FakeNode) -> None:
        self.node = node
        self.name = node.name
        self.reader: FakeReader | None = None
        self.welcome: Contact | None = None
        self.one_sided = None
        self.cut = False
        self._idle: list[FakeConnection] = []

    @property
    def reachable(self) -> bool:
        return self.node.up and not self.cut

    def _contact(self) -> None:
        if not self.reachable:
            raise NodeError(f"{self.name} refused the connection", node=self.name)
        if self.node.stopped:
            raise NodeTimeoutError(f"{self.name} did not answer in time", node=self.name)
        if self.welcome is not self.node.contact:
            self.welcome = self.node.contact
            self.reader = None

    def attach(self, deadline: float) -> FakeReader | None:
        self._contact()
        if self.node.mapped and self.reader is None:
            self.reader = FakeReader(self.node.memory)
        return self.reader

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[FakeConnection]:
        if self._idle:
            connection = self._idle.pop()
        else:
            self._contact()
            connection = FakeConnection(self)
        try:
            yield connection
        finally:
            if not connection.broken and not connection.unanswered:
                self._idle.append(connection)

    def call(self, name: str, deadline: float, **arguments: object) -> dict[str, object]:
        self._contact()
        entries = self.node.memory.entries
        if name == "stats":
            return {"objects": len(entries)}
        after, prefix = arguments["after"], arguments.get("prefix", b"")
        assert isinstance(after, bytes)
        assert isinstance(prefix, bytes)
        keys = [
            key for key in sorted(entries)
            if key > after and entries[key].deleted == (name == "tombstones") and key.startswith(prefix)
        ]  # fmt: skip
        page = keys[:3]
        following = page[-1] if len(keys) > 3 else b""
        if name == "tombstones":
            return {"tombstones": [(key, entries[key].generation) for key in page], "next": following}
        listed = [(key, e.generation, len(e.payload), e.expiry, e.pins) for key in page if (e := entries[key])]
        return {"objects": listed, "next": following}

    def close(self) -> None:
        self._idle.clear()


def store_over(*nodes: FakeNode, replicas: int = 1, timeout: float = 0.2) -> Store:
    """A store of fake nodes, whose breakers let every call through and whose upkeep is called by hand."""
    store = Store.__new__(Store)
    store._start([FakeChannel(node) for node in nodes], replicas, timeout)  # type: ignore[misc]
    core = core_of(store)
    core.upkeep.wake = lambda: None  # type: ignore[method-assign]
    for member in core.members:
        member.failed = lambda error: None  # type: ignore[method-assign]
    return store


def core_of(store: Store) -> Core:
    core = store._core
    assert core is not None
    return core


def channel_of(store: Store, node: FakeNode) -> FakeChannel:
    channel = next(member.channel for member in core_of(store).members if member.name == node.name)
    assert isinstance(channel, FakeChannel)
    return channel
