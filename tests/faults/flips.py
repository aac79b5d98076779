"""A connection to a node in this process with somebody in between who flips bits."""

from __future__ import annotations

import random
import select
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

from farpool._native import Connection, NodeServer, Reply
from farpool.cluster.wire.frames import Op
from tests.net.live_node import ALL_RIGHTS, NAME, soon

__all__ = ["FlippingWire", "flipped"]

_HEADER_BYTES = 64
_MOST = 1 << 16
_PROMPT_MS = 2
_PATIENCE_MS = 20_000


def flipped(data: bytes, bits: list[int]) -> bytes:
    """The data with some bits inverted."""
    changed = bytearray(data)
    for bit in bits:
        changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


class FlippingWire:
    """Passes one request and its reply on at a time; frames are smaller than the buffers of the sockets."""

    def __init__(self, server: NodeServer, rng: random.Random, session: int) -> None:
        self._rng = rng
        self._session = session
        ours, self._client = socket.socketpair()
        self._node, theirs = socket.socketpair()
        server.adopt(theirs.detach(), session, 0, ALL_RIGHTS, "")
        self.connection = Connection(ours.detach(), NAME, tenant=0, credential=0, spin=0.0)
        self._poll = select.poll()
        self._poll.register(self._node, select.POLLIN)
        self._client.settimeout(_PATIENCE_MS / 1000)
        self._thread = ThreadPoolExecutor(1)
        self.where = ""
        self.has_ended = False

    def renewed(self, server: NodeServer) -> FlippingWire:
        """This wire, or a new one if there is no going on with this."""
        if not (self.has_ended or self.connection.broken or self._poll.poll(0)):
            return self
        self.close()
        return FlippingWire(server, self._rng, self._session)

    def ask(self, op: Op, meta: bytes, payload: bytes | None) -> Future[Reply]:
        """Send a request; its reply, once it has been passed on."""
        return self._thread.submit(self.connection.exchange, op, meta, soon(), payload=payload)

    def pass_request(self, *, flip: bool) -> None:
        """To the node."""
        data = self._received(_HEADER_BYTES)
        data += self._received(int.from_bytes(data[16:20], "little") + int.from_bytes(data[24:32], "little"))
        self._node.sendall(self._damaged(data) if flip else data)

    def _received(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            data += self._client.recv(nbytes - len(data))
        return data

    def pass_reply(self, *, flip: bool) -> None:
        """To the client; also the end of the stream."""
        if not self._poll.poll(_PROMPT_MS):
            # The node may be waiting for what a length that was flipped has promised.
            self._node.shutdown(socket.SHUT_WR)
            self.has_ended = True
            assert self._poll.poll(_PATIENCE_MS), "the node neither answered nor hung up"
        try:
            data = self._node.recv(_MOST)
        except ConnectionResetError:
            data = b""
        self._client.sendall(self._damaged(data) if flip else data)
        if not data or (flip and self.where == "header"):
            self._client.shutdown(socket.SHUT_WR)

    def _damaged(self, data: bytes) -> bytes:
        bits = [self._rng.randrange(8 * len(data)) for _ in range(self._rng.choice([1, 1, 1, 2, 3]))]
        bits = sorted(set(bits))
        covered = 8 * (_HEADER_BYTES + int.from_bytes(data[16:20], "little"))
        self.where = "header" if bits[0] < covered else "payload"
        return flipped(data, bits)

    def close(self) -> None:
        self._thread.shutdown()
        self.connection.close()
        self._client.close()
        self._node.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
