"""Where clients arrive, in this process: deadlines, bounds, and trouble that stays with one connection."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.node import Node, control, listener
from farpool.cluster.node.calls import Lend
from farpool.cluster.node.control import ControlService
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, Right, pack_frame
from farpool.cluster.wire.handshake import Accepted
from farpool.errors import NodeError
from tests.nodes import eventually


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def started(folder: Path) -> Node:
    node = Node(parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=folder / "n", ephemeral=True)
    node.start()
    return node


@pytest.fixture
def impatient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node that waits for nobody for long, and for two strangers of one address at once."""
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(listener, "_HALF_OPEN_PER_HOST_MAX", 2)
    node = started(tmp_path)
    yield node
    node.stop()


def test_a_stranger_who_says_nothing_is_shown_the_door(impatient: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "farpool.node")
    with socket.create_connection(("127.0.0.1", impatient.address.port), timeout=20) as stranger:
        assert stranger.recv(1) == b""
    assert [record.fields["reason"] for record in caplog.records] == ["no handshake within 0.2 s"]
    assert impatient.stats()["refused"] == 1


def test_of_more_strangers_than_there_are_places_the_oldest_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 3600.0)
    monkeypatch.setattr(listener, "_HALF_OPEN_PER_HOST_MAX", 2)
    node = started(tmp_path)
    silent = [socket.create_connection(("127.0.0.1", node.address.port), timeout=20) for _ in range(6)]
    for stranger in silent[:4]:
        assert ended(stranger)
    eventually(lambda: node.stats()["half_open"] == 2)
    dial(node.address, "control", deadline=soon()).socket.close()
    assert ended(silent[4])
    eventually(lambda: node.stats()["half_open"] == 1)
    for stranger in silent:
        stranger.close()
    node.stop()


@pytest.mark.parametrize("local", [False, True])
def test_idle_strangers_keep_nobody_out(tmp_path: Path, local: bool) -> None:
    node = started(tmp_path)
    address = parse_address(f"unix://{node.socket_path}") if local else node.address
    silent: list[socket.socket] = []
    deadline = soon()
    while len(silent) < 1_500:
        stranger = socket.socket(socket.AF_UNIX if local else socket.AF_INET)
        stranger.settimeout(20)
        silent.append(stranger)
        try:
            stranger.connect(address.path if local else (address.host, address.port))
        except BlockingIOError:  # the backlog of a UNIX socket is full
            silent.pop().close()
            assert time.monotonic() < deadline
            time.sleep(0.001)
    with Control(dial(address, "control", deadline=soon())) as calls:
        assert calls.call("stats", soon())["half_open"] <= 256
    for stranger in silent:
        stranger.close()
    node.stop()


def test_strangers_who_say_nothing_do_not_keep_local_programs_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_HANDSHAKE_TIMEOUT_S", 3600.0)
    node = started(tmp_path)
    silent = [socket.create_connection(("127.0.0.1", node.address.port), timeout=20) for _ in range(300)]
    dial(parse_address(f"unix://{node.socket_path}"), "data", deadline=soon()).socket.close()
    for stranger in silent:
        stranger.close()
    node.stop()


def test_half_a_call_is_waited_for_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "STALL_TIMEOUT_S", 0.2)
    node = started(tmp_path)
    with dial(node.address, "control", deadline=soon()).socket as connection:
        connection.settimeout(20)
        time.sleep(0.5)  # between calls a client may rest
        connection.sendall(pack_frame(Op.CALL, b"\x81\xa4call\xa5stats"))
        assert connection.recv(1) == b"F"
        connection.sendall(b"FPW1")
        while connection.recv(4096):
            pass
    node.stop()


def test_what_goes_wrong_with_one_connection_stays_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "farpool.node")
    node = started(tmp_path)

    async def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(ControlService, "serve", fail)
        with Control(dial(node.address, "control", deadline=soon())) as calls, pytest.raises(NodeError):
            calls.call("stats", soon())
    with Control(dial(node.address, "control", deadline=soon())) as calls:
        assert calls.call("stats", soon())["capacity"] == 1 << 20
    node.stop()
    [failed] = [record for record in caplog.records if record.getMessage() == "failed"]
    assert "RuntimeError: on purpose" in failed.fields["detail"]


