"""Objects that leave memory for a file and come back."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import time
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Status, pack_frame
from farpool.errors import ChecksumError
from tests.node.nodes import ALL, Peer, node, reader, until, walked

MIB = 1 << 20


def server(
    folder: Path, file: Path, *, memory: int = 8 * MIB, nvme: int = 32 * MIB
) -> AbstractContextManager[_native.NodeServer]:
    folder.mkdir(exist_ok=True)
    return node(folder, memory, nvme=str(file), nvme_capacity=nvme)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "far.nvme"


def contents(seed: int, count: int, largest: int) -> dict[bytes, bytes]:
    draw = random.Random(seed)
    return {b"key-%d" % number: draw.randbytes(draw.randrange(1, largest)) for number in range(count)}


def settle(running: _native.NodeServer) -> None:
    """Wait until nothing is on its way to the file: until then it is held like a pin, and found in memory."""
    until(lambda: not any(entry[4] for entry in walked(running, 0, b"", b"", 1000)), "the file was not written")


def test_what_does_not_fit_into_memory_is_read_back_from_the_file(tmp_path: Path, file: Path) -> None:
    values = contents(1, 100, 400_000)  # some 20 MB
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        for key, value in values.items():
            assert peer.put(key, value).status == Status.DONE
        settle(running)
        stats = running.stats()
        assert stats["evictions"] == 0
        assert stats["nvme_objects"] > 40
        assert stats["used"] <= 8 * MIB
        assert stats["nvme_used"] <= 32 * MIB
        for _ in range(3):  # what is asked for twice comes back into memory, and something else leaves
            for key, value in values.items():
                assert peer.ask(Op.GET, key).payload == value
        assert running.stats()["promotions"] > 0


def test_replies_from_the_file_keep_their_place_among_the_others(tmp_path: Path, file: Path) -> None:
    values = contents(2, 100, 400_000)
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        for key, value in values.items():
            peer.put(key, value)
        deadline = time.monotonic() + 30
        keys = list(values)
        random.Random(3).shuffle(keys)
        for key in keys:
            peer.connection.send(Op.GET, key, deadline)
            peer.connection.send(Op.GET, b"nobody", deadline)
        for key in keys:
            assert peer.connection.receive(deadline).payload == values[key]
            assert peer.connection.receive(deadline).status == Status.MISSING


def test_a_pinned_object_is_in_memory_and_mapped_readers_ask_for_the_others(tmp_path: Path, file: Path) -> None:
    values = contents(4, 60, 400_000)
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        for key, value in values.items():
            peer.put(key, value)
        settle(running)
        with reader(running) as mapped:
            there = [key for key in values if mapped.get(key) is not None]
            away = [key for key in values if key not in there]
            assert len(there) > 5
            assert len(away) > 5
            for key in away[:5]:
                assert peer.pinned(key).status == Status.DONE
                found = mapped.get(key)
                assert found is not None
                assert found[0] == values[key]


def test_dropped_objects_do_not_come_back_from_the_file(tmp_path: Path, file: Path) -> None:
    values = contents(5, 100, 400_000)
    keys = list(values)
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        for key, value in values.items():
            peer.put(key, value)
        for key in keys[:60]:
            assert peer.drop(key) == Status.DONE
        for key in keys[:30]:
            assert peer.put(key, b"new").status == Status.DONE
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        assert [peer.get(key).payload for key in keys[:30]] == [b"new"] * 30
        assert {peer.get(key).status for key in keys[30:60]} == {Status.MISSING}
        assert [peer.get(key).payload for key in keys[60:]] == [values[key] for key in keys[60:]]


def test_a_full_file_forgets_the_objects_that_nobody_reads(tmp_path: Path, file: Path) -> None:
    values = contents(6, 200, 400_000)  # some 40 MB
    with server(tmp_path / "n", file, nvme=16 * MIB) as running:
        peer = Peer(running)
        for key, value in values.items():
            assert peer.put(key, value).status == Status.DONE
        found = {key: peer.ask(Op.GET, key) for key in values}
        assert running.stats()["evictions"] > 0
        assert sum(reply.status == Status.DONE for reply in found.values()) > 40
        for key, reply in found.items():
            assert reply.payload == values[key] or reply.status == Status.MISSING


def test_a_file_that_has_changed_hands_is_not_read(tmp_path: Path, file: Path) -> None:
    values = contents(7, 100, 400_000)
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        for key, value in values.items():
            peer.put(key, value)
        settle(running)
        away = running.stats()["nvme_objects"]
    file.unlink()
    with server(tmp_path / "n", file) as running:
        peer = Peer(running)
        replies = {key: peer.ask(Op.GET, key) for key in values}
        missing = [key for key, reply in replies.items() if reply.status == Status.MISSING]
        assert len(missing) == away
        assert all(reply.payload == values[key] for key, reply in replies.items() if key not in missing)


def test_what_is_asked_for_first_is_read_from_the_file_first(tmp_path: Path, file: Path) -> None:
    count = 60
    with server(tmp_path / "n", file, memory=16 * MIB, nvme=64 * MIB) as running:
        peer = Peer(running)
        for number in range(100):
            peer.published(b"%d" % number, bytes(MIB // 2))
    with server(tmp_path / "n", file, memory=16 * MIB, nvme=64 * MIB) as running, contextlib.ExitStack() as undo:
        assert running.stats()["nvme_objects"] > count
        answers = undo.enter_context(select.epoll())
        asking = []
        for number in range(count):
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            running.adopt(theirs.detach(), number + 1, 0, ALL, "")
            answers.register(ours, select.EPOLLIN | select.EPOLLONESHOT)
            asking.append(ours)
        for number, ours in enumerate(asking):
            ours.sendall(pack_frame(Op.GET, b"%d" % number))
        places = {ours.fileno(): number for number, ours in enumerate(asking)}
        order: list[int] = []
        while len(order) < count:
            found = answers.poll(20)
            assert found, f"{len(order)} answers came"
            order += [places[fd] for fd, _ in found]
    assert sum(order[: count // 2]) < sum(order[count // 2 :])


def test_what_is_on_its_way_to_the_file_is_told_and_counts_as_memory(tmp_path: Path, file: Path) -> None:
    with server(tmp_path / "n", file, nvme=256 * MIB) as running:
        peer = Peer(running)
        keys = (b"%d" % number for number in range(10_000))
        told: dict[str, int] = {}

        def put_and_look() -> bool:
            peer.published(next(keys), bytes(3 * MIB))
            told.update(running.stats())
            return told["nvme_leaving"] > 0

        until(put_and_look, "nothing was on its way")
        assert 3 * MIB <= told["nvme_leaving"] <= (64 + 4) * MIB
        assert told["taken"] >= told["backed"] >= told["used"] + told["nvme_leaving"] - MIB // 2
        until(lambda: running.stats()["nvme_leaving"] == 0, "the file was not written")


def test_two_nodes_do_not_share_a_file(tmp_path: Path, file: Path) -> None:
    with (
        server(tmp_path / "a", file),
        pytest.raises(RuntimeError, match=r"far\.nvme is in use by another node"),
        server(tmp_path / "b", file),
    ):
        pass


def test_a_damaged_file_is_found(tmp_path: Path, file: Path) -> None:
    values = contents(9, 60, 400_000)
    with server(tmp_path / "n", file) as running:
        ours, theirs = socket.socketpair()
        running.adopt(theirs.detach(), 1, 0, 15, "")
        connection = _native.Connection(ours.detach(), "node", tenant=0, credential=0, spin=0.0)
        peer = Peer(running)
        for key, value in values.items():
            peer.put(key, value)
        deadline = time.monotonic() + 30
        assert running.stats()["nvme_used"] > 0
        settle(running)
        descriptor = os.open(file, os.O_WRONLY)
        nbytes = os.fstat(descriptor).st_size
        for offset in range(4096, nbytes, 4096):
            os.pwrite(descriptor, b"\xff" * 16, offset)
        os.close(descriptor)
        damaged = 0
        for key, value in values.items():
            try:
                assert connection.exchange(Op.GET, key, deadline).payload == value
            except ChecksumError:
                damaged += 1
        assert damaged > 10
