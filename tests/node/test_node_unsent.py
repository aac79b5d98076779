"""Programs that ask and take no replies hold a bounded part of what is there, for a bounded time."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import NodeError
from tests.node.nodes import PATIENCE, Peer, node, until

MIB = 1 << 20
HALF = MIB // 2


def soon() -> float:
    return time.monotonic() + PATIENCE


def filled(server: _native.NodeServer, count: int = 30) -> tuple[Peer, dict[bytes, bytes]]:
    """A node full of objects of half a MiB, and their bytes."""
    publisher = Peer(server, key="publisher")
    values = {b"%d" % number: random.Random(number).randbytes(HALF - 1024) for number in range(count)}
    for key, value in values.items():
        publisher.published(key, value)
    return publisher, values


def asked(server: _native.NodeServer, keys: list[bytes], *, each: int, name: str = "reader") -> list[Peer]:
    """Connections of sessions of their own that ask for all of these and take nothing."""
    peers: list[Peer] = []
    for number, key in enumerate(keys):
        if number % each == 0:
            peers.append(Peer(server, session=1000 + len(peers), rights=Right.READ, key=name))
        peers[-1].connection.send(Op.GET, key, soon())
    until(lambda: server.stats()["gets"] >= len(keys), "the requests were not taken")
    return peers


def test_a_reader_that_takes_no_replies_keeps_nobody_from_publishing(tmp_path: Path) -> None:
    for each in (30, 1):  # on one connection and session, and on as many as there are objects
        folder = tmp_path / str(each)
        folder.mkdir()
        with node(folder, 16 * MIB) as server:
            publisher, values = filled(server)
            readers = asked(server, list(values), each=each)
            for number in range(40):
                assert publisher.put(b"new %d" % number, bytes(HALF)).status == Status.DONE
            assert publisher.put(b"large", bytes(4 * MIB)).status == Status.DONE
            assert len(readers) == 30 // each


def test_it_keeps_nobody_from_publishing_with_pins_besides(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        publisher, values = filled(server)
        readers = asked(server, list(values), each=1)
        greedy = Peer(server, session=8, rights=Right.READ, key="reader")
        pinned = [greedy.pinned(key).status for key in values]
        assert Status.BUSY in pinned
        for number in range(20):
            assert publisher.put(b"new %d" % number, bytes(HALF)).status == Status.DONE
        assert readers


def test_what_was_pinned_while_it_was_asked_for_counts_after_the_pin_has_gone(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        publisher, values = filled(server)
        readers: list[Peer] = []
        for key in values:
            reader = Peer(server, session=1000 + len(readers), rights=Right.READ, key="reader")
            pin = reader.pinned(key)
            readers.append(reader)
            if pin.status == Status.DONE:
                reader.connection.send(Op.GET, key, soon())
                reader.connection.send(Op.UNPIN, pin.meta[:8], soon(), serial=pin.serial)
        for number in range(20):
            assert publisher.put(b"new %d" % number, bytes(HALF)).status == Status.DONE


def test_replies_that_were_held_back_come_whole_and_in_order(tmp_path: Path) -> None:
    with node(tmp_path, 64 * MIB) as server:
        publisher, values = filled(server, 100)
        reader = Peer(server, session=8, rights=Right.READ, key="reader")
        order = random.Random(0).choices(list(values), k=120)
        for number, key in enumerate(order):
            reader.connection.send(Op.GET, key, soon())
            if number % 10 == 0:
                reader.connection.send(Op.PING, b"", soon())
        until(lambda: server.stats()["gets"] >= 100, "the requests were not taken")
        assert publisher.drop(order[-1]) == Status.DONE  # its reply has not begun
        for number, key in enumerate(order):
            reply = reader.connection.receive(soon())
            if key == order[-1] and reply.status == Status.MISSING:
                continue
            assert (reply.status, reply.payload) == (Status.DONE, values[key])
            if number % 10 == 0:
                assert reader.connection.receive(soon()).nbytes == 0
        assert reply.status == Status.MISSING


def test_who_waits_for_others_of_its_key_is_served_when_they_have_gone(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        _, values = filled(server)
        keys = list(values)
        stuck = asked(server, keys[:-2], each=1)
        late = [Peer(server, session=8 + number, rights=Right.READ, key="reader") for number in (0, 1)]
        other = Peer(server, session=10, rights=Right.READ, key="another")
        for peer, key in zip(late, keys[-2:], strict=True):
            peer.connection.send(Op.GET, key, soon())
        assert other.get(keys[0]).payload == values[keys[0]]  # another access key does not wait
        assert late[0].connection.unanswered == 1
        for peer in stuck:
            peer.close()
        for peer, key in zip(late, keys[-2:], strict=True):
            assert peer.connection.receive(soon()).payload == values[key]


@pytest.mark.slow
def test_who_takes_a_byte_now_and_then_runs_out_of_patience(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB, stall=0.5, grace=0.0) as server:
        publisher, values = filled(server)
        (slow,) = asked(server, list(values), each=30)
        taken = 0
        try:
            while taken < 60:
                slow.connection._exactly(1, soon())
                taken += 1
                time.sleep(0.05)
        except NodeError:
            pass
        until(lambda: server.stats()["connections"] == 1, "it was never closed")
        assert ("stalled", 1000) in [event[:2] for event in server.events()]
        assert publisher.put(b"large", bytes(15 * MIB)).status == Status.DONE
