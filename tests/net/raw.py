"""A client's stream of a few lines, which can send without receiving: for what the real client would never do."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from farpool._native import crc32c
from farpool.cluster.wire.frames import HEADER_BYTES, VERSION, Op
from farpool.errors import ChecksumError, NodeError, NodeTimeoutError

HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")


@dataclass
class Reply:
    status: int
    serial: int
    meta: bytes
    payload: bytes | None
    nbytes: int
    epoch: int = 0


class RawStream:
    """Takes over the descriptor of an authenticated stream."""

    def __init__(self, fd: int, tenant: int = 0) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)  # it may send a lot that nobody takes
        self._tenant = tenant
        self.epoch = 0  # told with each request
        self._number = 0
        self._unanswered: deque[tuple[int, int]] = deque()

    @property
    def unanswered(self) -> int:
        return len(self._unanswered)

    def send(
        self, op: int, meta: bytes, deadline: float, *, serial: int = 0, lease: int = 0, payload: Any = None
    ) -> None:
        body = b"" if payload is None else memoryview(payload).cast("B")
        self._number += 1
        fields = HEADER.pack(
            b"FPW1", VERSION, op, 0, self._number, len(meta), crc32c(body) if body else 0, len(body), serial, lease,
            self.epoch, self._tenant, 0, b"\0\0\0",
        )  # fmt: skip
        self._unanswered.append((self._number, op))
        self._within(deadline)
        head = fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta
        try:
            self._socket.sendall(head + body if len(body) < 1 << 16 else head)
            if len(body) >= 1 << 16:
                self._socket.sendall(body)
        except TimeoutError as error:
            raise NodeTimeoutError("the node did not take the request within the deadline") from error
        except OSError:  # it has hung up, and may have said why: receiving tells
            return

    def receive(self, deadline: float, into: Any = None) -> Reply:
        head = self._exactly(HEADER_BYTES, deadline)
        fields = HEADER.unpack(head[: HEADER.size])
        magic, version, op, status, number, meta_nbytes, crc, nbytes, serial, _, epoch, *_ = fields
        meta = self._exactly(meta_nbytes, deadline)
        assert (magic, version, (number, op)) == (b"FPW1", VERSION, self._unanswered.popleft())
        assert struct.unpack("<I", head[HEADER.size :])[0] == crc32c(meta, crc32c(head[: HEADER.size]))
        payload = self._exactly(nbytes, deadline)
        if op != Op.READ and nbytes and crc32c(payload) != crc:
            raise ChecksumError("the payload of the reply is damaged", tier="node")
        if into is not None:
            memoryview(into).cast("B")[:nbytes] = payload
        return Reply(status, serial, meta, payload if nbytes and into is None else None, nbytes, epoch)

    def exchange(self, op: int, meta: bytes, deadline: float, *, into: Any = None, **fields: Any) -> Reply:
        self.send(op, meta, deadline, **fields)
        return self.receive(deadline, into)

    def close(self) -> None:
        self._socket.close()

    __del__ = close  # as of the real one: who lets go of it ends it

    def _exactly(self, nbytes: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._within(deadline)
            try:
                more = self._socket.recv(min(nbytes - len(data), 1 << 20))
            except TimeoutError as error:
                raise NodeTimeoutError("the node did not answer within the deadline") from error
            except OSError as error:
                raise NodeError(f"receiving failed: {error}") from error
            if not more:
                raise NodeError("the node closed the connection")
            data += more
        return bytes(data)

    def _within(self, deadline: float) -> None:
        self._socket.settimeout(min(max(1e-6, deadline - time.monotonic()), 86400.0))
