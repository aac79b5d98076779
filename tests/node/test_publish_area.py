"""Payloads that are put through memory which a publisher writes and the node copies from (docs/wire.md)."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from farpool import _native
from farpool._native import crc32c
from farpool.cluster.wire.frames import HEADER_BYTES, Op, Right, Status
from tests.attacks.wire import frame, head
from tests.node.nodes import ALL, PATIENCE, Peer, node, until

KIB = 1 << 10
MIB = 1 << 20
HEADER = 4096
"""Bytes of the area's file before the area."""
IN_AREA = 2
"""Flag of a put whose payload lies in the area."""
AREA = MIB
"""Bytes of the area of a node that lends 64 MiB or more."""


class Reply(NamedTuple):
    status: int
    serial: int
    meta: bytes


class Publisher:
    """A connection on which a publish area can be asked for, and anything be said about what lies there."""

    def __init__(
        self, server: _native.NodeServer, *, session: int = 7, tenant: int = 0, rights: int = ALL, tcp: bool = False
    ) -> None:
        if tcp:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                self.socket = socket.create_connection(listening.getsockname())
                theirs, _ = listening.accept()
        else:
            self.socket, theirs = socket.socketpair()
        server.adopt(theirs.detach(), session, tenant, rights, "")
        self.socket.settimeout(PATIENCE)
        self.memory: mmap.mmap | None = None

    def ask(self) -> tuple[Reply, list[int]]:
        self.socket.sendall(frame(Op.AREA))
        data, files, _, _ = socket.recv_fds(self.socket, HEADER_BYTES, 4)
        return self._reply(data), files

    def open(self) -> mmap.mmap:
        reply, (file,) = self.ask()
        assert reply.status == Status.DONE
        self.memory = mmap.mmap(file, 0)
        os.close(file)
        return self.memory

    def fill(self, offset: int, data: bytes) -> None:
        assert self.memory is not None
        self.memory[HEADER + offset : HEADER + offset + len(data)] = data

    def begin(self, key: bytes, nbytes: int, crc: int) -> None:
        """Announce a put; its parts follow."""
        self.socket.sendall(frame(Op.PUT, head() + key, payload_nbytes=nbytes, payload_crc=crc, flags=IN_AREA))

    def name(self, *parts: tuple[int, int]) -> None:
        """Say where the next bytes of the payload lie."""
        self.socket.sendall(b"".join(struct.pack("<II", *part) for part in parts))

    def put(self, key: bytes, payload: bytes, step: int = 128 * KIB) -> Reply:
        """Put a payload piece by piece, each at the beginning of the area once the one before has been taken."""
        self.begin(key, len(payload), crc32c(payload))
        taken = 0
        while taken < len(payload):
            piece = payload[taken : taken + step]
            self.fill(0, piece)
            self.name((0, len(piece)))
            taken += len(piece)
            if taken < len(payload):
                told = self.reply()
                assert (told.status, told.serial) == (Status.TAKEN, taken)
        return self.reply()

    def reply(self) -> Reply:
        return self._reply(b"")

    def _reply(self, data: bytes) -> Reply:
        while len(data) < HEADER_BYTES:
            more = self.socket.recv(HEADER_BYTES - len(data))
            if not more:
                raise ConnectionResetError
            data += more
        status, nbytes, serial = (
            struct.unpack_from(form, data, at)[0] for form, at in (("<H", 6), ("<I", 16), ("<Q", 32))
        )
        meta = self.socket.recv(nbytes, socket.MSG_WAITALL) if nbytes else b""
        return Reply(status, serial, meta)

    def close(self) -> None:
        self.socket.close()

    def __del__(self) -> None:
        self.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path, 64 * MIB) as server:
        yield server


@pytest.fixture
def publisher(server: _native.NodeServer) -> Publisher:
    made = Publisher(server)
    made.open()
    return made


def lent(server: _native.NodeServer) -> int:
    return int(server.tenants()[0]["lent"])


