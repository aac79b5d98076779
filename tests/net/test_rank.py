"""Rendezvous order of nodes."""

from __future__ import annotations

from collections import Counter

from farpool._native import rank

SEEDS = [11, 222, 3333, 44444, 555555]


def test_every_node_has_one_rank_and_the_same_in_each_call() -> None:
    for number in range(100):
        key = b"key %d" % number
        assert sorted(rank(key, SEEDS)) == [0, 1, 2, 3, 4]
        assert rank(key, SEEDS) == rank(key, SEEDS)
    assert rank(b"key", []) == []


def test_a_node_that_leaves_changes_nothing_for_the_others() -> None:
    for number in range(200):
        key = b"key %d" % number
        order = [SEEDS[index] for index in rank(key, SEEDS)]
        for gone in SEEDS:
            rest = [seed for seed in SEEDS if seed != gone]
            assert [rest[index] for index in rank(key, rest)] == [seed for seed in order if seed != gone]


def test_keys_are_spread_evenly() -> None:
    first = Counter(rank(b"object/%d" % number, SEEDS)[0] for number in range(20_000))
    assert all(3600 < first[index] < 4400 for index in range(len(SEEDS)))
