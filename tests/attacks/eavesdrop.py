"""Somebody between a program and its node who writes down all that crosses the wire: what can be read there?"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from unittest.mock import patch

from tests.attacks.lab import MIB, Key, Lab
from tests.attacks.program import Outcome, attack, main

KEY = Key("program")
PATTERN = 64
PATTERNS = 4096
"""Together a put of 256 KiB."""
NAME = b"the name of an object that nobody else is to read"


@attack
def read_the_wire(lab: Lab, harmless: bool) -> Outcome:
    """Read along while a program puts and gets an object; the control reads along without TLS, and has to see it."""
    folder = None if harmless else lab.certificates(KEY.name)
    node = lab.node(16 * MIB, [KEY], tls=folder)
    scheme = "tcp" if folder is None else "tls"
    shown = {} if folder is None else {"FARPOOL_TLS": str(folder / KEY.name)}
    patterns = [lab.random.randbytes(PATTERN) for _ in range(PATTERNS)]
    value = b"".join(patterns)
    with (
        patch.dict(os.environ, shown),
        tapped(node.where) as wire,
        lab.store([f"{scheme}://127.0.0.1:{wire.port}"], KEY, replicas=1) as store,
    ):
        store.put(NAME, value)
        assert store.get(NAME) == value
    seen = sum(any(pattern in one for one in wire.heard()) for pattern in patterns)
    names = sum(one.count(NAME) for one in wire.heard())
    # Without what a program sends and is sent there is nothing that could have been read.
    heard = sum(map(len, wire.heard()))
    clear = seen == PATTERNS and names > 0
    return Outcome(
        clear if harmless else not seen and not names and heard > 2 * len(value),
        f"{seen} of {PATTERNS} patterns of {PATTERN} bytes and {names} names read from what crossed the wire "
        f"{'without' if folder is None else 'with'} TLS",
        {"bytes of the object": len(value), "connections": len(wire.heard()) // 2},
        {"bytes heard": heard},
    )


class Wire:
    """A listening socket whose connections go on to a node, with all that crosses them written down."""

    def __init__(self, node: tuple[str, int]) -> None:
        self._node = node
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._heard: list[bytearray] = []
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self._begin(self._accept)

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def heard(self) -> list[bytes]:
        """The bytes of each direction of each connection."""
        return [bytes(one) for one in self._heard]

    def close(self) -> None:
        """End all connections."""
        for one in (self._listening, *self._sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listening, *self._sockets):
            one.close()

    def _begin(self, act: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=act, args=arguments)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                program, _ = self._listening.accept()
                self._sockets.append(program)
                node = socket.create_connection(self._node)
                self._sockets.append(node)
                self._begin(self._pass_on, program, node)
                self._begin(self._pass_on, node, program)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        heard = bytearray()
        self._heard.append(heard)
        with suppress(OSError):
            while data := source.recv(1 << 16):
                heard += data
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@contextmanager
def tapped(node: tuple[str, int]) -> Iterator[Wire]:
    """A wire to a node."""
    wire = Wire(node)
    try:
        yield wire
    finally:
        wire.close()


if __name__ == "__main__":
    main()
