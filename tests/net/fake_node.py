"""A node of a few lines, for one connection: it answers as the test says, also wrongly."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farpool._native import Connection, crc32c
from farpool.cluster.wire.frames import HEADER_BYTES, VERSION

HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")
NAME = "tcp://node:7471"


@dataclass
class Request:
    op: int
    number: int
    meta: bytes
    payload: bytes
    serial: int
    lease: int
    tenant: int
    credential: int
    whole: bool


def frame(
    op: int,
    number: int,
    meta: bytes = b"",
    payload: bytes = b"",
    *,
    status: int = 0,
    serial: int = 0,
    magic: bytes = b"FPW1",
    version: int = VERSION,
    payload_crc: int | None = None,
    payload_nbytes: int | None = None,
    meta_nbytes: int | None = None,
) -> bytes:
    fields = HEADER.pack(
        magic,
        version,
        op,
        status,
        number,
        len(meta) if meta_nbytes is None else meta_nbytes,
        (crc32c(payload) if payload else 0) if payload_crc is None else payload_crc,
        len(payload) if payload_nbytes is None else payload_nbytes,
        serial,
        0,
        0,
        0,
        0,
        b"\0\0\0",
    )
    return fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta + payload


CHECKSUM_FOLLOWS = 1


def receive_exactly(stream: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        more = stream.recv(min(nbytes - len(data), 1 << 20))
        if not more:
            raise EOFError
        data += more
    return bytes(data)


def read_request(stream: socket.socket) -> Request:
    raw = receive_exactly(stream, HEADER_BYTES)
    magic, version, op, _, number, meta_nbytes, crc, nbytes, serial, lease, _, tenant, credential, zero = HEADER.unpack(
        raw[: HEADER.size]
    )
    meta = receive_exactly(stream, meta_nbytes)
    payload = receive_exactly(stream, nbytes)
    if zero[0] & CHECKSUM_FOLLOWS:
        (crc,) = struct.unpack("<I", receive_exactly(stream, 4))
    whole = (
        (magic, version, zero[1:]) == (b"FPW1", VERSION, b"\0\0")
        and struct.unpack("<I", raw[HEADER.size :])[0] == crc32c(meta, crc32c(raw[: HEADER.size]))
        and (crc32c(payload) if payload else 0) == crc
    )
    return Request(op, number, meta, payload, serial, lease, tenant, credential, whole)


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


Script = Callable[[socket.socket], None]


@contextmanager
def connected(script: Script, *, tenant: int = 0, spin: float = 0.0, credential: int = 0) -> Iterator[Connection]:
    """A connection to a node that does what `script` does in a thread of its own, until it returns or the test ends."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    connection = Connection(ours.detach(), NAME, tenant=tenant, credential=credential, spin=spin)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            script(theirs)
        except (EOFError, ConnectionError):
            pass
        except BaseException as error:
            failures.append(error)
        finally:
            theirs.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield connection
    finally:
        connection.close()
        thread.join(20)
        assert not thread.is_alive()
        assert not failures, failures
