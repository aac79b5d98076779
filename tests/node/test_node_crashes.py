"""What a node that was killed at the worst moment, or refused by the system, leaves to the next start."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from farpool.transport.frames import Status
from tests.node.nodes import Peer, node

MIB = 1 << 20
BEGIN = """
import errno, os, struct, sys
from pathlib import Path
from farpool.transport.frames import Op
from tests.node.nodes import Peer, generation, node
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
    at = generation()
    below = peer.prepare(b"below", 5 << 20, at)
    print(peer.published(b"key", bytes(5 << 20)), flush=True)
    peer.ask(Op.ABORT, struct.pack("<Q", below), generation=at)
    server.release(7, server.lend(7, 0, 8 << 20))
    no_more_backing(None)
    server.lend(7, 0, 15 << 20)
"""


def test_a_node_killed_while_an_object_leaves_memory_still_knows_its_generation(tmp_path: Path) -> None:
    (tmp_path / "n").mkdir()
    status, said = run(DEMOTED, tmp_path)
    assert status == -signal.SIGSYS
    with node(tmp_path / "n", 16 * MIB, nvme=str(tmp_path / "nvme"), nvme_capacity=16 * MIB) as server:
        reply = Peer(server).get(b"key")
        assert reply.status in (Status.DONE, Status.MISSING)
        assert reply.generation >= int(said[0])


WITHOUT_HOLES = """
no_holes(errno.EOPNOTSUPP)
with node(folder) as server:
    peer = Peer(server)
    for number in range(3000):
        peer.published(b"%d" % number, b"new")
    print(sum(peer.get(b"%d" % number).payload == b"new" for number in range(3000)))
"""


def test_a_node_starts_again_where_the_file_system_makes_no_holes(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        peer = Peer(server)
        for number in range(3000):
            peer.published(b"%d" % number, b"old")
    assert run(WITHOUT_HOLES, tmp_path) == (0, ["3000"])
