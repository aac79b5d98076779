"""The steps of a lease's holder, without clocks, managers and nodes."""

from __future__ import annotations

import math
import os
import random
from typing import Any

import pytest

from farpool.cluster.leases.client import GrantedLease, LeasedExtent, Reclaim
from farpool.cluster.leases.held import Claim, HeldLease, Move, Release, Renew, Replace, Rest
from farpool.cluster.leases.tickets import SigningKey, Ticket, TicketExtent, sign

pytest.importorskip("cryptography")

LEASE = "ab" * 16
MEMBERS = ["01" * 16, "02" * 16, "03" * 16]
A, B, C = MEMBERS
KEY = SigningKey(os.urandom(32))
TTL = 60.0


def extent(member: str, number: int, part: int = 0, nbytes: int = 4096) -> LeasedExtent:
    return LeasedExtent(member, number, nbytes, ("tcp://10.0.0.1:7471",), f"node-{member[1]}", part)


def lease(*extents: LeasedExtent, epoch: int = 1, wanted: tuple[LeasedExtent, ...] = (), ttl: float = TTL) -> Any:
    ticket = Ticket(
        lease=bytes.fromhex(LEASE),
        tenant=0,
        holder="",
        epoch=epoch,
        rights=3,
        issued_ms=1_000_000,  # the holder's clock plays no part
        expiry_ms=1_000_000 + int(ttl * 1000),
        extents=tuple(TicketExtent(bytes.fromhex(one.member), one.number, one.bytes) for one in extents),
    )
    reclaims = tuple(Reclaim(one.member, one.number, 5.0 + index) for index, one in enumerate(wanted))
    return GrantedLease(LEASE, epoch, sign(ticket, KEY), extents, reclaims)


def held(*extents: LeasedExtent, reclaim: float = 60.0, ttl: float = TTL) -> HeldLease:
    """A lease at time 0 whose extents are used."""
    found = HeldLease(lease(*extents, ttl=ttl), sent=0.0, reclaim=reclaim, chance=random.Random(1))
    assert found.take() == extents
    found.use(extents, found.ticket)
    return found


def renewed(one: HeldLease, answer: Any, now: float) -> tuple[LeasedExtent, ...]:
    """Renew, and show the new ticket to all members."""
    return answered(one, answer, now)


def answered(one: HeldLease, answer: Any, now: float, step: Any = None) -> tuple[LeasedExtent, ...]:
    lost = one.granted(answer, now, step)
    while isinstance(step := one.step(now), Claim):
        one.claimed(step.member, one.ticket)
    return lost


@pytest.mark.parametrize(("ttl", "reclaim", "least"), [(60.0, 60.0, 20.0), (60.0, 3.0, 1.0), (6.0, 60.0, 2.0)])
def test_it_renews_three_times_in_the_shorter_of_its_terms(ttl: float, reclaim: float, least: float) -> None:
    one = held(extent(A, 1), ttl=ttl, reclaim=reclaim)
    step = one.step(0.0)
    assert isinstance(step, Rest)
    assert 0.8 * least <= step.until <= least
    assert one.step(step.until) == Renew()
    assert one.until == ttl


def test_after_a_renewal_each_member_sees_the_new_ticket_once() -> None:
    extents = (extent(A, 1), extent(B, 1, part=1), extent(A, 2, part=2))
    one = held(*extents)
    one.granted(lease(*extents, ttl=61.0), 20.0)
    assert one.until == 81.0
    seen = []
    while isinstance(step := one.step(20.0), Claim):
        seen.append(step.member)
        one.claimed(step.member, one.ticket)
    assert seen == [A, B]
    assert isinstance(one.step(20.0), Rest)


def test_a_member_that_does_not_answer_is_asked_again_and_others_are_not_kept_waiting() -> None:
    one = held(extent(A, 1), extent(B, 1, part=1))
    one.granted(lease(extent(A, 1), extent(B, 1, part=1), ttl=61.0), 10.0)
    assert one.step(10.0) == Claim(A)
    one.not_claimed(A, 10.0, "it does not answer")
    assert one.step(10.0) == Claim(B)
    one.claimed(B, one.ticket)
    assert one.step(10.0) == Rest(12.0)
    assert "it does not answer" in str(one.notes(10.0))
    assert one.step(12.0) == Claim(A)
    one.claimed(A, one.ticket)
    assert one.notes(12.0) == {}


def test_while_no_manager_answers_it_tries_again_with_growing_pauses_and_says_so() -> None:
    one = held(extent(A, 1))
    now = 20.0
    pauses = []
    for _ in range(12):
        assert one.step(now) == Renew()
        one.failed(now, "connection refused")
        rest = one.step(now)
        assert isinstance(rest, Rest)
        pauses.append(rest.until - now)
        now = rest.until
    assert 0.1 <= pauses[0] <= 0.2
    assert max(pauses) <= 5.0
    assert pauses[-1] >= 2.5
    (note,) = one.notes(50.0).values()
    assert "for 30 s: connection refused; the memory can be used for 10 s more" in note
    assert one.notes(70.0).keys() == {"expired"}
    assert "expired 10 s ago" in one.notes(70.0)["expired"]
    renewed(one, lease(extent(A, 1)), 80.0)
    assert one.notes(80.0) == {}
    assert one.until == 140.0


