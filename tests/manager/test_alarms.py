"""Alarms: decisions alone, under a clock that the tests set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from farpool.cluster.manager.alarms import Alarms, Answer, Kind, Limits, Repair, Seen
from farpool.cluster.manager.records import AlarmRecord

A, B, C = ("a" * 32, "b" * 32, "c" * 32)
NAMES = {A: "n1", B: "n2", C: "n3"}
LOOK_S = 5.0
WALL = 1_700_000_000.0


class Pool:
    """A pool that looks at itself every 5 seconds, and the entries of its registry."""

    def __init__(self, members: int = 2) -> None:
        self.machine = Alarms()
        self.raised: dict[tuple[str, str], AlarmRecord] = {}
        self.now, self.wall = 1000.0, WALL
        self.members = dict(list(NAMES.items())[:members])
        self.counters: dict[str, dict[str, float]] = {
            member: dict.fromkeys(
                ("full", "evictions", "demotions", "drops", "expired", "incompatible", "nvme_written", "state"), 0.0
            )
            for member in self.members
        }
        self.tenants: dict[str, dict[int, dict[str, int]]] = {member: {} for member in self.members}
        self.clocks = dict.fromkeys(self.members, 0.0)
        self.repairs: dict[int, Repair] = {}
        self.policy: int | None = 0
        self.silent: set[str] = set()
        self.history: list[tuple[str, str, str]] = []

    def look(self, times: int = 1, seconds: float = LOOK_S) -> set[tuple[str, str]]:
        """Look several times; return the kinds and subjects of the raised alarms."""
        for _ in range(times):
            self.now += seconds
            self.wall += seconds
            for change in self.machine.look(self._seen(), self.raised):
                self.history.append(("raised" if change.record else "cleared", *change.key))
                if change.record is None:
                    del self.raised[change.key]
                else:
                    assert change.key not in self.raised
                    self.raised[change.key] = change.record
        return set(self.raised)

    def lead_anew(self) -> None:
        """Another manager leads from now on. It knows the registry's entries and nothing else."""
        self.machine = Alarms()

    def text(self, kind: Kind, subject: str) -> str:
        return self.raised[str(kind), subject].text

    def _seen(self) -> Seen:
        answers = {}
        for member in self.members.keys() - self.silent:
            clock = {"clock": self.wall + self.clocks[member], "clock_monotonic": self.now}
            counters: Mapping[str, float] = {**self.counters[member], **clock}
            tenants = {number: dict(counts) for number, counts in self.tenants[member].items()}
            answers[member] = Answer(self.wall, counters, tenants)
        return Seen(
            now=self.now,
            wall=self.wall,
            manager="m1",
            members=self.members,
            answers=answers,
            repairs=self.repairs,
            policy=self.policy,
        )

    def add(self, member: str, tenant: int, **counts: int) -> None:
        known = self.tenants[member].setdefault(tenant, {"puts": 0, "asked": 0, "found": 0, "readers": 0})
        for name, count in counts.items():
            known[name] += count


def test_a_healthy_pool_raises_nothing() -> None:
    pool = Pool(3)
    pool.repairs = {0: Repair()}
    pool.policy = 7
    for number in range(200):
        for member in pool.members:
            counters = pool.counters[member]
            counters["policy_revision"] = 7
            counters["full"] += 1
            counters["evictions"] += 5
            pool.add(member, 0, puts=100, asked=200, found=number % 3)
        assert pool.look() == set()


def add_traffic(pool: Pool, *, found: int = 0) -> None:
    pool.add(A, 3, puts=10, asked=20, found=found)
    pool.add(B, 3, puts=10, asked=20)


def test_lookups_that_never_find_anything_raise_an_alarm_until_they_find_something() -> None:
    pool = Pool()
    add_traffic(pool)
    pool.look()
    raised_at = 0
    while not pool.raised:
        add_traffic(pool)
        pool.look()
        raised_at += 1
        assert raised_at < 100
    assert pool.look() == {("no-hits", "tenant-3")}
    assert raised_at >= 5  # at 20 puts for each look
    assert "not one key was found" in pool.text(Kind.NO_HITS, "tenant-3")
    # One hit among thousands does not end it, and many do.
    for _ in range(10):
        add_traffic(pool, found=int(_ == 0))
        pool.look()
    assert pool.raised
    for _ in range(10):
        add_traffic(pool, found=10)
        pool.look()
    assert not pool.raised
    assert pool.history == [("raised", "no-hits", "tenant-3"), ("cleared", "no-hits", "tenant-3")]


