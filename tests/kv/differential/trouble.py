"""What happens to nodes while clients work: they are killed, stopped, restarted, replaced, and bits in them flip."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections import Counter
from pathlib import Path

from tests.faults.forge import ForgedNode
from tests.nodes import stats

__all__ = ["Trouble"]

_HEADER_BYTES = 4096
"""Bytes of a segment file before its contents."""
_FLIPS = 12


class Trouble:
    """Does something to some node, again and again; what follows from the seed.

    Parameters
    ----------
    nodes : list of ForgedNode
        The nodes.
    files : list of Path
        NVMe files of some of them.
    seed : str
        Decides what happens, and to whom.
    """

    def __init__(self, nodes: list[ForgedNode], files: list[Path], seed: str) -> None:
        self._nodes = nodes
        self._files = files
        self._random = random.Random(f"{seed} trouble")
        self.did: Counter[str] = Counter()
        self.evicted = 0

    def go_on(self, over: threading.Event) -> None:
        """Until it is over, and at least until each kind of thing was done once; all nodes are up then.

        `evicted` is then how many blocks the nodes have had no room for in memory.
        """
        kinds = ["kill", "stop", "flip", "flip", "replace", "flip"] + ["spoil"] * bool(self._files)
        while not over.is_set() or len(self.did) < len(set(kinds)):
            for what in self._random.sample(kinds, len(kinds)):
                getattr(self, f"_{what}")(self._random.choice(self._nodes), over)
                over.wait(self._random.uniform(0.0, 0.15))
                if over.is_set() and len(self.did) == len(set(kinds)):
                    break
        for node in self._nodes:
            self._count(node)

    def _count(self, node: ForgedNode) -> None:
        """Add up a node's counters before they end with it."""
        told = stats(node.address)
        self.evicted += told["evictions"] + told["demotions"]

    def _kill(self, node: ForgedNode, over: threading.Event) -> None:
        self._count(node)
        node.kill()
        over.wait(self._random.choice([0.0, 0.1, 0.4]))
        node.start()
        self.did["kill"] += 1

    def _replace(self, node: ForgedNode, over: threading.Event) -> None:
        self._count(node)
        node.kill()
        node.start(anew=True)
        self.did["replace"] += 1

    def _stop(self, node: ForgedNode, over: threading.Event) -> None:
        node.stop()
        over.wait(self._random.choice([0.05, 0.5]))
        node.cont()
        self.did["stop"] += 1

    def _flip(self, node: ForgedNode, over: threading.Event) -> None:
        """Flip bits where objects lie in the node's memory."""
        for path in node.folder.glob("objects-*.data"):
            self.did["flip"] += _flipped(path, _HEADER_BYTES, self._random)

    def _spoil(self, node: ForgedNode, over: threading.Event) -> None:
        """Flip bits in what nodes have moved to their files."""
        self.did["spoil"] += sum(_flipped(path, _HEADER_BYTES, self._random) for path in self._files)


def _flipped(path: Path, begin: int, rng: random.Random) -> int:
    """Flip some bits of a file behind `begin`, not in its holes; how many."""
    with contextlib.suppress(FileNotFoundError), open(path, "r+b", buffering=0) as file:
        places: list[int] = []
        end = begin
        while True:
            try:
                start = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:  # nothing but a hole is left
                break
            end = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            places += range(start, end, 4096)
        if not places:
            return 0
        for _ in range(_FLIPS):
            place = rng.choice(places) + rng.randrange(4096)
            if byte := os.pread(file.fileno(), 1, place):
                os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << rng.randrange(8)]), place)
        return _FLIPS
    return 0