def test_a_lease_that_has_ended_needs_nothing_more() -> None:
    one = held(extent(A, 1))
    one.ended("there is no such lease")
    assert one.step(1e9) == Rest(math.inf)
    assert "there is no such lease" in one.notes(1.0)["ended"]


def test_an_extent_that_is_wanted_back_is_replaced_copied_and_released() -> None:
    old, new, other = extent(A, 1), extent(B, 7), extent(C, 1, part=1)
    one = held(old, other)
    renewed(one, lease(old, other, wanted=(old,)), 20.0)
    assert one.step(20.0) == Replace(old)
    one.granted(lease(old, other, new, wanted=(old,)), 20.1)
    assert one.step(20.1) == Claim(A)
    for member in (A, C):
        one.claimed(member, one.ticket)
    step = one.step(20.2)
    assert step == Move(old, new)
    one.claimed(B, one.ticket)
    # A renewal during the copy needs a claim at the new member, too.
    one.granted(lease(old, other, new, wanted=(old,), ttl=61.0), 21.0)
    claims = []
    while isinstance(claim := one.step(21.0), Claim):
        claims.append(claim.member)
        one.claimed(claim.member, one.ticket)
    assert claims == [A, C, B]
    one.moved(Move(old, new))
    assert one.used == (other, new)
    assert one.step(21.0) == Release((old,))
    assert renewed(one, lease(other, new, epoch=2), 21.1) == ()
    assert isinstance(one.step(21.1), Rest)
    assert one.nbytes == 8192
    assert one.notes(21.1) == {}


def test_it_moves_the_most_urgent_extent_first_and_releases_all_together() -> None:
    first, second = extent(A, 1), extent(A, 2, part=1)
    one = held(first, second)
    renewed(one, lease(first, second, wanted=(second, first)), 20.0)
    assert one.step(20.0) == Replace(second)
    new = extent(B, 1, part=1)
    renewed(one, lease(first, second, new, wanted=(second, first)), 20.0)
    assert one.step(20.0) == Move(second, new)
    one.moved(Move(second, new))
    one.claimed(B, one.ticket)
    assert one.step(20.0) == Replace(first)
    other = extent(C, 1)
    renewed(one, lease(first, second, new, other, wanted=(second, first)), 20.0)
    one.moved(Move(first, other))
    one.claimed(C, one.ticket)
    assert one.step(20.0) == Release((second, first))


def test_a_refused_replacement_is_asked_for_again_and_reported() -> None:
    old = extent(A, 1)
    one = held(old)
    renewed(one, lease(old, wanted=(old,)), 20.0)
    step = one.step(20.0)
    one.refused(20.0, step, "no other member has 4096 bytes")
    assert one.step(20.2) == Renew()
    renewed(one, lease(old, wanted=(old,)), 20.2)
    assert one.step(20.2) == Rest(22.0)
    assert "are wanted back and cannot be moved: no other member" in str(one.notes(20.2))
    assert one.step(22.0) == Replace(old)
    # The lender may want it no more.
    renewed(one, lease(old), 30.0)
    assert one.notes(30.0) == {}


def test_no_manager_is_asked_for_changes_while_none_answers() -> None:
    old = extent(A, 1)
    one = held(old)
    renewed(one, lease(old, wanted=(old,)), 20.0)
    assert one.step(20.0) == Replace(old)
    one.failed(20.0, "away")
    assert isinstance(one.step(20.0), Rest)


def test_a_replacement_whose_answer_was_lost_is_found_at_the_next_renewal() -> None:
    old, new = extent(A, 1), extent(B, 4)
    one = held(old)
    renewed(one, lease(old, wanted=(old,)), 20.0)
    renewed(one, lease(old, new, wanted=(old,)), 25.0)
    assert one.step(25.0) == Move(old, new)
    assert one.take() == ()


def test_extents_that_a_manager_took_are_reported_as_lost() -> None:
    first, second = extent(A, 1), extent(B, 1, part=1)
    one = held(first, second)
    assert renewed(one, lease(second, epoch=2), 20.0) == (first,)
    assert one.used == (second,)
    assert "4 KiB on node-1 were taken by a manager" in str(one.notes(20.0))


def test_new_extents_wait_until_the_user_takes_them() -> None:
    first, second = extent(A, 1), extent(B, 1, part=1)
    one = held(first)
    one.granted(lease(first, second), 1.0)
    assert one.nbytes == 8192
    assert one.take() == (second,)
    assert one.take() == ()
    one.claimed(A, one.ticket)
    assert isinstance(one.step(1.0), Rest)  # the user alone shows the ticket to the new member at first
    one.drop([second])
    assert one.nbytes == 4096
    assert one.used == (first,)
    assert one.step(1.0) == Release((second,))


