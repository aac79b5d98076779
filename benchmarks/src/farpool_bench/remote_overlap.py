"""Check that a put of two copies sends to both nodes at the same time, by relays in front of both that count bytes.

The relay of the node that gets bytes first rests after a few of them, until the other one gets its first byte. So a put
that finished one node before it began with the next would wait for as long as the relay rests, and is found out.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from farpool.cluster.store import Store
from farpool.cluster.wire.address import parse_address
from farpool_bench.harness import Row

_NBYTES = 32 << 20
"""Bytes of the value, more than sockets buffer."""
_RESTS_AT = 256 << 10
_REST_TIMEOUT_S = 5.0
_CHUNK = 64 << 10


def measure_overlap(nodes: Sequence[str]) -> Row:
    """Put a value with copies on two nodes, and measure how these overlap."""
    meter = _Meter()
    with ExitStack() as stack:
        relays = [stack.enter_context(_Relay(node, meter, number)) for number, node in enumerate(nodes)]
        store = stack.enter_context(
            Store(*(relay.address for relay in relays), replicas=2, transport="tcp", timeout=60.0)
        )
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


class _Relay:
    """A TCP relay in front of a node, which reports the bytes sent to the node to the meter."""

    def __init__(self, node: str, meter: _Meter, number: int) -> None:
        there = parse_address(node)
        self._node = (there.host, there.port)
        self._meter = meter
        self._number = number
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self._closed = False
        self.address = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._begin(self._accept)

    def __enter__(self) -> _Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._sockets[0].accept()
                node = socket.create_connection(self._node)
                for one in (client, node):
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [client, node]
                self._begin(self._pass_on, client, node, True)
                self._begin(self._pass_on, node, client, False)

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                if counts:
                    self._meter.note(self._number, len(data))
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _begin(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()
