"""Reaching a node, or saying by its name why it cannot be reached, in time."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool.cluster.wire import dial as dialling
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.dial import Dialled, dial
from farpool.cluster.wire.handshake import Identity, NodeHandshake
from farpool.errors import NodeError, NodeTimeoutError, ProtocolError

IDENTITY = Identity("n1", bytes(16), bytes(16), 1 << 20, "host", "")


def reach(address: Address, seconds: float = 20.0) -> Dialled:
    return dial(address, "data", deadline=time.monotonic() + seconds)


def address_of(listening: socket.socket) -> Address:
    return Address("tcp", "127.0.0.1", listening.getsockname()[1])


@contextlib.contextmanager
def answering(said: bytes = b"", *, listening: socket.socket | None = None) -> Iterator[Address]:
    """A server for one connection: a node's handshake, or these bytes and then the end."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.settimeout(20)
            if said:
                connection.recv(64)
                connection.sendall(said)
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            else:
                node = NodeHandshake(IDENTITY, None)
                while node.accepted is None:
                    connection.sendall(node.feed(connection.recv(node.needed)))
            with contextlib.suppress(ConnectionError):  # the client may have ended it with bytes unread
                while connection.recv(4096):
                    pass

    with listening or socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("unix", path=server.getsockname()) if listening else address_of(server)
        thread.join(20)
        assert not thread.is_alive()


def test_a_connection_is_blocking_and_sends_at_once() -> None:
    with answering() as address:
        dialled = reach(address)
        with dialled.socket as connection:
            assert connection.gettimeout() is None
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert (dialled.node, dialled.welcome.node, dialled.credential) == (str(address), "n1", 0)


def test_a_connection_to_a_host_that_went_away_without_a_word_ends() -> None:
    # Even one that was ended at this side only and waits for the other, where nothing else has a time limit.
    with answering() as address, reach(address).socket as connection:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        probes = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        assert [connection.getsockopt(socket.IPPROTO_TCP, option) for option in probes] == [15, 5, 3]


def test_a_name_with_several_addresses_is_tried_until_one_answers() -> None:
    # Where localhost is ::1 as well, nothing listens there.
    with answering() as address:
        reach(Address("tcp", "localhost", address.port)).socket.close()


def test_a_unix_socket_is_reached(tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "s"))
    listening.listen()
    with answering(listening=listening) as address:
        reach(address).socket.close()


def test_nobody_there_is_an_error_that_names_the_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address_of(server)
    with pytest.raises(NodeError, match=f"{address} cannot be reached: Connection refused") as caught:
        reach(address)
    assert caught.value.node == str(address)


def test_no_such_unix_socket_is_an_error_that_names_the_node(tmp_path: Path) -> None:
    with pytest.raises(NodeError, match=f"unix://{tmp_path}/s cannot be reached: No such file"):
        reach(Address("unix", path=f"{tmp_path}/s"))


@pytest.mark.parametrize("host", ["no-such-host.invalid", "empty..label.invalid", f"{'long' * 16}.invalid"])
def test_an_unknown_host_is_an_error_that_names_the_node(host: str) -> None:
    with pytest.raises(NodeError, match=f"tcp://{re.escape(host)}:7471 cannot be reached"):
        reach(parse_address(f"{host}:7471"))


def test_silence_is_a_timeout_that_names_the_node() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with pytest.raises(NodeTimeoutError, match=f"{address_of(server)} did not answer within [0-9.]+ s;") as caught:
            reach(address_of(server), 0.2)
        assert isinstance(caught.value, TimeoutError)


def test_a_deadline_that_has_passed_is_a_timeout() -> None:
    with pytest.raises(NodeTimeoutError):
        reach(parse_address("127.0.0.1:7471"), -1)


def test_a_resolver_that_hangs_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def hang(address: Address, flags: int) -> list[tuple[int, object]]:
        if flags == socket.AI_NUMERICHOST:
            raise socket.gaierror
        release.wait(20)
        return []

    monkeypatch.setattr(dialling, "_look_up", hang)
    with pytest.raises(NodeTimeoutError, match=r"tcp://slow\.example:7471 did not answer"):
        reach(parse_address("slow.example:7471"), 0.2)
    release.set()


def test_a_full_backlog_of_a_unix_socket_is_a_timeout(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.bind(path)
        server.listen(0)
        for _ in range(2):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(path)
        with pytest.raises(NodeTimeoutError):
            reach(Address("unix", path=path), 0.2)


def test_a_server_of_another_kind_is_told_by_what_it_says() -> None:
    with (
        answering(b"HTTP/1.1 400 Bad Request\r\n" + b"\r\n" * 30) as address,
        pytest.raises(ProtocolError, match=f"{address} does not speak farpool's protocol: it sent b'HTTP/1.1'"),
    ):
        reach(address)


def test_an_end_during_the_handshake_is_an_error_that_names_the_node() -> None:
    with answering(b"FPW1") as address, pytest.raises(NodeError, match=f"{address} .*ended the connection during"):
        reach(address)
