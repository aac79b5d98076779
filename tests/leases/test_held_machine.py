"""A holder, a manager and nodes: lost requests and answers, lenders that want memory back, and copies that fail."""

from __future__ import annotations

import os
import random

import pytest

from farpool.cluster.leases.client import GrantedLease, LeasedExtent, Reclaim
from farpool.cluster.leases.held import Claim, HeldLease, Move, Release, Renew, Replace, Rest, Step
from farpool.cluster.leases.records import GRAIN_BYTES, LEASE, ORDERS, LeaseRecord, OrderRecord, decode
from farpool.cluster.leases.requests import Confirm, End, Grant, Granted, Mark, Refused, Request, Resize
from farpool.cluster.leases.requests import Release as ReleaseRequest
from farpool.cluster.leases.requests import Renew as RenewRequest
from farpool.cluster.leases.requests import Replace as ReplaceRequest
from farpool.cluster.leases.tickets import SigningKey, Ticket, TicketExtent, sign
from tests.leases.test_book import Pool, terms

pytest.importorskip("cryptography")

G = GRAIN_BYTES
MEMBERS = [f"{number:032x}" for number in range(1, 6)]
SIZE = 30 * G
TTL = 60.0
RECLAIM_S = 120.0
KEY = SigningKey(os.urandom(32))


class AwayError(Exception):
    """No manager answered."""


class Slot:
    """A range of the program's memory: the extent that provides it, and the value that the program wrote last."""

    def __init__(self, extent: LeasedExtent) -> None:
        self.extent, self.value, self.is_lost = extent, 0, False


