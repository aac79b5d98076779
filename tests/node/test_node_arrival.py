"""Memory is taken when the bytes of a payload come, and given back when they do not."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from farpool import _native
from farpool._native import crc32c
from farpool.cluster.wire.frames import Op, Status
from tests.attacks.wire import frame
from tests.node.nodes import PATIENCE, PLAIN, Peer, node, until

MIB = 1 << 20
SLICE = MIB
"""Bytes of payload for which memory is taken at once."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path, 32 * MIB) as server:
        yield server


def connected(server: _native.NodeServer, session: int = 9) -> socket.socket:
    ours, theirs = socket.socketpair()
    server.adopt(theirs.detach(), session, 0, 15, "")
    ours.settimeout(PATIENCE)
    return ours


def announced(key: bytes, payload: bytes) -> bytes:
    return frame(Op.PUT, PLAIN + key, payload_nbytes=len(payload), payload_crc=crc32c(payload))


def answered(sock: socket.socket) -> int:
    return int.from_bytes(sock.recv(64, socket.MSG_WAITALL)[6:8], "little")


def filled(server: _native.NodeServer) -> tuple[Peer, list[bytes]]:
    """A node full of objects of 1 MiB."""
    peer = Peer(server)
    keys = [b"%d" % number for number in range(31)]
    for key in keys:
        peer.published(key, bytes(MIB - 1024))
    return peer, keys


def there(peer: Peer, keys: list[bytes]) -> int:
    return sum(peer.ask(Op.STAT, key).status == Status.DONE for key in keys)


def test_a_header_takes_nothing_and_each_slice_what_it_needs(server: _native.NodeServer) -> None:
    peer, keys = filled(server)
    used = server.stats()["used"]
    payload = random.Random(0).randbytes(20 * MIB + 77)
    sock = connected(server)
    sock.sendall(announced(b"large", payload))
    for _ in range(20):
        assert peer.ask(Op.PING).status == Status.DONE
    assert server.stats()["used"] == used
    assert there(peer, keys) == len(keys)
    for sent in (1, SLICE, 5 * SLICE):
        before = server.stats()["bytes_in"]
        sock.sendall(payload[:sent])
        payload = payload[sent:]
        until(lambda b=before, s=sent: server.stats()["bytes_in"] - b >= s, "the bytes were not taken")  # type: ignore[misc]
        total = 20 * MIB + 77 - len(payload)
        assert len(keys) - there(peer, keys) <= total // SLICE + 1
    sock.sendall(payload)
    assert answered(sock) == Status.DONE
    assert peer.get(b"large").payload == random.Random(0).randbytes(20 * MIB + 77)
    sock.close()


@pytest.mark.parametrize("nbytes", [0, 1, SLICE - 1, SLICE, SLICE + 1, 3 * SLICE - 65, 3 * SLICE])
def test_a_payload_of_any_length_arrives_whole(server: _native.NodeServer, nbytes: int) -> None:
    peer = Peer(server)
    used = server.stats()["used"]
    payload = random.Random(nbytes).randbytes(nbytes)
    for part in (1000, 70_000, 300_000, 5 * MIB):
        sock = connected(server)
        data = announced(b"key", payload) + payload
        for at in range(0, len(data), part):
            sock.sendall(data[at : at + part])
        assert answered(sock) == Status.DONE
        assert (peer.get(b"key").payload or b"") == payload
        assert peer.drop(b"key") == Status.DONE
        assert server.stats()["used"] == used
        sock.close()


def test_what_was_taken_is_given_back_when_the_connection_breaks(server: _native.NodeServer) -> None:
    peer = Peer(server)
    sock = connected(server)
    sock.sendall(announced(b"large", bytes(30 * MIB)) + bytes(10 * MIB))
    until(lambda: server.stats()["bytes_in"] >= 10 * MIB, "the bytes were not taken")
    assert 10 * MIB <= server.stats()["used"] <= 12 * MIB
    sock.close()
    until(lambda: server.stats()["used"] == 0, "its memory was not given back")
    assert peer.put(b"other", bytes(30 * MIB)).status == Status.DONE


