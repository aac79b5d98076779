"""What one tenant may take of a node, and what it leaves to the others."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import NodeFullError, QuotaExceededError
from tests.attacks.lab import Key, Lab
from tests.node.nodes import Peer, lookup_meta, node, until, walked

MIB = 1 << 20
PIECE = bytes(64 << 10)


def fill(peer: Peer, count: int, name: str = "") -> None:
    for number in range(count):
        assert peer.put(b"%s%d" % (name.encode(), number), PIECE).status == Status.DONE


def held(server: _native.NodeServer, tenant: int) -> int:
    return len(walked(server, tenant, b"", b"", 10_000))


def peers(server: _native.NodeServer, *tenants: int) -> list[Peer]:
    return [Peer(server, session=10 + tenant, tenant=tenant) for tenant in tenants]


def test_a_tenant_alone_has_the_whole_node_and_gives_back_what_it_has_borrowed(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        one, two, three = peers(server, 1, 2, 3)
        fill(one, 200)
        assert held(server, 1) > 110
        fill(two, 200)
        assert 55 < held(server, 1) < 70
        assert 55 < held(server, 2) < 70
        fill(three, 200)
        assert all(35 < held(server, tenant) < 50 for tenant in (1, 2, 3))
        for peer in (one, two, three):
            for number in range(200):
                peer.drop(b"%d" % number)
        fill(two, 200, "again")
        assert held(server, 2) > 110


def test_what_each_tenant_has_is_told(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB, shares={2: 3 * MIB}) as server:
        one, _ = peers(server, 1, 2)
        fill(one, 10)
        server.lend(12, 2, MIB)
        told = server.tenants()
        assert {tenant: (has["objects"], has["lent"], has["share"]) for tenant, has in told.items()} == {
            1: (10, 0, 5 * MIB),
            2: (0, MIB, 3 * MIB),
        }
        assert 10 * len(PIECE) < told[1]["used"] <= told[1]["backed"]
        assert told[2]["used"] == told[2]["backed"] == MIB


def test_gets_and_hits_are_counted_for_each_tenant(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        one, two = peers(server, 1, 2)
        fill(one, 4)
        for key in (b"0", b"1", b"2", b"3", b"none"):
            one.ask(Op.GET, key)
        for key in (b"0", b"1"):
            two.ask(Op.GET, key)
        told = server.tenants()
        assert {tenant: (has["gets"], has["hits"]) for tenant, has in told.items()} == {1: (5, 4), 2: (2, 0)}
        stats = server.stats()
        assert (stats["gets"], stats["hits"]) == (7, 4)


@pytest.mark.slow
def test_metrics_tell_the_gets_and_hits_of_each_tenant() -> None:
    one, two = Key("one", tenant=3), Key("two", tenant=4)
    with Lab() as lab:
        running = lab.node(16 * MIB, [one, two], metrics=True)
        with running.connect(one) as owner, running.connect(two) as other:
            assert owner.put(b"key", PIECE).done
            assert [owner.get(b"key").done, owner.get(b"none").done, other.get(b"key").done] == [True, False, False]
        told = running.metrics()
    counted = {
        (metric, tenant): value
        for metric in ("gets", "hits")
        for tenant in (3, 4)
        for name, value in told.items()
        if name.startswith(f"farpool_node_tenant_{metric}_total{{") and f'tenant="{tenant}"' in name
    }
    assert counted == {("gets", 3): 2, ("gets", 4): 1, ("hits", 3): 1, ("hits", 4): 0}


def test_a_guaranteed_share_is_there_whatever_the_others_do(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB, shares={1: 5 * MIB}) as server:
        one, two, three = peers(server, 1, 2, 3)
        fill(two, 200)
        assert held(server, 2) > 110
        fill(one, 70)
        assert held(server, 1) == 70
        fill(three, 200)
        fill(two, 200, "again")
        assert held(server, 1) == 70


def test_a_lease_evicts_its_own_tenant_and_what_others_have_borrowed_and_no_more(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        one, two = peers(server, 1, 2)
        fill(two, 60)
        fill(one, 200)
        before = held(server, 2)
        assert before > 55
        with pytest.raises(QuotaExceededError, match="its share of 4194304 bytes"):
            server.lend(11, 1, 5 * MIB)
        lease = server.lend(11, 1, 4 * MIB - 4096)
        assert held(server, 2) == before
        assert held(server, 1) < 10
        server.release(11, lease)
        assert server.lend(12, 2, 3 * MIB)


def test_what_cannot_be_evicted_has_to_lie_within_the_share(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB, shares={2: 6 * MIB}) as server:
        one, two = peers(server, 1, 2)
        fill(one, 120)
        reader = Peer(server, session=11, tenant=1, rights=Right.READ)
        pins = [reader.pinned(b"%d" % number) for number in range(120)]
        done = [reply for reply in pins if reply.status == Status.DONE]
        assert 25 < len(done) < 32
        refused = [reply for reply in pins if reply.status not in (Status.DONE, Status.MISSING)]
        assert {reply.status for reply in refused} == {Status.BUSY}
        assert b"more than its share" in refused[0].meta
        assert one.touch(b"119", 0, 1) == Status.BUSY
        assert one.prepared(b"new", 2 * MIB).status == Status.BUSY
        assert one.put(b"new", bytes(2 * MIB)).status == Status.BUSY
        assert one.ask(Op.PING).status == Status.DONE
        with pytest.raises(QuotaExceededError):
            server.lend(11, 1, MIB)
        fill(two, 90)
        assert held(server, 2) == 90
        offset = struct.unpack_from("<Q", done[0].meta)[0]
        assert reader.unpin(offset, done[0].serial) == Status.DONE
        assert one.put(b"new", PIECE).status == Status.DONE


@pytest.mark.parametrize("keep", [False, True])
def test_whoever_pins_or_keeps_everything_leaves_room_for_publishers(tmp_path: Path, keep: bool) -> None:
    with node(tmp_path, 8 * MIB) as server:
        publisher = Peer(server)
        fill(publisher, 120)
        reader = Peer(server, session=8, rights=Right.PUBLISH if keep else Right.READ)
        keys = [b"%d" % number for number in range(120)]
        took = [reader.touch(key, 0, 1) if keep else reader.pinned(key).status for key in keys]
        assert took.count(Status.DONE) + took.count(Status.BUSY) == 120
        assert 105 < took.count(Status.DONE) < 113
        fill(publisher, 200, "new")
        assert publisher.put(b"large", bytes(MIB - 65536)).status == Status.DONE
        fixed = [key for key, status in zip(keys, took, strict=True) if status == Status.DONE]
        assert all(publisher.get(key).status == Status.DONE for key in fixed)


def test_a_session_has_so_many_unfinished_publishes_and_leases(tmp_path: Path) -> None:
    with node(tmp_path, 8 * MIB) as server:
        peer, other = Peer(server), Peer(server, session=8)
        prepared = [peer.prepare(b"%d" % number, 1) for number in range(4096)]
        reply = peer.prepared(b"one more", 1)
        assert reply.status == Status.BUSY
        assert b"4096 unfinished publishes" in reply.meta
        assert other.prepared(b"one more", 1).status == Status.DONE
        assert peer.abort(*prepared[0]) == Status.DONE
        assert peer.prepared(b"one more", 1).status == Status.DONE


@pytest.mark.slow
def test_a_session_has_so_many_pins(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer, other = Peer(server), Peer(server, session=8)
        serial = peer.published(b"key", b"value")
        offset, _ = peer.pin(b"key")
        deadline = 1e12
        for _ in range(0, 99_999, 99):
            for _ in range(99):
                peer.connection.send(Op.PIN, bytes(8) + b"key", deadline)
            assert all(peer.connection.receive(deadline).status in (Status.DONE, Status.BUSY) for _ in range(99))
        reply = peer.pinned(b"key")
        assert reply.status == Status.BUSY
        assert b"100000 pins" in reply.meta
        assert other.pinned(b"key").status == Status.DONE
        assert peer.unpin(offset, serial) == Status.DONE
        assert peer.pinned(b"key").status == Status.DONE


def test_a_lookup_of_many_keys_ends_the_turn_of_its_connection(tmp_path: Path) -> None:
    """Others are served between two of its frames, however many have been received."""
    with node(tmp_path) as server:
        greedy, small = Peer(server), Peer(server, session=8)
        small.published(b"small", b"x")
        meta = lookup_meta([b"k" * 8] * 5000)
        deadline = 1e12
        for _ in range(100):
            greedy.connection.send(Op.LOOKUP, meta, deadline)
        assert small.get(b"small").payload == b"x"
        for _ in range(100):
            assert greedy.connection.receive(deadline).status == Status.DONE


def taken(folder: Path) -> int:
    """Memory that the system has given for objects and leases."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.data"))


@pytest.mark.slow
def test_several_tenants_together_take_no_more_memory_than_the_node_lends(tmp_path: Path) -> None:
    most = 16 * MIB + 8 * 16384  # headers, and what the file system needs for itself
    with node(tmp_path, 16 * MIB) as server:
        for tenant in range(8):
            (peer,) = peers(server, tenant)
            fill(peer, 220)
            for number in range(220):
                peer.drop(b"%d" % number)
            assert taken(tmp_path) <= most
            assert server.stats()["backed"] <= 16 * MIB
        for tenant in range(8):
            (peer,) = peers(server, tenant)
            fill(peer, 100)
            assert taken(tmp_path) <= most
        with pytest.raises(NodeFullError):
            server.lend(10, 0, 16 * MIB)
        until(lambda: server.stats()["used"] <= 16 * MIB, "more is in use than there is")
