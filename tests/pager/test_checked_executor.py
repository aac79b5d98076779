"""The checker of order: what waits passes, and each missing wait that was planted is found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from farpool import OrderError
from farpool.memory.debug.checked import Span
from farpool.memory.pager import Kind, Mode, Move, Piece, Transfer
from tests.pager.harness import World
from tests.pager.test_pager import random_program
from tests.pager.virtual_executor import CheckedExecutor, Link, VirtualExecutor


def transfer(number: int, kind: Kind, place: int, *, after: tuple[int, ...] = (), nbytes: int = 64) -> Transfer:
    return Transfer(number, kind, number, (Piece(0, 64 * number, place, nbytes),), after, False)


@pytest.fixture
def executor() -> CheckedExecutor:
    return CheckedExecutor(VirtualExecutor(bytearray(1024), [bytearray(4096)], [(Link(), Link())]))


class Hasty(CheckedExecutor):
    """Plants a missing wait in each transfer."""

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        super().start([replace(c, after=()) if isinstance(c, Transfer) else c for c in commands])


@pytest.mark.parametrize("seed", range(5))
def test_a_transfer_of_the_engine_that_lost_its_waits_is_found(seed: int) -> None:
    world = World(9000)
    world.checked = Hasty(world.executor)
    with pytest.raises(OrderError, match=r"does not wait for write-back \d+|while write-back \d+ .* is under way"):
        random_program(world, seed, 300)


def test_a_fetch_waits_for_the_write_back_in_its_range_also_through_another(executor: CheckedExecutor) -> None:
    executor.start([transfer(1, Kind.WRITE_BACK, 0), Transfer(2, Kind.FETCH, 2, (), (1,), False)])
    executor.start([transfer(3, Kind.FETCH, 0, after=(2,)), transfer(4, Kind.FETCH, 64)])
    with pytest.raises(OrderError, match=r"fetch 5 .*does not wait for write-back 1 .*it waits for \[4\]"):
        executor.start([transfer(5, Kind.FETCH, 32, after=(4,))])


def test_nothing_of_a_batch_is_started_if_one_command_is_out_of_order(executor: CheckedExecutor) -> None:
    with pytest.raises(OrderError, match="write-back 2"):
        executor.start([transfer(1, Kind.FETCH, 0), transfer(2, Kind.WRITE_BACK, 0)])
    assert not executor.under_way(0, 1024)
    assert not executor.wait(1.0)
    executor.start([transfer(3, Kind.WRITE_BACK, 0)])
    assert executor.wait(1.0)


@pytest.mark.parametrize("move", [Move(0, 512, 64), Move(512, 32, 64)])
def test_a_move_keeps_clear_of_what_is_being_transferred(executor: CheckedExecutor, move: Move) -> None:
    executor.start([transfer(1, Kind.WRITE_BACK, 0), Move(128, 64, 64)])
    with pytest.raises(OrderError, match="a move"):
        executor.start([move])
    assert executor.wait(1.0)
    executor.poll()
    executor.start([move])


def test_what_an_access_holds_is_neither_fetched_into_nor_moved(executor: CheckedExecutor) -> None:
    executor.pin("op", [Span(0, 128, False)])
    executor.start([transfer(1, Kind.WRITE_BACK, 0)])
    with pytest.raises(OrderError, match=r"overlaps \[0, 128\), which an access holds to read"):
        executor.start([transfer(2, Kind.FETCH, 64, after=(1,))])
    with pytest.raises(OrderError, match=r"of which an access holds \[0, 128\)"):
        executor.start([Move(512, 64, 64)])
    executor.release("op")
    executor.start([transfer(2, Kind.FETCH, 64, after=(1,)), Move(512, 256, 64)])


def test_what_an_access_may_write_is_not_written_back(executor: CheckedExecutor) -> None:
    executor.pin("op", [Span(0, 128, True)])
    with pytest.raises(OrderError, match="which an access holds to write"):
        executor.start([transfer(1, Kind.WRITE_BACK, 0)])


@pytest.mark.parametrize(("kind", "writes", "allowed"), [
    (Kind.FETCH, False, False), (Kind.WRITE_BACK, True, False), (Kind.WRITE_BACK, False, True),
])  # fmt: skip
def test_an_access_is_granted_only_what_has_arrived(
    executor: CheckedExecutor, kind: Kind, writes: bool, allowed: bool
) -> None:
    executor.start([transfer(1, kind, 0)])
    if allowed:
        executor.pin("op", [Span(0, 64, writes)])
        return
    with pytest.raises(OrderError, match=r"aten.mm was granted arena range \[0, 64\) .* is under way there"):
        executor.pin("op", [Span(0, 64, writes)], "aten.mm")
    assert executor.wait(1.0)
    executor.poll()
    executor.pin("op", [Span(0, 64, writes)])


def test_an_access_may_copy_between_its_own_ranges_only_where_it_may_write(executor: CheckedExecutor) -> None:
    executor.pin("op", [Span(0, 128, False), Span(256, 128, True)])
    executor.start([Move(32, 300, 64)])
    with pytest.raises(OrderError):
        executor.start([Move(300, 32, 64)])


def test_what_a_failure_cancels_is_in_nobodys_way() -> None:
    inner = VirtualExecutor(bytearray(1024), [bytearray(4096)], [(Link(), Link())], lambda t: OSError("no"))
    executor = CheckedExecutor(inner)
    executor.start([transfer(1, Kind.WRITE_BACK, 0), transfer(2, Kind.FETCH, 0, after=(1,))])
    assert executor.wait(1.0)
    executor.poll()
    executor.pin("op", [Span(0, 64, True)])


def test_the_checker_passes_a_program_with_rows_gathered_and_freed_in_between() -> None:
    world = World(4096)
    rows = [world.create([64]) for _ in range(80)]
    for step in range(60):
        picked = [rows[(step * 7 + i * 11) % 80] for i in range(8)]
        world.access([(row, 1, Mode.WRITE) for row in picked], fill=step)
    assert world.pager.counters.write_backs


def test_a_virtual_failure_cancels_what_comes_after_it_although_nobody_has_polled_it_yet() -> None:
    arena = bytearray(b"o" * 64)
    failing = [True]
    executor = VirtualExecutor(arena, [bytearray(256)], [(Link(), Link())], lambda t: OSError() if failing[0] else None)
    executor.start([transfer(1, Kind.WRITE_BACK, 0)])
    assert executor.wait(1.0)
    failing[0] = False
    executor.start([transfer(2, Kind.FETCH, 0, after=(1,)), Transfer(3, Kind.FETCH, 3, (), (2,), False)])
    assert [(done.id, done.cancelled) for done in executor.poll()] == [(1, False), (2, True), (3, True)]
    assert arena == b"o" * 64
    executor.start([transfer(3, Kind.FETCH, 0, after=(1,))])
    assert executor.wait(1.0)
    assert executor.poll()[0].error is None
