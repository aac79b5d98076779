"""A tenant's epoch at one node: what a new one makes unreadable, who may begin it, what it leaves alone."""

from __future__ import annotations

import contextlib
import mmap
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from farpool._native import TenantEpoch, crc32c
from farpool.cluster.wire.frames import COPIED, HEAD, ROTATE, Op, Right, Status
from tests.node.nodes import PATIENCE, Head, Peer, exposed, lookup_meta, marks_nbytes, node, reader, until, walked

MIB = 1 << 20
EPOCH_AT = 128 + 6 * 8
"""Where the epoch stands in an index file."""

# Puts objects, begins an epoch, and says what it was told; then it is killed.
ROTATOR = """
import sys
from pathlib import Path
from tests.node.nodes import Peer, node
with node(Path(sys.argv[1]), 4 << 20) as server:
    peer = Peer(server)
    for number in range(500):
        peer.published(b"%d" % number, bytes(1000))
    assert peer.rotate(3) == (3, 500, 500000)
    peer.published(b"new", b"new")
    print("done", flush=True)
    sys.stdin.read()
"""


def soon() -> float:
    return time.monotonic() + PATIENCE


def copied(epoch: int) -> Head:
    return Head(copies=2, flags=COPIED | epoch << 32)


def test_nothing_that_was_put_before_is_found_in_any_way(tmp_path: Path) -> None:
    with node(tmp_path) as server, reader(server) as mapped:
        peer = Peer(server)
        for number in range(100):
            peer.published(b"%d" % number, b"old")
        peer.touch(b"7", 0, 1)
        other = Peer(server, session=8, tenant=1)
        other.published(b"0", b"another tenant's")
        assert mapped.get(b"0") is not None
        assert peer.rotate(1) == (1, 100, 300)
        keys = [b"%d" % number for number in range(100)]
        assert {peer.get(key).status for key in keys} == {Status.MISSING}
        assert {peer.ask(Op.STAT, key).status for key in keys} == {Status.MISSING}
        assert {peer.pinned(key).status for key in keys} == {Status.MISSING}
        assert {peer.touch(key) for key in keys} == {Status.MISSING}
        assert peer.lookup(keys).sizes == [None] * 100
        assert walked(server, 0, b"", b"", 1000) == []
        assert [mapped.get(key) for key in keys] == [None] * 100
        stats = server.stats()
        assert (stats["objects"], stats["object_bytes"]) == (1, 16)
        assert server.tenants()[0]["used"] == marks_nbytes(server)
        assert other.get(b"0").payload == b"another tenant's"
        assert peer.get(b"0").epoch == 1
        assert other.get(b"0").epoch == 0
        assert peer.put(b"0", b"new").status == Status.DONE
        assert peer.get(b"0").payload == b"new"
        found = mapped.get(b"0")
        assert found is not None
        assert found[0] == b"new"
        assert any(kind == "rotated" and "tenant 0 is in epoch 1" in text for kind, _, text in server.events())


def test_an_epoch_that_has_begun_already_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        assert peer.rotate(5) == (5, 0, 0)
        peer.published(b"k", b"v")
        assert peer.rotate(5) == (5, 0, 0)
        assert peer.rotate(4) == (5, 0, 0)
        assert peer.get(b"k").payload == b"v"
        for meta in (b"", b"123", b"12345"):
            assert peer.ask(Op.ROTATE, meta).status == Status.BAD_REQUEST
        for _ in range(2):  # whoever asks again learns what it did
            assert peer.rotate(2**32 - 1) == (2**32 - 1, 1, 1)
        assert peer.rotate(6) == (2**32 - 1, 0, 0)
        assert peer.get(b"k").status == Status.MISSING


@pytest.mark.parametrize("rights", [Right.READ, Right.WRITE, Right.READ | Right.PUBLISH, Right.READ | Right.ADMIN])
def test_an_epoch_takes_the_rights_to_publish_and_of_an_admin(tmp_path: Path, rights: Right) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"k", b"v")
        reply = Peer(server, session=8, rights=rights).ask(Op.ROTATE, ROTATE.pack(1))
        assert (reply.status, reply.epoch) == (Status.DENIED, 0)
        assert b"'publish' and 'admin'" in reply.meta
        assert Peer(server).get(b"k").payload == b"v"


@pytest.mark.parametrize("op", [Op.PING, Op.GET, Op.STAT, Op.LOOKUP, Op.PIN, Op.PUT, Op.DROP])
def test_a_node_learns_an_epoch_from_any_request_of_a_publisher(tmp_path: Path, op: Op) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"k", b"v")
        peer = Peer(server, session=8, rights=Right.READ | Right.PUBLISH)
        peer.connection.epoch = 9
        meta = {Op.PING: b"", Op.LOOKUP: lookup_meta([b"k"]), Op.PIN: bytes(8) + b"k", Op.PUT: Head().packed() + b"k"}
        reply = peer.ask(op, meta.get(op, b"k"), payload=b"new" if op == Op.PUT else None)
        assert reply.epoch == 9
        assert reply.status == (Status.DONE if op in (Op.PING, Op.LOOKUP, Op.PUT) else Status.MISSING)
        assert Peer(server).get(b"k").payload == (b"new" if op == Op.PUT else None)