def test_a_member_that_makes_new_extents_is_left_alone() -> None:
    first, second = extent(A, 1), extent(A, 2, part=1)
    one = held(first)
    one.granted(lease(first, second), 1.0)
    assert one.step(1.0) == Claim(A)
    assert one.take() == (second,)
    assert isinstance(one.step(1.0), Rest)
    one.use([second], one.ticket)
    assert one.used == (first, second)
    assert isinstance(one.step(1.0), Rest)


def test_a_late_answer_of_an_earlier_epoch_changes_nothing() -> None:
    first, second = extent(A, 1), extent(B, 1, part=1)
    one = held(first, second)
    renewed(one, lease(first, epoch=3), 20.0)
    ticket = one.ticket
    assert one.granted(lease(first, second, epoch=2), 21.0) == ()
    assert (one.ticket, one.used) == (ticket, (first,))


def test_an_answer_without_a_ticket_leads_to_a_renewal_soon() -> None:
    first = extent(A, 1)
    one = held(first)
    before = one.ticket
    one.granted(GrantedLease(LEASE, 1, None, (first,)), 20.0)
    assert one.ticket == before
    assert one.step(20.1) == Renew()


def test_holders_do_not_all_renew_at_the_same_time() -> None:
    times = set()
    for seed in range(20):
        one = HeldLease(lease(extent(A, 1)), sent=0.0, reclaim=60.0, chance=random.Random(seed))
        step = one.step(0.0)
        assert isinstance(step, Rest)
        times.add(step.until)
    assert len(times) > 10


# ---- copies ---------------------------------------------------------------------------------------------------------


def copies(*members: str, number: int = 1) -> tuple[LeasedExtent, ...]:
    """Copies of one part, each on another member."""
    return tuple(
        LeasedExtent(member, number, 4096, ("tcp://10.0.0.1:7471",), member[:2], 0, index)
        for index, member in enumerate(members)
    )


def test_bytes_with_copies_count_once() -> None:
    assert held(*copies(A, B)).nbytes == 4096
    assert held(*copies(A, B)).has_copies
    assert not held(extent(A, 1), extent(B, 1, part=1)).has_copies


def test_a_lost_copy_is_made_on_its_own_member_or_else_on_another_one() -> None:
    first, second = copies(A, B)
    one = held(first, second)
    one.failing({first.key: "it is away"})
    assert one.step(1.0) == Move(first, first)
    one.not_moved(Move(first, first), 1.0, "still away")
    assert isinstance(one.step(1.0), Rest)
    assert one.step(4.0) == Replace(first)
    one.refused(4.0, Replace(first), "no other member")
    assert "it is away; it could not be made again: no other member" in str(one.notes(4.0))
    renewed(one, lease(first, second), 4.5)
    assert one.step(7.0) == Move(first, first)
    one.not_moved(Move(first, first), 7.0, "still away")
    assert one.step(10.0) == Replace(first)
    new = LeasedExtent(C, 5, 4096, part=0, replica=0)
    answered(one, lease(first, second, new), 10.0, Replace(first))
    assert one.step(10.0) == Move(first, new)
    one.claimed(C, one.ticket)
    one.moved(Move(first, new))
    one.failing({})
    assert one.step(10.0) == Release((first,))
    one.granted(lease(new, second, epoch=2), 10.0)
    assert {each.key for each in one.used} == {new.key, second.key}
    assert one.nbytes == 4096
    assert one.notes(10.0) == {}


def test_a_copy_that_is_made_again_in_its_place_is_kept() -> None:
    first, second = copies(A, B)
    one = held(first, second)
    one.failing({second.key: "it is away"})
    one.moved(Move(second, second))
    one.failing({})
    assert isinstance(one.step(1.0), Rest)
    assert {each.key for each in one.used} == {first.key, second.key}
    assert one.notes(1.0) == {}


def test_a_copy_that_a_manager_takes_is_replaced_and_not_lost() -> None:
    first, second = copies(A, B)
    one = held(first, second)
    assert renewed(one, lease(second, epoch=2), 1.0) == ()
    assert one.used == (second,)
    assert one.step(1.0) == Replace(first)
    new = LeasedExtent(C, 5, 4096, part=0, replica=0)
    answered(one, lease(second, new, epoch=2), 1.0, Replace(first))
    assert one.take() == ()
    assert one.step(1.0) == Move(first, new)
    one.claimed(C, one.ticket)
    one.moved(Move(first, new))
    assert isinstance(one.step(1.0), Rest)  # the one that was taken needs no release
    assert {each.key for each in one.used} == {second.key, new.key}


def test_the_last_good_copy_that_a_manager_takes_is_lost() -> None:
    first, second = copies(A, B)
    one = held(first, second)
    one.failing({first.key: "it is away"})
    assert renewed(one, lease(first, epoch=2), 1.0) == (second,)
    assert "their bytes are lost" in str(one.notes(1.0))


def test_extents_that_were_shown_and_not_used_are_given_back() -> None:
    first, second = copies(A, B)
    one = HeldLease(lease(first, second), sent=0.0, reclaim=60.0, chance=random.Random(1))
    one.take()
    one.use([first], one.ticket)
    one.drop([first, second])
    assert one.used == ()
    assert one.step(0.0) == Release((second, first)) or one.step(0.0) == Release((first, second))