def test_whoever_sends_a_byte_now_and_then_runs_out_of_patience(tmp_path: Path) -> None:
    with node(tmp_path, 32 * MIB, stall=0.5) as server:
        sock = connected(server)
        sock.sendall(announced(b"large", bytes(30 * MIB)))
        deadline = time.monotonic() + PATIENCE
        sent = 0
        with suppress(BrokenPipeError, ConnectionResetError):
            while time.monotonic() < deadline:  # never half a second without a byte
                sock.sendall(b"x")
                sent += 1
                time.sleep(0.05)
        until(lambda: server.stats()["connections"] == 0, "it was never closed")
        assert 0 < sent < 30 * MIB
        assert [event[0] for event in server.events()] == ["stalled"]
        assert server.stats()["used"] == 0
        sock.close()


def test_of_two_that_do_not_fit_beside_each_other_one_arrives(server: _native.NodeServer) -> None:
    peer = Peer(server)
    payload = random.Random(1).randbytes(20 * MIB)
    socks = [connected(server), connected(server, 10)]
    for number, sock in enumerate(socks):
        sock.sendall(announced(b"%d" % number, payload))
    for at in range(0, len(payload), MIB):
        for sock in socks:
            sock.sendall(payload[at : at + MIB])
    came = [answered(sock) for sock in socks]
    assert sorted(came) == [Status.DONE, Status.FULL]
    assert peer.get(b"%d" % came.index(Status.DONE)).payload == payload
    assert server.stats()["used"] < 21 * MIB
    assert peer.put(b"more", bytes(11 * MIB)).status == Status.DONE
    for sock in socks:
        sock.close()


def test_many_that_announce_and_send_a_byte_keep_nobody_out(server: _native.NodeServer) -> None:
    peer, keys = filled(server)
    liars = [connected(server, 100 + number) for number in range(40)]
    for number, sock in enumerate(liars):
        before = server.stats()["bytes_in"]
        sock.sendall(announced(b"liar %d" % number, bytes(25 * MIB)) + b"x")
        until(lambda b=before: server.stats()["bytes_in"] > b, "the bytes were not taken")  # type: ignore[misc]
    for number in range(40):
        assert peer.put(b"new %d" % number, bytes(MIB)).status == Status.DONE
    assert peer.put(b"large", bytes(20 * MIB)).status == Status.DONE
    assert there(peer, keys) < len(keys)
    for sock in liars:
        sock.close()


def test_memory_of_what_was_announced_is_no_more_than_of_what_came(tmp_path: Path) -> None:
    """Places that had memory before are announced, and others need that memory."""
    with node(tmp_path, 32 * MIB) as server:
        peer, keys = filled(server)
        for key in keys:
            peer.drop(key)
        sock = connected(server)
        sock.sendall(announced(b"liar", bytes(30 * MIB)) + b"x")
        until(lambda: server.stats()["used"] > 0, "the byte was not taken")
        other = Peer(server, session=8, tenant=1)
        for number in range(28):
            assert other.put(b"%d" % number, bytes(MIB - 1024)).status == Status.DONE
        assert there(other, [b"%d" % number for number in range(28)]) == 28
        assert server.stats()["backed"] <= 32 * MIB
        sock.close()


def test_what_was_used_lately_stays_when_its_neighbours_go(tmp_path: Path) -> None:
    """Each object is larger than any hole, so that at last holes have to be made between those that are there."""
    with node(tmp_path, MIB) as server:
        peer = Peer(server)
        hot: list[bytes] = []
        for number in range(1500):
            key = b"%d" % number
            peer.published(key, bytes(20_000 + 64 * (number % 700)))
            if number % 40 == 0 and len(hot) < 6:
                hot.append(key)
            assert all(peer.get(one).status == Status.DONE for one in hot)


def test_a_put_of_what_is_there_ends_no_other_put(server: _native.NodeServer) -> None:
    peer, payload = Peer(server), random.Random(1).randbytes(14 * MIB)
    peer.published(b"there", bytes(16 * MIB))
    with connected(server) as sock:
        sock.sendall(announced(b"large", payload) + payload[:1])
        until(lambda: server.stats()["bytes_in"] > 16 * MIB + 200, "the byte was not taken")
        assert peer.put(b"there", bytes(20 * MIB)).status == Status.PRESENT
        sock.sendall(payload[1:])
        assert answered(sock) == Status.DONE
    assert peer.get(b"large").payload == payload
