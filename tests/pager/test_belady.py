from __future__ import annotations

from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.memory.pager import Mode
from farpool.memory.pager.belady import BlockAccess, Moved, Operand, belady_bytes

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE


def reads(*blocks: int, nbytes: int = 1) -> list[BlockAccess]:
    return [BlockAccess([Operand(block, nbytes, READ)]) for block in blocks]


def touch(block: int, mode: Mode, **others: list[int]) -> BlockAccess:
    return BlockAccess([Operand(block, 1, mode)], **others)


def test_each_block_is_fetched_once_if_all_fit() -> None:
    assert belady_bytes(reads(1, 2, 3, 1, 2, 3), 3) == Moved(3, 0)


def test_in_a_loop_that_does_not_fit_all_but_the_farthest_stay() -> None:
    assert belady_bytes(reads(*(1, 2, 3, 4) * 3), 3).fetched == 4 + 2
    assert belady_bytes(reads(*(1, 2, 3, 4) * 3), 1).fetched == 12


def test_a_dirty_block_is_written_when_it_leaves_and_a_clean_one_is_not() -> None:
    assert belady_bytes([touch(1, WRITE), *reads(2, 1)], 1) == Moved(3, 1)
    assert belady_bytes([touch(1, WRITE), *reads(2, 1, 2)], 1) == Moved(4, 1)


def test_a_created_block_is_not_fetched_before_it_was_written() -> None:
    assert belady_bytes([touch(1, WRITE, created=[1]), *reads(1)], 1) == Moved(0, 0)
    assert belady_bytes([touch(1, WRITE, created=[1]), *reads(2, 1)], 1) == Moved(2, 1)


def test_a_freed_block_is_not_written_and_its_number_begins_again() -> None:
    first = [touch(1, WRITE, created=[1], freed=[1]), *reads(2)]
    assert belady_bytes([*first, touch(1, WRITE, created=[1])], 1) == Moved(1, 0)


def test_what_is_overwritten_next_is_neither_written_nor_fetched() -> None:
    assert belady_bytes([touch(1, WRITE, created=[1]), *reads(2), touch(1, OVERWRITE)], 1) == Moved(1, 0)


def test_a_dirty_block_that_is_kept_without_a_further_use_is_written() -> None:
    assert belady_bytes([touch(1, OVERWRITE), *reads(2)], 1) == Moved(1, 1)


def test_a_block_named_twice_counts_once() -> None:
    twice = BlockAccess([Operand(1, 8, READ), Operand(1, 8, OVERWRITE)])
    assert belady_bytes([twice], 8) == Moved(8, 0)


def test_operands_that_do_not_fit_together_are_refused_by_number() -> None:
    both = BlockAccess([Operand(1, 5, READ), Operand(2, 4, READ)])
    with pytest.raises(ValueError, match="access 1 needs 9 bytes at once, the cache has 8"):
        belady_bytes([*reads(1, nbytes=5), both], 8)


def fewest_fetches(accesses: list[list[tuple[int, Mode]]], capacity: int) -> int:
    """By trying every content that the cache can have after each access; all blocks have one byte."""

    @cache
    def fewest(number: int, held: frozenset[int]) -> int:
        if number == len(accesses):
            return 0
        operands = accesses[number]
        blocks = {block for block, _ in operands}
        fetched = sum(1 for block, mode in operands if mode != OVERWRITE and block not in held)
        others = sorted(held - blocks)
        room = min(len(others), capacity - len(blocks))
        return fetched + min(
            fewest(number + 1, frozenset(kept) | blocks)
            for count in range(room + 1)
            for kept in combinations(others, count)
        )

    return fewest(0, frozenset())


operands = st.dictionaries(st.integers(0, 4), st.sampled_from([READ, WRITE, OVERWRITE]), min_size=1, max_size=2)


@given(st.lists(operands, max_size=9), st.integers(2, 4))
def test_no_choice_of_victims_fetches_less_when_blocks_are_of_one_size(
    program: list[dict[int, Mode]], capacity: int
) -> None:
    accesses = [BlockAccess([Operand(block, 1, mode) for block, mode in step.items()]) for step in program]
    assert belady_bytes(accesses, capacity).fetched == fewest_fetches(
        [list(step.items()) for step in program], capacity
    )


sized = st.lists(st.tuples(st.integers(0, 5), st.sampled_from([READ, WRITE, OVERWRITE])), max_size=30)


@given(sized, st.lists(st.integers(1, 9), min_size=6, max_size=6), st.integers(9, 40))
def test_bytes_moved_lie_between_what_must_and_what_can_be_moved(
    program: list[tuple[int, Mode]], sizes: list[int], capacity: int
) -> None:
    accesses = [BlockAccess([Operand(block, sizes[block], mode)]) for block, mode in program]
    moved = belady_bytes(accesses, capacity)
    first = {block: mode for block, mode in reversed(program)}
    assert moved.fetched >= sum(sizes[block] for block, mode in first.items() if mode != OVERWRITE)
    assert moved.fetched <= sum(sizes[block] for block, mode in program if mode != OVERWRITE)
    assert moved.written <= sum(sizes[block] for block, mode in program if mode != READ)
