"""Visits of members by the leading manager: decisions alone, under a clock that the tests set."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from farpool.abc.membership import MemberState
from farpool.cluster.leases.records import OrderRecord
from farpool.cluster.manager.deliveries import STRAY_AGE_S, Deliveries, Held, Reach, Report, Visit

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
LEASE = "1" * 32
UP = Reach(("tcp://10.0.0.1:7471",), MemberState.ACTIVE)
AWAY = Reach(UP.addresses, MemberState.SUSPECT)


def order(member: str, extent: int) -> OrderRecord:
    return OrderRecord(
        member=member, lease=LEASE, extent=extent, bytes=4096, tenant=1, medium="dram", epoch=2, reason="r", issued=0.0
    )


def deliveries(**settings: float) -> Deliveries:
    return Deliveries(random.Random(1), **{"look_interval": 1e9} | settings)  # type: ignore[arg-type]


def nothing(lease: str, member: str, extent: int) -> bool:
    return False


def test_each_member_has_one_visit_at_a_time_and_all_together_are_bounded() -> None:
    machine = deliveries(visits_max=2, orders_max=3)
    waiting = {member: [order(member, number) for number in range(5)] for member in (A, B, C)}
    members = dict.fromkeys(waiting, UP)
    visits = machine.due(waiting, members, 0.0)
    assert [(one.member, len(one.orders)) for one in visits] == [(A, 3), (B, 3)]
    assert machine.due(waiting, members, 1.0) == []
    machine.ended(Report(A, delivered=3), nothing, 1.0)
    waiting[A] = waiting[A][3:]
    # The member that no one has visited yet comes first.
    assert [one.member for one in machine.due(waiting, members, 1.0)] == [C]
    machine.ended(Report(B, delivered=3), nothing, 2.0)
    assert [one.member for one in machine.due(waiting, members, 2.0)] == [A]
    assert machine.delivered == 6


def test_a_member_that_is_away_is_tried_less_and_less_often_until_it_is_back() -> None:
    machine = deliveries()
    waiting, now, tried = {A: [order(A, 1)]}, 0.0, []
    while now < 1000.0:
        for visit in machine.due(waiting, {A: AWAY}, now):
            tried.append(now)
            machine.ended(Report(visit.member, error="it cannot be reached"), nothing, now)
        now += 0.25
    pauses = [after - before for before, after in itertools.pairwise(tried)]
    assert pauses[0] <= 1.25
    assert 40 < max(pauses) <= 60.25
    assert len(tried) < 30
    assert machine.failures(A) == machine.failed == len(tried)
    # It is tried at once when it is up again, and when it has another address.
    assert [one.member for one in machine.due(waiting, {A: UP}, now)] == [A]
    machine.ended(Report(A, error="it cannot be reached"), nothing, now)
    assert machine.due(waiting, {A: UP}, now) == []
    moved = Reach(("tcp://10.0.0.2:7471",), MemberState.ACTIVE)
    [visit] = machine.due(waiting, {A: moved}, now)
    assert visit.addresses == moved.addresses


def test_an_order_that_is_refused_waits_and_the_others_of_the_member_do_not() -> None:
    machine = deliveries()
    first, second = order(A, 1), order(A, 2)
    [visit] = machine.due({A: [first, second]}, {A: UP}, 0.0)
    assert visit.orders == (first, second)
    machine.ended(Report(A, delivered=1, refused={first.key: "its epoch is too low"}), nothing, 0.0)
    assert machine.held_back(0.5) == {first.key}
    assert machine.due({}, {A: UP}, 0.5) == []
    third = order(A, 3)
    [visit] = machine.due({A: [third]}, {A: UP}, 0.5)
    machine.ended(Report(A, delivered=1), nothing, 0.5)
    assert machine.held_back(1.5) == set()
    assert (machine.delivered, machine.refused) == (2, 1)


def test_the_orders_of_a_removed_member_and_of_a_damaged_one_wait_for_it() -> None:
    machine = deliveries()
    waiting = {A: [order(A, 1)], B: [order(B, 1)]}
    assert machine.due(waiting, {B: None}, 0.0) == []
    assert machine.due(waiting, {B: None}, 86_400.0) == []
    assert [one.member for one in machine.due(waiting, {A: UP, B: None}, 86_401.0)] == [A]
    assert [one.member for one in machine.due(waiting, {A: UP, B: UP}, 86_402.0)] == [B]


def test_a_manager_that_leads_no_longer_forgets_what_it_knew() -> None:
    machine = deliveries()
    waiting = {A: [order(A, 1)], B: [order(B, 1)]}
    assert len(machine.due(waiting, {A: UP, B: UP}, 0.0)) == 2
    machine.ended(Report(A, error="it cannot be reached"), nothing, 0.0)
    machine.rest()
    # Another visit of a member begins only after the first one has ended, even so.
    assert [one.member for one in machine.due(waiting, {A: UP, B: UP}, 0.1)] == [A]
    machine.rest()
    machine.ended(Report(B, refused={waiting[B][0].key: "no"}), nothing, 0.2)
    assert machine.held_back(0.2) == set()
    assert [one.member for one in machine.due(waiting, {A: UP, B: UP}, 0.2)] == [B]


def test_a_stray_ends_after_an_hour_without_a_valid_ticket() -> None:
    machine = deliveries(look_interval=100.0)
    named: set[int] = {1}

    def names(lease: str, member: str, extent: int) -> bool:
        assert (lease, member) == (LEASE, A)
        return extent in named

    held = [Held(LEASE, 1, 5, 0.0), Held(LEASE, 2, 5, 0.0), Held(LEASE, 3, 5, 100.0), Held(LEASE, 4, 5, 0.0)]
    now, ended = 0.0, []
    while now < 2 * STRAY_AGE_S:
        if now > STRAY_AGE_S / 2:
            named.add(4)  # a lease that came back
        if now > 1.5 * STRAY_AGE_S:
            held = [one if one.extent != 3 else Held(LEASE, 3, 5, -1.0) for one in held]
        for visit in machine.due({}, {A: UP}, now):
            ended += [(one.extent, now) for one in visit.strays]
            gone = {one.extent for one in visit.strays}
            held = [one for one in held if one.extent not in gone]
            machine.ended(Report(A, strays=len(gone), held=tuple(held) if visit.looks else None), names, now)
        now += 1.0
    assert [extent for extent, _ in ended] == [2, 3]
    assert ended[0][1] >= STRAY_AGE_S
    assert ended[1][1] >= 1.5 * STRAY_AGE_S
    assert machine.strays == 2


@pytest.mark.slow
def test_members_are_looked_at_now_and_then_and_not_all_at_once() -> None:
    machine = deliveries(look_interval=100.0, visits_max=1000)
    members = {f"{number:032x}": UP for number in range(300)} | {A: AWAY, B: None}
    looks: list[tuple[float, str]] = []
    for step in range(800):
        now = step / 4
        for visit in machine.due({}, members, now):
            assert visit.looks
            looks.append((now, visit.member))
            machine.ended(Report(visit.member, held=()), nothing, now)
    assert {member for now, member in looks if now <= 100.0} == members.keys() - {A, B}
    assert 300 <= len(looks) <= 700
    assert max(Counter(now for now, _ in looks).values()) < 20


class World:
    """Nodes that come and go, a registry's orders, and managers that lead one after another."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.members = [f"{number:032x}" for number in range(5)]
        self.orders = {
            one.key: one for number in range(40) for one in [order(self.random.choice(self.members), number)]
        }
        self.is_up = dict.fromkeys(self.members, True)
        self.removed: set[str] = set()
        self.ends = dict.fromkeys(self.orders, 0)
        self.visits: list[tuple[float, Deliveries, Visit]] = []
        self.machine = self.fresh()

    def fresh(self) -> Deliveries:
        return Deliveries(self.random, visits_max=2, orders_max=4, look_interval=50.0)

    def step(self, *, faulty: bool) -> None:
        self.now += 0.2
        if faulty:
            member = self.random.choice(self.members)
            self.is_up[member] = self.random.random() < 0.5
            if self.random.random() < 0.02:
                self.machine = self.fresh()  # another manager leads
            if self.random.random() < 0.02:
                self.removed ^= {member}
        members = {member: UP if self.is_up[member] else AWAY for member in self.members if member not in self.removed}
        waiting: dict[str, list[OrderRecord]] = {}
        for one in self.orders.values():
            if one.key not in self.machine.held_back(self.now):
                waiting.setdefault(one.member, []).append(one)
        for visit in self.machine.due(waiting, members, self.now):
            self.visits.append((self.now + self.random.choice([0.0, 0.3, 5.0]), self.machine, visit))
        own = [visit.member for _, machine, visit in self.visits if machine is self.machine]
        assert len(own) == len(set(own)) <= 2
        over = [one for one in self.visits if one[0] <= self.now]
        self.visits = [one for one in self.visits if one[0] > self.now]
        for _, machine, visit in over:
            machine.ended(self.carry_out(visit, faulty=faulty), nothing, self.now)

    def carry_out(self, visit: Visit, *, faulty: bool) -> Report:
        if not self.is_up[visit.member]:
            return Report(visit.member, error="it cannot be reached")
        done: Sequence[OrderRecord] = visit.orders
        error, refused = "", {}
        if faulty and self.random.random() < 0.3:
            done, error = done[: len(done) // 2], "the connection broke"
        elif faulty and self.random.random() < 0.3:
            done, refused = done[1:], {one.key: "not yet" for one in done[:1]}
        for one in done:
            self.ends[one.key] += 1
            self.orders.pop(one.key, None)
        return Report(visit.member, len(done), refused, held=() if visit.looks else None, error=error)


@pytest.mark.parametrize("seed", range(10))
def test_every_order_is_carried_out_whatever_happens_before(seed: int) -> None:
    world = World(seed)
    for _ in range(500):
        world.step(faulty=True)
    world.is_up = dict.fromkeys(world.members, True)
    world.removed.clear()
    for _ in range(1000):  # longer than the longest pause
        world.step(faulty=False)
    assert not world.orders
    assert all(world.ends.values())