def test_payloads_lie_where_their_parts_say(server: _native.NodeServer, publisher: Publisher) -> None:
    generator = random.Random(1)
    peer = Peer(server)
    for nbytes in (0, 1, 4095, 100_001, AREA):
        payload = generator.randbytes(nbytes)
        cuts = [0, *sorted(generator.sample(range(nbytes), min(5, nbytes))), nbytes]
        parts = [(begin, end - begin) for begin, end in itertools.pairwise(cuts) if end > begin]
        publisher.fill(0, payload)
        publisher.begin(b"%d" % nbytes, nbytes, crc32c(payload))
        publisher.name(*parts)
        reply = publisher.reply()
        assert reply.status == Status.DONE
        found = peer.get(b"%d" % nbytes)
        assert (found.payload or b"", found.serial) == (payload, reply.serial)


def test_a_payload_larger_than_the_area_is_taken_as_the_node_says_how_far_it_is(
    server: _native.NodeServer, publisher: Publisher
) -> None:
    payload = random.Random(2).randbytes(5 * MIB + 17)
    assert publisher.put(b"key", payload).status == Status.DONE
    assert Peer(server).get(b"key").payload == payload


def test_many_parts_at_once_are_worked_off_while_others_are_served(
    server: _native.NodeServer, publisher: Publisher
) -> None:
    value = b"v" * AREA
    publisher.fill(0, value)
    publisher.begin(b"key", 16 * AREA, crc32c(value * 16))
    publisher.name(*[(0, AREA)] * 16)
    publisher.socket.sendall(frame(Op.STAT, b"key"))  # is answered after it
    replies = [publisher.reply()]
    while replies[-1].status == Status.TAKEN:
        replies.append(publisher.reply())
    told = [reply.serial for reply in replies[:-1]]
    assert told == sorted(set(told))
    assert told[-1] < 16 * AREA
    assert replies[-1].status == Status.DONE
    stated = publisher.reply()
    assert (stated.status, stated.serial) == (Status.DONE, replies[-1].serial)


@pytest.mark.parametrize(
    "part",
    [
        (0, 0),
        (AREA, 1),
        (AREA - 1, 2),
        (2**32 - 1, 2),
        (1, 2**32 - 1),
        (0, 2**32 - 1),
        (2**32 - 1, 2**32 - 1),
        (0, 1001),
    ],
)
def test_a_part_outside_of_the_area_or_of_the_payload_is_a_bad_frame(
    server: _native.NodeServer, publisher: Publisher, part: tuple[int, int]
) -> None:
    before = server.stats()["used"] - (HEADER + AREA)
    publisher.begin(b"key", 2000, 0)
    publisher.name((0, 1000), part)
    with pytest.raises(ConnectionResetError):
        publisher.reply()
    peer = Peer(server)
    assert peer.get(b"key").status == Status.MISSING
    assert (server.stats()["bad_frames"], server.stats()["used"], lent(server)) == (1, before, 0)


@pytest.mark.parametrize("op", [Op.PUT, Op.WRITE, Op.GET, Op.AREA])
def test_a_payload_in_an_area_that_is_not_there_or_not_put_is_a_bad_frame(server: _native.NodeServer, op: Op) -> None:
    publisher = Publisher(server)
    if op != Op.PUT:
        publisher.open()
    publisher.socket.sendall(frame(op, head() + b"key", payload_nbytes=4, flags=IN_AREA))
    with pytest.raises(ConnectionResetError):
        publisher.reply()
    assert server.stats()["bad_frames"] == 1


def test_what_was_changed_before_the_node_has_copied_it_is_not_stored(
    server: _native.NodeServer, publisher: Publisher
) -> None:
    payload = bytes(range(256)) * 2000
    before = server.stats()["used"]
    publisher.fill(0, payload)
    publisher.begin(b"key", len(payload), crc32c(payload))
    publisher.fill(300_000, b"other bytes")
    publisher.name((0, len(payload)))
    assert publisher.reply().status == Status.CHECKSUM
    assert Peer(server).get(b"key").status == Status.MISSING
    assert (server.stats()["used"], server.stats()["checksum_errors"]) == (before, 1)
    publisher.fill(0, payload)
    publisher.begin(b"key", len(payload), crc32c(payload))
    publisher.name((0, len(payload)))
    assert publisher.reply().status == Status.DONE


