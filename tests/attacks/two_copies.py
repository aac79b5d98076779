"""What a put of two copies costs in Python, and in which order its bytes leave."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import Any, Self

from tests.attacks.lab import MIB, Key, Lab, Node
from tests.attacks.program import Outcome, attack, main
from tests.attacks.wire import Connection

KEY = Key("program")
MOST_CALLS = 10
PUTS = 20


@attack
def python_calls(lab: Lab, harmless: bool) -> Outcome:
    """Count the Python functions that a put of 1 MiB with two copies calls; the control puts nothing."""
    value = lab.random.randbytes(MIB)
    nodes = [lab.node(64 * MIB, [KEY]) for _ in range(3)]
    with lab.store(nodes, KEY, replicas=2) as store:
        for number in range(5):
            store.put(f"warm {number}", value)
        counts = [calls_of(int if harmless else partial(store.put, f"key {number}", value)) for number in range(PUTS)]
    python = sorted(count["call"] for count in counts)
    native = sorted(count["c_call"] for count in counts)
    fewest, median = python[0], python[PUTS // 2]
    return Outcome(
        fewest <= MOST_CALLS,
        f"{median} Python calls in the median of {PUTS} puts, {fewest} at least, {MOST_CALLS} allowed",
        {"puts of two copies": 0 if harmless else PUTS},
        {"calls of native functions, median": native[PUTS // 2]},
    )


def calls_of(act: Callable[[], object]) -> Counter[str]:
    """How often Python functions (call) and native ones (c_call) are called."""
    counts: Counter[str] = Counter()

    def note(_: FrameType, event: str, __: Any) -> None:
        counts[event] += 1

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    counts["c_call"] -= 1  # setprofile
    return counts


PAYLOAD = 32 * MIB
"""More than sockets take in advance."""
HELD_AT = 256 * 1024
PATIENCE = 5.0


@attack
def order_of_bytes(lab: Lab, harmless: bool) -> Outcome:
    """Stop reading from one of two nodes' sockets until the other's first byte; the control sends to both at once."""
    nodes = [lab.node(128 * MIB, [KEY]) for _ in range(2)]
    value = lab.random.randbytes(PAYLOAD)
    gate = Gate()
    relays = [lab.enter(Relay(node, gate, number)) for number, node in enumerate(nodes)]
    if harmless:
        connections = [Connection(relay.where, KEY.pair) for relay in relays]
        gate.arm()
        threads = [threading.Thread(target=one.put, args=(b"key", value)) for one in connections]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in connections:
            one.close()
    else:
        with lab.store([relay.url for relay in relays], KEY, replicas=2) as store:
            store.put("warm", b"value")
            gate.arm()
            store.put("key", value)
    return Outcome(
        gate.met,
        f"while one socket rests after {HELD_AT // 1024} KiB of {PAYLOAD // MIB} MiB, "
        f"{'bytes come' if gate.met else 'nothing comes'} at the other",
        {"puts of two copies": 1, "recording sockets": 2},
        {"bytes at either socket in the end": gate.received, "bytes of the payload": PAYLOAD},
    )


class Gate:
    """Holds the node that is written to first until something has arrived at the other, or nothing does.

    Attributes
    ----------
    received : list of int
        Bytes that have arrived at either socket.
    met : bool
        Something arrived at the other socket while the first one was held.
    """

    def __init__(self) -> None:
        self.received = [0, 0]
        self.met = False
        self._armed = False
        self._given_up = False
        self._changed = threading.Condition()

    def arm(self) -> None:
        """What arrives from now on counts."""
        with self._changed:
            self.received = [0, 0]
            self._armed = True

    def note(self, number: int, nbytes: int) -> None:
        """Bytes have arrived at a socket; returns when more may be read from it."""
        with self._changed:
            if not self._armed:
                return
            self.received[number] += nbytes
            self._changed.notify_all()
            if self.received[number] > HELD_AT and not self.met and not self._given_up:
                self.met = self._changed.wait_for(lambda: self.received[1 - number] > 0, PATIENCE)
                self._given_up = not self.met


class Relay:
    """Passes bytes between clients and a node, and records those of the clients; a context manager."""

    def __init__(self, node: Node, gate: Gate, number: int) -> None:
        self._node = node.where
        self._gate = gate
        self._number = number
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = [self._listening]
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def where(self) -> tuple[str, int]:
        host, port = self._listening.getsockname()
        return host, port

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.where[1]}"

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            server = socket.create_connection(self._node)
            self._open += [client, server]
            for source, sink, record in ((client, server, True), (server, client, False)):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                thread = threading.Thread(target=self._pass, args=(source, sink, record), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, record: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(64 * 1024):
                if record:
                    self._gate.note(self._number, len(data))
                sink.sendall(data)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 10
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        for one in self._open:
            one.close()


if __name__ == "__main__":
    main()
