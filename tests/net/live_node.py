"""The real data loop of a node, without listening and handshake: connections are adopted over socket pairs."""

from __future__ import annotations

import mmap
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from farpool._native import Connection, NodeServer, ObjectReader
from farpool.cluster.wire.frames import HEAD, Op, Right, Status

NAME = "tcp://node:7471"
MIB = 1 << 20
ALL_RIGHTS = int(Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@contextmanager
def serving(folder: Path, capacity: int = 64 * MIB, *, ephemeral: bool = False) -> Iterator[NodeServer]:
    server = NodeServer(str(folder), capacity, ephemeral=ephemeral)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def connect(server: NodeServer, *, session: int = 1, tenant: int = 0, rights: int = ALL_RIGHTS) -> Connection:
    return Connection(connect_fd(server, session, tenant, rights), NAME, tenant=tenant, credential=0, spin=0.0)


def connect_fd(server: NodeServer, session: int = 1, tenant: int = 0, rights: int = ALL_RIGHTS) -> int:
    ours, theirs = socket.socketpair()
    server.adopt(theirs.detach(), session, tenant, rights, "")
    return ours.detach()


def put(connection: Connection, key: bytes, payload: bytes, ttl_ms: int = 0) -> int:
    """Publish what is not there; its serial."""
    meta = HEAD.pack(ttl_ms, 0, 0, 0, 0, 0, 0) + key
    reply = connection.exchange(Op.PUT, meta, soon(), payload=payload)
    assert reply.status == Status.DONE, (Status(reply.status), reply.meta)
    return reply.serial


def drop(connection: Connection, key: bytes) -> None:
    reply = connection.exchange(Op.DROP, key, soon())
    assert reply.status == Status.DONE, (Status(reply.status), reply.meta)


@contextmanager
def opened(paths: tuple[str, ...] | list[str]) -> Iterator[list[int]]:
    files = [os.open(path, os.O_RDWR) for path in paths]
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


@contextmanager
def object_files(server: NodeServer, tenant: int = 0) -> Iterator[list[str]]:
    """Paths by which the files of a tenant's objects can be opened."""
    visited = server.objects_visited(1000 + tenant, tenant)
    try:
        yield [*server.objects_paths(tenant), f"/proc/self/fd/{visited}"]
    finally:
        os.close(visited)


def read_objects(server: NodeServer, tenant: int = 0) -> ObjectReader:
    with object_files(server, tenant) as paths, opened(paths) as (index, data, visited):
        return ObjectReader(index, data, visited, NAME)


def map_file(path: str) -> mmap.mmap:
    with opened([path]) as (file,):
        return mmap.mmap(file, 0)
