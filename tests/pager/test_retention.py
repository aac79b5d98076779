"""What of a loop is kept: close to the fewest bytes, and the link busy while the program computes."""

from __future__ import annotations

import pytest

from farpool.pager import Mode
from farpool.pager.belady import BlockAccess, Operand, belady_bytes
from tests.pager.harness import World
from tests.pager.virtual_executor import Link

UNIT = 64
"""Bytes that stand for 12 KiB of a real model."""
BANDWIDTH = 1e9
TURNS = 20
"""Until what is kept has settled."""


def layers(*sizes: int, times: int) -> list[int]:
    return [size * UNIT for size in sizes] * times


STACK = layers(50, times=96)
HEAD = [*layers(50, times=96), 1000 * UNIT]
"""Equal layers, and one operation a fifth as large as all of them."""
GPT2 = [*layers(1, 577, 192, 1, 768, 768, times=12), UNIT, 12_564 * UNIT]
"""Weights of GPT-2 small, in the order of a forward pass; its head is a third of them."""


class Loop:
    """A world with a network of these operations, whose blocks are at most a sixteenth of what fits."""

    def __init__(self, sizes: list[int], share: float, ratio: float) -> None:
        room = int(sum(sizes) * share) // UNIT * UNIT
        largest = room // 16 // UNIT * UNIT
        self.world = World(room, [4 * sum(sizes)], link=Link(0.0, BANDWIDTH))
        self.operations: list[tuple[int, int, int]] = []
        for size in sizes:
            cuts = [largest] * (size // largest) + ([size % largest] if size % largest else [])
            self.operations.append((self.world.create(cuts), len(cuts), size))
        accesses = [
            BlockAccess([Operand(block, self.world.size_of(block), Mode.READ) for block in range(first, first + count)])
            for first, count, _ in self.operations
        ]
        twice, once = (belady_bytes(accesses * turns, room).fetched for turns in (9, 8))
        self.fewest = twice - once
        self.computing = self.fewest / BANDWIDTH / ratio
        for first, count, _ in self.operations:
            self.world.access([(first, count, Mode.OVERWRITE)])

    def turn(self) -> tuple[float, float]:
        """Bytes fetched, over the fewest; seconds, over the longer of computing and link."""
        log, start = len(self.world.executor.log), self.world.executor.now
        whole = sum(size for _, _, size in self.operations)
        for first, count, size in self.operations:
            self.world.access([(first, count, Mode.READ)], compute=self.computing * size / whole)
        fetched = sum(
            piece.nbytes
            for command in self.world.executor.log[log:]
            if not hasattr(command, "source")
            for piece in command.pieces
        )
        limit = max(self.computing, self.fewest / BANDWIDTH)
        return fetched / self.fewest, (self.world.executor.now - start) / limit


@pytest.mark.parametrize(
    ("sizes", "share", "ratio", "most_bytes", "most_seconds"),
    [
        pytest.param(STACK, 0.25, 1.0, 1.05, 1.15, id="quarter of equal layers"),
        pytest.param(STACK, 0.75, 1.0, 1.1, 1.15, id="three quarters of equal layers"),
        pytest.param(STACK, 0.5, 2.0, 1.05, 1.06, id="half of equal layers, slow link"),
        pytest.param(HEAD, 0.25, 2.0, 1.05, 1.15, id="quarter with a head, slow link"),
        # The head's room cannot be used for what comes next, so the link idles while it is computed.
        pytest.param(HEAD, 0.5, 1.0, 1.06, 1.25, id="half with a head"),
        pytest.param(HEAD, 0.75, 0.5, 1.1, 1.02, id="three quarters with a head, fast link"),
        pytest.param(GPT2, 0.5, 0.5, 1.15, 1.02, id="half of GPT-2, fast link"),
        pytest.param(GPT2, 0.5, 2.0, 1.15, 1.25, id="half of GPT-2, slow link"),
        # Two neighbouring operations, which need room beside what is kept, take an eighth of what has to be fetched.
        pytest.param(GPT2, 0.75, 1.0, 1.35, 1.5, id="three quarters of GPT-2"),
    ],
)
def test_a_loop_settles_close_to_the_fewest_bytes(
    sizes: list[int], share: float, ratio: float, most_bytes: float, most_seconds: float
) -> None:
    loop = Loop(sizes, share, ratio)
    for _ in range(TURNS):
        loop.turn()
    turns = [loop.turn() for _ in range(8)]
    fetched, seconds = (sum(values) / len(turns) for values in zip(*turns, strict=True))
    assert fetched <= most_bytes
    assert seconds <= most_seconds