def test_a_tenant_that_only_puts_or_only_looks_up_has_no_alarm() -> None:
    pool = Pool()
    for _ in range(100):
        pool.add(A, 1, puts=100)
        pool.add(A, 2, asked=100)
        assert pool.look() == set()


def test_hits_of_programs_that_map_the_objects_are_unknown_and_not_zero() -> None:
    pool = Pool()
    pool.add(A, 3, readers=1)
    for _ in range(100):
        pool.add(A, 3, puts=100, asked=100)
        assert pool.look() == set()


def test_lookups_of_repair_count_for_no_tenant() -> None:
    pool = Pool()
    asked = 0
    for _ in range(100):
        asked += 200
        pool.add(A, 3, puts=100, asked=200)
        pool.repairs = {3: Repair(asked=asked)}
        assert pool.look() == set()


def test_the_alarm_about_hits_ends_for_a_tenant_that_is_quiet() -> None:
    pool = Pool()
    for _ in range(20):
        add_traffic(pool)
        pool.look()
    assert pool.raised
    pool.lead_anew()
    assert pool.look(100)
    assert not pool.look(200)


def test_objects_below_their_redundancy_raise_an_alarm_after_a_minute() -> None:
    pool = Pool()
    pool.add(A, 0)
    pool.repairs = {0: Repair(lacking=3, progress=1)}
    assert pool.look(12) == set()  # a node that restarts takes less than that
    pool.repairs = {0: Repair(lacking=0, progress=2)}
    assert pool.look() == set()
    pool.repairs = {0: Repair(lacking=3, progress=3)}
    assert pool.look(12) == set()  # the minute begins again
    assert pool.look(2) == {("too-few-copies", "tenant-0")}
    assert "3 objects have fewer copies" in pool.text(Kind.TOO_FEW_COPIES, "tenant-0")
    pool.lead_anew()
    pool.repairs = {}  # the new leader has not scanned yet
    assert pool.look(100) == {("too-few-copies", "tenant-0")}
    pool.repairs = {0: Repair(lacking=0, progress=1)}
    assert pool.look(4) == set()


def test_repair_without_progress_raises_an_alarm_until_it_goes_on() -> None:
    pool = Pool()
    for number in range(100):  # slow, and it goes on
        pool.repairs = {0: Repair(lacking=9, progress=number)}
        assert ("repair-stuck", "tenant-0") not in pool.look()
    assert ("repair-stuck", "tenant-0") not in pool.look(35)
    assert ("repair-stuck", "tenant-0") in pool.look(2)
    pool.lead_anew()
    assert ("repair-stuck", "tenant-0") in pool.look(30)
    for number in range(20):
        pool.repairs = {0: Repair(lacking=9, progress=number)}
        pool.look()
    assert ("repair-stuck", "tenant-0") not in pool.raised


def test_copies_that_fail_raise_an_alarm_with_the_reason() -> None:
    pool = Pool()
    pool.repairs = {0: Repair(lacking=1, failed=1, reason="n2: the node is full")}
    pool.look(2)
    assert pool.text(Kind.REPAIR_STUCK, "tenant-0") == "the copies of 1 objects could not be made: n2: the node is full"
    pool.repairs = {0: Repair(lacking=1, progress=1)}  # the next scan tries again
    pool.look(2)
    pool.repairs = {0: Repair(lacking=1, failed=1, progress=2, reason="n2: the node is full")}
    pool.look(2)
    assert [one for one in pool.history if one[1] == "repair-stuck"] == [("raised", "repair-stuck", "tenant-0")]


def test_puts_that_are_refused_while_nothing_is_evicted_raise_an_alarm() -> None:
    pool = Pool()
    pool.look()
    for _ in range(4):
        pool.counters[A]["full"] += 2
        pool.look()
    assert set(pool.raised) == {("eviction-stuck", A)}
    assert "refused 8 requests for want of room" in pool.text(Kind.EVICTION_STUCK, A)
    pool.lead_anew()
    assert pool.look(2)  # no program has asked again yet
    pool.counters[A]["evictions"] += 1
    assert pool.look() == set()


def test_the_alarm_about_eviction_ends_if_no_program_asks_for_room() -> None:
    pool = Pool()
    pool.look()
    for _ in range(6):
        pool.counters[A]["full"] += 2
        pool.look()
    assert pool.raised
    assert pool.look(5)
    assert pool.look(10) == set()