@pytest.mark.slow
def test_what_changes_while_the_node_copies_it_is_stored_as_announced_or_not_at_all(
    server: _native.NodeServer, publisher: Publisher
) -> None:
    payload = random.Random(3).randbytes(AREA)
    peer = Peer(server)
    publisher.fill(0, payload)
    ends = threading.Event()
    at = HEADER + AREA - 64 * KIB

    def change() -> None:
        memory = publisher.memory
        assert memory is not None
        while not ends.is_set():
            memory[at : at + 8] = b"\0" * 8
            memory[at : at + 8] = payload[AREA - 64 * KIB :][:8]

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for number in range(200):
            key = b"%d" % number
            publisher.begin(key, AREA, crc32c(payload))
            publisher.name((0, AREA))
            status = publisher.reply().status
            found = peer.get(key)
            assert (status, found.status) in ((Status.DONE, Status.DONE), (Status.CHECKSUM, Status.MISSING))
            assert found.status == Status.MISSING or found.payload == payload
            peer.drop(key)
    finally:
        ends.set()
        changing.join()


def test_a_publisher_that_goes_in_the_middle_leaves_nothing(server: _native.NodeServer) -> None:
    peer = Peer(server)
    before = server.stats()["used"]
    publisher = Publisher(server, session=8)
    publisher.open()
    publisher.begin(b"key", 5 * MIB, 0)
    publisher.name((0, AREA), (0, AREA))
    while publisher.reply().serial < 2 * AREA:
        pass
    assert server.stats()["used"] >= before + 2 * AREA
    publisher.close()
    until(lambda: server.stats()["used"] == before, "what had come is still there")
    assert peer.get(b"key").status == Status.MISSING
    assert lent(server) == 0


def test_memory_is_taken_as_parts_are_named_not_as_they_are_announced(server: _native.NodeServer) -> None:
    peer = Peer(server)
    for number in range(40):
        peer.published(b"%d" % number, bytes(MIB))
    publisher = Publisher(server, session=8)
    publisher.open()
    before = server.stats()
    publisher.begin(b"key", 30 * MIB, 0)
    publisher.name((0, AREA))
    assert publisher.reply().serial == AREA
    after = server.stats()
    assert after["evictions"] - before["evictions"] <= 1
    assert after["used"] - before["used"] <= 2 * MIB


def test_an_area_is_of_the_tenants_share_and_given_back(server: _native.NodeServer) -> None:
    publishers = [Publisher(server, session=session) for session in (8, 8, 9)]
    for number, publisher in enumerate(publishers, 1):
        publisher.open()
        assert lent(server) == number * (HEADER + AREA)
    for left, publisher in enumerate(reversed(publishers)):
        publisher.close()
        until(lambda left=left: lent(server) == (2 - left) * (HEADER + AREA), "the area was not given back")  # type: ignore[misc]


