"""The marks of visits: memory of its own for each session, which it may write and cannot cut off."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from farpool import AccessDeniedError, NodeError, QuotaExceededError, Store
from farpool._native import NodeServer
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, Status
from tests.node.nodes import PATIENCE, PLAIN, Peer, node, reader

HEADER = 4096
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

# Reads objects over and over until its input has ended, and once more. Says that it has begun, then how often.
READER = """
import select, sys, time
from farpool import Store
with Store(sys.argv[1], transport="mapped", timeout=20) as store:
    print("ready", flush=True)
    count, told, limit = 0, False, time.monotonic() + 60
    while not told and time.monotonic() < limit:
        told = bool(select.select([sys.stdin], [], [], 0)[0])
        for n in range(50):
            assert store.get(f"key {n}") == b"value" * 100
        count += 1
    print(count, flush=True)
"""


@contextmanager
def visited(server: NodeServer, tenant: int = 0, session: int = 7) -> Iterator[int]:
    file = server.objects_visited(session, tenant)
    try:
        yield file
    finally:
        os.close(file)


@contextmanager
def attached(running: RunningNode, session: int = 0) -> Iterator[list[int]]:
    """The three files of a tenant's objects, as a program gets them."""
    address = Address("unix", path=running.ready["socket"])
    control = Control(dial(address, "control", session=session, deadline=time.monotonic() + PATIENCE))
    _, files = control.call_with_files("attach_objects", time.monotonic() + PATIENCE)
    try:
        yield files
    finally:
        for file in files:
            os.close(file)
        control.close()


def marked(file: int) -> int:
    """How many objects the session has read since the hand came by."""
    return sum(os.pread(file, os.fstat(file).st_size - HEADER, HEADER))


def header_id(path: str | int) -> bytes:
    with open(path, "rb", closefd=isinstance(path, str)) as file:
        return os.pread(file.fileno(), 16, 32)


