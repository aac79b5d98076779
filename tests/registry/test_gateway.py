"""Which endpoints of an etcd are asked, counted at fake members that are silent or have no leader."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import pytest

from farpool.abc.registry import Commit, Condition, Put
from farpool.cluster.registry import gateway as module
from farpool.cluster.registry.etcd import EtcdRegistry
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


class ForgetfulMember:
    """Does a transaction and closes the connection without a reply; when it is sent again, its conditions fail.

    Its other connections stay open after a reply, so that the client uses them again.
    """

    def __init__(self) -> None:
        self.value = ""
        self.tries = 0
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
            connection.settimeout(WAIT_S)
            with connection, connection.makefile("rwb") as stream:
                while (line := stream.readline()) and (reply := self.answer(line, self.body(stream))) is not None:
                    header = {"revision": 2 if self.value else 1, "cluster_id": 1}
                    body = json.dumps({"header": header, **reply}).encode()
                    stream.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    stream.flush()

    def body(self, stream: IO[bytes]) -> dict[str, Any]:
        size = 0
        while (line := stream.readline().strip()) != b"":
            name, _, value = line.partition(b":")
            size = int(value) if name.lower() == b"content-length" else size
        request: dict[str, Any] = json.loads(stream.read(size))
        return request

    def answer(self, line: bytes, request: dict[str, Any]) -> dict[str, Any] | None:
        if b"/v3/kv/txn " in line:
            self.tries += 1
            if self.tries > 1:
                return {"succeeded": False}
            self.value = request["success"][0]["request_put"]["value"]
            return None
        key = base64.b64encode(b"farpool/k").decode()
        return {"kvs": [{"key": key, "value": self.value, "mod_revision": 2}] if self.value else []}

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(WAIT_S)


def test_a_transaction_whose_reply_was_lost_on_an_idle_connection_is_found_to_be_done() -> None:
    member = ForgetfulMember()
    registry = EtcdRegistry(member.endpoint, timeout=WAIT_S)
    assert registry.get("k") is None  # leaves an idle connection
    assert registry.commit([Condition("k", 0)], [Put("k", b"v")]) == Commit(True, 2)
    assert member.tries == 2
    registry.close()
    member.close()
