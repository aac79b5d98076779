"""The members that give the bytes of a lease."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool.cluster.leases.offers import Lender, Part, in_order, largest, place
from farpool.cluster.leases.records import EXTENTS_MAX, GRAIN_BYTES

G = GRAIN_BYTES
LABELS = ("rack", "row")


@st.composite
def fleets(draw: st.DrawFn, *, is_nested: bool = False) -> list[Lender]:
    """Some members; if `is_nested`, each rack is in one row."""
    lenders = []
    for number in range(draw(st.integers(0, 7))):
        rack = draw(st.integers(0, 3))
        labels = {"rack": f"r{rack}", "row": f"w{rack // 2 if is_nested else draw(st.integers(0, 2))}"}
        if draw(st.integers(0, 9)) == 0:
            del labels["rack"]
        free = draw(st.integers(0, 6)) * G + draw(st.sampled_from([0, 1, G - 1]))
        lenders.append(Lender(f"m{number}", free, 1.0, labels))
    return lenders


SPREADS = st.sampled_from([(), ("rack",), ("row",), ("rack", "row")])


def check(parts: list[Part], lenders: list[Lender], size: int, copies: int, spread: tuple[str, ...]) -> None:
    by_name = {one.member: one for one in lenders}
    assert sum(part.bytes for part in parts) == size
    assert len(parts) * copies <= EXTENTS_MAX
    used: dict[str, int] = {}
    for part in parts:
        assert part.bytes > 0
        assert part.bytes % G == 0
        assert len(set(part.members)) == copies == len(part.members)
        for member in part.members:
            used[member] = used.get(member, 0) + part.bytes
        if copies > 1:
            for label in spread:
                values = [by_name[member].labels[label] for member in part.members]
                assert len(set(values)) == copies
    assert all(size <= by_name[member].free for member, size in used.items())


@given(fleets(), st.integers(1, 20), st.integers(1, 3), SPREADS)
@settings(max_examples=120, deadline=None)
def test_parts_have_the_bytes_and_keep_copies_apart(
    lenders: list[Lender], pages: int, copies: int, spread: tuple[str, ...]
) -> None:
    parts = place(lenders, pages * G, copies, spread)
    if parts is not None:
        check(parts, lenders, pages * G, copies, spread)
    assert place(lenders, pages * G, copies, spread) == parts


@given(fleets(), st.integers(1, 3), SPREADS)
@settings(max_examples=120, deadline=None)
def test_the_largest_offer_can_be_placed(lenders: list[Lender], copies: int, spread: tuple[str, ...]) -> None:
    most = largest(lenders, copies, spread)
    if most:
        parts = place(lenders, most, copies, spread)
        assert parts is not None
        check(parts, lenders, most, copies, spread)
    assert place(lenders, most + G, copies, spread) is None


def possible(lenders: list[Lender], pages: int, copies: int, spread: tuple[str, ...]) -> bool:
    """Search all ways to place bytes, page by page."""
    able = [one for one in lenders if copies == 1 or all(label in one.labels for label in spread)]
    groups = [
        chosen
        for chosen in itertools.combinations(range(len(able)), copies)
        if copies == 1 or all(len({able[index].labels[label] for index in chosen}) == copies for label in spread)
    ]
    seen = set()

    def search(free: tuple[int, ...], left: int) -> bool:
        if left == 0:
            return True
        if (free, left) in seen:
            return False
        seen.add((free, left))
        return any(
            search(tuple(pages - (index in group) for index, pages in enumerate(free)), left - 1)
            for group in groups
            if all(free[index] for index in group)
        )

    return search(tuple(one.free // G for one in able), pages)


@given(fleets(is_nested=True), st.integers(1, 3), SPREADS)
@settings(max_examples=80, deadline=None)
def test_no_way_to_place_more_exists(lenders: list[Lender], copies: int, spread: tuple[str, ...]) -> None:
    lenders = lenders[:5]
    assert not possible(lenders, largest(lenders, copies, spread) // G + 1, copies, spread)


def test_bytes_that_fit_on_one_member_are_not_cut() -> None:
    lenders = [Lender("a", 4 * G), Lender("b", 8 * G)]
    assert place(lenders, 6 * G, 1, ()) == [Part(6 * G, ("b",))]
    assert place(lenders, 9 * G, 1, ()) == [Part(8 * G, ("b",)), Part(G, ("a",))]


def test_labels_that_cut_across_each_other_still_give_a_group() -> None:
    lenders = [
        Lender("a", G, 1.0, {"rack": "1", "row": "1"}),
        Lender("b", G, 1.0, {"rack": "1", "row": "2"}),
        Lender("c", G, 1.0, {"rack": "2", "row": "2"}),
    ]
    assert place(lenders, G, 2, LABELS) == [Part(G, ("a", "c"))]
    assert largest(lenders, 2, LABELS) == G


@pytest.mark.parametrize("copies", [1, 2])
def test_a_lease_over_many_members_stays_within_its_extents(copies: int) -> None:
    lenders = [Lender(f"m{number:03}", (1 + number % 7) * G) for number in range(200)]
    most = largest(lenders, copies, ())
    parts = place(lenders, most, copies, ())
    assert parts is not None
    check(parts, lenders, most, copies, ())
    assert most >= EXTENTS_MAX // copies * 5 * G


def test_members_with_more_weight_and_more_free_bytes_come_first_more_often() -> None:
    first = {"a": 0, "b": 0, "c": 0}
    for seed in range(600):
        lenders = [Lender("a", 8 * G, 1.0), Lender("b", 8 * G, 0.25), Lender("c", 4 * G, 0.5), Lender("d", 8 * G, 0.0)]
        order = in_order(lenders, seed.to_bytes(4, "big"))
        assert order == in_order(lenders, seed.to_bytes(4, "big"))
        first[order[0].member] += 1
    assert first["a"] > 2 * first["b"]
    assert first["a"] > 2 * first["c"]
    assert min(first.values()) > 60
