"""Who has to go when there is no room, and what is held until it is let go."""

import os
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import NodeFullError
from tests.attacks.lab import fallocate_keeping_size
from tests.node.nodes import Peer, node, reader, until, walked
from tests.small_disk import small_disk

KIB = 1024


def names(peer: Peer, count: int) -> list[int]:
    return [n for n in range(count) if peer.ask(Op.STAT, b"%d" % n).status == Status.DONE]


def test_the_oldest_goes_first_and_what_was_read_stays(tmp_path: Path) -> None:
    with node(tmp_path, (64 + 8) * KIB) as server:  # of which the reader's marks of visits take 8
        peer = Peer(server)
        for n in range(7):  # of 9 KiB each
            peer.published(b"%d" % n, bytes(9 * KIB))
        peer.get(b"0")
        with reader(server) as mapped:
            assert mapped.get(b"2") is not None  # seen without a message
        for n in range(7, 9):
            peer.published(b"%d" % n, bytes(9 * KIB))
        assert names(peer, 9) == [0, 2, 4, 5, 6, 7, 8]
        assert server.stats()["evictions"] == 2


def test_what_is_pinned_is_neither_evicted_nor_overwritten(tmp_path: Path) -> None:
    with node(tmp_path, 64 * KIB) as server:
        peer = Peer(server)
        payload = os.urandom(20 * KIB)
        serial = peer.published(b"pinned", payload)
        offset, nbytes = peer.pin(b"pinned")
        with reader(server) as mapped:
            view = mapped.view(offset, nbytes)
            for n in range(20):
                assert peer.put(b"%d" % n, bytes(9 * KIB)).status in (Status.DONE, Status.PRESENT)
            assert peer.get(b"pinned").payload == payload
            assert peer.drop(b"pinned") == Status.DONE
            for n in range(20):
                assert peer.put(b"%d" % n, bytes(9 * KIB)).status in (Status.DONE, Status.PRESENT)
            assert view == payload
            assert peer.prepared(b"big", 50 * KIB).status == Status.FULL
            assert names(peer, 20)  # nothing was evicted for what would not fit in the end
            assert peer.unpin(offset, serial) == Status.DONE
            assert peer.put(b"big", bytes(50 * KIB)).status == Status.DONE


def test_a_node_full_of_the_smallest_objects_takes_the_next(tmp_path: Path) -> None:
    with node(tmp_path, 16 * KIB) as server:
        peer = Peer(server)
        for n in range(2000):
            peer.published(b"%d" % n, b"")
        assert server.stats()["objects"] == 16 * KIB // 128


def test_a_payload_under_way_survives_a_drop_and_eviction(tmp_path: Path) -> None:
    with node(tmp_path, 16 << 20) as server:
        slow, peer = Peer(server), Peer(server, session=8)
        payload = os.urandom(12 << 20)  # more than a socket takes at once
        peer.published(b"key", payload)
        deadline = time.monotonic() + 20
        slow.connection.send(Op.GET, b"key", deadline)
        until(lambda: server.stats()["hits"] == 1, "the request was not taken")
        peer.drop(b"key")
        assert peer.put(b"large", bytes(8 << 20)).status == Status.FULL
        assert slow.connection.receive(deadline).payload == payload
        assert peer.put(b"large", bytes(8 << 20)).status == Status.DONE


def holding(server: _native.NodeServer) -> tuple[Peer, int]:
    """A session that holds an object, a preparation and a lease, and the lease."""
    peer = Peer(server)
    peer.published(b"key", bytes(1000))
    peer.pin(b"key")
    peer.prepare(b"prepared", 100_000)
    return peer, server.lend(7, 0, 4096)


def test_what_a_session_held_is_still_there_when_it_is_back_within_the_grace(tmp_path: Path) -> None:
    with node(tmp_path, grace=3600.0) as server:
        peer, lease = holding(server)
        peer.close()
        until(lambda: server.stats()["connections"] == 0, "the end of a connection was not seen")
        again = Peer(server)
        assert server.leases(7) == [(lease, 4096)]
        assert walked(server, 0, b"", b"", 9)[0][4] == 1
        again.close()


