"""The engine in a simulated cluster: what it restores, in which order and how fast, and what it never drops."""

from __future__ import annotations

import functools
import random

import pytest

from farpool.abc.membership import MemberState
from farpool.cluster.repair.messages import Held
from farpool.cluster.repair.rate import Bucket
from tests.repair.world import Member, World, lacking

KEYS = [b"key %d" % number for number in range(120)]


def filled(seed: int = 1, members: int = 5, copies: int = 2, **settings: object) -> World:
    world = World(seed, members, **settings)  # type: ignore[arg-type]
    for number, key in enumerate(KEYS):
        world.put(key, 1000 + number, copies)
    world.settle()
    return world


def member(world: World, number: int) -> Member:
    return list(world.members.values())[number]


def test_copies_of_a_lost_member_are_made_again_after_the_grace() -> None:
    world = filled()
    assert not world.started
    world.kill(member(world, 2), for_good=True)
    world.run(world.now + 4.0)
    assert not world.started  # it may come back
    world.settle()
    assert world.started
    assert not list(lacking(world))
    assert world.engine.counts.mended == world.engine.counts.endangered == len(world.started)


def test_a_member_that_restarts_within_the_grace_costs_nothing() -> None:
    world = filled()
    world.kill(member(world, 0), for_good=False)
    world.run(world.now + 3.0)
    world.come_back(member(world, 0))
    world.settle()
    assert not world.started
    assert not world.dropped


def test_a_draining_member_can_leave_after_its_objects_are_copied() -> None:
    world = filled(copies=1)
    leaving = member(world, 1)
    had = set(leaving.objects)
    world.set_state(leaving, MemberState.DRAINING)
    world.settle()
    assert set(leaving.objects) == had  # its copies are left alone
    world.remove(leaving)
    world.settle()
    assert world.all_keys() == set(KEYS)


def test_objects_move_to_a_member_that_joins_and_leave_the_others() -> None:
    world = filled(copies=2)
    joined = world.join(77)
    world.settle()
    assert len(KEYS) / 6 < len(joined.objects) < len(KEYS) * 2 / 3
    assert {len(world.holders(key)) for key in KEYS} == {2}
    assert world.engine.counts.moved == world.engine.counts.dropped == len(joined.objects)


def test_nothing_moves_without_rebalancing() -> None:
    world = filled(rebalances=False)
    world.join(77)
    world.settle()
    assert not world.started


def test_a_member_that_comes_back_late_makes_copies_surplus() -> None:
    world = filled()
    away = member(world, 3)
    world.kill(away, for_good=False)
    world.run(world.now + 20.0)
    world.settle()
    assert not list(lacking(world))
    world.come_back(away)
    world.settle()
    assert {len(world.holders(key)) for key in KEYS} == {2}


def test_what_would_be_lost_first_is_copied_first() -> None:
    world = World(3, 5, rate=5e4)
    for number, key in enumerate(KEYS):
        world.put(key, 1000, 3 if number % 2 else 2)
    world.settle()
    world.kill(member(world, 0), for_good=True)
    world.run(world.now + 6.0)
    world.kill(member(world, 1), for_good=True)
    begun = len(world.started)
    world.run(world.now + 6.0)
    world.settle()
    spare = [2 if int(order.key.split()[1]) % 2 else 1 for _, order in world.started[begun:]]
    assert not list(lacking(world))
    assert 1 in spare


def test_a_queue_that_overflows_is_filled_again_by_another_scan() -> None:
    world = filled(queue_max=5)
    world.kill(member(world, 2), for_good=True)
    world.settle()
    assert not list(lacking(world))
    assert world.engine.counts.scans > 2


def test_orders_that_never_end_time_out_and_are_given_again() -> None:
    world = filled(losses=0.5)
    world.kill(member(world, 2), for_good=True)
    world.settle()
    world.engine.scan()
    world.settle()
    assert not list(lacking(world))
    assert len(world.started) > world.engine.counts.copied > 0


