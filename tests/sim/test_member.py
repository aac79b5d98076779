"""The native node under the time that a simulation sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool._native import NodeServer
from farpool.errors import LeaseLostError, TicketError

LEASE = bytes(range(16))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    NodeServer.simulate_time(5000.0)
    server = NodeServer(str(tmp_path), 1 << 20, spin=0.0)
    yield server
    server.stop()
    NodeServer.simulate_time(0.0)


def claim(server: NodeServer, seconds: float, epoch: int = 1) -> int:
    server.connect(7, 1, "key")
    ((number, lease, nbytes, _),) = server.claim(
        7, 1, lease=LEASE, epoch=epoch, rights=3, seconds=seconds, extents=[(1, 4096)]
    )
    assert (number, nbytes) == (1, 4096)
    return lease


def left(server: NodeServer) -> float:
    (held,) = server.holdings()
    return float(held["seconds"])


def test_a_ticket_expires_by_the_simulated_time(server: NodeServer) -> None:
    lease = claim(server, 10.0)
    assert left(server) == pytest.approx(10.0)
    NodeServer.simulate_time(5009.0)
    assert left(server) == pytest.approx(1.0)
    assert server.lease_path(7, lease)
    NodeServer.simulate_time(5010.0)
    with pytest.raises((TicketError, LeaseLostError), match="expired"):
        server.lease_file(7, lease)
    claim(server, 10.0)
    assert left(server) == pytest.approx(10.0)


def test_other_threads_keep_the_time_of_the_system(server: NodeServer) -> None:
    claim(server, 10.0)
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(left(server)))
    thread.start()
    thread.join()
    assert found[0] != pytest.approx(10.0, abs=1.0)
    assert left(server) == pytest.approx(10.0)


def test_a_server_without_a_thread_serves_when_it_is_stepped(server: NodeServer) -> None:
    assert not server.step(0)
    server.start()
    server.stop()