def test_what_a_dead_session_held_is_freed_after_the_grace_and_not_before(tmp_path: Path) -> None:
    with node(tmp_path, grace=0.5) as server:
        keeper = Peer(server, session=8)
        peer, _ = holding(server)
        used = server.stats()["used"]
        gone = time.monotonic()
        peer.close()
        until(lambda: server.stats()["sessions"] == 1, "the session was not freed")
        assert time.monotonic() - gone >= 0.5
        assert server.leases(7) == []
        assert walked(server, 0, b"", b"", 9)[0][4] == 0
        assert server.stats()["used"] < used - 100_000
        assert [event[:2] for event in server.events()] == [("freed", 7)]
        assert keeper.get(b"key").status == Status.DONE


@pytest.mark.slow
def test_a_held_session_without_data_connections_lives(tmp_path: Path) -> None:
    with node(tmp_path, grace=0.0) as server:
        server.connect(7, 0, "")
        server.lend(7, 0, 4096)
        time.sleep(1.3)
        assert server.stats()["lent"] == 4096
        server.disconnect(7)
        until(lambda: server.stats()["lent"] == 0, "the session was not freed")


def test_memory_is_zero_when_it_is_lent_again(tmp_path: Path) -> None:
    with node(tmp_path, 64 * KIB) as server:
        peer = Peer(server)
        peer.published(b"key", b"\xaa" * 60 * KIB)
        for _ in range(4):
            lease = server.lend(7, 0, 60 * KIB)
            whole = struct.pack("<QQ", 0, 60 * KIB)
            assert peer.ask(Op.READ, whole, lease=lease).payload == bytes(60 * KIB)
            assert peer.ask(Op.WRITE, bytes(8), lease=lease, payload=b"\xbb" * 60 * KIB).status == Status.DONE
            with pytest.raises(NodeFullError, match="cannot lend"):
                server.lend(7, 0, 10 * KIB)
            server.release(7, lease)
            with pytest.raises(KeyError):
                server.release(7, lease)


