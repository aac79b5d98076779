"""What of a loop is kept: close to the fewest bytes, and the link busy while the program computes."""

from __future__ import annotations

import pytest

from farpool.memory.pager import Mode
from farpool.memory.pager.belady import BlockAccess, Operand, belady_bytes
from tests.pager.harness import World
from tests.pager.virtual_executor import Link

UNIT = 64
"""Bytes that stand for 12 KiB of a real model."""
BANDWIDTH = 1e9
TURNS = 20
"""Until what is kept has settled."""


def layers(*sizes: int, times: int) -> list[int]:
    return [size * UNIT for size in sizes] * times


BLOCKS = layers(1, times=32 * 32)
"""Blocks of keys and values, 32 of each layer, all of which are accessed before the layer computes."""
STACK = layers(50, times=96)
HEAD = [*layers(50, times=96), 1000 * UNIT]
"""Equal layers, and one operation a fifth as large as all of them."""
GPT2 = [*layers(1, 577, 192, 1, 768, 768, times=12), UNIT, 12_564 * UNIT]
"""Weights of GPT-2 small, in the order of a forward pass; its head is a third of them."""


class Loop:
    """A world with a network of these operations, whose blocks are at most a sixteenth of what fits.

    With `tied`, each pass begins with a lookup of rows in the blocks of the last operation. The program computes after
    every `together` operations, for all of them.
    """

    def __init__(self, sizes: list[int], share: float, ratio: float, *, tied: bool = False, together: int = 1) -> None:
        room = int(sum(sizes) * share) // UNIT * UNIT
        largest = room // 16 // UNIT * UNIT
        self.world = World(room, [4 * sum(sizes)], link=Link(0.0, BANDWIDTH))
        self.together = together
        self.operations: list[tuple[int, int, int]] = []
        for size in sizes:
            cuts = [largest] * (size // largest) + ([size % largest] if size % largest else [])
            self.operations.append((self.world.create(cuts), len(cuts), size))
        first, count, _ = self.operations[-1]
        # Not in the first and the last block, and more than two groups of blocks: a model looks up what it is asked.
        self.looked_up = range(first + 1, first + count - 1) if tied else range(0)
        accesses = [self.reading(block, 1) for block in self.looked_up]
        accesses += [self.reading(first, count) for first, count, _ in self.operations]
        twice, once = (belady_bytes(accesses * turns, room).fetched for turns in (9, 8))
        self.fewest = twice - once
        self.computing = self.fewest / BANDWIDTH / ratio
        for first, count, _ in self.operations:
            self.world.access([(first, count, Mode.OVERWRITE)])

    def reading(self, first: int, count: int) -> BlockAccess:
        return BlockAccess(
            [Operand(block, self.world.size_of(block), Mode.READ) for block in range(first, first + count)]
        )

    def turn(self) -> tuple[float, float]:
        """Bytes fetched, over the fewest; seconds, over the longer of computing and link."""
        log, began = len(self.world.executor.log), self.world.executor.now
        for start in self.looked_up[::4]:
            group = [(block, 1, Mode.READ) for block in self.looked_up if start <= block < start + 4]
            self.world.access(group, table=self.operations[-1][0])
        whole = sum(size for _, _, size in self.operations)
        for number, (first, count, size) in enumerate(self.operations, 1):
            share = 0.0 if number % self.together else self.together * size / whole
            self.world.access([(first, count, Mode.READ)], compute=self.computing * share)
        fetched = sum(
            piece.nbytes
            for command in self.world.executor.log[log:]
            if not hasattr(command, "source")
            for piece in command.pieces
        )
        limit = max(self.computing, self.fewest / BANDWIDTH)
        return fetched / self.fewest, (self.world.executor.now - began) / limit

    def settled(self) -> tuple[float, float]:
        """What `turn` gives once it has settled, on average."""
        for _ in range(TURNS):
            self.turn()
        fetched, seconds = zip(*(self.turn() for _ in range(8)), strict=True)
        return sum(fetched) / 8, sum(seconds) / 8


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
    fetched, seconds = Loop(sizes, share, ratio).settled()
    assert fetched <= most_bytes
    assert seconds <= most_seconds


@pytest.mark.parametrize(("share", "ratio", "most"), [(0.5, 0.2, 1.12), (0.5, 1.0, 1.15), (0.75, 0.2, 1.35)])
def test_rows_looked_up_in_a_tied_head_do_not_cost_what_is_kept_of_it(share: float, ratio: float, most: float) -> None:
    fetched, _ = Loop(GPT2, share, ratio, tied=True).settled()
    assert fetched <= most


@pytest.mark.parametrize(
    ("ratio", "most_bytes", "most_seconds"), [(0.8, 1.05, 1.05), (1.0, 1.05, 1.08), (4.0, 1.03, 1.03)]
)
@pytest.mark.slow
def test_the_link_goes_on_while_the_program_computes_after_many_accesses(
    ratio: float, most_bytes: float, most_seconds: float
) -> None:
    fetched, seconds = Loop(BLOCKS, 0.25, ratio, together=32).settled()
    assert fetched <= most_bytes
    assert seconds <= most_seconds


@pytest.mark.slow
def test_blocks_that_are_replaced_leave_kept_what_is_kept() -> None:
    loop = Loop(BLOCKS, 0.25, 1.0, together=32)
    fetched, _ = loop.settled()
    for number in range(31, len(loop.operations), 32):  # the last block of each layer is copied into another one
        first = loop.world.create([UNIT])
        loop.world.access([(first, 1, Mode.OVERWRITE)])
        loop.operations[number] = (first, 1, UNIT)
    assert sum(loop.turn()[0] for _ in range(4)) / 4 <= fetched + 0.1
