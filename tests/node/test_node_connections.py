"""Many connections, slow ones, and ones that mean no good."""

import resource
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Right, Status, pack_frame
from tests.forking import in_forked_child
from tests.node.nodes import ALL, PATIENCE, PLAIN, Peer, node, reader, until, walked


def raw(server: _native.NodeServer, session: int = 7) -> socket.socket:
    ours, theirs = socket.socketpair()
    server.adopt(theirs.detach(), session, 0, ALL, "")
    ours.settimeout(PATIENCE)
    return ours


def test_a_thousand_connections_are_served(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 3000:
        pytest.skip(f"only {hard} open files are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 3000), hard))
    try:
        with node(tmp_path, 4 << 20) as server:
            peers = [Peer(server, session=n + 1) for n in range(1000)]
            deadline = time.monotonic() + PATIENCE
            for n, peer in enumerate(peers):
                peer.connection.send(Op.PUT, PLAIN + b"%d" % n, deadline, payload=b"%d" % n)
            assert all(peer.connection.receive(deadline).status == Status.DONE for peer in peers)
            for n, peer in enumerate(peers):
                peer.connection.send(Op.GET, b"%d" % ((n + 500) % 1000), deadline)
            assert all(
                peer.connection.receive(deadline).payload == b"%d" % ((n + 500) % 1000) for n, peer in enumerate(peers)
            )
            assert server.stats()["connections"] == server.stats()["sessions"] == 1000
            for peer in peers:
                peer.close()
            until(lambda: server.stats()["connections"] == 0, "closed connections are still there")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_client_that_hangs_up_behind_its_requests_gets_the_replies(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"payload")
        for requests in (1, 40):
            ours, theirs = socket.socketpair()
            with ours:
                ours.settimeout(PATIENCE)
                ours.sendall(pack_frame(Op.GET, b"key") * requests)
                ours.shutdown(socket.SHUT_WR)  # before the node has read anything
                server.adopt(theirs.detach(), 7, 0, ALL, "")
                received = b"".join(iter(lambda ours=ours: ours.recv(1 << 16), b""))
            assert received.count(b"payload") == requests


def test_a_client_that_hangs_up_gets_a_reply_that_takes_many_turns(tmp_path: Path) -> None:
    with node(tmp_path, 32 << 20) as server:
        Peer(server).published(b"key", bytes(8 << 20))
        client = raw(server)
        with client:
            client.sendall(pack_frame(Op.GET, b"key"))
            client.shutdown(socket.SHUT_WR)
            received = sum(map(len, iter(lambda: client.recv(1 << 16), b"")))
        assert received > 8 << 20


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda frame: b"HTTP" + frame[4:], "not a frame"),
        (lambda frame: frame[:4] + b"\x01" + frame[5:], "another version; this farpool speaks version 2"),
        (lambda frame: frame[:16] + struct.pack("<I", 65537) + frame[20:], "larger than 65536"),
        (lambda frame: frame[:32] + b"\x01" + frame[33:], "do not match their checksum"),
        (lambda frame: frame[:-1] + b"X", "do not match their checksum"),
    ],
)
def test_a_bad_frame_ends_its_connection_and_no_other(
    tmp_path: Path, spoil: Callable[[bytes], bytes], reason: str
) -> None:
    with node(tmp_path) as server:
        bad, good = raw(server), Peer(server, session=8)
        bad.sendall(spoil(pack_frame(Op.GET, b"key")))
        assert bad.recv(1) == b""
        [(kind, session, text)] = server.events()
        assert (kind, session) == ("bad_frame", 7)
        assert reason in text
        assert server.stats()["bad_frames"] == 1
        assert good.ask(Op.PING).status == Status.DONE
        bad.close()


