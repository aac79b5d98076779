"""A program of the simulated pool: it takes, uses, renews, grows, shrinks, moves and ends leases."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farpool.cluster.leases.records import GRAIN_BYTES, LeaseRecord, LeaseRequest
from farpool.cluster.leases.requests import (
    Done,
    End,
    Grant,
    Granted,
    Outcome,
    Refused,
    Release,
    Renew,
    Replace,
    Request,
    Resize,
)
from farpool.cluster.wire.frames import Status
from farpool.sim.manager import Answer, Manager
from farpool.sim.member import HALF_BYTES, Member, Program
from farpool.sim.network import Process
from farpool.sim.plan import Step
from farpool.sim.violation import require
from farpool.sim.world import World

__all__ = ["TENANTS", "Client"]

TENANTS = 3
"""Tenants have the numbers from 1 on."""
_CALL_TIMEOUT_S = 4.0
_NODE_TIMEOUT_S = 1.0
_PAUSE_S = 0.3
_PATIENCE_S = 90.0
"""Seconds after which a request is answered at the latest, once there are no more faults."""


@dataclass(slots=True)
class _Held:
    """A lease that the program has."""

    record: LeaseRecord
    ticket: bytes


class Client(Process):
    """A process that uses leased memory.

    Parameters
    ----------
    world : World
        The simulation.
    number : int
        Number of the client, from which its tenant follows.
    steps : tuple of Step
        What it does. After a crash, it goes on with the next step, without its leases.
    members : mapping of str to Member
        All members of the pool, by identity.
    managers : sequence of Manager
        All managers.
    clients : sequence of Client
        All clients.
    """

    def __init__(
        self,
        world: World,
        number: int,
        steps: tuple[Step, ...],
        members: Mapping[str, Member],
        managers: Sequence[Manager],
        clients: Sequence[Client],
    ) -> None:
        super().__init__(f"client{number}", world.scheduler)
        self.tenant, self.holder = 1 + number % TENANTS, f"trainer{number}"
        self.is_done = False
        self.answers = 0
        self._world, self._number, self._steps = world, number, steps
        self._members, self._managers, self._clients = members, managers, clients
        self._next = 0
        self._values = 0
        self._channel = 0
        self._held: dict[str, _Held] = {}
        # Tickets of any age, as a hostile program would keep them.
        self._old: list[tuple[str, LeaseRecord, bytes]] = []

    def begin(self) -> None:
        """Go on with the steps that are left."""
        self._held = {}
        self._session = self._number * 1000 + self.starts
        if not self.is_done:
            self.spawn("program", self._run)

    def ended(self) -> None:
        """Close the connections to nodes."""
        session = self._session
        for member in self._members.values():
            if member.is_up:
                member.hang_up(session)

    def _run(self) -> None:
        while self._next < len(self._steps):
            step = self._steps[self._next]
            self._next += 1
            chance = random.Random(f"{self._world.seed} {step.client} {step.number}")
            self.scheduler.sleep(chance.choice([0.0, 0.0, 0.01, 1.0]) * chance.random())
            self._renew_due()
            self._take_step(step, chance)
        for lease in list(self._held):
            # The other leases expire.
            if self._world.chance.random() < 0.5:
                self._end(lease)
        self.is_done = True

    def _take_step(self, step: Step, chance: random.Random) -> None:
        lease = chance.choice([*self._held]) if self._held else ""
        match step.operation:
            case "take":
                self._take(step, chance)
            case "rest":
                self.scheduler.sleep(chance.uniform(0.5, 5.0))
            case "stale":
                self._show_old(chance)
            case _ if not lease:
                pass
            case "use":
                self._use(lease)
            case "renew":
                self._renew(lease)
            case "resize":
                size = chance.randint(1, 10 * GRAIN_BYTES)
                self._ask_about(lease, Resize(lease, self.tenant, self._epoch(lease), size))
            case "move":
                self._move(lease, chance)
            case "end":
                self._end(lease)

    # Requests to managers

    def _ask(self, request: Request) -> tuple[Outcome, bytes]:
        """Ask managers until one of them answers."""
        world, begun = self._world, self.scheduler.now
        chance = random.Random(f"{world.seed} {self.name} {self.steps}")
        while True:
            manager = chance.choice(self._managers)
            answer: Answer | None = world.network.ask(self, manager.name, manager.handler(request), _CALL_TIMEOUT_S)
            if answer is not None and not isinstance(answer.outcome, Exception):
                self.answers += 1
                return answer.outcome, answer.ticket
            waited = self.scheduler.now - max(begun, world.faults_end)
            reason = "" if answer is None else f": {answer.outcome}"
            text = f"{self.name} got no answer to {type(request).__name__} for {waited:.0f} s{reason}"
            require(waited < _PATIENCE_S, "starves", text)
            self.scheduler.sleep(_PAUSE_S * chance.random())

    def _ask_about(self, lease: str, request: Request) -> Outcome:
        """Ask for a change of a lease, and learn its present state."""
        outcome, ticket = self._ask(request)
        name = type(request).__name__.lower()
        if isinstance(outcome, Granted):
            self._learn(outcome, ticket)
            self.note(f"{name} {lease[:8]}: {_described(outcome.record)}")
        elif isinstance(outcome, Done):
            self._held.pop(lease, None)
            self.note(f"{name} {lease[:8]}: the lease has ended")
        else:
            self.note(f"{name} {lease[:8]}: refused, {outcome.reason}")
            if outcome.granted is not None:
                self._learn(outcome.granted, b"")
            elif outcome.reason == "unknown":
                self._held.pop(lease, None)
        return outcome

    def _learn(self, granted: Granted, ticket: bytes) -> None:
        known = self._held.get(granted.lease)
        if known is not None:
            before, now = known.record.epoch, granted.record.epoch
            text = f"{self.name} learned epoch {now} of lease {granted.lease[:8]} after {before}"
            require(now >= before, "epoch", text)
            ticket = ticket or known.ticket
        self._held[granted.lease] = _Held(granted.record, ticket)
        if ticket:
            self._old.append((granted.lease, granted.record, ticket))

    def _take(self, step: Step, chance: random.Random) -> None:
        copies = chance.choice(["none", "none", "copies:2"])
        terms = LeaseRequest(
            tenant=self.tenant,
            holder=self.holder,
            bytes=chance.randint(1, 8 * GRAIN_BYTES),
            request=f"{self.name} step {step.number}",
            redundancy=copies,
            spread=("rack",) if copies != "none" and chance.random() < 0.5 else (),
            reclaim_ms=chance.choice([500, 5000]),
            ttl=chance.choice([2.0, 10.0, 30.0]),
        )
        outcome, ticket = self._ask(Grant(terms))
        if isinstance(outcome, Granted):
            self._learn(outcome, ticket)
            self.note(f"takes {outcome.lease[:8]}: {_described(outcome.record)}")
        elif isinstance(outcome, Refused):
            self.note(f"is refused {terms.bytes} bytes: {outcome.reason}")

    def _renew(self, lease: str) -> None:
        self._ask_about(lease, Renew(lease, self.tenant))

    def _renew_due(self) -> None:
        """Renew the leases of which half the time is over."""
        for lease, held in list(self._held.items()):
            if held.record.expires - self.scheduler.now < held.record.terms.ttl / 2:
                self._renew(lease)

    def _end(self, lease: str) -> None:
        self._ask_about(lease, End(lease, self.tenant))

    def _move(self, lease: str, chance: random.Random) -> None:
        """Give back what lenders want, or any extent; use the replacement before the old extent is released."""
        record = self._held[lease].record
        wanted = [one for one in record.extents if one.reclaim_by] or [chance.choice(record.extents)]
        chosen = tuple((one.member, one.number) for one in wanted)
        outcome = self._ask_about(lease, Replace(lease, self.tenant, record.epoch, chosen))
        if isinstance(outcome, Granted) and lease in self._held:
            self._use(lease)
            if lease in self._held:
                self._ask_about(lease, Release(lease, self.tenant, self._epoch(lease), chosen))

    def _epoch(self, lease: str) -> int:
        return self._held[lease].record.epoch

    # Memory

    def _use(self, lease: str) -> None:
        """Claim the lease's extents, write one value into each of them, and read them."""
        held = self._held[lease]
        if held.ticket:
            self._use_ticket(lease, held.record, held.ticket)

    def _show_old(self, chance: random.Random) -> None:
        whose = self if chance.random() < 0.7 else chance.choice(self._clients)
        if not whose._old:
            return
        lease, record, ticket = chance.choice(whose._old)
        self.note(f"shows an old ticket of {whose.name} for lease {lease[:8]} with epoch {record.epoch}")
        self._use_ticket(lease, record, ticket)

    def _use_ticket(self, lease: str, record: LeaseRecord, ticket: bytes) -> None:
        for member_id in sorted({one.member for one in record.extents}):
            member = self._members[member_id]
            program = Program(self._session, self.tenant, self.holder, self._channel)
            claimed = self._call(member_id, lambda: member.claim(program, ticket))  # noqa: B023 - called at once
            if claimed is None:
                self._channel += 1
            elif "refused" in claimed:
                self.note(f"is refused lease {lease[:8]} by {member.name}: {claimed['refused'][:60]}")
            else:
                for _, extent in claimed["extents"]:
                    if not self._use_extent(member_id, program, extent):
                        self._channel += 1
                        break

    def _use_extent(self, member_id: str, program: Program, extent: int) -> bool:
        """Write into an extent, and read it; return False if the node did not answer."""
        member = self._members[member_id]
        self._values += 1
        value = (f"{self._number}{self._values:07}" * 2).encode()
        assert len(value) == 2 * HALF_BYTES
        if self._call(member_id, lambda: member.begin_write(program, extent, value)) is None:
            return False
        written = self._call(member_id, lambda: member.end_write(program, value))
        if written is None or written["status"] is None:
            return False
        found = self._call(member_id, lambda: member.read(program, extent))
        if found is None or found["status"] is None:
            return False
        if found["status"] == written["status"] == Status.DONE:
            text = f"{self.name} read {found['data']!r} from {member.name} after it had written {value!r}"
            require(found["data"] == value, "bytes", text)
        return True

    def _call(self, member_id: str, work: Any) -> dict[str, Any] | None:
        member = self._members[member_id]
        found: dict[str, Any] | None = self._world.network.ask(self, member.name, member.handler(work), _NODE_TIMEOUT_S)
        return found


def _described(record: LeaseRecord) -> str:
    return f"{record.terms.bytes} bytes, {len(record.extents)} extents, epoch {record.epoch}"
