"""Pins of objects that lie in the node's file: they come back into memory once for all who want them there."""

from __future__ import annotations

import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Status
from tests.net.raw import RawStream, Reply
from tests.node.nodes import ALL, PATIENCE, PLAIN, Peer, node, reader, stated, until

MIB = 1 << 20
LARGE = random.Random(1).randbytes(6 * MIB)


def serving(tmp_path: Path) -> AbstractContextManager[_native.NodeServer]:
    folder = tmp_path / "node"
    folder.mkdir(exist_ok=True)
    return node(folder, 8 * MIB, nvme=str(tmp_path / "far.nvme"), nvme_capacity=32 * MIB)


def is_held(peer: Peer, key: bytes) -> bool:
    """Whether it is pinned, being read, or on its way to the file."""
    return stated(peer.ask(Op.STAT, key))[2] > 0


@pytest.fixture
def shelved(tmp_path: Path) -> Iterator[_native.NodeServer]:
    """A node with room for one large object in memory, which is `other`; `large` lies in the file."""
    with serving(tmp_path) as running:
        peer = Peer(running)
        peer.published(b"large", LARGE)
        peer.published(b"other", bytes(6 * MIB))
    # Started anew, so that nothing is on its way to the file any more.
    with serving(tmp_path) as running:
        assert running.stats()["nvme_objects"] == 1
        yield running


class Early:
    """A connection whose requests are there before the node sees it: all of them are begun before one is answered."""

    def __init__(self, session: int) -> None:
        self._session = session
        ours, self._theirs = socket.socketpair()
        self.connection = RawStream(ours.detach())

    def send(self, op: int, meta: bytes, **fields: Any) -> None:
        self.connection.send(op, meta, time.monotonic() + PATIENCE, **fields)

    def adopt(self, running: _native.NodeServer) -> None:
        running.adopt(self._theirs.detach(), self._session, 0, ALL, "")

    def reply(self) -> Reply:
        return self.connection.receive(time.monotonic() + PATIENCE)


def test_pins_at_once_of_an_object_in_the_file_share_the_copy_in_memory(shelved: _native.NodeServer) -> None:
    early = Early(1)
    for _ in range(3):
        early.send(Op.PIN, bytes(8) + b"large")
    early.send(Op.GET, b"large")
    early.send(Op.PIN, bytes(8) + b"large")
    early.adopt(shelved)
    replies = [early.reply() for _ in range(5)]
    assert [reply.status for reply in replies] == [Status.DONE] * 5
    assert replies[3].payload == LARGE
    places = {struct.unpack("<QQII", reply.meta)[:2] for reply in (*replies[:3], replies[4])}
    assert len(places) == 1
    assert shelved.stats()["promotions"] == 1
    with reader(shelved) as mapped:
        assert bytes(mapped.view(*places.pop())) == LARGE
    early.send(Op.PIN, bytes(8) + b"other")  # now there is no room
    assert early.reply().status == Status.FULL


def test_pins_at_once_of_two_programs_share_the_copy_in_memory(shelved: _native.NodeServer) -> None:
    peer = Peer(shelved)
    for key in [b"large", b"other"] * 5:
        programs = [Early(session) for session in (11, 12, 13)]
        for program in programs:
            program.send(Op.PIN, bytes(8) + key)
        for program in programs:
            program.adopt(shelved)
        replies = [program.reply() for program in programs]
        assert [reply.status for reply in replies] == [Status.DONE] * 3
        assert len({reply.meta for reply in replies}) == 1
        for program, reply in zip(programs, replies, strict=True):
            program.send(Op.UNPIN, reply.meta[:8], serial=reply.serial)
            assert program.reply().status == Status.DONE
        # Whoever is pinned next is in the file by then, not on its way there.
        until(lambda: not any(is_held(peer, other) for other in (b"large", b"other")), "it did not get into the file")


def test_a_program_that_goes_while_its_pin_is_fetched_does_not_disturb_another_ones(
    shelved: _native.NodeServer,
) -> None:
    gone, stays = Early(11), Early(12)
    gone.send(Op.PIN, bytes(8) + b"large")
    stays.send(Op.PIN, bytes(8) + b"large")
    gone.connection.close()
    gone.adopt(shelved)
    stays.adopt(shelved)
    assert stays.reply().status == Status.DONE
    stays.send(Op.GET, b"large")
    assert stays.reply().payload == LARGE


@pytest.mark.parametrize("again", [True, False])
def test_a_pin_is_of_what_counts_when_its_object_is_dropped_while_it_is_fetched(
    shelved: _native.NodeServer, again: bool
) -> None:
    early = Early(1)
    early.send(Op.PIN, bytes(8) + b"large")
    early.send(Op.DROP, b"large")
    if again:
        early.send(Op.PUT, PLAIN + b"large", payload=b"new")
    early.adopt(shelved)
    pinned = early.reply()
    assert early.reply().status == Status.DONE
    if not again:
        assert pinned.status == Status.MISSING
        return
    put = early.reply()
    assert (put.status, pinned.status, pinned.serial) == (Status.DONE, Status.DONE, put.serial)
    with reader(shelved) as mapped:
        assert bytes(mapped.view(*struct.unpack("<QQII", pinned.meta)[:2])) == b"new"


def test_a_pin_is_refused_where_there_is_no_room_for_the_object(shelved: _native.NodeServer) -> None:
    peer = Peer(shelved)
    place, _ = peer.pin(b"other")
    early = Early(1)
    early.send(Op.PIN, bytes(8) + b"large")
    early.send(Op.PIN, bytes(8) + b"large")
    early.send(Op.GET, b"large")
    early.adopt(shelved)
    assert [early.reply().status for _ in range(3)] == [Status.FULL, Status.FULL, Status.DONE]
    assert peer.unpin(place, peer.get(b"other").serial) == Status.DONE
    early.send(Op.PIN, bytes(8) + b"large")
    assert early.reply().status == Status.DONE
