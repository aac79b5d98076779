"""What a node has told programs holds, whatever becomes of connections and of the node itself."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
import threading
from pathlib import Path

import pytest

from farpool.cluster.node.process import running_node
from farpool.cluster.store import Store
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import NodeError, NodeFullError
from tests.node.nodes import PATIENCE, Peer, exposed, node, until, walked

MIB = 1 << 20


@pytest.mark.parametrize("kill", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_pinned_view_stays_as_it_is_when_its_node_is_started_again(kill: bool) -> None:
    value = b"W" * 100_000
    with running_node(dram="8MiB", grace=1) as process, Store(process.address) as store:
        store.put("weights", value)
        pin = store.pin("weights")
        assert bytes(pin.view) == value
        if not kill:
            process.terminate()
        process.restart()
        with Store(process.address) as other:
            assert other.get("weights") == value
            for number in range(100):
                other.put(f"{number}", b"x" * 1_000_000)
        assert bytes(pin.view) == value
        pin.release()
        assert store.get("99") == b"x" * 1_000_000


def test_what_was_prepared_before_a_restart_is_written_nowhere_else(tmp_path: Path) -> None:
    with node(tmp_path, 4 * MIB) as server:
        peer = Peer(server)
        peer.published(b"key", b"kept")
        offset, _ = peer.prepare(b"large", MIB)
        with exposed(server) as late:
            server.stop()
            with node(tmp_path, 4 * MIB) as again:
                other = Peer(again)
                assert other.get(b"key").payload == b"kept"
                for number in range(3):
                    other.published(b"%d" % number, bytes([number]) * MIB)
                late.write(offset, b"\xff" * MIB)
                for number in range(3):
                    assert other.get(b"%d" % number).payload == bytes([number]) * MIB


def test_objects_of_which_programs_know_places_move_to_a_file_like_the_old_one(tmp_path: Path) -> None:
    with node(tmp_path, 4 * MIB) as server:
        peer = Peer(server)
        peer.published(b"key", b"kept")
        peer.pin(b"key")
        server.stop()
    data = tmp_path / "objects-0.data"
    header, old = data.read_bytes()[:4096], data.stat().st_ino
    with node(tmp_path, 4 * MIB) as again:
        assert Peer(again).get(b"key").payload == b"kept"
        fresh = data.read_bytes()[:4096]
    assert fresh == header
    assert (data.stat().st_ino != old, data.stat().st_size) == (True, 4096 + 12 * MIB)


def test_a_preparation_ends_after_its_connection_though_the_session_lives(tmp_path: Path) -> None:
    with node(tmp_path, 4 * MIB, grace=0.2) as server:
        stays = Peer(server)
        before = server.stats()["used"]
        for _ in range(3):
            goes = Peer(server)
            goes.prepare(b"large", MIB)
            goes.close()
        offset, serial = stays.prepare(b"slow", 1000)
        until(lambda: server.stats()["used"] < before + MIB, "the preparations are still there")
        with exposed(server) as memory:
            assert stays.commit(offset, serial, memory.write(offset, bytes(1000))).status == Status.DONE


def test_a_pin_is_ended_only_by_its_own_serial(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        serial = peer.published(b"key", b"value")
        offset, _ = peer.pin(b"key")
        assert peer.unpin(offset, serial + 1) == Status.UNKNOWN
        assert peer.unpin(offset, serial) == Status.DONE
        assert peer.unpin(offset, serial) == Status.UNKNOWN


def test_a_foreign_file_among_the_segments_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "objects-x.index").write_text("mine")
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"value")
    assert (tmp_path / "objects-x.index").read_text() == "mine"


@pytest.mark.parametrize("capacity", [134_217_664, 2 * MIB - 64, 2 * MIB + 64])
def test_the_last_bytes_of_any_capacity_can_be_used(tmp_path: Path, capacity: int) -> None:
    with node(tmp_path, capacity) as server:
        peer = Peer(server)
        value = b"v" * (capacity - 128)
        assert peer.published(b"key", value)
        assert peer.get(b"key").payload == value


def test_more_of_the_file_can_be_asked_for_at_once_than_is_read_at_once(tmp_path: Path) -> None:
    value = b"v" * (4 * MIB)
    with node(tmp_path, 8 * MIB, nvme=str(tmp_path / "far.nvme"), nvme_capacity=64 * MIB) as server:
        peer = Peer(server)
        for number in range(10):
            peer.published(b"%d" % number, value)
        until(lambda: server.stats()["nvme_objects"] >= 8, "nothing went to the file")
        deadline = 1e12
        for turn in range(60):
            peer.connection.send(Op.GET, b"%d" % (turn % 8), deadline)
        for _ in range(60):
            assert peer.connection.receive(deadline).payload == value


@pytest.mark.slow
def test_a_pin_of_a_node_that_is_gone_can_be_let_go() -> None:
    with running_node(dram="8MiB") as process:
        store = Store(process.address, timeout=2)
        store.put("key", b"value")
        pin = store.pin("key")
        process.kill()
        with pytest.raises(NodeError):
            store.put("other", b"value")
        pin.release()
        store.close()


def test_an_ephemeral_node_that_has_stopped_makes_no_files(tmp_path: Path) -> None:
    with node(tmp_path, ephemeral=True) as server:
        server.objects_paths(0)
    with pytest.raises(OSError, match="making files for a tenant"):
        server.objects_paths(1)
    with pytest.raises(OSError, match="making files for a tenant"):
        walked(server, 2, b"", b"", 1)
    assert list(tmp_path.iterdir()) == []


def test_what_an_ephemeral_node_is_asked_to_lend_while_it_stops_leaves_no_file() -> None:
    nbytes = 512 * MIB  # whose backing takes longer than it takes to stop
    with tempfile.TemporaryDirectory(prefix="farpool-test-", dir="/dev/shm") as folder:

        def ask() -> None:
            with contextlib.suppress(NodeFullError):
                server.lend(7, 0, nbytes)

        with node(Path(folder), nbytes, ephemeral=True) as server:
            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: server.stats()["lent"] > 0, "nothing was lent")
        asking.join(PATIENCE)
        assert not asking.is_alive()
        assert list(Path(folder).iterdir()) == []


def test_the_threads_of_a_node_take_no_signals(tmp_path: Path) -> None:
    tasks = Path("/proc/self/task")
    before = {task.name for task in tasks.iterdir()}
    with node(tmp_path, nvme=str(tmp_path / "far.nvme"), nvme_capacity=MIB):
        threads = [task for task in tasks.iterdir() if task.name not in before]
        assert len(threads) == 5  # the loop, and four for the file
        for thread in threads:
            (blocked,) = re.findall(r"SigBlk:\s*(\w+)", (thread / "status").read_text())
            assert int(blocked, 16) & 1 << signal.SIGTERM - 1
