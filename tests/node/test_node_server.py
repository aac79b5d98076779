"""Every operation of docs/wire.md, and the statuses that it can have."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import _native
from farpool.transport.frames import Op, Right, Status
from tests.node.nodes import ALL, Peer, generation, node, reader, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path) as server:
        yield server


@pytest.fixture
def peer(server: _native.NodeServer) -> Peer:
    return Peer(server)


def test_what_is_put_comes_back_under_its_generation(peer: Peer) -> None:
    for payload in (b"", b"x", bytes(range(256)) * 700):
        number = peer.published(b"key", payload)
        reply = peer.get(b"key")
        assert (reply.status, reply.generation, reply.nbytes) == (Status.DONE, number, len(payload))
        assert (reply.payload or b"") == payload


def test_stat_tells_length_expiry_checksum_and_pins(peer: Peer) -> None:
    expiry = int(time.time() * 1000) + 60_000
    number = peer.published(b"key", b"payload", expiry=expiry)
    peer.pin(b"key")
    reply = peer.ask(Op.STAT, b"key")
    assert reply.generation == number
    assert struct.unpack("<QQII", reply.meta) == (7, expiry, _native.crc32c(b"payload"), 1)


def test_a_generation_that_is_not_newer_is_stale(peer: Peer) -> None:
    number = peer.published(b"key", b"new")
    for older in (number, number - 1, 0):
        reply = peer.put(b"key", b"old", at=older)
        assert (reply.status, reply.generation) == (Status.STALE, number)
        reply = peer.delete(b"key", older)
        assert (reply.status, reply.generation) == (Status.STALE, number)
    assert peer.get(b"key").payload == b"new"


def test_a_deletion_leaves_a_tombstone_until_it_is_forgotten(server: _native.NodeServer, peer: Peer) -> None:
    number = peer.published(b"key", b"payload")
    buried = generation()
    reply = peer.delete(b"key", buried)
    assert (reply.status, reply.generation) == (Status.DONE, number)
    for op in (Op.GET, Op.STAT, Op.PIN):
        reply = peer.ask(op, b"key")
        assert (reply.status, reply.generation) == (Status.DELETED, buried)
    assert server.tombstones(0, b"", 10) == [(b"key", buried)]
    assert peer.ask(Op.FORGET, b"key", generation=number).status == Status.MISSING
    assert peer.ask(Op.FORGET, b"key", generation=buried).status == Status.DONE
    assert server.tombstones(0, b"", 10) == []
    reply = peer.get(b"key")
    assert reply.status == Status.MISSING
    assert reply.generation >= buried
    assert peer.put(b"key", b"back from the dead", at=buried).status == Status.STALE


def test_deleting_what_was_never_there_leaves_a_tombstone_as_well(peer: Peer) -> None:
    buried = generation()
    reply = peer.delete(b"key", buried)
    assert (reply.status, reply.generation) == (Status.DONE, 0)
    assert peer.put(b"key", b"late", at=buried - 1).status == Status.STALE


def test_an_expired_object_is_missing_and_its_generation_stays_known(server: _native.NodeServer, peer: Peer) -> None:
    number = peer.published(b"key", b"payload", expiry=int(time.time() * 1000) + 40)
    swept = peer.published(b"swept", b"payload", expiry=int(time.time() * 1000) + 40)
    time.sleep(0.06)
    reply = peer.get(b"key")
    assert reply.status == Status.MISSING
    assert reply.generation >= number
    until(lambda: server.stats()["expired"] == 2, "what has expired was not swept")
    assert peer.put(b"swept", b"payload", at=swept).status == Status.STALE


def milliseconds() -> int:
    return int(time.time() * 1000)


def expiry_of(peer: Peer, key: bytes) -> int:
    _, expiry, _, _ = struct.unpack("<QQII", peer.ask(Op.STAT, key).meta)
    return int(expiry)


def test_touch_moves_the_expiry(peer: Peer) -> None:
    number = peer.published(b"key", b"payload", expiry=milliseconds() + 3_600_000)
    assert peer.ask(Op.TOUCH, struct.pack("<Q", 0) + b"key").generation == number
    assert expiry_of(peer, b"key") == 0
    later = milliseconds() + 7_200_000
    assert peer.ask(Op.TOUCH, struct.pack("<Q", later) + b"key").generation == number
    assert expiry_of(peer, b"key") == later
    assert peer.get(b"key").payload == b"payload"
    assert peer.ask(Op.TOUCH, struct.pack("<Q", milliseconds()) + b"key").generation == number
    assert peer.get(b"key").status == Status.MISSING
    assert peer.ask(Op.TOUCH, struct.pack("<Q", 0) + b"other").status == Status.MISSING


def test_a_prepared_payload_is_found_only_after_its_commit(server: _native.NodeServer, peer: Peer) -> None:
    number = generation()
    offset = peer.prepare(b"key", 5, number)
    assert peer.get(b"key").status == Status.MISSING
    with reader(server, writable=True) as mapped:
        crc = mapped.write(offset, b"hello")
        commit = struct.pack("<QII", offset, crc, 0)
        assert peer.ask(Op.COMMIT, commit, generation=number + 1).status == Status.UNKNOWN
        reply = peer.ask(Op.COMMIT, commit, generation=number)
        assert (reply.status, reply.generation) == (Status.DONE, number)
        assert peer.ask(Op.COMMIT, commit, generation=number).status == Status.UNKNOWN
        assert mapped.get(b"key") == (b"hello", number)
    assert peer.get(b"key").payload == b"hello"


def test_an_aborted_publish_gives_its_memory_back(server: _native.NodeServer, peer: Peer) -> None:
    before = server.stats()["used"]
    number = generation()
    offset = peer.prepare(b"key", 50_000, number)
    assert server.stats()["used"] > before
    assert peer.ask(Op.ABORT, struct.pack("<Q", offset), generation=number).status == Status.DONE
    assert server.stats()["used"] == before
    assert peer.ask(Op.ABORT, struct.pack("<Q", offset), generation=number).status == Status.UNKNOWN


def test_a_commit_that_was_overtaken_is_stale(peer: Peer) -> None:
    number = generation()
    offset = peer.prepare(b"key", 5, number)
    newer = peer.published(b"key", b"newer")
    reply = peer.ask(Op.COMMIT, struct.pack("<QII", offset, 0, 0), generation=number)
    assert (reply.status, reply.generation) == (Status.STALE, newer)
    assert peer.get(b"key").payload == b"newer"


def test_another_session_cannot_commit_abort_or_unpin(server: _native.NodeServer, peer: Peer) -> None:
    number = generation()
    prepared = peer.prepare(b"key", 5, number)
    of_pinned = peer.published(b"pinned", b"payload")
    pinned, _ = peer.pin(b"pinned")
    other = Peer(server, session=8)
    assert other.ask(Op.COMMIT, struct.pack("<QII", prepared, 0, 0), generation=number).status == Status.UNKNOWN
    assert other.ask(Op.ABORT, struct.pack("<Q", prepared), generation=number).status == Status.UNKNOWN
    assert other.ask(Op.UNPIN, struct.pack("<Q", pinned), generation=of_pinned).status == Status.UNKNOWN
    assert peer.ask(Op.UNPIN, struct.pack("<Q", pinned), generation=of_pinned).status == Status.DONE
    assert peer.ask(Op.UNPIN, struct.pack("<Q", pinned), generation=of_pinned).status == Status.UNKNOWN


def test_private_memory_is_read_and_written_by_its_session_alone(server: _native.NodeServer, peer: Peer) -> None:
    lease = server.lend(7, 0, 10_000)
    assert peer.ask(Op.READ, struct.pack("<QQ", 0, 10_000), lease=lease).payload == bytes(10_000)
    assert peer.ask(Op.WRITE, struct.pack("<Q", 9_996), lease=lease, payload=b"tail").status == Status.DONE
    assert peer.ask(Op.READ, struct.pack("<QQ", 9_995, 5), lease=lease).payload == b"\0tail"
    for meta in (struct.pack("<QQ", 9_996, 5), struct.pack("<QQ", 2**64 - 1, 2), b"short"):
        assert peer.ask(Op.READ, meta, lease=lease).status == Status.BAD_REQUEST
    assert peer.ask(Op.WRITE, struct.pack("<Q", 9_997), lease=lease, payload=b"tail").status == Status.BAD_REQUEST
    other = Peer(server, session=8)
    assert other.ask(Op.READ, struct.pack("<QQ", 0, 1), lease=lease).status == Status.UNKNOWN
    assert other.ask(Op.WRITE, struct.pack("<Q", 0), lease=lease, payload=b"x").status == Status.UNKNOWN
    server.release(7, lease)
    assert peer.ask(Op.READ, struct.pack("<QQ", 0, 1), lease=lease).status == Status.UNKNOWN


REQUESTS = {
    Op.GET: (Right.READ, b"key"),
    Op.STAT: (Right.READ, b"key"),
    Op.PUT: (Right.PUBLISH, bytes(8) + b"key"),
    Op.DELETE: (Right.PUBLISH, b"key"),
    Op.TOUCH: (Right.PUBLISH, bytes(8) + b"key"),
    Op.PIN: (Right.READ, b"key"),
    Op.PREPARE: (Right.PUBLISH, bytes(16) + b"key"),
    Op.FORGET: (Right.PUBLISH, b"key"),
    Op.READ: (Right.WRITE, bytes(16)),
    Op.WRITE: (Right.WRITE, bytes(8)),
}


@pytest.mark.parametrize("op", REQUESTS)
def test_each_operation_needs_its_right(server: _native.NodeServer, op: Op) -> None:
    right, meta = REQUESTS[op]
    assert Peer(server, rights=ALL & ~right).ask(op, meta).status == Status.DENIED
    assert Peer(server, rights=right).ask(op, meta).status != Status.DENIED


def test_tenants_do_not_see_each_other(server: _native.NodeServer, peer: Peer) -> None:
    peer.published(b"key", b"payload")
    other = Peer(server, session=9, tenant=2)
    assert other.get(b"key").status == Status.MISSING
    assert server.list(2, b"", b"", 10) == []
    assert server.objects_paths(0) != server.objects_paths(2)


@pytest.mark.parametrize("op", [op for op in REQUESTS if op not in (Op.READ, Op.WRITE)])
def test_keys_have_1_to_256_bytes(peer: Peer, op: Op) -> None:
    fixed = REQUESTS[op][1].removesuffix(b"key")
    assert peer.ask(op, fixed).status == Status.BAD_REQUEST
    assert peer.ask(op, fixed + b"k" * 257).status == Status.BAD_REQUEST
    assert peer.ask(op, fixed + b"k" * 256, generation=generation()).status != Status.BAD_REQUEST


def test_an_unknown_operation_is_a_bad_request_that_says_so(peer: Peer) -> None:
    reply = peer.ask(200)
    assert reply.status == Status.BAD_REQUEST
    assert b"does not know" in reply.meta
    assert peer.ask(Op.PING).status == Status.DONE
    assert peer.ask(Op.GET, b"key", payload=b"a payload that has no place here").status == Status.BAD_REQUEST


def test_an_object_larger_than_the_node_is_refused(peer: Peer) -> None:
    reply = peer.ask(Op.PREPARE, struct.pack("<QQ", 1 << 20, 0) + b"key", generation=generation())
    assert reply.status == Status.TOO_LARGE
    assert (
        peer.ask(Op.PREPARE, struct.pack("<QQ", 2**64 - 1, 0) + b"key", generation=generation()).status
        == Status.TOO_LARGE
    )
    assert peer.put(b"key", bytes((1 << 20) - 1)).status == Status.TOO_LARGE
    assert peer.ask(Op.PING).status == Status.DONE
    assert peer.put(b"key", bytes((1 << 20) + 1)).status == Status.TOO_LARGE
    with pytest.raises(ConnectionError):
        peer.ask(Op.PING)


@pytest.mark.parametrize("op", [Op.PUT, Op.PREPARE, Op.DELETE])
def test_a_generation_of_the_far_future_is_refused_and_changes_nothing(peer: Peer, op: Op) -> None:
    now = int(time.time() * 1e6) << 12
    day = 24 * 3600 * 10**6 << 12
    meta = {Op.PUT: bytes(8), Op.PREPARE: bytes(16), Op.DELETE: b""}[op] + b"key"
    reply = peer.ask(op, meta, generation=now + 2 * day)
    assert reply.status == Status.BAD_REQUEST
    assert b"a day ahead" in reply.meta
    assert peer.ask(Op.GET, b"key").status == Status.MISSING
    assert peer.ask(op, meta, generation=now + day // 2).status == Status.DONE