def test_a_frame_of_another_tenant_is_denied(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        sock = raw(server)
        sock.sendall(pack_frame(Op.PING, b"", tenant=5))
        assert struct.unpack_from("<H", sock.recv(64, socket.MSG_WAITALL), 6) == (Status.DENIED,)
        sock.close()


def test_one_that_rests_in_the_middle_of_a_frame_is_closed_and_one_between_frames_is_not(tmp_path: Path) -> None:
    with node(tmp_path, stall=0.2) as server:
        resting, patient = raw(server), Peer(server, session=8)
        resting.sendall(pack_frame(Op.GET, b"key")[:-1])
        assert resting.recv(1) == b""
        assert [event[:2] for event in server.events()] == [("stalled", 7)]
        assert patient.ask(Op.PING).status == Status.DONE
        resting.close()


def test_one_that_takes_no_replies_is_closed_and_frees_what_it_held(tmp_path: Path) -> None:
    with node(tmp_path, 8 << 20, stall=0.3, grace=0.0) as server:
        stuck, peer = raw(server), Peer(server, session=8)
        peer.published(b"key", bytes(4 << 20))
        stuck.sendall(pack_frame(Op.GET, b"key") * 300)
        until(lambda: server.stats()["hits"] >= 100, "the requests were not taken")
        assert peer.get(b"key").nbytes == 4 << 20
        until(lambda: server.stats()["connections"] == 1, "it was never closed")
        assert peer.put(b"large", bytes(7 << 20)).status == Status.DONE
        stuck.close()


def test_small_requests_are_served_between_the_parts_of_large_ones(tmp_path: Path) -> None:
    with node(tmp_path, 128 << 20) as server:
        bulk, small = Peer(server), Peer(server, session=8)
        payload = bytes(32 << 20)
        small.published(b"large", payload)
        small.published(b"small", b"x")
        deadline = time.monotonic() + PATIENCE
        for _ in range(8):
            bulk.connection.send(Op.GET, b"large", deadline)
        buffer = bytearray(len(payload))
        bulk.connection.receive(deadline, buffer)
        before = server.stats()["bytes_out"]
        for _ in range(20):
            assert small.get(b"small").payload == b"x"
        assert server.stats()["bytes_out"] - before < 7 * len(payload)  # it did not have to wait for all of them
        for _ in range(7):
            bulk.connection.receive(deadline, buffer)


def test_a_payload_that_was_damaged_on_its_way_is_refused(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer, sock = Peer(server), raw(server)
        used = server.stats()["used"]
        fields = struct.pack("<4sBBHQIIQQQIIB3s", b"FPW1", 2, Op.PUT, 0, 1, 35, 0, 3, 0, 0, 0, 0, 0, bytes(3))
        meta = PLAIN + b"key"
        crc = _native.crc32c(meta, _native.crc32c(fields))
        sock.sendall(fields + struct.pack("<I", crc) + meta + b"abc")
        assert struct.unpack_from("<H", sock.recv(64, socket.MSG_WAITALL), 6) == (Status.CHECKSUM,)
        assert peer.get(b"key").status == Status.MISSING
        assert server.stats()["checksum_errors"] == 1
        assert server.stats()["used"] == used
        sock.close()


def test_a_listing_goes_on_where_it_was_while_the_table_grows(tmp_path: Path) -> None:
    with node(tmp_path, 64 << 20) as server:
        peer = Peer(server)
        keys = {b"%d" % n for n in range(400)}
        for key in keys:
            peer.published(key, b"")
        found: list[bytes] = []
        more = 400
        while batch := walked(server, 0, found[-1] if found else b"", b"", 50):
            found += [entry[0] for entry in batch]
            for _ in range(150):
                peer.published(b"%d" % more, b"")
                more += 1
        assert keys <= set(found)
        assert len(found) == len(set(found))
        assert [entry[0] for entry in walked(server, 0, b"", b"1234", 5)]
        assert walked(server, 0, b"", b"x", 5) == []


def test_rights_are_those_of_the_connection_and_not_of_the_session(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"payload")
        assert Peer(server, rights=Right.READ).put(b"key", b"other").status == Status.DENIED


def test_a_closed_connection_whose_socket_lives_on_in_another_process_ends_no_node(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        ours, theirs = socket.socketpair()
        with theirs.dup(), ours:  # as a fork has it, or a subprocess before its exec
            server.adopt(theirs.detach(), 7, 0, ALL, "")
            ours.sendall(b"x" * 64)  # no frame
            until(lambda: server.stats()["connections"] == 0, "the connection was not closed")
            ours.sendall(b"more")
            peer = Peer(server)
            assert peer.ask(Op.PING).status == Status.DONE
            assert server.stats()["connections"] == 1


def test_a_forked_child_can_drop_its_copy_of_a_node(tmp_path: Path) -> None:
    file = str(tmp_path / "far.nvme")
    servers = [_native.NodeServer(str(tmp_path), 64 << 20, ephemeral=True, nvme=file, nvme_capacity=1 << 20)]
    servers[0].start()
    try:
        peer = Peer(servers[0])

        def child() -> None:
            servers[0].stop()
            servers.clear()

        peer.published(b"key", b"payload")
        with reader(servers[0]) as mapped:
            in_forked_child(child)
            assert mapped.get(b"key") is not None
        assert peer.get(b"key").payload == b"payload"
        with reader(servers[0]):  # the files are still there
            pass
    finally:
        servers[0].stop()
