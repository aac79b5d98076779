"""A native node without its Python, and connections to it over socket pairs."""

from __future__ import annotations

import itertools
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farpool import _native
from farpool.transport.frames import Op, Right, Status

ALL = Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN
PATIENCE = 20.0
_counter = itertools.count(1)


def generation() -> int:
    """Newer than each one before, and than what a fresh node vouches for."""
    return (int(time.time() * 1e6) + 3_000_000 << 12) + next(_counter)


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


class Peer:
    """A program's connection, with a method for each operation that it uses often."""

    def __init__(self, server: _native.NodeServer, *, session: int = 7, tenant: int = 0, rights: int = ALL) -> None:
        ours, theirs = socket.socketpair()
        server.adopt(theirs.detach(), session, tenant, rights)
        self.connection = _native.Connection(ours.detach(), "node", tenant=0, credential=0, spin=0.0)

    def ask(self, op: int, meta: bytes = b"", *, into: Any = None, **fields: Any) -> _native.Reply:
        return self.connection.exchange(op, meta, time.monotonic() + PATIENCE, into=into, **fields)

    def put(self, key: bytes, payload: bytes, *, at: int | None = None, expiry: int = 0) -> _native.Reply:
        number = generation() if at is None else at
        return self.ask(Op.PUT, struct.pack("<Q", expiry) + key, generation=number, payload=payload)

    def published(self, key: bytes, payload: bytes, *, expiry: int = 0) -> int:
        reply = self.put(key, payload, expiry=expiry)
        assert reply.status == Status.DONE, reply.status
        return reply.generation

    def get(self, key: bytes) -> _native.Reply:
        return self.ask(Op.GET, key)

    def delete(self, key: bytes, at: int | None = None) -> _native.Reply:
        return self.ask(Op.DELETE, key, generation=generation() if at is None else at)

    def pin(self, key: bytes) -> tuple[int, int]:
        reply = self.ask(Op.PIN, key)
        assert reply.status == Status.DONE, reply.status
        offset, nbytes, _, _ = struct.unpack("<QQII", reply.meta)
        return offset, nbytes

    def prepare(self, key: bytes, nbytes: int, at: int) -> int:
        reply = self.ask(Op.PREPARE, struct.pack("<QQ", nbytes, 0) + key, generation=at)
        assert reply.status == Status.DONE, reply.status
        (offset,) = struct.unpack("<Q", reply.meta)
        return int(offset)

    def close(self) -> None:
        self.connection.close()


@contextmanager
def reader(server: _native.NodeServer, tenant: int = 0, *, writable: bool = False) -> Iterator[_native.ObjectReader]:
    index, data = server.objects_paths(tenant)
    files = [
        os.open(index, os.O_RDONLY),
        os.open(data, os.O_RDWR if writable else os.O_RDONLY),
        server.objects_visited(tenant),
    ]
    try:
        yield _native.ObjectReader(files[0], files[1], files[2], "node", writable=writable)
    finally:
        for file in files:
            os.close(file)
