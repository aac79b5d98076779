"""Requests that no good client makes: a node answers them, and nobody else is the worse for it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import _native
from farpool._native import crc32c
from farpool.cluster.wire.frames import COMMIT, HEAD, OFFSET, Op, Right, Status
from farpool.errors import QuotaExceededError
from tests.attacks.wire import frame, head
from tests.node.colliding import colliding_keys
from tests.node.nodes import ALL, Head, Peer, exposed, node, stated, until, walked

MIB = 1 << 20
LARGEST = 2**64 - 1
CENTURIES = 2**49  # milliseconds


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path, 8 * MIB) as server:
        yield server


@pytest.fixture
def peer(server: _native.NodeServer) -> Peer:
    return Peer(server)


def plain(server: _native.NodeServer, session: int, tenant: int, rights: int = ALL) -> socket.socket:
    """A connection on which anything can be said."""
    ours, theirs = socket.socketpair()
    server.adopt(theirs.detach(), session, tenant, rights, "")
    return ours


def test_the_largest_numbers_in_a_head_come_back_and_harm_nobody(server: _native.NodeServer, peer: Peer) -> None:
    assert (
        peer.put(b"key", b"payload", Head(LARGEST, 255, 255, 65535, 2**32 - 1, LARGEST, LARGEST)).status == Status.DONE
    )
    told = stated(peer.ask(Op.STAT, b"key"))[3]
    # A put may say the object's priority, and not that it is kept.
    assert told[1:] == (255, 255, 65535, 2**32 - 1, LARGEST, 7 << 8)
    assert told.ttl_ms > CENTURIES
    assert Head._make(HEAD.unpack(peer.get(b"key").meta))[1:] == told[1:]
    assert [entry[5] for entry in walked(server, 0, b"", b"", 10)] == [255]


def test_the_longest_times_to_live_do_not_end(peer: Peer) -> None:
    peer.published(b"key", b"payload", ttl_ms=1000)
    for ttl_ms in (2**53, 2**63 - 1, 2**63, LARGEST):
        assert peer.touch(b"key", ttl_ms) == Status.DONE
        assert stated(peer.ask(Op.STAT, b"key"))[3].ttl_ms > CENTURIES
        assert peer.pinned(b"key", ttl_ms).status == Status.DONE
    peer.published(b"other", b"payload")
    peer.pin(b"other", 1)
    until(lambda: stated(peer.ask(Op.STAT, b"other"))[2] == 0, "a pin of a millisecond has ended")
    assert stated(peer.ask(Op.STAT, b"key"))[2] == 4


def test_absurd_lengths_are_too_large_and_take_nothing(server: _native.NodeServer, peer: Peer) -> None:
    used = server.stats()["used"]
    for nbytes in (8 * MIB, 2**32, 2**40, 2**63, LARGEST - 4095, LARGEST - 63, LARGEST):
        assert peer.prepared(b"key", nbytes).status == Status.TOO_LARGE, nbytes
    assert server.stats()["used"] == used


def test_a_reader_cannot_keep_or_let_go(server: _native.NodeServer, peer: Peer) -> None:
    peer.published(b"key", b"payload")
    reader = Peer(server, session=8, rights=Right.READ)
    assert [reader.touch(b"key", 0, keep) for keep in range(3)] == [Status.DENIED] * 3
    assert stated(peer.ask(Op.STAT, b"key"))[3].flags == 0


def test_serials_and_offsets_that_are_guessed_end_nothing(server: _native.NodeServer, peer: Peer) -> None:
    offset, serial = peer.prepare(b"key", 100)
    peer.published(b"pinned", b"payload")
    place, _ = peer.pin(b"pinned")
    used = server.stats()["used"]
    strangers = [Peer(server, session=8), Peer(server, session=9, tenant=1)]
    for other in (*strangers, peer):
        for guess in (0, serial - 1, serial + 1, LARGEST) if other is peer else (0, serial, serial + 1, LARGEST):
            assert other.commit(offset, guess, 0).status == Status.UNKNOWN
            assert other.abort(offset, guess) == Status.UNKNOWN
            assert other.unpin(offset, guess) == Status.UNKNOWN
    for other in strangers:
        for guess in range(10):
            assert other.unpin(place, guess) == Status.UNKNOWN
    assert server.stats()["used"] == used
    assert peer.commit(offset, serial, crc32c(bytes(100))).status == Status.DONE


def test_what_was_not_written_is_not_published(server: _native.NodeServer, peer: Peer) -> None:
    """Neither what lay there before, nor what nobody could read."""
    secret = bytes(range(1, 251)) * 40
    peer.published(b"secret", secret)
    assert peer.drop(b"secret") == Status.DONE
    offset, serial = peer.prepare(b"shown?", len(secret))
    assert peer.commit(offset, serial, 0).status == Status.CHECKSUM
    assert peer.commit(offset, serial, 0).status == Status.UNKNOWN
    assert peer.get(b"shown?").status == Status.MISSING
    assert server.stats()["used"] == 0
    assert server.stats()["checksum_errors"] == 1
    peer.published(b"shown?", b"value")
    assert peer.get(b"shown?").payload == b"value"


def test_requests_behind_a_large_commit_are_answered_after_it(tmp_path: Path) -> None:
    with node(tmp_path, 128 * MIB) as server, exposed(server) as memory:
        peer, deadline = Peer(server), 1e12
        places = [peer.prepare(b"%d" % number, 50 * MIB) for number in range(2)]
        sums = [memory.write(offset, b"%d" % number * (50 * MIB)) for number, (offset, _) in enumerate(places)]
        for (offset, serial), checksum in zip(places, sums, strict=True):
            peer.connection.send(Op.COMMIT, COMMIT.pack(offset, checksum, 0), deadline, serial=serial)
        peer.connection.send(Op.STAT, b"1", deadline)
        peer.connection.send(Op.PING, b"", deadline)
        replies = [peer.connection.receive(deadline) for _ in range(4)]
        assert [reply.status for reply in replies] == [Status.DONE] * 4
        assert stated(replies[2])[:2] == (50 * MIB, sums[1])


def test_a_publish_is_committed_once(server: _native.NodeServer, peer: Peer) -> None:
    offset, serial = peer.prepare(b"key", 0)
    assert peer.commit(offset, serial, 0).status == Status.DONE
    used = server.stats()["used"]
    for _ in range(3):
        assert peer.commit(offset, serial, 0).status == Status.UNKNOWN
        assert peer.abort(offset, serial) == Status.UNKNOWN
    assert (server.stats()["objects"], server.stats()["used"]) == (1, used)


def test_a_drop_while_it_is_prepared_is_of_what_was_there_before(peer: Peer) -> None:
    first, first_serial = peer.prepare(b"key", 0)
    second, second_serial = peer.prepare(b"key", 0)
    assert peer.drop(b"key") == Status.MISSING
    assert peer.commit(first, first_serial, 0).status == Status.DONE
    assert peer.drop(b"key") == Status.DONE
    assert peer.commit(second, second_serial, 0).status == Status.DONE
    assert peer.get(b"key").serial == second_serial


def test_keys_that_are_made_to_have_one_hash_do_not_stand_in_one_line(
    server: _native.NodeServer, peer: Peer, tmp_path: Path
) -> None:
    keys = colliding_keys(tmp_path / "objects-0.index", 300)
    assert {peer.put(key, b"x").status for key in keys} == {Status.DONE}
    kept = [entry[0] for entry in walked(server, 0, b"", b"", 1000)]
    assert set(kept) <= set(keys[-64:])  # the newest, and no more than are quickly looked through
    assert len(kept) >= 16  # which chance never reaches
    for number in range(10_000):  # others are not kept out
        assert peer.put(b"%d" % number, b"x").status == Status.DONE
    used = server.stats()["used"]
    for key in keys:
        peer.put(key, b"x")
        peer.pinned(key)
    prepared = [peer.prepared(key, 1) for key in keys if peer.get(key).status == Status.MISSING]
    assert len(prepared) >= len(keys) - 64
    with exposed(server) as memory:
        places = [(OFFSET.unpack(one.meta)[0], one.serial) for one in prepared]
        done = {peer.commit(offset, serial, memory.write(offset, b"x")).status for offset, serial in places}
    assert done == {Status.FULL}
    assert server.stats()["used"] <= used + 64 * 512


@pytest.mark.parametrize("how", ["lease", "prepare", "announce", "take no reply"])
def test_a_guaranteed_share_is_there_whatever_a_tenant_holds_that_was_alone(tmp_path: Path, how: str) -> None:
    piece = bytes(MIB)
    held = []
    with node(tmp_path, 16 * MIB, shares={1: 8 * MIB, 2: 8 * MIB}) as server:
        greedy = Peer(server, tenant=1)
        for number in range(30):
            key = b"%d" % number
            if how == "lease":
                try:
                    server.lend(7, 1, MIB)
                except QuotaExceededError:
                    break
            elif how == "prepare":
                greedy.prepared(key, MIB)
            else:
                if how == "take no reply":
                    greedy.put(key, piece)
                one = plain(server, 7, 1)
                one.sendall(
                    frame(Op.GET, key)
                    if how == "take no reply"
                    else frame(Op.PUT, head() + key, payload_nbytes=MIB, payload_crc=1) + b"x"
                )
                held.append(one)
                until(lambda: server.stats()["connections"] == len(held) + 1, "the connection is there")
                assert greedy.ask(Op.PING).status == Status.DONE
        other = Peer(server, session=8, tenant=2)
        assert [other.put(b"%d" % number, piece).status for number in range(7)] == [Status.DONE] * 7
        assert [other.get(b"%d" % number).status for number in range(7)] == [Status.DONE] * 7
        for one in held:
            one.close()
