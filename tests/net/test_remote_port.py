"""A tier's space on the leases of nodes: mapped, over connections, and both at once."""

from __future__ import annotations

import mmap
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from farpool._native import Memory, NodeServer, Port, RemoteEnd, RemotePort, StripedPort
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    LeaseLostError,
    NodeError,
    NodeTimeoutError,
    PoolClosedError,
    ProtocolError,
)
from tests.forking import in_forked_child
from tests.net.fake_node import frame, read_request, receive_exactly
from tests.net.live_node import ALL_RIGHTS, MIB, NAME, connect_fd, map_file, serving

STRIPE = 64 << 10
SESSION = 9


class Ends:
    """Leases of one node, each an end of its own."""

    def __init__(self, server: NodeServer, *, mapped: bool = False, rights: int = ALL_RIGHTS) -> None:
        self.server = server
        self.rights = rights
        self.mapped = mapped
        self.leases: list[int] = []
        self.dialled = 0

    def make(self, nbytes: int) -> RemoteEnd:
        lease = self.server.lend(SESSION, 0, nbytes)
        self.leases.append(lease)
        memory = map_file(self.server.lease_path(SESSION, lease)) if self.mapped else None
        return end(self.dial, nbytes, memory=memory, lease=lease)

    def dial(self) -> int:
        self.dialled += 1
        return connect_fd(self.server, SESSION, 0, self.rights)


def end(dial: Callable[[], int], nbytes: int, *, memory: mmap.mmap | None = None, lease: int = 1) -> RemoteEnd:
    return RemoteEnd(NAME, lease, nbytes, memory=memory, dial=dial, tenant=0, credential=0, spin=0.0)


def striped(ends: list[RemoteEnd], share: int, *, stripe: int = STRIPE) -> StripedPort:
    ports = [RemotePort("remote", end, timeout=10.0) for end in ends]
    return StripedPort("remote", ports, stripe=stripe, share=share)


def never() -> int:
    raise AssertionError("nothing is to be dialled")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    with serving(tmp_path) as server:
        yield server


def write(port: Port, offset: int, data: bytes) -> None:
    memory = Memory(len(data))
    memoryview(memory)[: len(data)] = data
    port.write(offset, memory.address, len(data))


def read(port: Port, offset: int, nbytes: int) -> bytes:
    memory = Memory(nbytes)
    port.read(offset, memory.address, nbytes)
    return bytes(memoryview(memory)[:nbytes])


@pytest.mark.parametrize("kinds", ["w", "m", "www", "mm", "wm", "mwwm"])
def test_a_striped_space_agrees_with_a_bytearray(server: NodeServer, kinds: str) -> None:
    share = 12 * STRIPE
    ends = [Ends(server, mapped=kind == "m").make(share) for kind in kinds]
    port = striped(ends, share)
    model = bytearray(share * len(kinds))
    rng = random.Random(kinds)
    sizes = [1, 100, STRIPE - 1, STRIPE, STRIPE + 1, 3 * STRIPE + 17, len(model)]
    for _ in range(60):
        nbytes = min(rng.choice(sizes), len(model))
        offset = rng.choice([0, len(model) - nbytes, rng.randrange(len(model) - nbytes + 1)])
        if rng.random() < 0.5:
            data = rng.randbytes(nbytes)
            write(port, offset, data)
            model[offset : offset + nbytes] = data
        else:
            assert read(port, offset, nbytes) == model[offset : offset + nbytes]
    assert read(port, 0, len(model)) == model


def test_stripes_lie_round_robin_and_one_after_the_other_in_each_lease(server: NodeServer) -> None:
    makers = [Ends(server) for _ in range(3)]
    port = striped([maker.make(2 * STRIPE) for maker in makers], 2 * STRIPE)
    for stripe in range(6):
        write(port, stripe * STRIPE, bytes([stripe + 1]) * STRIPE)
    for number, maker in enumerate(makers):
        file = map_file(server.lease_path(SESSION, maker.leases[0]))
        assert file[4096 : 4096 + STRIPE] == bytes([number + 1]) * STRIPE
        assert file[4096 + STRIPE : 4096 + 2 * STRIPE] == bytes([number + 4]) * STRIPE


def test_many_more_pieces_than_the_window_are_moved(server: NodeServer) -> None:
    stripe = 4096
    port = striped([Ends(server).make(4 * MIB) for _ in range(2)], 4 * MIB, stripe=stripe)
    data = random.Random(2).randbytes(8 * MIB)
    write(port, 0, data)
    assert read(port, 0, 8 * MIB) == data


