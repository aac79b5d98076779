"""Rendezvous order of members."""

from __future__ import annotations

from collections import Counter

import pytest

from farpool._native import Ranking

NAMES = ("a", "b", "c", "d", "e")
SEEDS = [11, 222, 3333, 44444, 555555]
EARLIER = ["baedc", "dbcea", "aecbd", "acbed"]
"""Orders of the first keys, computed by the release before `Ranking`."""


def ranking(seeds: list[int], weights: list[float] | None = None, takers: int | None = None) -> Ranking:
    names = tuple(NAMES[SEEDS.index(seed)] for seed in seeds)
    return Ranking(names, seeds, weights or [1.0] * len(seeds), len(seeds) if takers is None else takers)


def test_every_member_has_one_rank_and_the_same_in_each_call() -> None:
    ranks = ranking(SEEDS)
    for number in range(100):
        key = b"key %d" % number
        assert sorted(ranks.order(key)) == list(NAMES)
        assert ranks.order(key) == ranks.order(key) == ranks.places(key)
        assert ranks.first(key) == ranks.order(key)[0]
    assert ranking([]).order(b"key") == []
    with pytest.raises(ValueError, match="no member"):
        ranking([]).first(b"key")


def test_a_member_that_leaves_changes_nothing_for_the_others() -> None:
    for number in range(200):
        key = b"key %d" % number
        order = ranking(SEEDS).order(key)
        for gone, name in zip(SEEDS, NAMES, strict=True):
            rest = ranking([seed for seed in SEEDS if seed != gone])
            assert rest.order(key) == [one for one in order if one != name]


def test_the_order_is_the_one_of_earlier_releases() -> None:
    """Else programs of two releases would look for an object on different nodes."""
    assert ["".join(ranking(SEEDS).order(b"key %d" % number)) for number in range(4)] == EARLIER


def test_keys_are_spread_evenly() -> None:
    first = Counter(ranking(SEEDS).first(b"object/%d" % number) for number in range(20_000))
    assert all(3600 < first[name] < 4400 for name in NAMES)


def test_keys_are_spread_by_weight() -> None:
    ranks = ranking(SEEDS, [1.0, 2.0, 1.0, 0.0, 4.0])
    first = Counter(ranks.first(b"object/%d" % number) for number in range(16_000))
    for name, share in zip(NAMES, [2000, 4000, 2000, 0, 8000], strict=True):
        assert abs(first[name] - share) <= 250, first
    assert all(ranks.order(b"object/%d" % number)[-1] == "d" for number in range(200))


def test_a_weight_that_all_share_changes_no_order() -> None:
    assert all(
        ranking(SEEDS, [3.0] * 5).order(b"%d" % number) == ranking(SEEDS).order(b"%d" % number) for number in range(200)
    )


def test_members_that_take_nothing_rank_behind_the_others() -> None:
    ranks = ranking(SEEDS, takers=3)
    for number in range(200):
        key = b"key %d" % number
        assert ranks.places(key) == ranking(SEEDS[:3]).order(key)
        assert ranks.order(key) == ranks.places(key) + ranking(SEEDS[3:]).order(key)
        assert ranks.first(key) == ranks.places(key)[0]
    only = ranking(SEEDS[:2], takers=0)
    assert only.places(b"key") == []
    assert only.first(b"key") == ranking(SEEDS[:2]).first(b"key")


@pytest.mark.parametrize("count", [1, 2, 5])
def test_keys_are_grouped_by_their_first_member(count: int) -> None:
    ranks = ranking(SEEDS[:count])
    keys = [b"key %d" % number for number in range(50)]
    groups = ranks.by_first(keys)
    assert {name: list(numbers) for name, numbers in groups.items()} == {
        name: own
        for name in NAMES[:count]
        if (own := [number for number, key in enumerate(keys) if ranks.first(key) == name])
    }
    assert ranking([]).by_first(keys) == {}


def test_a_ranking_needs_a_seed_and_a_weight_for_each_member() -> None:
    for seeds, weights, takers in (([1], [1.0, 1.0], 2), ([1, 2], [1.0], 2), ([1, 2], [1.0, 1.0], 3)):
        with pytest.raises(ValueError, match="one seed and one weight"):
            Ranking(("a", "b"), seeds, weights, takers)
