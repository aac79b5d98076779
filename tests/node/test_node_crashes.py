"""What a node that was killed at the worst moment, or refused by the system, leaves to the next start."""

from __future__ import annotations

import gc
import random
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import farpool
from farpool.cluster.node.process import RunningNode
from farpool.cluster.wire.frames import Status
from tests.node.nodes import Peer, node
from tests.nodes import eventually
from tests.small_disk import small_disk

MIB = 1 << 20
BEGIN = """
import errno, os, struct, sys
from pathlib import Path
from farpool.cluster.wire.frames import Op
from tests.node.nodes import Peer, node
from tests.node.syscalls import no_holes, no_more_backing
folder = Path(sys.argv[1])
"""


def run(program: str, folder: Path) -> tuple[int, list[str]]:
    """A program's exit status and what it said, line by line."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program, folder], stdout=subprocess.PIPE, text=True, timeout=60
    )
    return done.returncode, done.stdout.splitlines()


# The object lies behind a hole without memory. What stays in memory of it goes into the hole, which needs memory first.
DEMOTED = """
with node(folder / "n", 16 << 20, nvme=str(folder / "nvme"), nvme_capacity=16 << 20) as server:
    peer = Peer(server)
    below = peer.prepare(b"below", 5 << 20)
    peer.published(b"key", b"value" * 1_000_000)
    peer.abort(*below)
    server.release(7, server.lend(7, 0, 8 << 20))
    no_more_backing(None)
    server.lend(7, 0, 15 << 20)
"""


def test_a_node_killed_while_an_object_leaves_memory_still_has_it(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    assert run(DEMOTED, tmp_path)[0] == -signal.SIGSYS
    with node(tmp_path / "n", 16 * MIB, nvme=str(tmp_path / "nvme"), nvme_capacity=16 * MIB) as server:
        assert Peer(server).get(b"key").payload == b"value" * 1_000_000


# Puts and reads until it is killed, far more than memory holds; says what is confirmed.
SPILLING = """
import random
draw = random.Random(int(sys.argv[2]))
with node(folder / "n", 4 << 20, nvme=str(folder / "nvme"), nvme_capacity=64 << 20) as server:
    peer = Peer(server)
    for number in range(1000):
        key = b"key-%d" % number
        value = random.Random(key).randbytes(draw.choice([1, 300, 5000, 40_000, 200_000]))
        assert peer.put(key, value).status == 0
        print(number, len(value), flush=True)
        again = draw.randrange(number + 1)
        if draw.random() < 0.3:
            assert peer.get(b"key-%d" % again).status == 0
        if draw.random() < 0.1:
            peer.unpin(peer.pin(b"key-%d" % again)[0], peer.ask(Op.STAT, b"key-%d" % again).serial)
"""


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("trials", [range(3), pytest.param(range(3, 103), marks=pytest.mark.slow)])
def test_a_killed_node_has_all_that_it_had_confirmed_wherever_it_was(tmp_path: Path, trials: range) -> None:
    for seed in trials:
        folder = tmp_path / str(seed)
        (folder / "n").mkdir(parents=True)
        draw = random.Random(seed)
        command = [sys.executable, "-c", BEGIN + SPILLING, str(folder), str(seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(draw.randrange(40, 600))]
            child.kill()
            said += [line for line in child.stdout if line.endswith("\n")]
        confirmed = {int(number): int(nbytes) for number, nbytes in (line.split() for line in said)}
        assert len(confirmed) == len(said) >= 40
        with node(folder / "n", 4 * MIB, nvme=str(folder / "nvme"), nvme_capacity=64 * MIB) as server:
            peer = Peer(server)
            for number, nbytes in confirmed.items():
                key = b"key-%d" % number
                reply = peer.get(key)
                assert reply.status == Status.DONE, f"seed {seed} lost {key!r} of {nbytes} bytes"
                assert reply.payload == random.Random(key).randbytes(nbytes)
        shutil.rmtree(folder)


WITHOUT_HOLES = """
no_holes(errno.EOPNOTSUPP)
with node(folder) as server:
    peer = Peer(server)
    for number in range(3000):
        assert peer.drop(b"%d" % number) == 0
        peer.published(b"%d" % number, b"new")
    print(sum(peer.get(b"%d" % number).payload == b"new" for number in range(3000)))