def test_refusals_far_apart_are_no_stuck_eviction() -> None:
    pool = Pool()
    for _ in range(10):
        pool.counters[A]["full"] += 1
        assert pool.look(20) == set()


def test_a_node_that_drains_refuses_puts_without_an_alarm() -> None:
    pool = Pool()
    pool.counters[A]["state"] = 1
    for _ in range(20):
        pool.counters[A]["full"] += 2
        assert pool.look() == set()


def test_objects_that_never_reach_the_nvme_file_raise_an_alarm() -> None:
    pool = Pool()
    pool.counters[A]["nvme_leaving"] = 1 << 20
    for _ in range(50):
        pool.counters[A]["nvme_written"] += 4096
        assert pool.look() == set()
    assert pool.look(20) == {("eviction-stuck", A)}
    pool.counters[A]["nvme_written"] += 4096
    assert pool.look() == set()


def test_a_policy_older_than_the_registrys_raises_an_alarm() -> None:
    pool = Pool()
    pool.policy = 9
    for member in pool.members:
        pool.counters[member]["policy_revision"] = 9
    assert pool.look(10) == set()
    pool.policy = 12  # a node takes it over within a second or two
    assert pool.look(2) == set()
    pool.counters[A]["policy_revision"] = 12
    assert pool.look(5) == {("old-policy", B)}
    assert "applies revision 9" in pool.text(Kind.OLD_POLICY, B)
    pool.policy = None  # the entry is damaged, so nothing is known
    assert pool.look(5) == {("old-policy", B)}
    pool.policy = 12
    pool.counters[B]["policy_revision"] = 12
    assert pool.look() == set()
    pool.counters[B]["policy_silence"] = 61.0
    assert pool.look(4) == {("old-policy", B)}


def test_a_clock_that_jumps_raises_an_alarm_for_a_minute() -> None:
    pool = Pool(3)
    assert pool.look(5) == set()
    pool.clocks[A] = 1.0  # as much as a slow answer may make of it
    assert pool.look() == set()
    pool.clocks[A] = 3600.0
    assert pool.look() == {("clock", A)}
    assert "3600.0 s ahead" in pool.text(Kind.CLOCK, A)
    pool.lead_anew()
    assert pool.look(20) == {("clock", A)}
    pool.clocks[A] = 0.0  # it jumps back
    assert pool.look(11) == {("clock", A)}
    assert pool.look(3) == set()


def test_the_clock_of_the_manager_is_compared_with_those_of_the_members() -> None:
    pool = Pool(3)
    pool.look()
    pool.wall += 100.0
    pool.clocks = dict.fromkeys(pool.members, -100.0)
    assert pool.look() == {("clock", "m1")}
    assert pool.raised["clock", "m1"].about == "manager m1"


def test_a_node_that_reports_half_of_its_clock_has_no_alarm() -> None:
    pool = Pool()
    pool.silent = {B}
    seen = pool._seen()
    broken = {name: value for name, value in seen.answers[A].counters.items() if name != "clock_monotonic"}
    answers = {A: Answer(WALL, {**broken, "clock": 0.0})}
    for _ in range(2):
        assert pool.machine.look(replace(seen, answers=answers), {}) == []


def test_a_reboot_is_no_jump_of_a_clock() -> None:
    pool = Pool()
    pool.look()
    before = pool.machine._members[A].answer
    assert before is not None
    pool.machine._members[A].answer = Answer(
        before.at, {**before.counters, "clock_monotonic": before.counters["clock_monotonic"] + 1e6}
    )
    assert pool.look() == set()


def test_a_member_that_is_lost_three_times_flaps_until_it_stays() -> None:
    pool = Pool()
    for _ in range(2):
        pool.machine.lost(A, pool.now)
        pool.machine.lost(B, pool.now)
        assert pool.look(3) == set()
    pool.machine.lost(A, pool.now)
    assert pool.look() == {("flapping", A)}
    assert "3 times in 600 s" in pool.text(Kind.FLAPPING, A)
    assert pool.look(100) == {("flapping", A)}
    pool.lead_anew()
    assert pool.look(10) == {("flapping", A)}  # it has not counted the losses, and waits as long
    assert pool.look(20) == set()


def test_losses_far_apart_are_no_flapping() -> None:
    pool = Pool()
    for _ in range(20):
        pool.machine.lost(A, pool.now)
        assert pool.look(70) == set()