def test_an_object_that_no_member_takes_is_given_up_with_its_reasons() -> None:
    world = filled(members=3, copies=2, losses=2.0, tries_max=3)
    world.kill(member(world, 0), for_good=True)
    world.settle()
    counts = world.engine.counts
    assert counts.left.keys() == set(lacking(world))
    assert {one.lacking for one in counts.left.values()} == {1}
    assert all("no answer within" in one.reasons[0] for one in counts.left.values())


def test_objects_that_lack_copies_are_counted_until_they_have_them() -> None:
    world = filled(members=3, copies=2, rate=2e4)
    assert world.engine.lacking == 0
    # Members move, and nothing lacks.
    world.join(77)
    world.run(world.now + 1.0)
    assert world.engine.lacking == 0
    world.settle()
    world.kill(member(world, 0), for_good=True)
    world.run(world.now + 7.0)
    assert 0 < world.engine.lacking <= len(KEYS)
    world.settle()
    assert world.engine.lacking == 0


def test_objects_count_as_lacking_copies_if_there_are_too_few_members() -> None:
    world = filled(members=2, copies=2)
    world.kill(member(world, 0), for_good=True)
    world.settle()
    assert not world.started  # nobody could take a copy
    assert world.engine.lacking == len(KEYS)
    world.join(77)
    world.settle()
    assert world.engine.lacking == 0


def test_failed_and_held_back_copies_count_as_lacking() -> None:
    world = filled(members=3, copies=2, losses=2.0, tries_max=3)
    world.kill(member(world, 0), for_good=True)
    world.settle()
    assert world.engine.lacking == len(world.engine.counts.left) > 0
    world = filled(members=3, copies=2, pressure=1e9)
    for one in world.members.values():
        world.engine.lost_copy(b"other", one.identity, world.now, evicted=True)
    world.kill(member(world, 1), for_good=True)
    world.settle()
    assert world.engine.lacking == len(list(lacking(world))) > 0


def test_a_member_lost_while_objects_move_leaves_no_object_unnoticed() -> None:
    # No order is answered, and all are under way while the scan looks at their objects.
    world = filled(members=2, copies=2, losses=2.0, tries_max=1, order_timeout=20.0)
    world.join(77)
    world.run(world.now + 1.0)
    assert len(world.engine._flights)
    world.kill(member(world, 0), for_good=True)
    world.settle()
    assert world.engine.counts.left.keys() == set(lacking(world)) == set(KEYS)
    assert world.engine.counts.endangered == world.engine.counts.failed == len(KEYS)


def test_a_member_lost_while_a_surplus_copy_is_dropped_leaves_no_object_unnoticed() -> None:
    world = World(1, 4, order_timeout=20.0)
    world.put(b"key", 1000, 2)
    extra = next(one for one in world.members.values() if one not in world.holders(b"key"))
    extra.objects[b"key"] = world.holders(b"key")[0].objects[b"key"]
    world._drop = lambda order, delay: world.dropped.append(order)  # type: ignore[method-assign]
    world.engine.scan()
    while not world.dropped:
        world.run(world.now + 0.1)
    del extra.objects[b"key"]
    world.kill(world.holders(b"key")[0], for_good=True)
    world.settle()
    assert not list(lacking(world))


def test_copies_that_might_be_evicted_do_not_go_to_members_that_evict() -> None:
    world = filled(members=3, copies=2, pressure=1e9)
    for one in world.members.values():
        world.engine.lost_copy(b"other", one.identity, world.now, evicted=True)
    world.put(b"kept", 10, 2, is_kept=True)
    world.kill(member(world, 1), for_good=True)
    world.settle()
    assert {order.key for _, order in world.started} <= {b"kept"}
    assert world.engine.counts.held_back > 0
    assert b"kept" not in set(lacking(world))


def test_a_copy_that_was_damaged_is_made_again_without_a_scan() -> None:
    world = filled()
    scans = world.engine.counts.scans
    holder = world.holders(KEYS[7])[0]
    world.lose(holder, KEYS[7], evicted=True)
    world.settle()
    assert len(world.holders(KEYS[7])) == 2
    assert world.engine.counts.scans == scans


