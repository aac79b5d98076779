"""What a node finds when it starts: adopted if it is whole, refused with a reason if not."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from farpool._native import crc32c
from farpool.cluster.wire.frames import Op, Status
from tests.node.nodes import Head, Peer, node, reader, walked

# Publishes until it is killed, each payload a function of its key and of how often that was put; says on stdout what it
# is about to do and what it was told is done.
PUBLISHER = """
import sys
from pathlib import Path
from tests.node.nodes import Peer, node
with node(Path(sys.argv[1]), 1 << 20) as server:
    peer = Peer(server)
    for n in range(1000000):
        key, turn = b"key-%d" % (n % 50), n // 50
        print(key.decode(), turn, "begin", flush=True)
        if turn:
            assert peer.drop(key) == 0
        print(key.decode(), turn, "dropped", flush=True)
        if n % 11 != 10 or not turn:
            assert peer.put(key, (b"%s %d " % (key, turn)) * (1 + n % 97)).status == 0
            print(key.decode(), turn, "there", flush=True)
        else:
            peer.put(key, b"late %d" % turn)
            peer.drop(key)
            assert peer.put(key, (b"%s %d " % (key, turn)) * (1 + n % 97)).status == 0
            print(key.decode(), turn, "there", flush=True)
"""


def test_a_restarted_node_has_its_objects_and_leases_and_new_serials(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        head = Head(0, copies=3, kind=1, parts=2, recompute_us=5, namespace=6)
        written = {b"%d" % n: (peer.put(b"%d" % n, bytes(n), head).serial, n) for n in range(300)}
        assert peer.drop(b"7") == Status.DONE
        assert peer.touch(b"8", 0, 1) == Status.DONE
        _, newest = peer.prepare(b"unfinished", 100)
        lease = server.lend(7, 0, 5000)
        peer.ask(Op.WRITE, struct.pack("<Q", 4990), lease=lease, payload=b"kept")
        before = server.stats()["used"]
    with node(tmp_path) as server:
        peer = Peer(server)
        assert server.stats()["adopted"] == 299
        assert server.stats()["used"] < before
        assert server.leases(7) == [(lease, 5000)]
        assert peer.ask(Op.READ, struct.pack("<QQ", 4990, 4), lease=lease).payload == b"kept"
        assert peer.get(b"7").status == Status.MISSING
        for key, (serial, nbytes) in written.items():
            if key != b"7":
                reply = peer.get(key)
                assert (reply.status, reply.serial, reply.nbytes) == (Status.DONE, serial, nbytes)
                assert reply.meta == head._replace(flags=key == b"8").packed()  # which is kept
        assert [entry[0] for entry in walked(server, 0, b"", b"", 400) if entry[6]] == [b"8"]
        assert peer.published(b"7", b"again") > newest


@pytest.mark.parametrize("seed", range(3))
def test_after_a_kill_all_that_was_confirmed_is_there_and_nothing_that_was_dropped(tmp_path: Path, seed: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", PUBLISHER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    last: dict[bytes, tuple[int, str]] = {}

    def note(line: str) -> None:
        name, turn, what = line.split()
        last[name.encode()] = (int(turn), what)

    for _ in range(900 + 777 * seed):
        note(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    for line in child.stdout:  # what it said in its last moments
        if line.endswith("\n"):
            note(line)
    child.stdout.close()
    child.wait(20)
    with node(tmp_path) as server, reader(server) as mapped:
        peer = Peer(server)
        for key, (turn, what) in last.items():
            reply = peer.get(key)
            if what == "there":
                assert reply.status == Status.DONE
            if reply.status == Status.DONE:
                assert reply.payload
                first = b"%s %d " % (key, turn)
                before = [b"%s %d " % (key, turn - 1)] if what == "begin" else []
                meanwhile = [b"late"] if what == "dropped" else []
                assert reply.payload.startswith((first, *before, *meanwhile))
                assert mapped.get(key) == (reply.payload, reply.serial)
            else:
                assert reply.status == Status.MISSING


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
        Peer(server).published(b"key", b"payload")
    with node(tmp_path, 2 << 20) as server:
        assert "another amount of memory" in server.events()[0][2]
        assert Peer(server).get(b"key").status == Status.MISSING


@pytest.mark.parametrize("suffix", ["index", "data"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda content: b"x" * len(content), "not a segment file"),
        (lambda content: content[:24] + b"\xff" + content[25:], "damaged header"),
        (lambda content: content[:100], "not a segment file"),
        (lambda content: content[:8192], "of another kind or size"),
        (lambda content: content[:8] + b"\x01" + content[9:], "of version 1, which this farpool reads no more"),
        (lambda content: content[:8] + b"\x03" + content[9:], "another version"),
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
    other.rename(tmp_path / "lease-1.data")  # as earlier farpools called it
    with node(tmp_path) as server:
        assert server.leases(7) == []
        texts = sorted(text for _, _, text in server.events())
        assert len(texts) == 2
        assert any("not a segment file" in text for text in texts)
        assert any("does not say in its name whose lease it is" in text for text in texts)
    assert not list(tmp_path.glob("lease-*"))


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [(24, "<Q", 1 << 40), (48, "<Q", 8), (56, "<Q", 9), (64, "<I", 1), (104, "<Q", 5)],
    ids=["capacity", "session", "lease", "tenant", "owner"],
)
def test_a_lease_is_whose_its_name_says_whatever_its_header_says(
    tmp_path: Path, offset: int, form: str, value: int
) -> None:
    with node(tmp_path) as server:
        path = Path(server.lease_path(7, server.lend(7, 0, 4096)))
        kept = server.lend(7, 0, 4096)
    with path.open("r+b") as file:
        header = bytearray(file.read(124))
        struct.pack_into(form, header, offset, value)
        file.seek(0)
        file.write(bytes(header) + struct.pack("<I", crc32c(bytes(header))))
        if offset == 24:
            file.truncate(4096 + value)
    with node(tmp_path) as server:
        Peer(server, session=8, tenant=1)  # the session that was named is whose it was
        assert server.leases(7) == [(kept, 4096)]
        assert server.stats()["lent"] == 4096
        assert server.tenants()[1]["lent"] == 0
        [(kind, _, text)] = server.events()
        assert kind == "removed"
        assert path.name in text
    assert not path.exists()


@pytest.mark.parametrize("nbytes", [100, 4096, 4096 + 4095, 4096 + 4097, 1 << 43])
def test_a_lease_whose_length_changed_is_removed(tmp_path: Path, nbytes: int) -> None:
    with node(tmp_path) as server:
        path = Path(server.lease_path(7, server.lend(7, 0, 4096)))
    os.truncate(path, nbytes)
    with node(tmp_path) as server:
        assert (server.leases(7), server.stats()["lent"]) == ([], 0)
        [(kind, _, text)] = server.events()
        assert kind == "removed"
        assert path.name in text
    assert not path.exists()


def test_damaged_objects_are_not_adopted(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        serial = peer.published(b"key", b"payload")
        offset, _ = peer.pin(b"key")
        data = Path(server.objects_paths(0)[1])
    with data.open("r+b") as file:
        file.seek(offset - 128)
        file.write(b"\xff" * 64)
    with node(tmp_path) as server:
        assert server.stats()["adopted"] == 0
        peer = Peer(server)
        assert peer.get(b"key").status == Status.MISSING
        assert peer.published(b"key", b"payload") > serial
