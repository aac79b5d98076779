"""Copies on few distinct groups of members: how many groups, what a loss costs, what a join moves, and repair."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool._native import Ranking
from farpool.abc.membership import MemberInfo
from farpool.abc.redundancy import Redundancy
from farpool.cluster.redundancy import Copies, Copysets
from farpool.cluster.repair.exposure import Exposure
from farpool.cluster.repair.roster import Roster
from farpool.errors import ConfigError
from farpool.testing import RedundancyConformance
from tests.nodes import eventually
from tests.store.local_nodes import LocalNode, Nodes, store_over
from tests.store.test_members import Listed, held

KEYS = [b"key %d" % number for number in range(3000)]


class TestCopysets(RedundancyConformance):
    def make(self) -> Redundancy:
        return Copysets(3, 2)


class TestSpreadCopysets(RedundancyConformance):
    def make(self) -> Redundancy:
        return Copysets(2, 4, spread="rack")


def infos(count: int, seed: int = 0, racks: int = 1) -> list[MemberInfo]:
    dice = random.Random(seed)
    return [
        MemberInfo((f"tcp://n{number}:7471",), dice.randbytes(16), labels={"rack": f"r{number % racks}"})
        for number in range(count)
    ]


class Placement:
    """Places of objects on members, as a store and as repair compute them."""

    def __init__(self, redundancy: Redundancy, members: Sequence[MemberInfo]) -> None:
        self.redundancy = redundancy
        self.roster = Roster(redundancy, 30.0, 60.0)
        self.roster.update(members, 0.0)

    def group(self, key: bytes) -> tuple[bytes, ...]:
        return tuple(self.roster.places(self.roster.order(key), self.redundancy.parts))

    def groups(self, keys: Sequence[bytes] = KEYS) -> dict[bytes, tuple[bytes, ...]]:
        return {key: self.group(key) for key in keys}


def distinct(placement: Placement) -> set[frozenset[bytes]]:
    return {frozenset(group) for group in placement.groups().values()}


@settings(max_examples=30, deadline=None)
@given(
    count=st.integers(1, 24),
    parts=st.integers(2, 5),
    rings=st.integers(1, 4),
    seed=st.integers(0, 1000),
    racks=st.integers(1, 6),
    spread=st.sampled_from(["", "rack", "no such label"]),
)
def test_groups_scatter_and_labels_stay_within_their_bounds(
    count: int, parts: int, rings: int, seed: int, racks: int, spread: str
) -> None:
    members = infos(count, seed, racks)
    redundancy = Copysets(parts, rings, spread=spread)
    groups = set(Placement(redundancy, members).groups(KEYS[:200]).values())
    assert len({frozenset(group) for group in groups}) <= rings * count
    others: dict[bytes, set[bytes]] = defaultdict(set)
    labels = {one.identity: one.labels["rack"] for one in members}
    for group in groups:
        assert len(set(group)) == min(parts, count)
        for member in group:
            others[member] |= set(group) - {member}
        if spread == "rack":
            assert len({labels[member] for member in group}) == min(parts, racks, count)
    if spread != "rack":
        assert all(len(own) <= 2 * rings * (parts - 1) for own in others.values())


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2, 12), seed=st.integers(0, 1000), key=st.binary(min_size=1, max_size=20))
def test_the_group_depends_on_the_first_member_and_the_set_of_the_others(count: int, seed: int, key: bytes) -> None:
    roster = Roster(Copysets(2), 30.0, 60.0)
    roster.update(infos(count, seed), 0.0)
    order = roster.order(key)
    again = Roster(Copysets(2), 30.0, 60.0)
    again.update(list(reversed(infos(count, seed))), 0.0)
    assert again.order(key) == order
    assert sorted(order) == sorted(one.identity for one in infos(count, seed))


def test_fewer_losses_of_three_members_lose_objects_than_with_plain_copies() -> None:
    members = infos(12)
    identities = [one.identity for one in members]
    few, many = distinct(Placement(Copysets(3, 1), members)), distinct(Placement(Copies(3), members))
    assert len(few) <= 12
    assert len(many) > 200  # of 220: 3000 objects have nearly all groups
    lost = sum(any(group <= set(gone) for group in few) for gone in combinations(identities, 3))
    assert lost == len(few)  # so the probability is the number of groups over C(N, R)
    for failed in (3, 4, 5, 6):
        fatal = sum(any(group <= set(gone) for group in few) for gone in combinations(identities, failed))
        bound = len(few) * math.comb(failed, 3) / math.comb(12, 3)
        assert fatal / math.comb(12, failed) <= bound + 1e-12


@pytest.mark.parametrize("parts", [2, 3])
def test_a_join_moves_at_most_twice_the_copies_that_it_would_move_with_plain_copies(parts: int) -> None:
    members = infos(20, seed=3)

    def moved(redundancy: Redundancy) -> int:
        before, after = (Placement(redundancy, some).groups() for some in (members[:-1], members))
        return sum(len(set(after[key]) - set(before[key])) for key in KEYS)

    plain = moved(Copies(parts))
    assert 0.6 * parts / 20 < plain / len(KEYS) < 1.4 * parts / 20
    assert plain < moved(Copysets(parts, 2)) < 2.4 * plain


def test_the_first_member_follows_the_weights_and_the_load_is_even_with_equal_ones() -> None:
    members = infos(10, seed=5)
    load: dict[bytes, int] = defaultdict(int)
    for group in Placement(Copysets(3, 4), members).groups().values():
        for member in group:
            load[member] += 1
    assert max(load.values()) < 1.2 * min(load.values())


def test_lost_and_leaving_members_are_replaced_by_the_next_on_the_ring_so_groups_stay_few() -> None:
    members = infos(12, seed=7)
    placement = Placement(Copysets(3, 1), members)
    before = placement.groups()
    gone = members[4].identity
    placement.roster.unheard(gone, 1.0)
    placement.roster.lapse(100.0)
    after = placement.groups()
    assert len({frozenset(group) for group in after.values()}) <= 12
    for key in KEYS:
        assert gone not in after[key]
        assert len(set(before[key]) - set(after[key])) <= 1  # only the copy that was lost is made again


def test_exposure_counts_the_same_groups() -> None:
    members = infos(6, seed=11)
    labels = {one.identity: dict[str, str](one.labels) for one in members}
    few, many = Exposure(), Exposure()
    for exposure, redundancy in ((few, Copysets(2, 1)), (many, Copies(2))):
        for group in Placement(redundancy, members).groups().values():
            exposure.add(10, 2, {member: labels[member] for member in group}, group)
    assert few.groups == len(distinct(Placement(Copysets(2, 1), members))) == 6
    assert many.groups == math.comb(6, 2)
    assert few.objects == many.objects == len(KEYS)
    assert all(loss.objects == 0 for loss in few.members.values())


def named(nodes: Sequence[LocalNode]) -> Listed:
    return Listed(*[MemberInfo((node.name,), node.identity) for node in nodes])


@pytest.mark.parametrize("knows", [True, False], ids=["listed-identities", "addresses"])
@pytest.mark.slow
def test_a_store_and_its_repair_put_copies_on_the_groups(local: Nodes, knows: bool) -> None:
    nodes, redundancy = local(6), Copysets(2, 1)
    keys = [f"key {number}" for number in range(80)]
    with store_over(nodes, redundancy=redundancy, members=named(nodes) if knows else None) as store:
        store.put_many((key, key.encode()) for key in keys)

        def groups() -> dict[str, frozenset[int]]:
            return {key: frozenset(n for n, node in enumerate(nodes) if key.encode() in held(node)) for key in keys}

        before = groups()
        assert all(len(group) == 2 for group in before.values())
        assert len(set(before.values())) <= 6
        assert store.repair().endangered == 0  # it wants the copies where they are
        if not knows:
            return
        nodes[0].replace()
        store._cluster._membership.set(*named(nodes).members())  # type: ignore[union-attr,attr-defined]
        eventually(lambda: store._cluster.snapshot.is_settled)  # type: ignore[union-attr]
        assert store.repair().mended == sum(0 in group for group in before.values()) > 0
        assert store.get_many(keys) == [key.encode() for key in keys]


def test_a_ranking_puts_the_first_member_first() -> None:
    members = infos(7)
    roster = Roster(Copysets(3, 3), 30.0, 60.0)
    roster.update(members, 0.0)
    ordered = sorted(one.identity for one in members)
    ranking = Ranking(tuple(ordered), [int.from_bytes(one[:8], "little") for one in ordered], [1.0] * 7, 7)
    assert all(roster.order(key)[0] == ranking.places(key)[0] for key in KEYS[:200])


@pytest.mark.parametrize(("parts", "rings"), [(1, 1), (2, 0), (2, 65), (2, 1.5), (256, 1)])
def test_wrong_numbers_are_refused(parts: int, rings: int) -> None:
    with pytest.raises(ConfigError):
        Copysets(parts, rings)