def test_the_exposure_says_what_each_loss_would_cost() -> None:
    world = filled(copies=2)
    for key in KEYS[:10]:
        world.holders(key)[0].objects.pop(key)
    world.engine.scan()
    world.settle()
    exposure = world.engine.exposure()
    assert exposure is not None
    assert (exposure.objects, exposure.below) == (len(KEYS), 10)
    assert sum(loss.objects for loss in exposure.members.values()) == 10
    by_rack = {name: loss for (_, name), loss in exposure.labels.items()}
    for name, loss in by_rack.items():
        inside = [one for one in world.members.values() if one.info.labels["rack"] == name]
        assert loss.objects <= len(set().union(*(one.objects for one in inside)))
    assert exposure.nbytes == sum(1000 + number for number in range(len(KEYS)))


def test_a_kept_object_needs_copies_that_are_kept() -> None:
    world = filled()
    key = KEYS[0]
    first, second = world.holders(key)
    first.objects[key] = Held(key, 1000, 2, is_kept=True)
    world.engine.scan()
    world.settle()
    assert [one.objects[key].is_kept for one in world.holders(key)] == [True, True]
    assert set(map(id, world.holders(key))) == {id(first), id(second)}


def test_the_bucket_allows_its_rate() -> None:
    bucket = Bucket(100.0)
    taken, now = 0.0, 0.0
    while now < 10.0:
        delay = bucket.delay(now)
        if delay:
            now += delay
        else:
            bucket.take(30.0)
            taken += 30.0
    assert 0.95 * 1000 <= taken <= 1000 + 25 + 30
    assert Bucket(None).delay(0.0) == 0.0


@functools.cache
def disturbed(seed: int) -> World:
    """A world in which everything happens at once for a while. Several tests look at it and change nothing."""
    chance = random.Random(seed)
    world = World(seed, 5, rate=2e5, losses=chance.choice([0.0, 0.1, 0.3]), queue_max=chance.choice([10, 1000]))
    joined = iter(range(100, 200))
    for number in range(60):
        world.put(
            b"%d" % number, chance.randrange(1, 20_000), chance.choice([1, 2, 2, 3]), is_kept=chance.random() < 0.2
        )
    for number in range(40):
        world.run(world.now + chance.uniform(0.0, 3.0))
        one = chance.choice(list(world.members.values()))
        up = [each for each in world.members.values() if each.is_up and each.info.state is MemberState.ACTIVE]
        what = chance.randrange(8)
        if what == 0 and len(up) > 3:
            world.kill(one, for_good=chance.random() < 0.3)
        elif what == 1 and not one.is_up:
            world.come_back(one)
        elif what == 2 and len(up) > 3 and one.is_up:
            world.set_state(one, MemberState.DRAINING)
        elif what == 3 and one.is_up:
            world.set_state(one, MemberState.ACTIVE)
        elif what == 4 and len(world.members) < 8:
            world.join(next(joined))
        elif what == 5 and not one.is_up and not one.objects:
            world.remove(one)
        elif what == 6 and one.objects:
            world.lose(one, chance.choice(sorted(one.objects)), evicted=True)
        else:
            world.put(b"new %d" % number, chance.randrange(20_000), 2)
    world.losses = 0.0
    for one in list(world.members.values()):
        if not one.is_up and one.objects:
            world.come_back(one)
    world.settle()
    world.engine.scan()
    world.settle()
    return world


@pytest.mark.parametrize("seed", range(16))
def test_whatever_happens_all_copies_are_there_at_the_end(seed: int) -> None:
    world = disturbed(seed)
    assert not list(lacking(world))
    if world.started:
        world.check_rate()
    extra = [
        key
        for key in world.all_keys()
        if len(world.counting(key)) > max(one.objects[key].copies for one in world.holders(key))
    ]
    assert not extra


@pytest.mark.slow
def test_the_simulation_sees_what_it_is_for() -> None:
    worlds = [disturbed(seed) for seed in range(6)]
    assert sum(len(world.started) for world in worlds) > 50
    assert sum(len(world.dropped) for world in worlds) > 5