def test_whoever_may_only_read_and_knows_a_later_epoch_finds_nothing_and_changes_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        owner = Peer(server)
        owner.published(b"k", b"v")
        peer = Peer(server, session=8, rights=Right.READ | Right.WRITE | Right.ADMIN)
        peer.connection.epoch = 9
        assert peer.get(b"k").status == Status.MISSING
        assert peer.ask(Op.STAT, b"k").status == Status.MISSING
        assert peer.pinned(b"k").status == Status.MISSING
        assert peer.lookup([b"k"]).sizes == [None]
        assert peer.ask(Op.PING).epoch == 0
        assert owner.get(b"k").payload == b"v"
        stranger = Peer(server, session=9, tenant=1, rights=Right.PUBLISH)
        stranger.connection.epoch = 9
        stranger.ask(Op.PING)
        assert owner.get(b"k").payload == b"v"


def test_a_node_in_a_later_epoch_serves_whoever_does_not_know_it(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        peer.rotate(3)
        peer.published(b"k", b"v")
        peer.connection.epoch = 2
        assert (peer.get(b"k").payload, peer.get(b"k").epoch) == (b"v", 3)


def test_what_is_pinned_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    with node(tmp_path, 1 * MIB) as server, reader(server) as mapped:
        peer = Peer(server)
        value = bytes(range(256)) * 1000
        serial = peer.published(b"k", value)
        offset, nbytes = peer.pin(b"k")
        view = mapped.view(offset, nbytes)
        peer.rotate(1)
        assert peer.get(b"k").status == Status.MISSING
        for number in range(40):  # more than there is room for
            assert peer.put(b"%d" % number, bytes(100_000)).status == Status.DONE
        assert view == value
        used = server.tenants()[0]["used"]
        assert peer.unpin(offset, serial) == Status.DONE
        assert server.tenants()[0]["used"] == used - (nbytes + 128)
        for number in range(40):
            peer.put(b"more-%d" % number, bytes(100_000))
        assert view != value  # its memory is used again


def test_a_put_that_is_under_way_is_of_the_new_epoch(tmp_path: Path) -> None:
    with node(tmp_path) as server, exposed(server) as memory:
        peer = Peer(server)
        offset, serial = peer.prepare(b"k", 3)
        memory.write(offset, b"val")
        slow = Peer(server, session=8)
        payload = bytes(100_000)
        whole = _put_frame(b"slow", payload)
        slow.connection._socket.sendall(whole[:50_000])
        until(lambda: server.stats()["bytes_in"] > 50_000, "half of it has not come")
        peer.rotate(1)
        reply = peer.commit(offset, serial, crc32c(b"val"))
        assert reply.status == Status.DONE
        assert reply.serial > serial
        slow.connection._socket.sendall(whole[50_000:])
        until(lambda: peer.get(b"slow").status == Status.DONE, "it did not come")
    with node(tmp_path) as server:
        peer = Peer(server)
        assert peer.get(b"k").payload == b"val"
        assert peer.get(b"slow").payload == payload


def _put_frame(key: bytes, payload: bytes) -> bytes:
    from tests.net.raw import HEADER

    meta = Head().packed() + key
    fields = HEADER.pack(b"FPW1", 2, Op.PUT, 0, 1, len(meta), crc32c(payload), len(payload), 0, 0, 0, 0, 0, b"\0\0\0")
    return fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta + payload


def test_a_copy_of_an_earlier_epoch_is_not_taken(tmp_path: Path) -> None:
    with node(tmp_path) as server, exposed(server) as memory:
        peer = Peer(server)
        peer.rotate(2)
        assert peer.put(b"k", b"v", copied(1)).status == Status.MISSING
        assert peer.prepared(b"k", 3, copied(1)).status == Status.MISSING
        assert peer.get(b"k").status == Status.MISSING
        assert peer.put(b"k", b"v", copied(2)).status == Status.DONE
        assert HEAD.unpack(peer.get(b"k").meta)[-1] == 2 << 32  # the next copy is of this epoch
        reply = peer.prepared(b"late", 3, copied(2))
        offset = struct.unpack("<Q", reply.meta)[0]
        memory.write(offset, b"val")
        peer.rotate(3)
        assert peer.commit(offset, reply.serial, crc32c(b"val")).status == Status.MISSING
        assert peer.get(b"late").status == Status.MISSING


def test_objects_in_the_nvme_file_and_on_their_way_there_are_unreadable_too(tmp_path: Path) -> None:
    folder = tmp_path / "n"
    folder.mkdir()
    for rotates in (True, False):
        with node(folder, 4 * MIB, nvme=str(tmp_path / "far.nvme"), nvme_capacity=32 * MIB) as server:
            peer = Peer(server)
            keys = [b"%d" % number for number in range(100)]
            if rotates:
                for key in keys:
                    peer.published(key, key * 50_000)
                until(lambda: server.stats()["nvme_objects"] > 10, "nothing is in the file")
                for key in keys[:20]:  # half of them are being read from the file when the epoch begins
                    peer.connection.send(Op.GET, key, soon())
                assert peer.connection.unanswered == 20
                assert Peer(server, session=8).rotate(1)[1] >= 90
                for key in keys[:20]:
                    reply = peer.connection.receive(soon())
                    assert reply.payload in (key * 50_000, None)
            assert {peer.get(key).status for key in keys} == {Status.MISSING}
            until(lambda: server.stats()["nvme_used"] == 0, "the file is not empty")
            until(lambda: server.stats()["used"] == 0, "the memory is not free")


def test_after_a_kill_the_epoch_is_what_it_was(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ROTATOR, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "done\n"
        child.send_signal(signal.SIGKILL)
    with node(tmp_path, 4 * MIB) as server:
        peer = Peer(server)
        assert server.stats()["adopted"] == 1
        assert (peer.get(b"new").payload, peer.get(b"new").epoch) == (b"new", 3)
        assert peer.get(b"7").status == Status.MISSING


@pytest.mark.slow
def test_more_objects_than_are_looked_at_at_once_are_all_unreadable_at_once(tmp_path: Path) -> None:
    count = 50_000
    keys = [b"%d" % number for number in range(count)]
    with node(tmp_path, 32 * MIB) as server, reader(server) as mapped:
        peer = Peer(server)
        for key in keys:
            peer.connection.send(Op.PUT, Head().packed() + key, soon(), payload=b"v")
            if peer.connection.unanswered == 100:
                for _ in range(100):
                    assert peer.connection.receive(soon()).status == Status.DONE
        used = server.tenants()[0]["used"]
        assert peer.rotate(1) == (1, count, count)
        assert server.stats()["objects"] > 0  # not all have been swept away yet
        with contextlib.ExitStack() as stack:
            outdated = stack.enter_context(reader(server))
            for found in (mapped, outdated):
                assert all(found.get(key) is None for key in keys)
        for start in range(0, count, 4000):
            assert peer.lookup(keys[start : start + 4000]).sizes == [None] * len(keys[start : start + 4000])
        assert walked(server, 0, b"", b"", 10) == []
        peer.published(keys[0], b"new")
        assert peer.rotate(2) == (2, 1, 3)
        until(lambda: server.tenants()[0]["used"] < used - count * 64, "the memory is not free")


@pytest.mark.slow
def test_objects_that_were_not_swept_away_before_a_stop_are_not_adopted(tmp_path: Path) -> None:
    with node(tmp_path, 32 * MIB) as server:
        peer = Peer(server)
        for number in range(50_000):
            peer.connection.send(Op.PUT, Head().packed() + b"%d" % number, soon(), payload=b"v")
            if peer.connection.unanswered == 100:
                for _ in range(100):
                    peer.connection.receive(soon())
        peer.rotate(1)
    with node(tmp_path, 32 * MIB) as server:
        stats = server.stats()
        assert (stats["adopted"], stats["objects"], stats["object_bytes"]) == (0, 0, 0)
        assert Peer(server).ask(Op.PING).epoch == 1


def test_a_node_that_lends_another_amount_keeps_the_epoch(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server).rotate(4)
    with node(tmp_path, 2 * MIB) as server:
        assert Peer(server).ask(Op.PING).epoch == 4


@pytest.mark.parametrize("bit", [0, 3, 31, 32, 40, 63])
@pytest.mark.parametrize("epoch", [0, 6])
def test_a_damaged_epoch_is_told_from_a_whole_one(tmp_path: Path, epoch: int, bit: int) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        if epoch:
            peer.rotate(epoch)
        peer.published(b"k", b"v")
    with open(tmp_path / "objects-0.index", "r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        memory[EPOCH_AT + bit // 8] ^= 1 << bit % 8
    with node(tmp_path) as server:
        assert Peer(server).get(b"k").status == Status.MISSING
        assert any("the tenant's epoch is damaged" in text for _, _, text in server.events())


def test_a_mapped_reader_finds_nothing_where_the_node_is_behind(tmp_path: Path) -> None:
    known = TenantEpoch()
    with node(tmp_path) as server, reader(server, epoch=known) as mapped:
        peer = Peer(server)
        peer.published(b"k", b"v")
        assert mapped.get(b"k") is not None
        known.meet(2)
        assert mapped.get(b"k") is None
        assert mapped.get_into(b"k", bytearray(1)) is None
        assert mapped.lookup([b"k"]) == ([None], [0])
        peer.rotate(2)
        peer.published(b"k", b"new")
        assert mapped.get(b"k") is not None
        peer.rotate(7)
        assert mapped.get(b"k") is None
        assert known.value == 7  # it has learned it from the mapped index


def test_an_epoch_only_grows() -> None:
    epoch = TenantEpoch()
    for told, known in ((0, 0), (5, 5), (3, 5), (2**32 - 1, 2**32 - 1), (0, 2**32 - 1)):
        epoch.meet(told)
        assert epoch.value == known
