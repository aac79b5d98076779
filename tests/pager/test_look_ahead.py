"""Looking ahead on the virtual clock: loops, several of them in turn, and programs that change."""

from __future__ import annotations

import pytest

from farpool.memory.pager import Mode
from tests.pager.harness import World
from tests.pager.virtual_executor import Link

BLOCK = 256
LINK = Link(0.0, 256e6)
"""A block takes a microsecond."""
COMPUTE = 2e-6


def make_world(blocks: int, room: int, late: int | None = None) -> tuple[World, list[int]]:
    """A world with filled blocks, of which `room` fit."""
    world = World(room * BLOCK, link=LINK, late=late)
    numbers = [world.create([BLOCK]) for _ in range(blocks)]
    for number in numbers:
        world.access([(number, 1, Mode.OVERWRITE)])
    return world, numbers


def turn(world: World, blocks: list[int], compute: float = COMPUTE) -> int:
    """Read the blocks in order; returns how many had to be fetched on demand."""
    before = world.pager.counters.demand_fetches
    for block in blocks:
        world.access([(block, 1, Mode.READ)], compute=compute)
    return world.pager.counters.demand_fetches - before


@pytest.mark.parametrize("late", [None, 0, 3, 40])
def test_a_loop_of_which_a_quarter_fits_waits_for_nothing_once_it_is_known(late: int | None) -> None:
    """Also where the times of computing become known so many accesses later."""
    world, blocks = make_world(64, 16, late)
    for _ in range(10):
        turn(world, blocks)
    start = world.executor.now
    assert turn(world, blocks) == 0
    assert world.executor.now - start == pytest.approx(64 * COMPUTE, rel=0.01)


def test_a_loop_moves_little_more_than_belady() -> None:
    world, blocks = make_world(64, 16)
    for _ in range(8):
        turn(world, blocks, compute=0.75e-6)
    counters = world.pager.counters
    before = counters.demand_fetches + counters.prefetches
    for _ in range(10):
        turn(world, blocks, compute=0.75e-6)
    # With 16 places a loop of 64 misses (64 - 16) * 64 / 63 times a turn at best.
    assert counters.demand_fetches + counters.prefetches - before <= 10 * 52


def test_what_a_loop_fetches_is_spread_over_it() -> None:
    """Or the link would idle in one stretch of the loop and be short in the next."""
    world, blocks = make_world(64, 16)
    for _ in range(10):
        turn(world, blocks, compute=0.75e-6)
    counters = world.pager.counters
    fetched = []
    for first in range(0, 64, 16):
        before = counters.demand_fetches + counters.prefetches
        turn(world, blocks[first : first + 16], compute=0.75e-6)
        fetched.append(counters.demand_fetches + counters.prefetches - before)
    assert max(fetched) - min(fetched) <= 5


def test_training_and_evaluation_are_both_foretold_when_they_alternate() -> None:
    world, blocks = make_world(96, 16)
    training, evaluation = blocks[:64], blocks[64:][::-1]
    for _ in range(4):
        for _ in range(3):
            turn(world, training)
        turn(world, evaluation)
    # At the turn from one to the other a few accesses pass before the tape is found again.
    assert turn(world, training) <= 6
    assert turn(world, training) <= 6
    assert turn(world, training) <= 6
    assert turn(world, evaluation) <= 6


def test_prefill_and_decode_are_both_foretold() -> None:
    """A long pass once, then many short ones over the same blocks in another order."""
    world, blocks = make_world(48, 12)
    prefill, decode = blocks, blocks[::-1][:40]
    for _ in range(3):
        turn(world, prefill)
        for _ in range(5):
            turn(world, decode)
    assert turn(world, prefill) <= 6
    assert sum(turn(world, decode) for _ in range(5)) <= 12


def test_leaving_the_tape_is_counted_and_the_new_loop_is_known_after_one_turn() -> None:
    world, blocks = make_world(64, 16)
    for _ in range(6):
        turn(world, blocks)
    before = world.pager.divergences
    changed = blocks[:20] + blocks[40:] + blocks[20:40]
    turn(world, changed)
    assert world.pager.divergences > before
    turn(world, changed)
    known = world.pager.divergences
    assert turn(world, changed) == 0
    assert world.pager.divergences == known


def test_a_loop_is_foretold_with_a_smaller_budget_as_well() -> None:
    world, blocks = make_world(64, 32)
    for _ in range(4):
        turn(world, blocks)
    while not world.pager.resize(16 * BLOCK):
        world.pump()
        world.executor.wait(1.0)
        world.pump()
    for _ in range(6):
        turn(world, blocks)
    start = world.executor.now
    assert turn(world, blocks) == 0
    assert world.executor.now - start == pytest.approx(64 * COMPUTE, rel=0.01)


def test_an_inserted_access_does_not_lose_the_tape() -> None:
    world, blocks = make_world(64, 16)
    extra = world.create([BLOCK])
    world.access([(extra, 1, Mode.OVERWRITE)])
    for _ in range(6):
        turn(world, blocks)
    turn(world, blocks[:32])
    world.access([(extra, 1, Mode.READ)])
    assert turn(world, blocks[32:]) <= 2
    assert turn(world, blocks) <= 2


def test_a_first_walk_through_many_blocks_is_fetched_ahead_by_its_stride() -> None:
    world, blocks = make_world(200, 16)
    assert turn(world, blocks[::2]) <= 50  # a hundred blocks that no tape knows in this order


def test_a_program_without_a_pattern_is_left_alone() -> None:
    world, blocks = make_world(64, 16)
    order = [(index * index * 7 + index * 13) % 64 for index in range(400)]
    start = world.pager.counters.prefetches
    turn(world, [blocks[index] for index in dict.fromkeys(order)])
    assert world.pager.counters.prefetches - start <= 3


def test_without_prefetching_nothing_is_fetched_ahead() -> None:
    world = World(16 * BLOCK, link=LINK, prefetch=False)
    blocks = [world.create([BLOCK]) for _ in range(64)]
    for block in blocks:
        world.access([(block, 1, Mode.OVERWRITE)])
    for _ in range(6):
        turn(world, blocks)
    assert world.pager.counters.prefetches == 0


def test_names_of_one_storage_that_several_bear_by_now_are_not_fetched_as_one() -> None:
    """Their blocks cannot lie in one run: each storage is aligned."""
    world, blocks = make_world(32, 12)
    large = world.create([BLOCK] * 3)
    world.access([(large, 3, Mode.OVERWRITE)])
    for _ in range(6):
        turn(world, blocks)
        world.access([(large, 3, Mode.READ)], compute=COMPUTE)
    turn(world, blocks[:8])
    world.free(large, 3)
    small, other = world.create([96]), world.create([BLOCK] * 2)
    assert (small, other) == (large, large + 1)
    for first, count in ((small, 1), (other, 2)):
        world.access([(first, count, Mode.OVERWRITE)])
    for _ in range(3):
        turn(world, blocks[8:])
        turn(world, blocks[:8])
    for first, count in ((small, 1), (other, 2)):
        world.access([(first, count, Mode.READ)])
