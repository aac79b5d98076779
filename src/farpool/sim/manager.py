"""A manager of the simulated pool: the production engine of leases, and the orders that it delivers to nodes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from farpool.cluster.leases.engine import Clock, Engine
from farpool.cluster.leases.records import LeaseRecord, OrderRecord
from farpool.cluster.leases.requests import Confirm, Granted, Outcome, Request
from farpool.cluster.leases.tickets import Order, Ticket, TicketExtent
from farpool.errors import RegistryError
from farpool.sim.member import Member
from farpool.sim.network import Process
from farpool.sim.scheduler import Reply
from farpool.sim.world import World

__all__ = ["Answer", "Manager"]

_LOOK_INTERVAL_S = 0.2
_UPKEEP_INTERVAL_S = 1.0
_ORDERS_INTERVAL_S = 0.7
_CALL_TIMEOUT_S = 3.0
_NODE_TIMEOUT_S = 1.0
_GROUP_MAX = 20


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to a client.

    Attributes
    ----------
    outcome : Granted or Done or Refused or Exception
        What became of the request.
    ticket : bytes
        The signed ticket of a granted lease.
    """

    outcome: Outcome | Exception
    ticket: bytes = b""


class Manager(Process):
    """A process that changes leases for clients, ends them in time, and has nodes free memory.

    Parameters
    ----------
    world : World
        The simulation.
    name : str
        Name in the log.
    members : mapping of str to Member
        All members of the pool, by identity.
    """

    def __init__(self, world: World, name: str, members: Mapping[str, Member]) -> None:
        super().__init__(name, world.scheduler)
        self._world, self._members = world, members

    def begin(self) -> None:
        """Begin without anything that the process knew before."""
        world = self._world
        clock = Clock(self._now, world.scheduler.look, world.scheduler.sleep)
        chance = random.Random(f"{world.seed} {self.name} {self.starts}")
        registry = world.registry_for(self)
        self._engine = Engine(registry, clock, lambda: world.policies, _CALL_TIMEOUT_S, chance)
        self._queue: deque[tuple[Request, Callable[[Answer], None]]] = deque()
        self._arrived: Reply[bool] = Reply()
        self.spawn("desk", self._serve)
        self.spawn("orders", self._deliver_orders)

    def _now(self) -> float:
        return self.scheduler.now + self.ahead

    # Requests

    def handler(self, request: Request) -> Callable[[Callable[[Answer], None]], None]:
        """Return a function that takes a client's request."""

        def handle(answer: Callable[[Answer], None]) -> None:
            if self.survives_step():
                self._enqueue(request, answer)

        return handle

    def _enqueue(self, request: Request, answer: Callable[[Answer], None]) -> None:
        self._queue.append((request, answer))
        self.scheduler.answer(self._arrived, True)

    def _serve(self) -> None:
        """Carry out requests, and whatever is due in between, as `LeaseService` does on its thread."""
        engine = self._engine
        upkeep_at = self.scheduler.now
        while True:
            if not self._queue:
                self._arrived = Reply()
                self.scheduler.receive(self._arrived, _LOOK_INTERVAL_S)
            group = [self._queue.popleft() for _ in range(min(len(self._queue), _GROUP_MAX))]
            try:
                if not group:
                    engine.follow()
                    engine.yield_turn()
                    if self.scheduler.now >= upkeep_at:
                        upkeep_at = self.scheduler.now + _UPKEEP_INTERVAL_S
                        engine.upkeep()
                    continue
                outcomes: tuple[Outcome | Exception, ...] = engine.settle([request for request, _ in group])
            except RegistryError as error:
                outcomes = (error,) * len(group)
                if not group:
                    self.scheduler.sleep(_LOOK_INTERVAL_S)
            self.step()
            for (_, answer), outcome in zip(group, outcomes, strict=False):
                answer(self._answer(outcome))
            self._queue.extendleft(reversed(group[len(outcomes) :]))

    def _answer(self, outcome: Outcome | Exception) -> Answer:
        return Answer(outcome, self._ticket(outcome) if isinstance(outcome, Granted) else b"")

    def _ticket(self, granted: Granted) -> bytes:
        record: LeaseRecord = granted.record
        now = self._now()
        if record.expires <= now:
            return b""
        ticket = Ticket(
            lease=bytes.fromhex(granted.lease),
            tenant=record.terms.tenant,
            holder=record.terms.holder,
            epoch=record.epoch,
            rights=3 if record.terms.rights == "rw" else 1,
            issued_ms=int(now * 1000),
            expiry_ms=int(record.expires * 1000),
            extents=tuple(TicketExtent(bytes.fromhex(one.member), one.number, one.bytes) for one in record.extents),
        )
        return self._world.sign(ticket)

    # Orders

    def _deliver_orders(self) -> None:
        """Send orders to nodes, and record what they confirm."""
        world = self._world
        chance = random.Random(f"{world.seed} {self.name} orders {self.starts}")
        while True:
            self.scheduler.sleep(_ORDERS_INTERVAL_S * (0.5 + chance.random()))
            for member in self._members.values():
                with self._engine.lock:
                    orders = list(self._engine.book.view.orders(member.id))
                for order in orders:
                    if not self._deliver(order):
                        break  # the node does not answer

    def _deliver(self, record: OrderRecord) -> bool:
        """Have a node carry an order out; return False if it did not answer."""
        world = self._world
        member = self._members[record.member]
        order = Order(
            lease=bytes.fromhex(record.lease),
            member=member.identity,
            epoch=record.epoch,
            action="end",
            extents=(record.extent,),
            issued_ms=int(self._now() * 1000),
            reason=record.reason,
        )
        data = world.sign(order)
        found = world.network.ask(self, member.name, member.handler(lambda: member.order(data)), _NODE_TIMEOUT_S)
        if found is not None and "ended" in found:
            self._enqueue(Confirm(record.member, record.lease, record.extent), lambda answer: None)
        return found is not None
