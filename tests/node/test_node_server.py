"""Every operation of docs/wire.md, and the statuses that it can have."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import HEAD, PLACE, TOUCH, Op, Right, Status
from farpool.errors import AccessDeniedError
from tests.node.nodes import (
    ALL,
    PLAIN,
    Head,
    Peer,
    exposed,
    lookup_meta,
    marks_nbytes,
    node,
    present,
    reader,
    stated,
    until,
    walked,
)

HOUR = 3_600_000


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path) as server:
        yield server


@pytest.fixture
def peer(server: _native.NodeServer) -> Peer:
    return Peer(server)


def test_what_is_put_comes_back_with_its_head_and_a_serial_of_its_own(peer: Peer) -> None:
    head = Head(0, copies=2, kind=2, parts=61, recompute_us=1_000_000, namespace=2**64 - 1)
    serials = []
    for number, payload in enumerate((b"", b"x", bytes(range(256)) * 700)):
        put = peer.put(b"key %d" % number, payload, head)
        reply = peer.get(b"key %d" % number)
        assert (put.status, reply.status, reply.serial, reply.nbytes) == (0, 0, put.serial, len(payload))
        assert (reply.payload or b"") == payload
        assert Head._make(HEAD.unpack(reply.meta)) == head
        serials.append(put.serial)
    assert sorted(set(serials)) == serials


def test_what_is_there_stays_and_a_second_put_is_told_of_it(peer: Peer) -> None:
    serial = peer.put(b"key", b"first", Head(HOUR, copies=2)).serial
    for payload in (b"second, and longer", b""):
        reply = peer.put(b"key", payload, Head(HOUR // 2, copies=3))
        nbytes, checksum, head = present(reply)
        assert (reply.serial, nbytes, checksum, head.copies) == (serial, 5, _native.crc32c(b"first"), 2)
    assert present(peer.prepared(b"key", 100))[0] == 5
    assert peer.get(b"key").payload == b"first"


def test_a_second_put_moves_the_end_away_and_never_nearer(peer: Peer) -> None:
    peer.put(b"key", b"payload", Head(HOUR))
    assert HOUR // 2 < present(peer.put(b"key", b"", Head(HOUR // 4)))[2].ttl_ms <= HOUR
    assert 2 * HOUR < present(peer.put(b"key", b"", Head(3 * HOUR)))[2].ttl_ms <= 3 * HOUR
    assert present(peer.put(b"key", b"", Head(0)))[2].ttl_ms == 0
    assert present(peer.put(b"key", b"", Head(HOUR)))[2].ttl_ms == 0


def test_stat_tells_length_checksum_pins_and_the_head(peer: Peer) -> None:
    serial = peer.put(b"key", b"payload", Head(HOUR, copies=1, kind=5)).serial
    peer.pin(b"key")
    reply = peer.ask(Op.STAT, b"key")
    nbytes, checksum, pins, head = stated(reply)
    assert (reply.serial, nbytes, checksum, pins) == (serial, 7, _native.crc32c(b"payload"), 1)
    assert (head.copies, head.kind, HOUR // 2 < head.ttl_ms <= HOUR) == (1, 5, True)


def test_a_drop_hides_the_key_at_once_and_a_later_put_is_a_new_object(server: _native.NodeServer, peer: Peer) -> None:
    serial = peer.published(b"key", b"old")
    assert peer.drop(b"key") == Status.DONE
    for op, meta in ((Op.GET, b""), (Op.STAT, b""), (Op.PIN, bytes(8)), (Op.TOUCH, bytes(16)), (Op.DROP, b"")):
        reply = peer.ask(op, meta + b"key")
        assert (reply.status, reply.serial) == (Status.MISSING, 0)
    assert walked(server, 0, b"", b"", 10) == []
    assert server.stats()["used"] == 0
    assert peer.published(b"key", b"new") > serial
    assert peer.get(b"key").payload == b"new"


def test_what_is_dropped_while_it_is_pinned_keeps_its_memory_until_the_last_pin_ends(
    server: _native.NodeServer, peer: Peer
) -> None:
    payload = bytes(range(250)) * 400
    serial = peer.published(b"key", payload)
    (offset, nbytes), _ = peer.pin(b"key"), peer.pin(b"key")
    used = server.stats()["used"]
    assert peer.drop(b"key") == Status.DONE
    assert peer.get(b"key").status == Status.MISSING
    fresh = peer.published(b"key", b"new")
    with reader(server) as mapped:
        assert mapped.view(offset, nbytes) == payload
        assert mapped.get(b"key") == (b"new", fresh)
    assert peer.unpin(offset, serial) == Status.DONE
    assert server.stats()["used"] > used
    assert peer.unpin(offset, serial) == Status.DONE
    assert server.stats()["used"] - marks_nbytes(server) < 1000
    assert peer.unpin(offset, serial) == Status.UNKNOWN
    assert peer.get(b"key").payload == b"new"


def test_an_expired_object_is_missing_and_its_memory_is_free(server: _native.NodeServer, peer: Peer) -> None:
    peer.published(b"key", b"payload", ttl_ms=40)
    peer.published(b"swept", b"payload", ttl_ms=40)
    time.sleep(0.06)
    with reader(server) as mapped:
        assert mapped.get(b"key") is None
        assert mapped.get(b"swept") is None
    assert peer.get(b"key").status == Status.MISSING
    assert peer.lookup([b"swept"]).sizes == [None]
    until(lambda: server.stats()["expired"] == 2, "what has expired was not swept")
    assert server.stats()["used"] == marks_nbytes(server)
    assert peer.put(b"swept", b"payload").status == Status.DONE


def ttl_of(peer: Peer, key: bytes) -> int:
    return stated(peer.ask(Op.STAT, key))[3].ttl_ms


def test_touch_moves_the_end_away_and_only_letting_go_sets_it(peer: Peer) -> None:
    peer.published(b"key", b"payload", ttl_ms=HOUR)
    assert peer.touch(b"key", HOUR // 2) == Status.DONE
    assert HOUR // 2 < ttl_of(peer, b"key") <= HOUR
    assert peer.touch(b"key", 2 * HOUR) == Status.DONE
    assert HOUR < ttl_of(peer, b"key") <= 2 * HOUR
    assert peer.touch(b"key", 0) == Status.DONE
    assert peer.touch(b"key", HOUR) == Status.DONE
    assert ttl_of(peer, b"key") == 0
    assert peer.touch(b"key", 2**64 - 1, 2) == Status.DONE  # further away than the node can count
    assert ttl_of(peer, b"key") > 2**49
    assert peer.touch(b"key", 1, 2) == Status.DONE
    until(lambda: peer.get(b"key").status == Status.MISSING, "it did not expire")
    assert peer.touch(b"other", 0) == Status.MISSING
    assert peer.ask(Op.TOUCH, TOUCH.pack(0, 3) + b"key").status == Status.BAD_REQUEST


def test_what_is_kept_neither_expires_nor_is_evicted_and_can_be_dropped(tmp_path: Path) -> None:
    with node(tmp_path, 64 << 10) as server:
        peer = Peer(server)
        peer.published(b"kept", bytes(9000), ttl_ms=1)
        while peer.touch(b"kept", 1, 1) == Status.MISSING:  # it was too late
            peer.put(b"kept", bytes(9000), ttl_ms=1)
        for n in range(40):
            peer.published(b"%d" % n, bytes(9000))
        assert server.stats()["evictions"] > 30
        assert peer.get(b"kept").nbytes == 9000
        assert [entry[6] for entry in walked(server, 0, b"", b"kept", 10)] == [True]
    with node(tmp_path, 64 << 10) as server:
        peer = Peer(server)
        for n in range(40):
            peer.put(b"new %d" % n, bytes(9000))
        assert peer.get(b"kept").nbytes == 9000
        assert peer.put(b"large", bytes(57_000)).status == Status.FULL
        assert peer.touch(b"kept", HOUR, 2) == Status.DONE
        assert peer.put(b"large", bytes(57_000)).status == Status.DONE
        assert peer.get(b"kept").status == Status.MISSING
        assert peer.touch(b"large", 0, 1) == Status.DONE
        assert peer.drop(b"large") == Status.DONE
        assert server.stats()["used"] == 0


def test_a_pin_with_a_time_to_live_ends_by_itself(server: _native.NodeServer, peer: Peer) -> None:
    serial = peer.published(b"key", b"payload")
    offset, _ = peer.pin(b"key", ttl_ms=50)
    peer.pin(b"key", ttl_ms=HOUR)
    peer.pin(b"key")
    until(lambda: stated(peer.ask(Op.STAT, b"key"))[2] == 2, "the pin did not end")
    assert peer.unpin(offset, serial) == peer.unpin(offset, serial) == Status.DONE
    assert peer.unpin(offset, serial) == Status.UNKNOWN
    peer.close()
    until(lambda: server.stats()["connections"] == 0, "the connection did not end")


def test_many_keys_are_looked_up_at_once(server: _native.NodeServer, peer: Peer) -> None:
    sizes = {b"key %d" % n: n * 7 for n in range(300)}
    for key, nbytes in sizes.items():
        peer.published(key, bytes(nbytes))
    keys = list(sizes)
    found = peer.lookup(keys)
    assert (found.leading, found.sizes) == (300, list(sizes.values()))
    assert peer.drop(b"key 200") == peer.drop(b"key 7") == Status.DONE
    expected = [None if key in (b"key 200", b"key 7") else nbytes for key, nbytes in sizes.items()]
    found = peer.lookup(keys)
    assert (found.leading, found.sizes) == (7, expected)
    assert peer.lookup(keys[::-1]).sizes == expected[::-1]
    assert peer.lookup([b"key 1"] * 3 + [b"other"] + [b"key 2"] * 70).leading == 3
    assert peer.lookup([]) == (0, [])
    with reader(server) as mapped:
        for asked in (keys, keys[::-1], [b"other", b"key 1"], [], [b"", b"x" * 300, b"key 2"]):
            whole = [key for key in asked if 0 < len(key) <= 256]
            if whole == asked:
                sizes, missing = mapped.lookup(asked)
                assert sizes == peer.lookup(asked).sizes
                assert missing == [number for number, size in enumerate(sizes) if size is None]
        with pytest.raises(ValueError, match="key 1 of a list of keys is not bytes"):
            mapped.lookup([b"key 1", "key 2"])  # type: ignore[list-item]


def test_a_lookup_counts_as_a_use_only_where_it_says_so(tmp_path: Path) -> None:
    with node(tmp_path, 64 << 10) as server, reader(server) as mapped:
        peer = Peer(server)
        for n in range(7):  # of 9 KiB each
            peer.published(b"%d" % n, bytes(9 << 10))
        peer.lookup([b"0"])
        peer.lookup([b"1"], flags=1)
        mapped.lookup([b"2"])
        mapped.lookup([b"3"], visit=True)
        for n in range(7, 10):
            peer.published(b"%d" % n, bytes(9 << 10))
        assert peer.lookup([b"%d" % n for n in range(5)]).sizes == [None, 9 << 10, None, 9 << 10, None]


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        bytes(7),
        struct.pack("<II", 2, 0),
        struct.pack("<II", 0, 1),
        struct.pack("<IIH", 0, 1, 0),
        struct.pack("<IIH", 0, 1, 4) + b"key",
        struct.pack("<IIH", 0, 1, 257) + b"k" * 257,
        lookup_meta([b"key"]) + b"x",
        struct.pack("<II", 0, 2**32 - 1),
    ],
)
def test_a_lookup_that_is_none_is_refused(peer: Peer, meta: bytes) -> None:
    reply = peer.ask(Op.LOOKUP, meta)
    assert reply.status == Status.BAD_REQUEST
    assert b"expected" in reply.meta


def test_a_prepared_payload_is_found_only_after_its_commit(server: _native.NodeServer, peer: Peer) -> None:
    offset, serial = peer.prepare(b"key", 5)
    assert peer.get(b"key").status == Status.MISSING
    with exposed(server) as memory, reader(server) as mapped:
        crc = memory.write(offset, b"hello")
        assert peer.commit(offset, serial + 1, crc).status == Status.UNKNOWN
        reply = peer.commit(offset, serial, crc)
        assert (reply.status, reply.serial) == (Status.DONE, serial)
        assert peer.commit(offset, serial, crc).status == Status.UNKNOWN
        assert mapped.get(b"key") == (b"hello", serial)
    assert peer.get(b"key").payload == b"hello"


def test_an_aborted_publish_gives_its_memory_back(server: _native.NodeServer, peer: Peer) -> None:
    before = server.stats()["used"]
    offset, serial = peer.prepare(b"key", 50_000)
    assert server.stats()["used"] > before
    assert peer.abort(offset, serial) == Status.DONE
    assert server.stats()["used"] == before
    assert peer.abort(offset, serial) == Status.UNKNOWN


def test_of_two_publishers_the_first_to_finish_stays(server: _native.NodeServer, peer: Peer) -> None:
    marks = marks_nbytes(server)
    slow, quick = peer.prepare(b"key", 5), peer.prepare(b"key", 5)
    with exposed(server) as memory:
        crc = memory.write(quick[0], b"quick")
        assert peer.commit(*quick, crc).status == Status.DONE
        reply = peer.commit(*slow, memory.write(slow[0], b"slow."))
    nbytes, checksum, _ = present(reply)
    assert (reply.serial, nbytes, checksum) == (quick[1], 5, crc)
    assert peer.get(b"key").payload == b"quick"
    assert peer.drop(b"key") == Status.DONE
    assert server.stats()["used"] == marks


def test_another_session_cannot_commit_abort_or_unpin(server: _native.NodeServer, peer: Peer) -> None:
    prepared = peer.prepare(b"key", 5)
    of_pinned = peer.published(b"pinned", b"payload")
    pinned, _ = peer.pin(b"pinned")
    other = Peer(server, session=8)
    assert other.commit(*prepared, 0).status == Status.UNKNOWN
    assert other.abort(*prepared) == Status.UNKNOWN
    assert other.unpin(pinned, of_pinned) == Status.UNKNOWN
    assert peer.unpin(pinned, of_pinned) == Status.DONE
    assert peer.unpin(pinned, of_pinned) == Status.UNKNOWN


@pytest.mark.parametrize("other", [{"tenant": 2, "key": "mine"}, {"key": "another"}, {"key": ""}])
def test_a_session_belongs_to_its_tenant_and_key(server: _native.NodeServer, other: dict[str, object]) -> None:
    mine = Peer(server, session=5, key="mine")
    lease = server.lend(5, 0, 4096)
    with pytest.raises(AccessDeniedError, match="another access key or tenant"):
        Peer(server, session=5, **other)  # type: ignore[arg-type]
    with pytest.raises(AccessDeniedError):
        server.connect(5, int(other.get("tenant", 0)), str(other["key"]))  # type: ignore[call-overload]
    with pytest.raises(AccessDeniedError):
        server.lend(5, 2, 4096)
    assert Peer(server, session=5, key="mine").ask(Op.READ, bytes(16), lease=lease).status == Status.DONE
    assert mine.ask(Op.PING).status == Status.DONE
    assert server.leases(5) == [(lease, 4096)]


def test_a_session_stays_its_keys_when_the_node_is_started_again(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server, session=5, tenant=1, key="mine")
        lease = server.lend(5, 1, 4096)
    with node(tmp_path) as server:
        for tenant, key in ((1, "another"), (2, "mine"), (1, "")):
            with pytest.raises(AccessDeniedError):
                Peer(server, session=5, tenant=tenant, key=key)
        assert Peer(server, session=5, tenant=1, key="mine").ask(Op.READ, bytes(16), lease=lease).status == Status.DONE


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
    Op.PUT: (Right.PUBLISH, PLAIN + b"key"),
    Op.DROP: (Right.PUBLISH, b"key"),
    Op.DEMOTE: (Right.PUBLISH, b"key"),
    Op.TOUCH: (Right.PUBLISH, bytes(16) + b"key"),
    Op.RETAIN: (Right.PUBLISH, bytes(24) + b"key"),
    Op.END_SESSION: (Right.PUBLISH, bytes(8)),
    Op.PIN: (Right.READ, bytes(8) + b"key"),
    Op.PREPARE: (Right.PUBLISH, bytes(8) + PLAIN + b"key"),
    Op.LOOKUP: (Right.READ, lookup_meta([b"key"])),
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
    assert walked(server, 2, b"", b"", 10) == []
    assert server.objects_paths(0) != server.objects_paths(2)


@pytest.mark.parametrize("op", [op for op in REQUESTS if op not in (Op.LOOKUP, Op.READ, Op.WRITE, Op.END_SESSION)])
def test_keys_have_1_to_256_bytes(peer: Peer, op: Op) -> None:
    fixed = REQUESTS[op][1].removesuffix(b"key")
    assert peer.ask(op, fixed).status == Status.BAD_REQUEST
    assert peer.ask(op, fixed + b"k" * 257).status == Status.BAD_REQUEST
    assert peer.ask(op, fixed + b"k" * 256).status != Status.BAD_REQUEST


def test_an_unknown_operation_is_a_bad_request_that_says_so(peer: Peer) -> None:
    for op in (47, 200):
        reply = peer.ask(op)
        assert reply.status == Status.BAD_REQUEST
        assert b"does not know" in reply.meta
    assert peer.ask(Op.PING).status == Status.DONE
    assert peer.ask(Op.GET, b"key", payload=b"a payload that has no place here").status == Status.BAD_REQUEST


def test_an_object_larger_than_the_node_is_refused(peer: Peer) -> None:
    for nbytes in (1 << 20, 2**64 - 1):
        assert peer.prepared(b"key", nbytes).status == Status.TOO_LARGE
    assert peer.put(b"key", bytes((1 << 20) - 1)).status == Status.TOO_LARGE
    assert peer.ask(Op.PING).status == Status.DONE
    assert peer.put(b"key", bytes((1 << 20) + 1)).status == Status.TOO_LARGE
    with pytest.raises(ConnectionError):
        peer.ask(Op.PING)


def test_pins_tell_where_the_payload_lies(server: _native.NodeServer, peer: Peer) -> None:
    serial = peer.published(b"key", b"payload")
    reply = peer.pinned(b"key")
    offset, nbytes, checksum, number = PLACE.unpack(reply.meta)
    assert (reply.serial, nbytes, checksum, number) == (serial, 7, _native.crc32c(b"payload"), 1)
    with reader(server) as mapped:
        assert mapped.view(offset, nbytes) == b"payload"