def test_a_lease_that_is_taken_back_says_so_to_whoever_has_it_mapped(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        lease = server.lend(7, 0, 4096)
        with open(server.lease_path(7, lease), "rb", buffering=0) as file:
            file.seek(144)
            assert file.read(8) == bytes(8)
            server.release(7, lease)
            file.seek(144)
            assert file.read(8) == struct.pack("<Q", 1)


def test_a_lease_whose_header_was_overwritten_stays_as_large_as_it_was_lent(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        lease = server.lend(7, 0, 4096)
        with open(server.lease_path(7, lease), "r+b") as file:
            file.write(b"\xff" * 4096)
        reply = peer.ask(Op.READ, struct.pack("<QQ", 1 << 40, 4096), lease=lease)
        assert reply.status == Status.BAD_REQUEST
        server.release(7, lease)
        assert server.stats()["used"] == 0


def lease_with_file(server: _native.NodeServer, nbytes: int) -> tuple[int, int]:
    """A lease, and its file as a program is passed it."""
    lease = server.lend(7, 0, nbytes)
    return lease, server.lease_file(7, lease)


def made_longer(file: int, nbytes: int) -> None:
    os.posix_fallocate(file, 0, 4096 + nbytes + (8 << 20))


def given_memory_behind_its_end(file: int, nbytes: int) -> None:
    fallocate_keeping_size(file, 4096 + nbytes, 8 << 20)


def cut(file: int, nbytes: int) -> None:
    os.ftruncate(file, nbytes // 2)


@pytest.mark.parametrize("change", [made_longer, given_memory_behind_its_end, cut])
def test_a_lease_whose_file_a_program_changed_is_taken_back(tmp_path: Path, change: Callable[[int, int], None]) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        lease, file = lease_with_file(server, 100_000)
        other, other_file = lease_with_file(server, 100_000)
        try:
            change(file, 100_000)
            until(lambda: server.leases(7) == [(other, 100_000)], "the lease was not taken back")
            [(kind, session, text)] = server.events()
            assert (kind, session) == ("taken_back", 7)
            assert "100000 bytes" in text
            assert peer.ask(Op.READ, struct.pack("<QQ", 0, 10), lease=lease).status == Status.UNKNOWN
            assert peer.ask(Op.READ, struct.pack("<QQ", 0, 10), lease=other).status == Status.DONE
            assert server.stats()["lent"] == 100_000
            until(lambda: os.fstat(file).st_blocks * 512 <= 2 * 4096, "its memory was kept")
            assert os.pread(file, 8, 144) == struct.pack("<Q", 1)  # who has it mapped is told
        finally:
            os.close(file)
            os.close(other_file)


def test_a_lease_that_was_cut_off_only_for_a_moment_is_taken_back(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        lease, file = lease_with_file(server, 100_000)
        os.ftruncate(file, 4096)
        assert peer.ask(Op.WRITE, bytes(8), lease=lease, payload=bytes(100)).status == Status.DONE  # into nothing
        os.ftruncate(file, 4096 + 100_000)
        until(lambda: server.leases(7) == [], "the lease was not taken back")
        os.close(file)


def test_a_little_memory_behind_a_lease_is_given_back_and_the_lease_stays(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        lease, file = lease_with_file(server, 100_000)
        peer.ask(Op.WRITE, struct.pack("<Q", 99_996), lease=lease, payload=b"kept")
        fallocate_keeping_size(file, 4096 + 100_000, 1 << 20)
        until(lambda: os.fstat(file).st_blocks * 512 <= 4096 + 102_400, "the memory was kept")
        assert peer.ask(Op.READ, struct.pack("<QQ", 99_996, 4), lease=lease).payload == b"kept"
        assert server.leases(7) == [(lease, 100_000)]
        os.close(file)


@pytest.mark.parametrize("ephemeral", [False, True])
def test_what_is_given_back_is_free_also_where_a_program_keeps_the_file(tmp_path: Path, ephemeral: bool) -> None:
    with node(tmp_path, ephemeral=ephemeral) as server:
        lease, file = lease_with_file(server, 500_000)
        assert os.fstat(file).st_blocks * 512 > 500_000
        server.release(7, lease)
        assert os.fstat(file).st_size == 4096 + 500_000  # an access that is late finds zeros, not nothing
        until(lambda: os.fstat(file).st_blocks * 512 <= 2 * 4096, "its memory was kept")
        os.close(file)


def test_what_the_system_gave_for_a_lease_stays_when_the_node_stops(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        lease, file = lease_with_file(server, 500_000)
    assert os.fstat(file).st_blocks * 512 > 500_000
    os.close(file)
    with node(tmp_path) as server:
        assert server.leases(7) == [(lease, 500_000)]


def test_an_object_whose_header_was_overwritten_is_missing(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        peer.published(b"key", b"payload")
        offset, _ = peer.pin(b"key")
        with open(server.objects_paths(0)[1], "r+b") as file:
            file.seek(offset - 128)
            file.write(b"\xff" * 64)
        assert peer.get(b"key").status == Status.MISSING
        assert server.stats()["objects"] == 0


def test_a_client_that_cuts_its_files_off_does_not_end_the_node(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer, other = Peer(server), Peer(server, session=8, tenant=1)
        peer.published(b"key", b"payload" * 1000)
        other.published(b"key", b"payload")
        lease = server.lend(7, 0, 100_000)
        for path in (server.objects_paths(0)[1], server.lease_path(7, lease)):
            os.truncate(path, 0)
        assert peer.get(b"key").status == Status.MISSING
        walked(server, 0, b"", b"", 10)
        server.stats()
        with suppress(KeyError):  # the node may have taken it back
            server.release(7, lease)
        assert other.get(b"key").payload == b"payload"


def test_a_client_that_cuts_its_file_off_costs_the_node_no_mapping_for_each_look(tmp_path: Path) -> None:
    with node(tmp_path, 16 << 20) as server:
        peer = Peer(server)
        keys = [b"%d" % number for number in range(1000)]
        for key in keys:
            peer.published(key, bytes(8000))
        before = len(Path("/proc/self/maps").read_text().splitlines())
        os.truncate(server.objects_paths(0)[1], 4096)
        for key in keys[::-1] + keys:
            assert peer.get(key).status == Status.MISSING
        assert len(Path("/proc/self/maps").read_text().splitlines()) < before + 100


def taken(folder: Path) -> int:
    """Memory that the system has given for a node's objects and leases."""
    return sum(file.stat().st_blocks * 512 for file in folder.glob("*.data"))


@pytest.mark.parametrize(("count", "nbytes"), [(60, 256 * KIB), (400, 36 * KIB)])
def test_a_node_takes_no_more_memory_than_it_lends(tmp_path: Path, count: int, nbytes: int) -> None:
    capacity = 16 << 20
    most = capacity + capacity // 8  # a page that a live object shares with a hole stays
    keys = [b"%d" % number for number in range(count)]
    with node(tmp_path, capacity) as server:
        peer = Peer(server)
        for key in keys:
            peer.published(key, bytes(nbytes))
    with node(tmp_path, capacity) as server:  # what an earlier start has left counts as well
        assert server.stats()["adopted"] == count
        peer = Peer(server)
        for key in keys[::2]:  # so that what goes lies between what stays
            peer.get(key)
        server.lend(7, 0, 8 << 20)
        assert taken(tmp_path) <= most
        for number in range(1500):
            peer.published(b"new-%d" % number, bytes(20_000 + number % 7000))
            assert number % 100 or taken(tmp_path) <= most
        server.lend(7, 0, 6 << 20)
        assert taken(tmp_path) <= most


def test_objects_leave_for_a_lease_that_the_system_has_no_memory_for() -> None:
    with small_disk(16) as folder, node(folder, 64 << 20) as server:
        peer = Peer(server)
        peer.published(b"kept", bytes(KIB))
        assert peer.touch(b"kept", keep=1) == Status.DONE
        for n in range(100):
            peer.published(b"%d" % n, bytes(200 * KIB))
        before = server.stats()
        for nbytes in (16 << 20, 40 << 20):  # the system cannot have that, whoever leaves
            with pytest.raises(OSError, match="No space left"):
                server.lend(7, 0, nbytes)
        assert (server.stats()["objects"], server.stats()["lent"]) == (before["objects"], 0)
        lease = server.lend(7, 0, 8 << 20)
        assert lease
        after = server.stats()
        assert after["lent"] == 8 << 20
        assert 20 <= after["objects"] < before["objects"]
        assert peer.get(b"kept").payload == bytes(KIB)
        for n in range(100):
            assert peer.put(b"more %d" % n, bytes(200 * KIB)).status == Status.DONE
        # Nothing is left of those that were refused.
        assert [str(path) for path in folder.glob("lease-*")] == [server.lease_path(7, lease)]


def lend(server: _native.NodeServer, peer: Peer, nbytes: int) -> int:
    with pytest.raises(OSError, match="No space left"):
        server.lend(7, 0, nbytes)
    return Status.FULL


def put(server: _native.NodeServer, peer: Peer, nbytes: int) -> int:
    return peer.put(b"huge", bytes(nbytes)).status


def prepare(server: _native.NodeServer, peer: Peer, nbytes: int) -> int:
    return peer.prepared(b"huge", nbytes).status


@pytest.mark.parametrize("ask", [put, prepare, lend])
@pytest.mark.parametrize("left", [0, 3 << 20])  # that the system can still give
def test_nothing_is_evicted_for_what_the_system_has_no_memory_for(
    ask: Callable[[_native.NodeServer, Peer, int], int], left: int
) -> None:
    with small_disk(16) as folder, node(folder, 16 << 20) as server:
        peer = Peer(server)
        with open(folder / "other", "wb") as other:  # another program takes it
            os.posix_fallocate(other.fileno(), 0, (6 << 20) if left == 0 else 3 << 20)
        for n in range(40):
            peer.published(b"%d" % n, bytes(200 * KIB))
        if left == 0:
            with suppress(OSError), open(folder / "rest", "wb", buffering=0) as rest:
                while True:
                    rest.write(bytes(4096))
        before = server.stats()
        for _ in range(3):
            assert ask(server, peer, 14 << 20) == Status.FULL
        after = server.stats()
        assert (after["objects"], after["evictions"]) == (before["objects"], before["evictions"])
        assert put(server, peer, 7 << 20) == Status.DONE  # all that leaves for it, and what is left, is enough


@pytest.mark.slow
def test_memory_that_is_not_used_for_half_a_minute_goes_back_to_the_host(tmp_path: Path) -> None:
    with node(tmp_path, 16 << 20) as server:
        peer = Peer(server)
        for n in range(70):
            peer.published(b"%d" % n, bytes(200 * KIB))
        full = taken(tmp_path)
        for n in range(1, 70):
            assert peer.drop(b"%d" % n) == Status.DONE
        assert taken(tmp_path) == full
        deadline = time.monotonic() + 120
        while taken(tmp_path) > 1 << 20:
            assert time.monotonic() < deadline, "the node kept the memory"
            time.sleep(0.2)
        assert server.stats()["backed"] < 1 << 20
        assert peer.get(b"0").payload == bytes(200 * KIB)