"""


def test_a_node_starts_again_where_the_file_system_makes_no_holes(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        for number in range(3000):
            peer.published(b"%d" % number, b"old")
    assert run(WITHOUT_HOLES, tmp_path) == (0, ["3000"])


def test_a_node_killed_while_its_objects_move_to_a_new_file_has_them_all(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        peer = Peer(server)
        for number in range(8):
            peer.published(b"%d" % number, bytes(MIB))
        peer.pin(b"0")  # so that the objects move at the next start
    assert (
        run(f"no_more_backing(None, at_least={MIB})\nwith node(folder, 16 << 20): pass", tmp_path)[0] == -signal.SIGSYS
    )
    with node(tmp_path, 16 * MIB) as server:
        peer = Peer(server)
        assert [peer.get(b"%d" % number).payload for number in range(8)] == [bytes(MIB)] * 8


# Each start comes to another file before it has no descriptor left.
FEW_FILES = """
import resource
most = len(os.listdir("/proc/self/fd")) + 32
for limit in range(3, most):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, 4096))
    try:
        with node(folder) as server:
            assert server.events() == []
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        print("refused")
"""


def test_a_start_without_descriptors_fails_and_forgets_nothing(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        Peer(server).published(b"key", b"value")
        leases = sorted(server.lend(7, 0, 4096) for _ in range(8))
    status, said = run(FEW_FILES, tmp_path)
    assert status == 0
    assert len(said) > 8
    with node(tmp_path) as server:
        assert sorted(lease for lease, _ in server.leases(7)) == leases
        assert Peer(server).get(b"key").payload == b"value"


REFUSED = """
with node(folder) as server:
    no_more_backing(errno.EDQUOT)
    try:
        server.lend(7, 0, 4096)
    except OSError as error:
        print(error.errno == errno.EDQUOT, sorted(path.name for path in folder.iterdir()))
"""


def test_a_lease_that_the_system_refuses_says_why_and_leaves_no_file(tmp_path: Path) -> None:
    assert run(REFUSED, tmp_path) == (0, ["True []"])


@pytest.mark.slow
def test_a_node_killed_while_its_file_is_made_makes_it_anew(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    begin = "with node(folder / 'n', nvme=str(folder / 'nvme'), nvme_capacity=8 << 20): pass"
    assert run(f"no_more_backing(None)\n{begin}", tmp_path)[0] == -signal.SIGSYS
    for _ in range(2):
        assert run(begin, tmp_path)[0] == 0


def fill(path: Path) -> None:
    """Take all that a file system has left."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def test_a_node_starts_again_on_a_file_system_that_is_full_and_says_what_it_has() -> None:
    with small_disk(24) as disk:
        node = RunningNode(str(disk / "node"), ["--dram", "16MiB"])
        try:
            node.start()
            assert node.ready["room"] == node.ready["capacity"] == 16 << 20
            with farpool.Store(node.address, transport="tcp") as store:
                for n in range(50):
                    store.put(f"key {n}", bytes([n]) * 100_000)
                node.kill()
                fill(disk / "other")
                node.start()
                assert 50 * 100_000 < node.ready["room"] < 12 << 20
                eventually(lambda: "less room than --dram" in node.log)
                assert [store.get(f"key {n}") for n in range(50)] == [bytes([n]) * 100_000 for n in range(50)]
                for n in range(50):
                    store.put(f"more {n}", bytes(100_000))
                assert store.get("more 49") == bytes(100_000)
        finally:
            node.close()


@pytest.mark.slow
def test_a_node_whose_objects_were_pinned_starts_again_without_them_on_a_file_system_that_is_full() -> None:
    with small_disk(24) as disk:
        node = RunningNode(str(disk / "node"), ["--dram", "16MiB"])
        try:
            node.start()
            with farpool.Store(node.address) as store:
                store.put("key", bytes(100_000))
                pin = store.pin("key")
                node.kill()
                assert pin is not None
                pin.release()
            del store, pin
            gc.collect()  # no program has the node's file mapped
            fill(disk / "other")
            node.start()
            eventually(lambda: "has no memory for a file without programs in it" in node.log)
            with farpool.Store(node.address) as store:
                assert store.get("key") is None
                store.put("key", bytes(50_000))
                assert store.get("key") == bytes(50_000)
        finally:
            node.close()


def test_a_node_without_an_earlier_start_is_refused_on_a_file_system_that_is_full() -> None:
    with small_disk(1) as disk:
        node = RunningNode(str(disk / "node"), ["--dram", "16MiB"])
        try:
            with pytest.raises(RuntimeError, match=r"--dram is 16 MiB, but .* has room for"):
                node.start()
        finally:
            node.close()
