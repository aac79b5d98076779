"""The pager on simulated tiers: right bytes, hard budget, the same transfers for the same inputs."""

from __future__ import annotations

import random
from typing import Any

import pytest

from farpool.memory.pager import Kind, Mode, NoRoomError, Run, TooLargeError
from tests.pager.harness import World
from tests.pager.virtual_executor import Link

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE


def seeds(quick: int, count: int) -> list[Any]:
    """So many seeds; the tests of those behind the quick ones are slow."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, count))]


def random_program(world: World, seed: int, steps: int) -> None:
    """Creates, accesses and frees at random; every read is checked."""
    rng = random.Random(seed)
    storages: list[tuple[int, int]] = []
    for step in range(steps):
        if not storages or (len(storages) < 24 and rng.random() < 0.2):
            count = rng.choice([1, 1, 1, 2, 3, 5])
            sizes = [64 * rng.randint(1, 8)] * (count - 1) + [rng.randint(1, 512)]
            first = world.create(sizes)
            storages.append((first, count))
            world.access([(first, count, OVERWRITE)], fill=step)
        elif rng.random() < 0.1:
            world.free(*storages.pop(rng.randrange(len(storages))))
        else:
            runs = []
            for first, count in rng.sample(storages, min(len(storages), rng.randint(1, 3))):
                low = rng.randrange(count)
                runs.append((first + low, rng.randint(1, count - low), rng.choice([READ, READ, WRITE, OVERWRITE])))
            world.access(runs, fill=step, compute=rng.choice([0.0, 1e-6, 1e-4]))


@pytest.mark.parametrize("seed", seeds(20, 60))
def test_a_random_program_reads_what_it_wrote(seed: int) -> None:
    world = World(random.Random(seed).choice([9000, 10_000, 16_384, 40_000]))
    random_program(world, seed, 300)
    assert world.pager.counters.accesses > 100


def test_times_that_cannot_be_are_refused() -> None:
    world = World(4096, late=0)
    block = world.create([64])
    world.access([(block, 1, OVERWRITE)])
    for ordinal, start, end in [(-1, 0.0, 1.0), (1, 0.0, 1.0), (0, 1.0, 0.5), (0, 0.0, float("nan"))]:
        with pytest.raises(ValueError, match=r"Pager\.ran: access"):
            world.pager.ran(ordinal, start, end)
    with pytest.raises(ValueError, match="whose times come late"):
        World(4096).pager.ran(0, 0.0, 1.0)


@pytest.mark.parametrize("seed", range(10))
def test_the_same_inputs_give_the_same_transfers(seed: int) -> None:
    logs = []
    for _ in range(2):
        world = World(12_000)
        random_program(world, seed, 200)
        logs.append(world.executor.log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("completions_first", [False, True])
@pytest.mark.parametrize("seed", seeds(12, 40))
def test_failed_transfers_lose_nothing(seed: int, completions_first: bool) -> None:
    rng = random.Random(seed)
    world = World(12_000, tiers=(1 << 16, 1 << 20), fault=lambda t: OSError("no") if rng.random() < 0.1 else None)
    world.completions_first = completions_first
    errors = 0
    storages: list[int] = []
    for step in range(300):
        if len(storages) < 40:
            storages.append(world.create([512]))
        first = rng.choice(storages)
        try:
            mode = OVERWRITE if first not in world.expected else rng.choice([READ, WRITE, OVERWRITE])
            world.access([(first, 1, mode)], fill=step, compute=rng.choice([0.0, 1e-5]))
        except OSError:
            errors += 1
    assert errors
    world.executor._fault = None
    for first in storages:
        if first in world.expected:
            world.access([(first, 1, READ)])


def test_a_loop_is_fetched_ahead_after_one_pass() -> None:
    world = World(16_000, link=Link(1e-6, 1e9))
    blocks = [world.create([2000]) for _ in range(16)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])
    for _ in range(6):
        for block in blocks:
            world.access([(block, 1, READ)], compute=1e-5)
    counters = world.pager.counters
    before = counters.demand_fetches
    for block in blocks:
        world.access([(block, 1, READ)], compute=1e-5)
    assert counters.demand_fetches == before
    assert counters.prefetches_wasted <= 3


def test_the_tape_moves_no_more_than_belady_in_a_loop() -> None:
    world = World(8 * 2048)
    blocks = [world.create([2048]) for _ in range(16)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])
    for _ in range(4):
        for block in blocks:
            world.access([(block, 1, READ)], compute=1e-4)
    counters = world.pager.counters
    before = counters.demand_fetches + counters.prefetches
    for _ in range(10):
        for block in blocks:
            world.access([(block, 1, READ)], compute=1e-4)
    fetched = counters.demand_fetches + counters.prefetches - before
    # Belady on a cyclic loop of 16 with 8 places misses 16 - 8 + 1 of each pass at most
    assert fetched <= 10 * 11


def test_operands_larger_than_the_arena_are_refused_and_nothing_changes() -> None:
    world = World(4096)
    block = world.create([8192])
    with pytest.raises(TooLargeError):
        world.pager.request([Run(block, 1, READ)])
    other = world.create([4096])
    world.access([(other, 1, OVERWRITE)])
    world.access([(other, 1, READ)])


def test_a_full_lower_tier_is_an_error_and_the_bytes_stay() -> None:
    world = World(4096, tiers=(2048,))
    blocks = [world.create([1024]) for _ in range(5)]
    for step in range(30):
        world.access([(blocks[step * 7 % 5], 1, WRITE if step % 3 else READ)], fill=step)
    extra = [world.create([1024]) for _ in range(2)]
    world.access([(extra[0], 1, OVERWRITE)])
    with pytest.raises(NoRoomError):
        world.access([(extra[1], 1, OVERWRITE)])
    world.free(extra[0], 1)
    for block in blocks:
        world.access([(block, 1, READ)])


def test_operands_that_fill_the_arena_are_granted_whatever_lay_there_before() -> None:
    world = World(16 * 64 * 10)
    rng = random.Random(1)
    small = [world.create([64 * rng.randint(1, 9)]) for _ in range(40)]
    large = [world.create([64 * 16 * 2] * 2 + [64 * 14]) for _ in range(2)]
    for _ in range(20):
        for block in rng.sample(small, 20):
            world.access([(block, 1, WRITE)], fill=rng.randrange(256))
        world.access([(large[0], 3, WRITE), (large[1], 3, WRITE)], fill=3)
        world.access([(large[0], 2, READ), (large[1] + 1, 2, READ), (rng.choice(small), 1, READ)])


def test_a_lower_budget_is_reached_and_a_higher_one_used() -> None:
    world = World(16_384)
    blocks = [world.create([1024]) for _ in range(16)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])
    while not world.pager.resize(4096):
        world.pump()
        world.executor.wait(1.0)
        world.pump()
    assert world.pager.used <= 4096
    for block in blocks:
        world.access([(block, 1, READ)])
    assert world.pager.resize(16_384)
    for block in blocks:
        world.access([(block, 1, READ)])
    assert world.pager.used > 4096


def test_names_of_blocks_born_in_a_loop_repeat() -> None:
    world = World(4096)
    weights = [world.create([512]) for _ in range(10)]
    for block in weights:
        world.access([(block, 1, OVERWRITE)])
    for _ in range(8):
        born = []
        for block in weights:
            world.access([(block, 1, READ)], compute=1e-6)
            gradient = world.create([512])
            world.access([(gradient, 1, OVERWRITE)], compute=1e-6)
            born.append(gradient)
        for gradient, weight in zip(born, weights, strict=True):
            world.access([(gradient, 1, READ), (weight, 1, WRITE)], compute=1e-6)
        for gradient in born:
            world.free(gradient, 1)
    before = world.pager.divergences
    for _ in range(3):
        born = []
        for block in weights:
            world.access([(block, 1, READ)], compute=1e-6)
            gradient = world.create([512])
            world.access([(gradient, 1, OVERWRITE)], compute=1e-6)
            born.append(gradient)
        for gradient, weight in zip(born, weights, strict=True):
            world.access([(gradient, 1, READ), (weight, 1, WRITE)], compute=1e-6)
        for gradient in born:
            world.free(gradient, 1)
    assert world.pager.divergences == before


def test_a_prefetch_that_failed_is_tried_again_when_it_is_needed() -> None:
    failing: set[int] = set()
    world = World(8 * 2048, fault=lambda t: OSError("no") if not t.demand and t.block in failing else None)
    blocks = [world.create([2048]) for _ in range(16)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])
    for turn in range(6):
        if turn == 3:
            failing.update(blocks)
        for block in blocks:
            world.access([(block, 1, READ)], compute=1e-4)
    failing.clear()
    before = world.pager.counters.prefetches_used
    for block in blocks:
        world.access([(block, 1, READ)], compute=1e-4)
    assert world.pager.counters.prefetches_used > before


def test_a_fetch_that_was_given_up_before_it_started_never_starts() -> None:
    failing = [True]
    world = World(4096, fault=lambda t: OSError("no") if failing[0] and t.kind == Kind.WRITE_BACK else None)
    old, new = world.create([4096]), world.create([4096])
    failing[0] = False
    world.access([(new, 1, OVERWRITE)], fill=1)
    world.access([(old, 1, OVERWRITE)], fill=2)
    failing[0] = True
    assert world.pager.evict_for_test(old)
    (write_back,) = world.pager.take_commands()
    access = world.pager.request([Run(new, 1, READ)])
    (fetch,) = (transfer for transfer in world.pager.transfers() if transfer.block == new)
    assert fetch.after == (write_back.id,)
    world.executor.start([write_back])
    world.executor.wait(1.0)
    (done,) = world.executor.poll()
    world.pager.failed(done.id, done.error)
    assert fetch not in world.pager.take_commands()
    world.pager.abandon(access)
    failing[0] = False
    world.access([(old, 1, READ)])
    world.access([(new, 1, READ)])


def test_an_error_is_raised_once_and_the_next_access_tries_again() -> None:
    failing = [False]
    world = World(4096, fault=lambda t: OSError("no") if failing[0] and t.kind == Kind.FETCH else None, prefetch=False)
    blocks = [world.create([1024]) for _ in range(8)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])
    failing[0] = True
    with pytest.raises(OSError, match="no"):
        world.access([(blocks[0], 1, READ), (blocks[1], 1, READ)])
    failing[0] = False
    for block in blocks[:2]:
        world.access([(block, 1, READ)])


def test_a_lower_budget_is_reached_once_the_tier_works_again() -> None:
    failing = [True]
    world = World(
        4096, fault=lambda t: OSError("no") if failing[0] and t.kind == Kind.WRITE_BACK else None, prefetch=False
    )
    blocks = [world.create([1024]) for _ in range(4)]
    for block in blocks:
        world.access([(block, 1, OVERWRITE)])

    assert not world.pager.resize(1024)
    world.pump()
    while world.executor.wait(1.0):
        world.pump()
    with pytest.raises(OSError, match="no"):
        world.pager.resize(1024)
    assert world.pager.resize(4096)
    failing[0] = False
    while not world.pager.resize(1024):
        world.pump()
        assert world.executor.wait(1.0)
        world.pump()
    for block in blocks:
        world.access([(block, 1, READ)])
