"""A native node without its Python, and connections to it over socket pairs."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from farpool import _native
from farpool.cluster.wire.frames import (
    COMMIT,
    HEAD,
    LOOKUP,
    OFFSET,
    PLACE,
    PRESENT,
    ROTATE,
    ROTATED,
    STATED,
    TOUCH,
    TTL,
    Op,
    Right,
    Status,
)
from tests.net.raw import RawStream, Reply

ALL = Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN
PATIENCE = 20.0


class Head(NamedTuple):
    """What an object is besides its bytes."""

    ttl_ms: int = 0
    copies: int = 0
    kind: int = 0
    parts: int = 0
    recompute_us: int = 0
    namespace: int = 0
    flags: int = 0

    def packed(self) -> bytes:
        return HEAD.pack(*self)


PLAIN = Head().packed()


class Found(NamedTuple):
    """What a lookup says."""

    leading: int
    sizes: list[int | None]


def until(holds: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


@contextmanager
def node(folder: Path, capacity: int = 1 << 20, **settings: Any) -> Iterator[_native.NodeServer]:
    server = _native.NodeServer(str(folder), capacity, **{"spin": 0.0, **settings})
    server.start()
    try:
        yield server
    finally:
        server.stop()


def walked(
    server: _native.NodeServer, tenant: int, after: bytes, prefix: bytes, limit: int
) -> list[tuple[bytes, int, int, int, int, int, bool]]:
    """A whole walk over a tenant's objects, turn after turn."""
    found, place = server.list_some(tenant, 0, after, prefix, limit)
    while place and len(found) < limit:
        some, place = server.list_some(tenant, place, after, prefix, limit - len(found))
        found += some
    return found


class Peer:
    """A program's connection, with a method for each operation that it uses often."""

    def __init__(
        self, server: _native.NodeServer, *, session: int = 7, tenant: int = 0, rights: int = ALL, key: str = ""
    ) -> None:
        ours, theirs = socket.socketpair()
        try:
            server.adopt(theirs.detach(), session, tenant, rights, key)
        except BaseException:
            ours.close()
            raise
        server.expose(session, tenant)  # so that it may prepare
        self.connection = RawStream(ours.detach())

    def ask(self, op: int, meta: bytes = b"", *, into: Any = None, **fields: Any) -> Reply:
        return self.connection.exchange(op, meta, time.monotonic() + PATIENCE, into=into, **fields)

    def put(self, key: bytes, payload: bytes, head: Head | None = None, *, ttl_ms: int = 0) -> Reply:
        return self.ask(Op.PUT, (head or Head(ttl_ms)).packed() + key, payload=payload)

    def published(self, key: bytes, payload: bytes, *, ttl_ms: int = 0) -> int:
        """Put what is not there; its serial."""
        reply = self.put(key, payload, ttl_ms=ttl_ms)
        assert reply.status == Status.DONE, reply.status
        return reply.serial

    def get(self, key: bytes) -> Reply:
        return self.ask(Op.GET, key)

    def drop(self, key: bytes) -> int:
        return self.ask(Op.DROP, key).status

    def touch(self, key: bytes, ttl_ms: int = 0, keep: int = 0) -> int:
        return self.ask(Op.TOUCH, TOUCH.pack(ttl_ms, keep) + key).status

    def pinned(self, key: bytes, ttl_ms: int = 0) -> Reply:
        return self.ask(Op.PIN, TTL.pack(ttl_ms) + key)

    def pin(self, key: bytes, ttl_ms: int = 0) -> tuple[int, int]:
        """Offset and bytes of the payload."""
        reply = self.pinned(key, ttl_ms)
        assert reply.status == Status.DONE, reply.status
        offset, nbytes, _, _ = PLACE.unpack(reply.meta)
        return offset, nbytes

    def unpin(self, offset: int, serial: int) -> int:
        return self.ask(Op.UNPIN, OFFSET.pack(offset), serial=serial).status

    def rotate(self, epoch: int) -> tuple[int, int, int]:
        """The epoch that is now, and objects and bytes that are gone."""
        reply = self.ask(Op.ROTATE, ROTATE.pack(epoch))
        assert reply.status == Status.DONE, reply.status
        now, _, objects, nbytes = ROTATED.unpack(reply.meta)
        return now, objects, nbytes

    def prepared(self, key: bytes, nbytes: int, head: Head | None = None) -> Reply:
        return self.ask(Op.PREPARE, OFFSET.pack(nbytes) + (head or Head()).packed() + key)

    def prepare(self, key: bytes, nbytes: int) -> tuple[int, int]:
        """Offset and serial."""
        reply = self.prepared(key, nbytes)
        assert reply.status == Status.DONE, reply.status
        return int(OFFSET.unpack(reply.meta)[0]), reply.serial

    def commit(self, offset: int, serial: int, checksum: int) -> Reply:
        return self.ask(Op.COMMIT, COMMIT.pack(offset, checksum, 0), serial=serial)

    def abort(self, offset: int, serial: int) -> int:
        return self.ask(Op.ABORT, OFFSET.pack(offset), serial=serial).status

    def lookup(self, keys: Sequence[bytes], flags: int = 0) -> Found:
        reply = self.ask(Op.LOOKUP, lookup_meta(keys, flags))
        assert reply.status == Status.DONE, reply.meta
        return looked_up(reply.meta)

    def close(self) -> None:
        self.connection.close()