def test_threads_share_a_port_and_its_connections_are_used_again(server: NodeServer) -> None:
    makers = [Ends(server) for _ in range(2)]
    port = striped([maker.make(8 * MIB) for maker in makers], 8 * MIB)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(10):
                data = random.Random(f"{number}/{step}").randbytes(3 * MIB)
                write(port, number * 4 * MIB, data)
                assert read(port, number * 4 * MIB, 3 * MIB) == data
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not failures, failures
    assert all(1 <= maker.dialled <= 4 for maker in makers)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 4 * STRIPE + 1), (4 * STRIPE, 1), (2**63, 1), (2**64 - 1, 2), (1, 4 * STRIPE)]
)
@pytest.mark.parametrize("mapped", [False, True])
def test_what_lies_outside_of_the_space_is_refused(server: NodeServer, mapped: bool, offset: int, nbytes: int) -> None:
    ends = [Ends(server, mapped=mapped).make(2 * STRIPE) for _ in range(2)]
    memory = Memory(5 * STRIPE)
    for port in (striped(ends, 2 * STRIPE), RemotePort("remote", ends[0], timeout=10.0)):
        for move in (port.read, port.write):
            with pytest.raises(ValueError, match="outside"):
                move(offset, memory.address, nbytes)


def test_ends_that_do_not_fit_together_are_refused(server: NodeServer) -> None:
    with pytest.raises(ValueError, match="at least one port"):
        striped([], STRIPE)
    with pytest.raises(ValueError, match="whole stripes"):
        striped([end(never, STRIPE + 1)], STRIPE + 1)
    with pytest.raises(ValueError, match="outside of the 65536 bytes"):
        read(striped([end(never, STRIPE), end(never, STRIPE)], 2 * STRIPE), 3 * STRIPE, 1)
    with pytest.raises(ValueError, match="expected a header of 4096 and a lease of 65536"):
        end(never, STRIPE, memory=mmap.mmap(-1, STRIPE))


@pytest.mark.parametrize("mapped", [False, True])
def test_a_lease_that_was_taken_back_is_lost(server: NodeServer, mapped: bool) -> None:
    maker = Ends(server, mapped=mapped)
    port = RemotePort("remote", maker.make(STRIPE), timeout=10.0)
    write(port, 0, b"bytes")
    server.release(SESSION, maker.leases[0])
    with pytest.raises(LeaseLostError, match="remote") as caught:
        read(port, 0, 5)
    assert caught.value.node == NAME
    with pytest.raises(LeaseLostError):
        write(port, 0, b"bytes")


def test_a_key_without_the_right_is_an_access_error(server: NodeServer) -> None:
    port = RemotePort("remote", Ends(server, rights=int(Right.READ)).make(STRIPE), timeout=10.0)
    with pytest.raises(AccessDeniedError):
        write(port, 0, b"bytes")


def test_what_dialling_raises_is_what_the_transfer_raises() -> None:
    def fail() -> int:
        raise LookupError("no such host")

    port = RemotePort("remote", end(fail, STRIPE), timeout=1.0)
    with pytest.raises(LookupError, match="no such host"):
        write(port, 0, b"bytes")


@pytest.mark.parametrize("mapped", [False, True])
def test_a_restarted_node_still_has_what_was_written(tmp_path: Path, mapped: bool) -> None:
    with serving(tmp_path, ephemeral=False) as server:
        maker = Ends(server, mapped=mapped)
        port = RemotePort("remote", maker.make(4 * STRIPE), timeout=10.0)
        write(port, STRIPE - 3, b"before")
    with serving(tmp_path, ephemeral=False) as maker.server:
        assert read(port, STRIPE - 3, 6) == b"before"
        write(port, 0, b"after")
        assert read(port, 0, 5) == b"after"
        assert maker.dialled == (0 if mapped else 2)


class Scripted:
    """An end whose n-th connection is served by the n-th script."""

    def __init__(self, *scripts: Callable[[socket.socket], None]) -> None:
        self._scripts = list(scripts)
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []
        self.dialled = 0

    def dial(self) -> int:
        ours, theirs = socket.socketpair()
        theirs.settimeout(20)
        script = self._scripts[self.dialled]
        self.dialled += 1
        thread = threading.Thread(target=self._run, args=(script, theirs))
        self._sockets.append(theirs)
        self._threads.append(thread)
        thread.start()
        return ours.detach()

    @staticmethod
    def _run(script: Callable[[socket.socket], None], stream: socket.socket) -> None:
        try:
            script(stream)
        except (EOFError, OSError):
            pass
        finally:
            stream.close()

    def close(self) -> None:
        for stream in self._sockets:
            with suppress(OSError):
                stream.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def scripted_port(
    *scripts: Callable[[socket.socket], None], timeout: float = 10.0
) -> Iterator[tuple[RemotePort, Scripted]]:
    node = Scripted(*scripts)
    port = RemotePort("remote", end(node.dial, 4 * STRIPE), timeout=timeout)
    try:
        yield port, node
    finally:
        node.close()


