"""The server behind /metrics, with clients that do not behave."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from farpool.cluster.node import Node, metrics_server
from farpool.cluster.node.metrics import NodeCollector
from farpool.cluster.node.metrics_server import MetricsServer
from farpool.cluster.wire.address import Address, parse_address
from tests.nodes import eventually

ANY = parse_address("127.0.0.1:0", any_port=True)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(ANY, NodeCollector(Node(ANY, 1 << 20, name="n1")))
    yield server
    server.close()


def got(address: Address) -> bytes:
    with urllib.request.urlopen(f"http://{address.host}:{address.port}/metrics", timeout=30) as reply:
        return bytes(reply.read())


def serving() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


@pytest.mark.slow
def test_idle_connections_are_few_threads_and_keep_nobody_out(
    server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 3600.0)
    idle = [socket.create_connection((server.address.host, server.address.port), timeout=30) for _ in range(500)]
    assert got(server.address) == b""
    assert serving() <= metrics_server._CONNECTIONS_MAX
    with contextlib.suppress(ConnectionError):  # the oldest was ended
        assert idle[0].recv(1) == b""
    for one in idle:
        one.close()
    eventually(lambda: serving() == 0)


def test_a_connection_that_says_nothing_is_ended(server: MetricsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.1)
    with socket.create_connection((server.address.host, server.address.port), timeout=30) as idle:
        assert idle.recv(1) == b""
    eventually(lambda: serving() == 0)
