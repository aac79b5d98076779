"""The map that debug mode keeps of the bytes, led through what a pager may decide between two looks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from farpool.memory.debug.tenants import Tenants, gaps
from farpool.memory.pager import Kind, Move, Piece, Transfer


class Pager:
    """As much of a pager as the map looks at."""

    def __init__(self, **places: int) -> None:
        self.capacity = 4096
        self.under_way: list[Transfer] = []
        self.places = [-1] * 8
        self.owners: list[int] = []
        self.put(**places)

    def put(self, **places: int) -> None:
        """Block 3 lies at 512: ``b3=512``."""
        self.owners = [int(name[1:]) for name in places]
        for name, place in places.items():
            self.places[int(name[1:])] = place

    def resident(self) -> list[int]:
        return self.owners

    def transfers(self) -> list[Transfer]:
        return self.under_way

    def rounded(self, nbytes: int) -> int:
        return -(-nbytes // 64) * 64

    def block(self, number: int) -> SimpleNamespace:
        return SimpleNamespace(place=self.places[number], size=500)


def tenants(pager: Pager) -> Tenants:
    made = Tenants(pager)  # type: ignore[arg-type]
    made.update(())
    for tenant in made:
        tenant.filled = True
    return made


def write_back(number: int, block: int, place: int) -> Transfer:
    return Transfer(number, Kind.WRITE_BACK, block, (Piece(0, 0, place, 500),), (), False)


def test_a_block_that_left_without_a_word_is_free_at_once() -> None:
    made = tenants(pager := Pager(b1=0, b2=512))
    pager.put(b2=512)
    (left,) = made.update(())
    assert (left.tenant.block, left.free, left.moved, left.written) == (1, [(0, 512)], None, False)
    assert made.free() == [(0, 512), (1012, 3084)]


def test_a_block_that_moves_twice_over_one_that_left_keeps_its_bytes() -> None:
    made = tenants(pager := Pager(b1=0, b2=1024))
    pager.put(b2=512)
    (left,) = made.update([Move(1024, 0, 500), Move(0, 512, 500)])
    assert (left.tenant.block, left.free, left.moved) == (1, [(0, 512)], None)
    assert made[2].place == 512
    assert made.generation[2] == 2


def test_a_block_that_is_moved_and_then_written_back_leaves_from_its_new_place() -> None:
    made = tenants(pager := Pager(b1=1024))
    pager.put()
    (left,) = made.update([Move(1024, 0, 500), write_back(7, 1, 0)])
    assert left.written
    assert not left.free
    assert made.free() == [(512, 3584)]
    gone = made.written_back(write_back(7, 1, 0), failed=False)
    assert gone is not None
    assert gone.place == 0
    assert made.free() == [(0, 4096)]


@pytest.mark.parametrize("failed", [False, True])
def test_a_block_that_is_kept_while_it_is_written_back_stays_filled(failed: bool) -> None:
    made = tenants(pager := Pager(b1=0))
    pager.put()
    made.update([write_back(7, 1, 0)])
    if not failed:
        pager.put(b1=0)
    assert made.written_back(write_back(7, 1, 0), failed=failed) is None
    assert made[1].filled
    assert made.generation[1] == 3


def test_a_block_moved_before_it_left_is_nobodys_at_its_target() -> None:
    made = tenants(pager := Pager(b1=1024))
    pager.put()
    move = Move(1024, 0, 500)
    (left,) = made.update([move])
    assert left.moved is move
    assert not left.free


def test_what_was_promised_a_range_whose_write_back_failed_leaves_it_to_its_owner() -> None:
    made = tenants(pager := Pager(b1=0))
    pager.put(b2=0)
    made.update([write_back(7, 1, 0)])
    made.written_back(write_back(7, 1, 0), failed=True)
    pager.put(b1=0)
    (left,) = made.update(())
    assert (left.tenant.block, left.free) == (2, [(500, 12)])
    assert made[1].filled


@pytest.mark.parametrize(("started", "free"), [(False, [(0, 512)]), (True, [(500, 12)])])
def test_what_a_write_back_left_is_free_until_the_next_owners_transfer_is_started(started: bool, free: Any) -> None:
    made = tenants(pager := Pager(b1=0))
    pager.put()
    made.update([write_back(7, 1, 0)])
    pager.put(b2=0)
    if started:
        made.update([Transfer(8, Kind.FETCH, 2, (Piece(0, 0, 0, 500),), (7,), True)])
    assert made.written_back(write_back(7, 1, 0), failed=False) is not None
    assert made.without_tenants(0, 512) == free


@pytest.mark.parametrize(("taken", "expected"), [
    ([], [(10, 10)]), ([(0, 10), (20, 30)], [(10, 10)]), ([(0, 15)], [(15, 5)]),
    ([(12, 15), (13, 14)], [(10, 2), (15, 5)]), ([(0, 40)], []), ([(30, 40)], [(10, 10)]),
])  # fmt: skip
def test_gaps_are_what_no_range_covers(taken: Any, expected: Any) -> None:
    assert gaps(taken, 10, 20) == expected
