"""Which endpoints of an etcd are asked, counted at fake members that are silent or have no leader."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from farpool.cluster.registry import gateway as module
from farpool.cluster.registry.gateway import Gateway
from farpool.cluster.registry.messages import Empty, LeaseRequest

WAIT_S = 60.0
NO_LEADER = b'{"code": 14, "error": "etcdserver: no leader"}'


class FakeMember:
    """Counts requests. `answer` returns a status and a body, or None to leave a request without an answer."""

    def __init__(self, answer: Callable[[int], tuple[int, bytes] | None]) -> None:
        self.answer = answer
        self.asked = 0
        self.connections: list[socket.socket] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint: tuple[str, int] = self.listener.getsockname()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        while True:
            try:
                connection = self.listener.accept()[0]
            except OSError:
                return
            self.connections.append(connection)
            connection.settimeout(WAIT_S)
            request = b""
            while not request.endswith(b"}"):
                request += connection.recv(1 << 16)
            self.asked += 1
            reply = self.answer(self.asked)
            if reply is not None:
                status, body = reply
                head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + body)
                connection.close()

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            connection.close()
        self.thread.join(WAIT_S)


@pytest.fixture
def member() -> Iterator[Callable[[Callable[[int], tuple[int, bytes] | None]], FakeMember]]:
    made: list[FakeMember] = []

    def make(answer: Callable[[int], tuple[int, bytes] | None]) -> FakeMember:
        made.append(FakeMember(answer))
        return made[-1]

    yield make
    for one in made:
        one.close()


def ask(gateway: Gateway) -> None:
    gateway.call("/v3/lease/revoke", LeaseRequest(1), Empty, time.monotonic() + WAIT_S)


Make = Callable[[Callable[[int], tuple[int, bytes] | None]], FakeMember]


def test_a_stopped_leader_is_asked_once_while_the_others_elect_another_one(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "_SILENT_REST_S", WAIT_S)
    stopped = member(lambda _: None)
    electing = member(lambda turn: (503, NO_LEADER) if turn <= 5 else (200, b"{}"))
    other = member(lambda _: (503, NO_LEADER))
    gateway = Gateway("etcd://test", [one.endpoint for one in (stopped, electing, other)])
    ask(gateway)
    assert (stopped.asked, electing.asked) == (1, 6)
    ask(gateway)
    assert (stopped.asked, electing.asked) == (1, 7)
    gateway.close()


def test_a_silent_endpoint_is_asked_again_after_its_rest(member: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "_SILENT_REST_S", 0.5)
    woken = member(lambda turn: (200, b"{}") if turn > 1 else None)
    cut_off = member(lambda _: (503, NO_LEADER))
    gateway = Gateway("etcd://test", [woken.endpoint, cut_off.endpoint])
    ask(gateway)
    assert woken.asked == 2
    assert cut_off.asked > 2
    gateway.close()


def test_endpoints_that_are_all_silent_are_asked_in_each_round_with_more_patience(
    member: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_TIMEOUT_S", 0.1)
    waking, silent = member(lambda turn: (200, b"{}") if turn == 3 else None), member(lambda _: None)
    gateway = Gateway("etcd://test", [silent.endpoint, waking.endpoint])
    began = time.monotonic()
    ask(gateway)
    assert (waking.asked, silent.asked) == (3, 2)
    assert time.monotonic() - began >= 2 * 0.1 + 2 * 0.2
    gateway.close()