def serve(stream: socket.socket, memory: bytearray | None = None, requests: int = 10**9) -> None:
    memory = bytearray(4 * STRIPE) if memory is None else memory
    for _ in range(requests):
        request = read_request(stream)
        assert request.whole
        if request.op == Op.READ:
            offset, nbytes = struct.unpack("<QQ", request.meta)
            stream.sendall(frame(request.op, request.number, b"", bytes(memory[offset : offset + nbytes])))
        else:
            (offset,) = struct.unpack("<Q", request.meta)
            memory[offset : offset + len(request.payload)] = request.payload
            stream.sendall(frame(request.op, request.number))


def test_a_connection_that_dies_in_the_middle_of_its_second_transfer_is_tried_once_more() -> None:
    memory = bytearray(4 * STRIPE)

    def dying(stream: socket.socket) -> None:
        serve(stream, memory, requests=1)
        read_request(stream)  # and no answer

    with scripted_port(dying, lambda stream: serve(stream, memory)) as (port, node):
        write(port, 0, b"first")
        write(port, STRIPE, b"second")
        assert node.dialled == 2
        assert memory[STRIPE : STRIPE + 6] == b"second"


def test_a_new_connection_that_dies_is_an_error_at_once() -> None:
    def dying(stream: socket.socket) -> None:
        read_request(stream)

    with scripted_port(dying, dying) as (port, node):
        with pytest.raises(NodeError, match="closed the connection"):
            read(port, 0, 10)
        assert node.dialled == 1


def test_a_node_that_stops_is_an_error_at_the_timeout() -> None:
    ended = threading.Event()

    def stopping(stream: socket.socket) -> None:
        read_request(stream)
        ended.wait(20)

    with scripted_port(stopping, timeout=0.1) as (port, _):
        with pytest.raises(NodeTimeoutError):  # the peer itself ends the connection, which would be another error
            write(port, 0, bytes(3 * STRIPE))
        ended.set()


def test_a_write_waits_until_a_failed_one_can_change_nothing_any_more() -> None:
    memory = bytearray(4 * STRIPE)
    go_on = threading.Event()

    def stopped(stream: socket.socket) -> None:
        receive_exactly(stream, 1)
        go_on.wait(20)
        receive_exactly(stream, 63)
        meta_and_payload = receive_exactly(stream, 8 + 3)
        memory[:3] = meta_and_payload[8:]
        stream.recv(1)

    with scripted_port(stopped, lambda stream: serve(stream, memory), timeout=0.1) as (port, node):
        with pytest.raises(NodeTimeoutError):
            write(port, 0, b"old")
        with pytest.raises(NodeTimeoutError, match="did not end a connection"):
            write(port, 0, b"new")
        assert node.dialled == 1
        go_on.set()
        deadline = time.monotonic() + 10
        while True:
            try:
                write(port, 0, b"new")
                break
            except NodeTimeoutError:
                assert time.monotonic() < deadline
        assert memory[:3] == b"new"
        assert read(port, 0, 3) == b"new"


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({"payload": b"too long a payload"}, ProtocolError),
        ({"payload": b""}, ProtocolError),
        ({"status": Status.UNKNOWN}, LeaseLostError),
        ({"status": Status.DENIED}, AccessDeniedError),
        ({"status": Status.CHECKSUM}, ChecksumError),
        ({"status": Status.BAD_REQUEST, "meta": b"expected less"}, NodeError),
        ({"status": 4711}, NodeError),
    ],
)
def test_a_reply_that_is_not_the_bytes_is_an_error(reply: dict[str, object], error: type[Exception]) -> None:
    def answering(stream: socket.socket) -> None:
        while True:
            request = read_request(stream)
            stream.sendall(frame(request.op, request.number, **reply))  # type: ignore[arg-type]

    with scripted_port(answering, answering) as (port, _):
        with pytest.raises(error) as caught:
            read(port, 0, 10)
        assert type(caught.value) is error


def test_a_fork_does_not_use_the_connections_of_its_parent(server: NodeServer) -> None:
    port = RemotePort("remote", Ends(server).make(STRIPE), timeout=10.0)
    write(port, 0, b"bytes")

    def child() -> None:
        with pytest.raises(PoolClosedError, match="fork"):
            read(port, 0, 5)

    in_forked_child(child)
    assert read(port, 0, 5) == b"bytes"