def test_beyond_its_share_a_tenant_gets_no_area_and_puts_over_the_socket(tmp_path: Path) -> None:
    with node(tmp_path, 64 * MIB, shares={1: 8 * MIB, 2: 56 * MIB}) as server:
        server.expect_tenants({1, 2})
        server.lend(7, 1, 7 * MIB + MIB // 2)
        publisher = Publisher(server, tenant=1)
        reply, files = publisher.ask()
        assert (reply.status, files) == (Status.BUSY, [])
        assert b"the tenant's share has no room" in reply.meta
        client = connected(server, tenant=1)
        for number in range(3):
            reply = client.exchange(Op.PUT, head() + b"%d" % number, soon(), payload=bytes(300_000))
            assert reply.status == Status.DONE
        assert server.stats()["bytes_in"] > 900_000


def test_a_session_may_have_64_areas(tmp_path: Path) -> None:
    with node(tmp_path, 128 * MIB) as server:
        publishers = [Publisher(server) for _ in range(64)]
        for publisher in publishers:
            publisher.open()
        late = Publisher(server)
        reply, files = late.ask()
        assert (reply.status, files) == (Status.BUSY, [])
        assert b"64 publish areas" in reply.meta
        other = Publisher(server, session=8)
        other.open()
        publishers[0].close()
        until(lambda: lent(server) == 64 * (HEADER + AREA), "its area was not given back")
        late.open()


def test_who_may_not_publish_or_has_one_or_is_not_on_this_host_gets_no_area(server: _native.NodeServer) -> None:
    assert Publisher(server, rights=Right.READ | Right.WRITE).ask()[0].status == Status.DENIED
    assert Publisher(server, tcp=True).ask()[0].status == Status.BAD_REQUEST
    publisher = Publisher(server)
    publisher.open()
    reply, files = publisher.ask()
    assert (reply.status, files) == (Status.BAD_REQUEST, [])
    assert lent(server) == HEADER + AREA


def test_an_area_cannot_be_cut_and_whoever_keeps_it_keeps_no_memory(server: _native.NodeServer) -> None:
    publisher = Publisher(server)
    _, (file,) = publisher.ask()
    for nbytes in (0, HEADER, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(file, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    assert os.fstat(file).st_blocks * 512 == HEADER + AREA
    publisher.close()
    until(lambda: os.fstat(file).st_blocks == 0, "its memory is still there")
    os.close(file)


def test_a_hole_in_an_area_reads_as_zeros(server: _native.NodeServer, publisher: Publisher) -> None:
    again = Publisher(server)
    _, (file,) = again.ask()
    publisher, again.memory = again, mmap.mmap(file, 0)
    publisher.fill(0, b"x" * AREA)
    libc_punch(file, HEADER, AREA)
    publisher.begin(b"key", AREA, crc32c(bytes(AREA)))
    publisher.name((0, AREA))
    assert publisher.reply().status == Status.DONE
    os.close(file)


def test_clients_put_pieces_of_any_size_many_at_a_time(server: _native.NodeServer) -> None:
    client = connected(server)
    client.exchange(Op.PUT, head() + b"first", soon(), payload=bytes(MIB))  # asks for the area
    before = server.stats()["bytes_in"]
    generator = random.Random(4)
    values = []
    for number in range(12):
        sizes = [generator.choice((1, 777, 65_537, 300_000, MIB + 1)) for _ in range(generator.randrange(1, 6))]
        values.append((b"%d" % number, [generator.randbytes(nbytes) for nbytes in (*sizes, 70_000)]))
    asks = [(client, Op.PUT, head() + key, 0, tuple(pieces), None) for key, pieces in values]
    asks += [(client, Op.GET, key, 0, None, None) for key, _ in values]
    answers = _native.exchange(asks, soon())
    assert [answer.status for answer in answers] == [Status.DONE] * 24
    assert [answer.payload for answer in answers[12:]] == [b"".join(pieces) for _, pieces in values]
    assert server.stats()["bytes_in"] - before < 100_000


@pytest.mark.parametrize("before", [70_001, AREA - 1, 3 * AREA + 65])
def test_a_client_puts_what_fills_the_whole_area(server: _native.NodeServer, before: int) -> None:
    client = connected(server)
    client.exchange(Op.PUT, head() + b"first", soon(), payload=bytes(MIB))  # asks for the area
    generator = random.Random(before)
    payloads = [generator.randbytes(nbytes) for nbytes in (before, AREA, AREA - 1, AREA - 63, AREA + 1)]
    asks = [(client, Op.PUT, head() + b"%d" % number, 0, payload, None) for number, payload in enumerate(payloads)]
    assert [answer.status for answer in _native.exchange(asks, soon())] == [Status.DONE] * 5
    for number, payload in enumerate(payloads):
        assert client.exchange(Op.GET, b"%d" % number, soon()).payload == payload


def test_a_program_prepares_no_places_unless_the_objects_are_exposed_to_it(server: _native.NodeServer) -> None:
    peer = Peer(server)
    for number in range(60):
        peer.published(b"%d" % number, bytes(MIB))
    before = server.stats()
    publisher = Publisher(server, session=8)
    publisher.socket.sendall(frame(Op.PREPARE, struct.pack("<Q", 30 * MIB) + head() + b"key"))
    reply = publisher.reply()
    assert reply.status == Status.DENIED
    assert b"one-sided fabric" in reply.meta
    after = server.stats()
    assert (after["evictions"], after["used"]) == (before["evictions"], before["used"])


def connected(server: _native.NodeServer, session: int = 9, tenant: int = 0) -> _native.Connection:
    ours, theirs = socket.socketpair()
    server.adopt(theirs.detach(), session, tenant, ALL, "")
    return _native.Connection(ours.detach(), "node", tenant=tenant, credential=0, spin=0.0, area=True)


def soon() -> float:
    return time.monotonic() + PATIENCE


def libc_punch(file: int, offset: int, nbytes: int) -> None:
    """Have the system take the memory of a range back."""
    import ctypes

    keep_size, punch_hole = 1, 2
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.fallocate(file, keep_size | punch_hole, ctypes.c_int64(offset), ctypes.c_int64(nbytes))
    assert done == 0, os.strerror(ctypes.get_errno())