def test_the_marks_lie_in_no_file_and_nobody_can_change_their_length(tmp_path: Path) -> None:
    with node(tmp_path) as server, visited(server) as file:
        Peer(server).published(b"key", b"value")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["objects-0.data", "objects-0.index"]
        assert fcntl.fcntl(file, fcntl.F_GET_SEALS) == SEALS
        size = os.fstat(file).st_size
        for nbytes in (0, size - 1, size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(file, nbytes)
        with pytest.raises(PermissionError):
            os.posix_fallocate(file, 0, size + 4096)
        with pytest.raises(PermissionError):
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        assert os.fstat(file).st_size == size
        assert not os.get_inheritable(file)


@pytest.mark.slow
def test_a_reader_that_would_cut_the_marks_off_does_not_end_another_one() -> None:
    with running_node() as running, Store(running.address, transport="mapped", timeout=20) as store:
        store.put_many({f"key {n}": b"value" * 100 for n in range(50)})
        other = subprocess.Popen(
            [sys.executable, "-c", READER, running.address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "ready\n"
            with attached(running) as (_, _, file):
                for _ in range(100):
                    with pytest.raises(PermissionError):
                        os.ftruncate(file, 0)
                    os.pwrite(file, bytes(1000), HEADER)  # it may forget visits, no more
                    time.sleep(0.005)
                other.stdin.close()
                assert int(other.stdout.readline()) > 0
                assert other.wait(PATIENCE) == 0
                assert marked(file) == 0, "another session's marks are not here"
        finally:
            other.kill()
            other.wait(PATIENCE)
            other.stdout.close()


@pytest.mark.slow
def test_the_marks_decide_who_stays_also_where_several_objects_share_one(tmp_path: Path) -> None:
    count = 70_000
    with node(tmp_path, 16 << 20) as server, visited(server) as file, reader(server) as mapped:
        assert os.fstat(file).st_size == HEADER + (16 << 10)  # a node of so many bytes; there are more objects
        fill(server, 0, count)
        for number in range(100):
            assert mapped.get(b"%d" % number) is not None
        assert marked(file) == 100
        fill(server, count, 150_000 - count)
        assert server.stats()["evictions"] > 1000
        # The oldest, which would have gone first; those behind them have.
        assert all(mapped.get(b"%d" % number) is not None for number in range(100))
        assert all(mapped.get(b"%d" % number) is None for number in range(100, 1000))
    with node(tmp_path, 16 << 20) as server, visited(server) as file, reader(server) as mapped:
        adopted = server.stats()["adopted"]
        assert adopted > count
        assert marked(file) == 0
        assert mapped.get(b"149999") is not None
        assert marked(file) == 1


def session_of(store: Store) -> int:
    welcome = store._cluster.members[0].channel.welcome
    assert welcome is not None
    return welcome.session


def test_the_marks_of_all_sessions_count_also_of_one_that_has_ended(tmp_path: Path) -> None:
    count = 1500
    with node(tmp_path, 1 << 20, grace=0.0) as server:
        peers = [Peer(server, session=session) for session in (21, 22)]
        for number in range(count):
            peers[0].published(b"%d" % number, bytes(200))
        assert server.stats()["evictions"] == 0
        first = reader(server, session=21)
        second = reader(server, session=22)
        with first as one, second as other:
            for number in range(100):
                assert (one if number % 2 else other).get(b"%d" % number) is not None
        peers[1].close()  # its session ends at once
        deadline = time.monotonic() + PATIENCE
        while server.stats()["sessions"] > 1:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        for number in range(count, count + 2500):
            peers[0].put(b"%d" % number, bytes(200))
            if server.stats()["evictions"] > 500:
                break
        for number in range(100):
            assert peers[0].get(b"%d" % number).status == Status.DONE
        assert all(peers[0].get(b"%d" % number).status == Status.MISSING for number in range(100, 300))
        peers[0].close()


def test_the_marks_are_charged_and_bounded_in_number(tmp_path: Path) -> None:
    most = 256
    with node(tmp_path, 64 << 20, grace=0.0) as server:
        before = server.stats()["used"]
        peers = [Peer(server, session=session) for session in range(1, most + 2)]
        for session in range(1, most + 1):
            with visited(server, session=session) as file:
                size = os.fstat(file).st_size
        assert server.stats()["used"] == before + most * size
        with pytest.raises(QuotaExceededError, match="at most 256 sessions"):
            server.objects_visited(most + 1, 0)
        with visited(server, session=1) as file, visited(server, session=1) as again:
            assert os.fstat(file).st_ino == os.fstat(again).st_ino
        with pytest.raises(AccessDeniedError, match="another tenant"):
            server.objects_visited(1, 5)
        for peer in peers:
            peer.close()
        deadline = time.monotonic() + PATIENCE
        while server.stats()["used"] > before:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
def test_a_program_that_may_not_map_any_more_is_served_over_the_socket() -> None:
    with running_node() as running, Store(running.address, timeout=20) as publisher:
        publisher.put("key", b"value")
        with ExitStack() as held:
            for _ in range(255):
                held.enter_context(attached(running))
            with Store(running.address, timeout=20) as store:
                assert store.get("key") == b"value"
                assert store._cluster.members[0].channel.reader is None
            with Store(running.address, transport="mapped", timeout=20) as store, pytest.raises(QuotaExceededError):
                store.get("key")


def fill(server: NodeServer, first: int, count: int) -> None:
    """Publish small objects, many requests at a time."""
    connection, deadline = Peer(server).connection, time.monotonic() + 3 * PATIENCE
    for begin in range(first, first + count, 100):
        batch = range(begin, begin + 100)
        for number in batch:
            connection.send(Op.PUT, PLAIN + b"%d" % number, deadline, payload=b"")
        for _ in batch:
            assert connection.receive(deadline).status == Status.DONE
    connection.close()


def test_a_restarted_node_has_new_marks_and_the_old_ones_stay_whole_for_who_has_them(tmp_path: Path) -> None:
    with node(tmp_path) as server, visited(server) as old, reader(server) as mapped:
        Peer(server).published(b"key", b"value")
        assert mapped.get(b"key") is not None
        assert marked(old) == 1
        server.stop()
        with node(tmp_path) as again, visited(again) as new, reader(again) as anew:
            assert again.stats()["adopted"] == 1
            assert os.fstat(new).st_ino != os.fstat(old).st_ino
            assert header_id(new) == header_id(old) == header_id(again.objects_paths(0)[0])
            assert marked(new) == 0
            assert mapped.get(b"key") is not None
            assert (marked(old), marked(new)) == (1, 0)
            assert anew.get(b"key") is not None
            assert marked(new) == 1


@pytest.mark.slow
def test_a_program_marks_what_it_reads_in_the_memory_of_a_restarted_node() -> None:
    with running_node() as running, Store(running.address, transport="mapped", timeout=20) as store:
        store.put("key", b"value")
        assert store.get("key") == b"value"
        with attached(running, session_of(store)) as files:
            assert marked(files[2]) == 1
        with attached(running) as files:
            assert marked(files[2]) == 0
        running.restart()
        deadline = time.monotonic() + PATIENCE
        while True:
            assert store.get("key") == b"value"
            with attached(running, session_of(store)) as files:
                if marked(files[2]) == 1:
                    break
            assert time.monotonic() < deadline
        store.get("key")
        mapped = store.pin("key")
        assert mapped.is_mapped
        mapped.release()


def test_what_an_earlier_farpool_left_of_the_marks_is_removed(tmp_path: Path) -> None:
    for name in ("objects-0.visited", "objects-0.visited.new", "objects-3.visited"):
        (tmp_path / name).write_bytes(bytes(8192))
    (tmp_path / "of somebody else.visited").write_bytes(b"")
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"value")
    with node(tmp_path) as server:
        assert Peer(server).get(b"key").payload == b"value"
        assert server.events() == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["objects-0.data", "objects-0.index", "of somebody else.visited"]


@pytest.mark.slow
def test_passing_the_files_or_refusing_to_leaves_none_open_in_the_node() -> None:
    with running_node(grace=0.5) as running:
        with attached(running):
            pass
        before = len(os.listdir(f"/proc/{running.pid}/fd"))
        channel = Channel(parse_address(running.address), transport="tcp")
        for _ in range(20):
            with attached(running):
                pass
            with pytest.raises(NodeError, match="UNIX socket"):
                channel.call("attach_objects", time.monotonic() + PATIENCE)
        channel.close()
        deadline = time.monotonic() + PATIENCE
        while len(os.listdir(f"/proc/{running.pid}/fd")) > before:
            assert time.monotonic() < deadline
            time.sleep(0.02)
