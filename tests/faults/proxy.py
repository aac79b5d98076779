"""TCP proxies before a node, which delay or damage the bytes that pass."""

from __future__ import annotations

import contextlib
import random
import selectors
import socket
import threading
import time
from types import TracebackType
from typing import Self

from farpool.cluster.wire.address import parse_address
from tests.faults.flips import flipped

__all__ = ["FlippingProxy", "Proxy"]

_EVERY = 200_000
"""Bytes between two flips, about."""


class Proxy:
    """Passes bytes on in both directions, in a thread.

    Attributes
    ----------
    delay : float
        Seconds for which it holds back each piece that comes from the node.
    """

    def __init__(self, node: str) -> None:
        self.delay = 0.0
        self._target = parse_address(node)
        self._nodes: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._others: dict[socket.socket, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"

    def _run(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select(0.05):
                if key.fileobj is self._listening:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._others:
                    self._pass(key.fileobj)

    def _accept(self) -> None:
        client, _ = self._listening.accept()
        try:
            node = socket.create_connection((self._target.host, self._target.port), timeout=10)
        except OSError:
            client.close()
            return
        self._nodes.add(node)
        for one, other in ((client, node), (node, client)):
            one.settimeout(10)
            self._others[one] = other
            self._selector.register(one, selectors.EVENT_READ)

    def _pass(self, source: socket.socket) -> None:
        target = self._others[source]
        try:
            data = source.recv(1 << 16)
            if data:
                if source in self._nodes:
                    time.sleep(self.delay)
                target.sendall(self._passed(data))
                return
        except OSError:
            pass
        for end in (source, target):
            self._selector.unregister(end)
            del self._others[end]
            self._nodes.discard(end)
            end.close()

    def _passed(self, data: bytes) -> bytes:
        return data

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing = True
        self._thread.join(30)
        for end in (self._listening, *self._others):
            with contextlib.suppress(OSError):
                end.close()
        self._selector.close()


class FlippingProxy(Proxy):
    """Flips bits of the bytes that pass."""

    def __init__(self, node: str, seed: str) -> None:
        super().__init__(node)
        self.flips = 0
        self._random = random.Random(seed)
        self._left = self._random.randrange(_EVERY)

    def _passed(self, data: bytes) -> bytes:
        if self._left >= len(data):
            self._left -= len(data)
            return data
        self.flips += 1
        bit = 8 * self._left + self._random.randrange(8)
        self._left = self._random.randrange(2 * _EVERY)
        return flipped(data, [bit])
