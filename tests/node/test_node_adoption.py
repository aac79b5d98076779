"""What a node finds when it starts: adopted if it is whole, refused with a reason if not."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool.transport.frames import Op, Status
from tests.node.nodes import Peer, generation, node, reader

# Publishes until it is killed, each payload a function of key and generation; says on stdout what it was told is done.
PUBLISHER = """
import sys, time
from pathlib import Path
from tests.node.nodes import Peer, generation, node
with node(Path(sys.argv[1]), 1 << 20) as server:
    peer = Peer(server)
    for n in range(1000000):
        key, number = b"key-%d" % (n % 50), generation()
        payload = (b"%s %d " % (key, number)) * (1 + n % 97)
        if n % 11 == 10:
            peer.delete(key, number)
        else:
            assert peer.put(key, payload, at=number).status == 0
        print(key.decode(), number, n % 11 == 10, flush=True)
"""


def test_a_restarted_node_has_its_objects_tombstones_and_leases(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        written = {b"%d" % n: (peer.published(b"%d" % n, os.urandom(n)), n) for n in range(300)}
        buried = generation()
        peer.delete(b"7", buried)
        lease = server.lend(7, 0, 5000)
        peer.ask(Op.WRITE, struct.pack("<Q", 4990), lease=lease, payload=b"kept")
        before = server.stats()["used"]
    with node(tmp_path) as server:
        peer = Peer(server)
        assert server.stats()["adopted"] == 300
        assert server.stats()["used"] == before
        assert server.leases(7) == [(lease, 5000)]
        assert peer.ask(Op.READ, struct.pack("<QQ", 4990, 4), lease=lease).payload == b"kept"
        assert (peer.get(b"7").status, peer.get(b"7").generation) == (Status.DELETED, buried)
        for key, (number, nbytes) in written.items():
            if key != b"7":
                reply = peer.get(key)
                assert (reply.status, reply.generation, reply.nbytes) == (Status.DONE, number, nbytes)


@pytest.mark.parametrize("seed", range(3))
def test_after_a_kill_each_object_is_one_that_was_published_and_none_is_older(tmp_path: Path, seed: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    newest: dict[bytes, tuple[int, bool]] = {}

    def note(line: str) -> None:
        name, number, deleted = line.split()
        newest[name.encode()] = (int(number), deleted == "True")

    for _ in range(400 + 333 * seed):
        note(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    for line in child.stdout:  # what it said in its last moments
        if line.endswith("\n"):
            note(line)
    child.stdout.close()
    child.wait(20)
    with node(tmp_path) as server, reader(server) as mapped:
        peer = Peer(server)
        for key, (number, deleted) in newest.items():
            reply = peer.get(key)
            assert reply.generation >= number
            if reply.generation == number:
                assert reply.status == (Status.DELETED if deleted else Status.DONE)
            if reply.status == Status.DONE:
                assert reply.payload
                assert reply.payload.startswith(b"%s %d " % (key, reply.generation))
                assert mapped.get(key) == (reply.payload, reply.generation)


def test_ephemeral_forgets_and_tells_who_has_the_old_objects_mapped(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"payload")
        with reader(server) as mapped:
            assert mapped.get(b"key") is not None
            server.stop()
            assert mapped.get(b"key") is None  # nobody serves it
            with node(tmp_path, ephemeral=True) as again:
                assert Peer(again).get(b"key").status == Status.MISSING
                assert mapped.get(b"key") is None
                assert again.stats()["adopted"] == 0
    assert list(tmp_path.iterdir()) == []


def test_another_capacity_forgets_with_a_reason(tmp_path: Path) -> None:
    with node(tmp_path, 1 << 20) as server:
        number = Peer(server).published(b"key", b"payload")
    with node(tmp_path, 2 << 20) as server:
        assert "another amount of memory" in server.events()[0][2]
        reply = Peer(server).get(b"key")
        assert reply.status == Status.MISSING
        assert reply.generation >= number - (3_000_000 << 12)


@pytest.mark.parametrize("suffix", ["index", "data"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"x" * len(content), "not a segment file"),
        (lambda content: content[:24] + b"\xff" + content[25:], "damaged header"),
        (lambda content: content[:100], "not a segment file"),
        (lambda content: content[:8192], "of another kind or size"),
        (lambda content: content[:8] + b"\x02" + content[9:], "another version"),
    ],
)
def test_a_damaged_segment_file_is_not_used_and_the_reason_is_told(
    tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes], reason: str
) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"payload")
        path = Path(next(path for path in server.objects_paths(0) if path.endswith(suffix)))
    path.write_bytes(damage(path.read_bytes()))
    with node(tmp_path) as server:
        [(kind, _, text)] = server.events()
        assert kind == "forgotten"
        assert reason in text
        assert Peer(server).get(b"key").status == Status.MISSING
        assert Peer(server).put(b"key", b"payload").status == Status.DONE


def test_a_damaged_lease_file_is_removed_with_a_reason(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        path = Path(server.lease_path(7, server.lend(7, 0, 4096)))
        other = Path(server.lease_path(7, server.lend(7, 0, 4096)))
    path.write_bytes(b"\0" * 8192)
    other.rename(tmp_path / "lease-1.data")
    with node(tmp_path) as server:
        assert server.leases(7) == []
        texts = sorted(text for _, _, text in server.events())
        assert len(texts) == 2
        assert any("not a segment file" in text for text in texts)
        assert any("another lease" in text for text in texts)
    assert not list(tmp_path.glob("lease-*"))


def test_damaged_objects_are_not_adopted_and_their_generations_stay_known(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        number = peer.published(b"key", b"payload")
        offset, _ = peer.pin(b"key")
        data = Path(server.objects_paths(0)[1])
    with data.open("r+b") as file:
        file.seek(offset - 64)
        file.write(b"\0" * 64)
    with node(tmp_path) as server:
        assert server.stats()["adopted"] == 0
        reply = Peer(server).get(b"key")
        assert reply.status == Status.MISSING
        assert reply.generation >= number