def lookup_meta(keys: Sequence[bytes], flags: int = 0) -> bytes:
    return LOOKUP.pack(flags, len(keys)) + b"".join(struct.pack("<H", len(key)) + key for key in keys)


def looked_up(meta: bytes) -> Found:
    """The answer to a lookup, each part of it checked against the others."""
    count, leading = LOOKUP.unpack_from(meta)
    bits = int.from_bytes(meta[8 : 8 + (count + 63) // 64 * 8], "little")
    assert bits >> count == 0
    nbytes = struct.unpack(f"<{count}Q", meta[8 + (count + 63) // 64 * 8 :])
    found = [size if bits >> number & 1 else None for number, size in enumerate(nbytes)]
    assert all(size == 0 for size, there in zip(nbytes, found, strict=True) if there is None)
    assert leading == next((number for number, there in enumerate(found) if there is None), count)
    return Found(leading, found)


def stated(reply: Reply) -> tuple[int, int, int, Head]:
    """Bytes, checksum, pins and the head of a reply to ``stat``."""
    return *STATED.unpack_from(reply.meta), Head._make(HEAD.unpack(reply.meta[STATED.size :]))


def present(reply: Reply) -> tuple[int, int, Head]:
    """Bytes, checksum and the head of what was there already."""
    assert reply.status == Status.PRESENT, reply.status
    nbytes, checksum, _ = PRESENT.unpack_from(reply.meta)
    return nbytes, checksum, Head._make(HEAD.unpack(reply.meta[PRESENT.size :]))


def marks_nbytes(server: _native.NodeServer, tenant: int = 0, session: int = 7) -> int:
    """Bytes that a session's marks of visits take, which are made for a reader in that session."""
    with open(server.objects_visited(session + tenant, tenant), "rb") as file:
        return os.fstat(file.fileno()).st_size


@contextmanager
def reader(
    server: _native.NodeServer,
    tenant: int = 0,
    *,
    session: int = 7,
    epoch: _native.TenantEpoch | None = None,
) -> Iterator[_native.ObjectReader]:
    files = [*server.objects_files(tenant, False), server.objects_visited(session + tenant, tenant)]
    try:
        yield _native.ObjectReader(files[0], files[1], files[2], "node", epoch=epoch)
    finally:
        for file in files:
            os.close(file)


class Exposed:
    """The data segment as a program of a one-sided fabric has it."""

    def __init__(self, server: _native.NodeServer, tenant: int = 0) -> None:
        index, data = server.objects_files(tenant, True)
        self._memory = mmap.mmap(data, 0)
        os.close(index)
        os.close(data)

    def write(self, offset: int, payload: bytes) -> int:
        """Write there; the checksum of it."""
        self._memory[offset : offset + len(payload)] = payload
        return _native.crc32c(payload)

    def close(self) -> None:
        self._memory.close()


@contextmanager
def exposed(server: _native.NodeServer, tenant: int = 0) -> Iterator[Exposed]:
    memory = Exposed(server, tenant)
    try:
        yield memory
    finally:
        memory.close()