def test_a_manager_that_rests_counts_losses_for_the_time_when_it_leads() -> None:
    pool = Pool()
    for _ in range(3):
        pool.machine.lost(A, pool.now)
        pool.machine.rest()
    assert pool.look() == {("flapping", A)}


def test_more_writes_to_nvme_than_the_budget_raise_an_alarm() -> None:
    pool = Pool()
    pool.counters[A]["nvme_budget"] = 86400.0 * 100  # 100 bytes a second
    pool.look()
    for _ in range(500):  # exactly the budget
        pool.counters[A]["nvme_written"] += 500
        assert pool.look() == set()
    pool.counters[A]["nvme_written"] += 350_000  # less than the part of an hour
    assert pool.look() == set()
    pool.counters[A]["nvme_written"] += 20_000
    assert pool.look() == {("nvme-wear", A)}
    assert "8.24 MiB a day" in pool.text(Kind.NVME_WEAR, A)
    pool.lead_anew()
    assert pool.look(600) == {("nvme-wear", A)}
    assert pool.look(200) == set()


def test_a_node_that_starts_again_has_written_nothing_yet() -> None:
    pool = Pool()
    pool.counters[A] |= {"nvme_budget": 86400.0 * 100, "nvme_written": 1e12}
    pool.look(2)
    pool.counters[A]["nvme_written"] = 0.0
    assert pool.look(2) == set()


def test_a_mismatch_at_the_hello_raises_an_alarm_for_ten_minutes() -> None:
    pool = Pool()
    pool.counters[A]["incompatible"] = 5.0  # from before this manager
    assert pool.look(2) == set()
    pool.counters[A]["incompatible"] += 2
    assert pool.look() == {("incompatible", A)}
    assert "refused 2 connections" in pool.text(Kind.INCOMPATIBLE, A)
    assert pool.look(60) == {("incompatible", A)}
    pool.lead_anew()
    assert pool.look(60) == {("incompatible", A)}
    assert pool.look(70) == set()


def test_a_node_that_starts_again_or_counts_less_refused_nothing() -> None:
    pool = Pool()
    pool.counters[A] |= {"incompatible": 5.0, "full": 9.0, "evictions": 7.0}
    assert pool.look(2) == set()
    pool.counters[A] |= dict.fromkeys(("incompatible", "full", "evictions"), 0.0)
    assert pool.look(2) == set()
    del pool.counters[A]["drops"], pool.counters[A]["incompatible"]  # a node of another release
    assert pool.look(2) == set()


@pytest.mark.parametrize("kind", list(Kind))
def test_a_member_that_does_not_answer_keeps_its_alarms(kind: Kind) -> None:
    pool = Pool()
    subject = A if kind not in (Kind.NO_HITS, Kind.TOO_FEW_COPIES, Kind.REPAIR_STUCK) else "tenant-3"
    record = AlarmRecord(kind=str(kind), subject=subject, since=pool.wall)
    pool.raised[str(kind), subject] = record
    pool.silent = {A}
    assert pool.look(50) == {(str(kind), subject)}


def test_alarms_about_what_is_gone_are_cleared() -> None:
    pool = Pool()
    for subject in (C, "another manager", "tenant-9"):
        pool.raised["clock", subject] = AlarmRecord(kind="clock", subject=subject)
    pool.silent = {A}
    assert pool.look() == {("clock", "tenant-9")}  # perhaps the silent member has objects of this tenant
    pool.silent = set()
    assert pool.look() == set()


def test_an_alarm_of_a_later_release_stays() -> None:
    pool = Pool()
    pool.raised["a-new-kind", A] = AlarmRecord(kind="a-new-kind", subject=A)
    assert pool.look(10) == {("a-new-kind", A)}


def test_an_alarm_that_could_not_be_written_comes_again() -> None:
    pool = Pool()
    pool.look()
    pool.counters[A]["incompatible"] += 1
    first: Any = None
    for _ in range(2):
        pool.now += LOOK_S
        pool.wall += LOOK_S
        (change,) = pool.machine.look(pool._seen(), {})
        first = first or change
        assert change.key == first.key


def test_all_times_grow_with_the_interval() -> None:
    fast = Limits().at(0.5)
    assert (fast.hits_window, fast.hits_min, fast.flaps_window, fast.flaps_min) == (3.0, 100, 60.0, 3)
    assert (fast.clock_offset, fast.policy_silence) == (Limits().clock_offset, Limits().policy_silence)
