from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from farpool.memory.pager import Mode
from farpool.memory.pager.belady import BlockAccess, Operand
from farpool.observe.reuse import quantiles, reuse_distances

READ, OVERWRITE = Mode.READ, Mode.OVERWRITE


def test_a_distance_is_the_distinct_bytes_since_the_use_before() -> None:
    accesses = [BlockAccess([Operand(block, nbytes, READ)]) for block, nbytes in ((1, 5), (2, 7), (2, 7), (1, 5))]
    assert reuse_distances(accesses) == {7: 7, 12: 5}


def test_an_overwrite_is_no_reuse() -> None:
    accesses = [BlockAccess([Operand(1, 5, mode)]) for mode in (READ, OVERWRITE, READ)]
    assert reuse_distances(accesses) == {5: 5}


def test_a_freed_block_counts_no_more_and_its_number_begins_again() -> None:
    accesses = [
        BlockAccess([Operand(1, 5, READ)]),
        BlockAccess([Operand(2, 7, READ)], freed=[2]),
        BlockAccess([Operand(2, 7, READ)], created=[2], freed=[2]),
        BlockAccess([Operand(1, 5, READ)]),
    ]
    assert reuse_distances(accesses) == {5: 5}


@given(st.lists(st.integers(0, 6), max_size=40))
def test_distances_are_those_of_a_stack_in_order_of_recency(blocks: list[int]) -> None:
    sizes = [3, 1, 4, 1, 5, 9, 2]
    expected: Counter[int] = Counter()
    stack: list[int] = []
    for block in blocks:
        if block in stack:
            expected[sum(sizes[other] for other in stack[stack.index(block) :])] += sizes[block]
            stack.remove(block)
        stack.append(block)
    assert reuse_distances([BlockAccess([Operand(block, sizes[block], READ)]) for block in blocks]) == expected


def test_quantiles_are_weighted_by_bytes() -> None:
    assert quantiles(Counter({10: 90, 100: 10}), (0.5, 0.9, 0.95, 1.0)) == [
        (0.5, 10),
        (0.9, 10),
        (0.95, 100),
        (1.0, 100),
    ]
    assert quantiles(Counter(), (0.5,)) == []