def test_a_client_that_comes_while_the_node_stops_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started(tmp_path)
    serving = node._listener
    assert serving is not None
    accepted = collect_accepted(monkeypatch)
    holding, go_on = threading.Event(), threading.Event()
    serving._loop.call_soon_threadsafe(lambda: (holding.set(), go_on.wait(20)))
    assert holding.wait(20)
    with socket.create_connection(("127.0.0.1", node.address.port), timeout=20) as client:
        # The loop learns of both at once.
        serving._loop.call_soon_threadsafe(serving._stopping.set)
        go_on.set()
        node.stop()
        assert ended(client)
    assert [connection.fileno() for connection in accepted] == [-1] * len(accepted)


def test_a_client_that_was_accepted_just_before_the_node_stops_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = started(tmp_path)
    serving = node._listener
    assert serving is not None
    accepted = collect_accepted(monkeypatch, then=serving._stopping.set)
    with socket.create_connection(("127.0.0.1", node.address.port), timeout=20) as client:
        assert ended(client)
    node.stop()
    assert [connection.fileno() for connection in accepted] == [-1]


def test_memory_that_is_being_made_keeps_no_other_call_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    lending = threading.Semaphore(0)
    make_call = control.make_call

    def slow(call: Any, client: Accepted, *rest: Any, **options: Any) -> Any:
        if isinstance(call, Lend) and client.tenant == 1:
            lending.release()
            assert go_on.wait(60)
        return make_call(call, client, *rest, **options)

    monkeypatch.setattr(control, "make_call", slow)
    secret = b"sixteen bytes or more"
    rights = Right.READ | Right.WRITE
    keys = {name: Grant(secret, rights, tenant) for name, tenant in (("one", 1), ("two", 2))}
    node = Node(parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=tmp_path / "n", ephemeral=True, keys=keys)
    node.start()
    with contextlib.ExitStack() as until_the_end:
        connections = [
            until_the_end.enter_context(
                dial(node.address, "control", key=AccessKey("one", secret), deadline=soon()).socket
            )
            for _ in range(64)
        ]
        for connection in connections:
            connection.sendall(pack_frame(Op.CALL, b"\x82\xa4call\xa4lend\xa5bytes\x01"))
        assert lending.acquire(timeout=20)
        with Control(dial(node.address, "control", key=AccessKey("two", secret), deadline=soon())) as calls:
            assert calls.call("stats", soon())["capacity"] == 1 << 20
            assert calls.call("lend", soon(), bytes=1)["lease"]
        go_on.set()
        for connection in connections:
            connection.settimeout(20)
            assert connection.recv(1) == b"F"
    node.stop()


class EventfulServer:
    """Has had one more event whenever it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def events(self) -> list[tuple[str, int, str]]:
        self.asked += 1
        return [("evicted", 7, f"event {self.asked}")]


def test_events_are_logged_at_once_and_once_more_at_the_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "farpool.node")
    monkeypatch.setattr(listener, "_EVENTS_INTERVAL_S", 3600.0)
    server = EventfulServer()
    listening = listener.Listener([], None, server, None)  # type: ignore[arg-type]
    listening.start()
    eventually(lambda: len(caplog.records) == 1)
    listening.stop()
    assert [record.fields["detail"] for record in caplog.records] == ["event 1", "event 2"]  # type: ignore[attr-defined]


def collect_accepted(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None] = lambda: None) -> list[socket.socket]:
    """The connections that are accepted from now on; after each, `then` is called."""
    accepted: list[socket.socket] = []
    accept = socket.socket.accept

    def accept_and_note(listening: socket.socket) -> tuple[socket.socket, object]:
        connection, peer = accept(listening)
        accepted.append(connection)
        then()
        return connection, peer

    monkeypatch.setattr(socket.socket, "accept", accept_and_note)
    return accepted


def ended(client: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return client.recv(1) == b""
    return True


def test_a_node_that_was_stopped_leaves_no_thread_and_no_descriptor(tmp_path: Path) -> None:
    def held() -> tuple[set[threading.Thread], int]:
        gc.collect()  # the event loop's tasks refer to each other
        return set(threading.enumerate()), len(os.listdir("/proc/self/fd"))

    def nothing_more() -> bool:
        threads, descriptors = held()  # what earlier tests left may be gone by now
        return threads <= before[0] and descriptors <= before[1]

    before = held()
    for _ in range(3):
        node = started(tmp_path)
        connections = [dial(node.address, purpose, deadline=soon()) for purpose in ("control", "data")]
        node.stop()
        node.stop()
        for connection in connections:
            assert connection.socket.recv(1) == b""
            connection.socket.close()
        assert node.stats() == {}
    eventually(nothing_more)
    assert not (tmp_path / "n").exists()
