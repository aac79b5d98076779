"""Deadlines of clients: a node that itself stood still does not count that time."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from farpool.cluster.node import patience as patience_module
from farpool.cluster.node.patience import patience
from farpool.cluster.node.process import running_node
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.handshake import ClientHandshake
from tests.nodes import eventually


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience_module, "_SLICE_S", 0.05)


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_what_came_while_the_loop_stood_still_is_received(seconds: float) -> None:
    async def receive() -> bytes:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)

            def stand_still() -> None:
                time.sleep(3 * seconds)
                there.sendall(b"late")

            async with patience(seconds):
                loop.call_later(0.01, stand_still)
                return await loop.sock_recv(here, 10)

    assert asyncio.run(receive()) == b"late"


@pytest.mark.usefixtures("short_slices")
@pytest.mark.parametrize("pause", [0.0, 0.12])
def test_a_client_that_says_nothing_runs_out_of_patience_also_at_a_loop_that_is_always_late(pause: float) -> None:
    async def wait() -> None:
        loop = asyncio.get_running_loop()

        def keep_late() -> None:
            time.sleep(pause)
            loop.call_later(0.001, keep_late)

        if pause:
            keep_late()
        async with asyncio.timeout(60.0), patience(0.2):
            await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(wait())
    assert 0.2 <= time.monotonic() - began < 30.0


@pytest.mark.usefixtures("short_slices")
def test_a_block_that_ends_in_time_leaves_no_timer_behind() -> None:
    failures: list[object] = []

    async def block() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, failure: failures.append(failure))
        async with patience(0.1):
            await asyncio.sleep(0.06)
        await asyncio.sleep(0.2)

    asyncio.run(block())
    assert not failures


@pytest.mark.slow
def test_a_stopped_node_that_goes_on_ends_no_handshake_and_frees_no_session() -> None:
    with running_node(grace=4) as node:
        address = parse_address(node.address)
        calls = Control(dial(address, "control", deadline=soon()))
        session = calls.welcome.session
        lease = calls.call("lend", soon(), bytes=4096)["lease"]
        handshake = ClientHandshake(node.address, "data", None, 0, secure=False)
        hello = handshake.start()
        with socket.create_connection((address.host, address.port), timeout=20.0) as stranger:
            stranger.sendall(hello[:20])
            eventually(lambda: calls.call("stats", soon())["half_open"] == 1)
            calls.close()
            time.sleep(0.3)
            with node.suspended():
                stranger.sendall(hello[20:])
                time.sleep(6.0)  # longer than a handshake may take, and than the grace
            while handshake.welcome is None:
                data = stranger.recv(handshake.needed)
                assert data, "the node ended the handshake"
                if to_send := handshake.feed(data):
                    stranger.sendall(to_send)
        with Control(dial(address, "control", session=session, deadline=soon())) as again:
            assert again.call("leases", soon()) == {"leases": [[lease, 4096]]}