class Program:
    """Everything, from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = Pool(**{f"m{member}": SIZE for member in MEMBERS})
        self.engine = self.pool.manager()
        self.is_faulty = False
        self.contents: dict[tuple[str, int], int] = {}
        """The bytes at the nodes, by extent."""
        self.slots: list[Slot] = []
        self.moves = self.losses = 0
        request = Grant(terms(3 * G, ttl=TTL, reclaim_ms=int(RECLAIM_S * 1000)))
        answer = self.send(request)
        self.held = HeldLease(answer, sent=self.pool.tick, reclaim=RECLAIM_S, chance=self.random)
        self.use_new()

    # The way to the manager

    def send(self, request: Request) -> GrantedLease:
        """Ask the manager; the request or the answer may get lost."""
        chance = self.random.random() if self.is_faulty else 1.0
        if chance < 0.1:
            raise AwayError
        (outcome,) = self.pool.ask(self.engine, request)
        if chance < 0.2:
            raise AwayError
        if isinstance(outcome, Refused):
            raise ValueError(outcome.text)
        assert isinstance(outcome, Granted)
        return self.answer(outcome)

    def answer(self, granted: Granted) -> GrantedLease:
        record = granted.record
        now = int(self.pool.now * 1000)
        extents = tuple(
            LeasedExtent(one.member, one.number, one.bytes, ("tcp://10.0.0.1:7471",), "", one.part, one.copy)
            for one in record.extents
        )
        reclaims = tuple(Reclaim(one.member, one.number, one.reclaim_by) for one in granted.wanted_back)
        expiry = int(record.expires * 1000)
        if expiry <= now:
            return GrantedLease(granted.lease, record.epoch, None, extents, reclaims)
        ticket = Ticket(
            lease=bytes.fromhex(granted.lease),
            tenant=1,
            holder="trainer",
            epoch=record.epoch,
            rights=3,
            issued_ms=now,
            expiry_ms=expiry,
            extents=tuple(TicketExtent(bytes.fromhex(one.member), one.number, one.bytes) for one in extents),
        )
        return GrantedLease(granted.lease, record.epoch, sign(ticket, KEY), extents, reclaims)

    # The holder

    def use_new(self) -> None:
        new = self.held.take()
        if self.is_faulty and self.random.random() < 0.1:
            self.held.drop(new)  # a node had no room
            return
        for one in new:
            self.contents[one.key] = 0
            self.slots.append(Slot(one))
        self.held.use(new, self.held.ticket)

    def act(self) -> bool:
        """Carry out one step; return False if there is none."""
        step = self.held.step(self.pool.tick)
        now = self.pool.tick
        if isinstance(step, Rest):
            assert step.until > now
            return False
        if isinstance(step, Claim):
            if self.is_faulty and self.random.random() < 0.1:
                self.held.not_claimed(step.member, now, "it does not answer")
            else:
                self.held.claimed(step.member, self.held.ticket)
        elif isinstance(step, Move):
            self.move(step)
        else:
            self.ask(step)
        return True

    def ask(self, step: Step) -> None:
        lease, epoch, now = self.held.lease, self.held.epoch, self.pool.tick
        requests: dict[type, Request] = {Renew: RenewRequest(lease, 1)}
        if isinstance(step, Replace):
            requests[Replace] = ReplaceRequest(lease, 1, epoch, (step.extent.key,))
        if isinstance(step, Release):
            used = {slot.extent.key for slot in self.slots}
            assert not used.intersection(one.key for one in step.extents)
            requests[Release] = ReleaseRequest(lease, 1, epoch, tuple(one.key for one in step.extents))
        try:
            answer = self.send(requests[type(step)])
        except AwayError:
            self.held.failed(now, "away")
        except ValueError as refusal:
            self.held.refused(now, step, str(refusal))
        else:
            self.lose(self.held.granted(answer, now, step))

    def lose(self, extents: tuple[LeasedExtent, ...]) -> None:
        for slot in self.slots:
            if slot.extent.key in {one.key for one in extents}:
                slot.is_lost = True
                self.losses += 1

    def move(self, step: Move) -> None:
        (slot,) = [one for one in self.slots if one.extent.key == step.old.key]
        if (self.is_faulty and self.random.random() < 0.3) or step.old.key not in self.contents:
            self.held.not_moved(step, self.pool.tick, "a node failed")
            return
        self.contents[step.new.key] = self.contents[step.old.key]
        slot.extent = step.new
        self.held.claimed(step.new.member, self.held.ticket)
        self.held.moved(step)
        self.moves += 1

    def grow(self) -> None:
        if self.held.has_ended or len(self.slots) >= 12:
            return
        self.use_new()
        try:
            answer = self.send(Resize(self.held.lease, 1, self.held.epoch, self.held.nbytes + 2 * G))
        except (AwayError, ValueError):
            return
        self.lose(self.held.granted(answer, self.pool.tick))
        self.use_new()

    # The others

    def orders(self) -> list[OrderRecord]:
        entries = self.pool.registry.range(ORDERS).entries
        return [decode(entry.key, entry.value, OrderRecord) for entry in entries]

    def deliver(self) -> None:
        for order in self.orders():
            if self.random.random() < 0.5:
                self.contents.pop((order.member, order.extent), None)
                self.pool.ask(self.engine, Confirm(order.member, order.lease, order.extent))

    def record(self) -> LeaseRecord | None:
        for entry in self.pool.registry.range(LEASE).entries:
            return decode(entry.key, entry.value, LeaseRecord)
        return None

    def want_back(self) -> None:
        """A lender wants one of its extents back, or drains, or lends again."""
        record = self.record()
        if record is None:
            return
        one = self.random.choice(record.extents)
        if self.random.random() < 0.5:
            self.pool.ask(self.engine, Mark(self.held.lease, None, ((one.member, one.number),)))
        else:
            self.pool.lend(one.member, SIZE, draining=self.random.random() < 0.5)

    def step(self) -> None:
        chance = self.random.random()
        if chance < 0.55:
            if not self.act():
                self.pool.sleep(self.random.choice([0.5, 2.0, 10.0]))
        elif chance < 0.65:
            self.grow()
        elif chance < 0.75 and self.slots:
            slot = self.random.choice(self.slots)
            slot.value = self.random.randrange(1 << 30)
            if slot.extent.key in self.contents:
                self.contents[slot.extent.key] = slot.value
        elif chance < 0.85:
            self.deliver()
        elif chance < 0.9:
            self.want_back()
        else:
            self.pool.upkeep(self.engine)
        self.check()

    def check(self) -> None:
        record = self.record()
        leased = {(one.member, one.number) for one in record.extents} if record else set()
        used = {one.key for one in self.held.used}
        for slot in self.slots:
            if slot.extent.key in leased:
                assert slot.extent.key in used
                assert self.contents[slot.extent.key] == slot.value
        for one in self.held.used:
            assert sum(slot.extent.key == one.key for slot in self.slots) == 1

    def settle(self) -> None:
        """Let everything work, and let time pass, until all is quiet."""
        self.is_faulty = False
        for member in MEMBERS:
            self.pool.lend(member, SIZE)
        for _ in range(60):
            self.pool.sleep(1.0)
            self.pool.upkeep(self.engine)
            for _ in range(200):
                if not self.act():
                    break
                self.check()
            else:
                raise AssertionError(f"it never rests: {self.held.step(self.pool.tick)}")
            self.deliver()


@pytest.mark.parametrize("seed", range(25))
def test_a_holder_keeps_its_bytes_and_returns_all_others(seed: int) -> None:
    program = Program(seed)
    program.is_faulty = True
    for _ in range(300):
        program.step()
    program.settle()
    record = program.record()
    assert record is not None
    assert not program.held.has_ended
    leased = {(one.member, one.number) for one in record.extents}
    spare = {one.key for one in program.held.take()}
    assert leased == {one.key for one in program.held.used} | spare
    assert all(slot.is_lost or slot.extent.key in leased for slot in program.slots)
    assert {name.partition(" ")[0] for name in program.held.notes(program.pool.tick)} <= {"lost"}
    assert program.moves > 0
    program.pool.ask(program.engine, End(program.held.lease, 1))
    while program.orders():
        program.deliver()
    assert not any(key in program.contents for key in leased)


def test_nothing_is_lost_if_managers_and_nodes_answer() -> None:
    moves = 0
    for seed in range(10):
        program = Program(100 + seed)
        for _ in range(200):
            program.step()
        assert program.losses == 0
        moves += program.moves
    assert moves > 20
