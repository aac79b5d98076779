"""Objects read from mapped memory while the node publishes, drops and evicts as fast as it can."""

from __future__ import annotations

import multiprocessing
import os
import random
import struct
import threading
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import Status
from tests.node.nodes import Peer, node

FINDS = 5000
"""Objects that a reader finds before it ends."""
MOST_PASSES = 2_000_000
KEYS = [b"key-%d" % n for n in range(40)]


def payload(key: bytes, number: int) -> bytes:
    """Whole in itself, and of no other key and publish."""
    word = struct.pack("<Q", number) + key.ljust(16)
    return word * (1 + number % 211)


def read(paths: tuple[str, str, str], results: multiprocessing.Queue[tuple[int, str]]) -> None:
    """Read until enough was found; puts how much it was, and the first thing that was wrong."""
    with open(paths[0], "rb") as index, open(paths[1], "rb") as data, open(paths[2], "r+b") as visited:
        mapped = _native.ObjectReader(index.fileno(), data.fileno(), visited.fileno(), "node")
        found, wrong = 0, ""
        now: dict[bytes, int] = {}  # serials
        gone: set[int] = set()
        for _ in range(MOST_PASSES):
            if wrong or found >= FINDS:
                break
            for key in KEYS:
                try:
                    hit = mapped.get(key)
                except Exception as error:
                    wrong = f"{type(error).__name__}: {error}"
                    break
                if hit is None:
                    continue
                found += 1
                if hit[0] != payload(key, struct.unpack_from("<Q", hit[0])[0]):
                    wrong = f"{key!r} has bytes that were never published"
                if hit[1] in gone:
                    wrong = f"{key!r} went back from {now[key]} to {hit[1]}"
                if hit[1] != now.setdefault(key, hit[1]):
                    gone.add(now[key])
                    now[key] = hit[1]
        results.put((found, wrong))


def write(server: _native.NodeServer, ended: threading.Event, seed: int) -> None:
    peer = Peer(server, session=seed + 1)
    draw = random.Random(seed)
    while not ended.is_set():
        key, number = draw.choice(KEYS), draw.getrandbits(40)
        if number % 2:
            assert peer.drop(key) in (Status.DONE, Status.MISSING)
        else:
            assert peer.put(key, payload(key, number)).status in (Status.DONE, Status.PRESENT)
    peer.close()


@pytest.mark.slow
def test_a_reader_of_mapped_memory_sees_whole_objects_and_none_again_that_has_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with (
        node(tmp_path, 64 << 10) as server,
        os.fdopen(server.objects_visited(9, 0)) as visited,
    ):  # room for about half of them
        paths = (*server.objects_paths(0), f"/proc/{os.getpid()}/fd/{visited.fileno()}")
        readers = [context.Process(target=read, args=(paths, results), daemon=True) for _ in range(3)]
        for process in readers:
            process.start()
        ended = threading.Event()  # set by the last reader, however long their processes take to start
        writers = [threading.Thread(target=write, args=(server, ended, seed)) for seed in range(2)]
        for thread in writers:
            thread.start()
        try:
            outcomes = [results.get(timeout=240) for _ in readers]
        finally:
            ended.set()
            for thread in writers:
                thread.join(30)
        for process in readers:
            process.join(30)
        assert [wrong for _, wrong in outcomes] == [""] * len(readers)
        assert min(found for found, _ in outcomes) >= FINDS
        assert server.stats()["evictions"] > 0
        assert server.stats()["drops"] > 0
    results.close()
