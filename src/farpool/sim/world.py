"""Puts a simulated pool together, runs a plan in it, and checks that it comes to rest."""

from __future__ import annotations

import random
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farpool._native import NodeServer
from farpool.abc.registry import Put
from farpool.cluster.leases.records import GRAIN_BYTES, OrderRecord
from farpool.cluster.leases.requests import TenantLimits
from farpool.cluster.leases.tickets import Order, SigningKey, Ticket, sign
from farpool.cluster.members.records import RECORD, MemberRecord, encode
from farpool.sim.client import Client
from farpool.sim.manager import Manager
from farpool.sim.member import Member
from farpool.sim.network import Network, Process
from farpool.sim.plan import FAULTS_END_S, Fault, Plan
from farpool.sim.registry import NAME, RegistryServer, SimulatedRegistry
from farpool.sim.scheduler import Scheduler
from farpool.sim.truth import Truth
from farpool.sim.violation import Violation, require

__all__ = ["Outcome", "World", "run_plan"]

_PAGES_MAX = 20
_STEPS_END_S = 600.0
"""Seconds within which all programs have ended."""
_REST_S = 120.0
"""Seconds after the end of all programs within which all memory is free again."""
_POLICIES = {
    1: TenantLimits(guaranteed={"dram": 8 * GRAIN_BYTES}, most={"dram": 24 * GRAIN_BYTES}),
    2: TenantLimits(guaranteed={"dram": 6 * GRAIN_BYTES}),
    3: TenantLimits(most={"dram": 20 * GRAIN_BYTES}, priority=1),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes
    ----------
    plan : Plan
        The plan.
    violation : Violation or None
        The rule that was broken.
    log : tuple of str
        What happened, in order.
    counts : dict of str to int
        How often things happened.
    """

    plan: Plan
    violation: Violation | None
    log: tuple[str, ...]
    counts: dict[str, int]


class World:
    """A pool in one process.

    Parameters
    ----------
    plan : Plan
        Steps of programs, and faults.
    folder : Path
        Holds the nodes' folders.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan, self.seed = plan, plan.seed
        self.scheduler = Scheduler()
        self.begun = self.scheduler.now
        self.faults_end = self.begun + FAULTS_END_S
        self.chance = random.Random(f"world {plan.seed}")
        self.log: list[str] = []
        self.policies = _POLICIES
        self.key = SigningKey(self.chance.randbytes(32))
        self.public_keys = {self.key.id: self.key.public}
        self.signed: dict[bytes, Ticket | Order] = {}
        self.network = Network(self.scheduler, plan.seed)
        self.truth = Truth(self.policies, lambda: self.scheduler.now, self._require_freed)
        self.server = RegistryServer(lambda: self.scheduler.now, self.truth.check)
        self.members = [
            Member(self, f"node{number}", number.to_bytes(16, "big"), folder, _PAGES_MAX * GRAIN_BYTES)
            for number in range(1, plan.members + 1)
        ]
        self.managers = [Manager(self, f"manager{number}") for number in range(1, plan.managers + 1)]
        self.clients = [
            Client(self, number, tuple(step for step in plan.steps if step.client == f"client{number}"))
            for number in range(1, plan.clients + 1)
        ]
        self._by_id = {member.id: member for member in self.members}
        self.processes: dict[str, Process] = {one.name: one for one in (*self.members, *self.managers, *self.clients)}
        for name, process in self.processes.items():
            process.note = lambda text, name=name: self.note(name, text)  # type: ignore[misc]

    # What processes use

    def note(self, name: str, text: str) -> None:
        """Write a line into the log."""
        self.log.append(f"{self.scheduler.now - self.begun:10.4f} {name:>9} {text}")

    def member(self, identity: str) -> Member:
        """Return the member with an identity."""
        return self._by_id[identity]

    def registry_for(self, process: Process) -> SimulatedRegistry:
        """Return the registry as a process reaches it."""
        return SimulatedRegistry(self.server, self.network, process)

    def sign(self, message: Ticket | Order) -> bytes:
        """Return a signed ticket or order, as all managers do, and remember its content for checks."""
        data = sign(message, self.key)
        self.signed[data] = message
        return data

    def _require_freed(self, order: OrderRecord) -> None:
        member = self.member(order.member)
        text = f"the end of extent {order.extent} of lease {order.lease[:8]} was confirmed, and {member.name} has it"
        require(not member.has(order.lease, order.extent), "confirmed", text)

    # The run

    def run(self) -> None:
        """Run the plan, and check that the pool comes to rest.

        Raises
        ------
        Violation
            A rule was broken.
        """
        for number, member in enumerate(self.members):
            record = MemberRecord(
                addresses=(f"tcp://10.0.0.{number + 1}:7471",),
                labels={"rack": f"r{number // 2}"},
                media={"dram": self.chance.randint(6, _PAGES_MAX) * GRAIN_BYTES},
            )
            self.server.commit([], [Put(RECORD + member.id, encode(record))])
        for process in self.processes.values():
            process.start()
        for fault in self.plan.faults:
            if fault.kind == "crash":
                self.processes[fault.target].crashes[fault.number] = fault.seconds
            else:
                self.scheduler.after(fault.at, lambda fault=fault: self._begin_fault(fault))  # type: ignore[misc]
        self.scheduler.after(FAULTS_END_S, self._end_faults)
        is_done = self.scheduler.run(_STEPS_END_S, lambda: all(client.is_done for client in self.clients))
        late = [client.name for client in self.clients if not client.is_done]
        require(is_done, "starves", f"{late} did not end within {_STEPS_END_S:g} s")
        self.scheduler.run(max(0.0, self.faults_end - self.scheduler.now))
        self.note("all", "programs have ended, and nothing goes wrong any more")
        self.scheduler.run(_REST_S, self._rests)
        leases, orders = sorted(lease[:8] for lease in self.truth.leases), sorted(self.truth.orders)
        require(not leases and not orders, "rest", f"the leases {leases} and the orders {orders} have not ended")
        for member in self.members:
            member.check_extents()
            require(not member.extents, "rest", f"{member.name} has the extents {member.extents} without a lease")

    def _rests(self) -> bool:
        """Return True if no memory is lent, and all processes are up."""
        is_free = not self.truth.leases and not self.truth.orders
        return is_free and all(process.is_up for process in self.processes.values())

    # Faults

    def _begin_fault(self, fault: Fault) -> None:
        self.note("fault", str(fault))
        match fault.kind:
            case "cut" | "loss" | "slow":
                self._disturb(fault)
            case "clock":
                self.processes[fault.target].ahead = fault.seconds
            case "compact":
                self.server.compact(self.server.revision)
            case "drain":
                self._change_member(fault.target, draining=True)
                self.scheduler.after(fault.seconds, lambda: self._change_member(fault.target, draining=False))
            case "lend":
                self._change_member(fault.target, pages=fault.number)

    def _disturb(self, fault: Fault) -> None:
        """Disturb the links between two processes, or between one and all others, for a while."""
        others = [fault.other] if fault.other else [NAME, *self.processes]
        links = [
            self.network.link(*way)
            for other in others
            if other != fault.target
            for way in ((fault.target, other), (other, fault.target))
        ]

        def change(sign: int) -> None:
            for link in links:
                link.cuts += sign * (fault.kind == "cut")
                link.losses += sign * (fault.kind == "loss")
                link.delays += sign * (fault.kind == "slow")

        change(1)
        self.scheduler.after(min(fault.seconds, self.faults_end - self.scheduler.now), lambda: change(-1))

    def _change_member(self, name: str, *, draining: bool | None = None, pages: int | None = None) -> None:
        """Do what the lender's owner does to its record."""
        member = self.processes[name]
        assert isinstance(member, Member)
        self.truth.has_changed_members = True
        record = self.truth.records[member.id]
        if draining is not None:
            record = msgspec.structs.replace(record, draining=draining)
        if pages is not None:
            record = msgspec.structs.replace(record, media={"dram": pages * GRAIN_BYTES})
        self.server.commit([], [Put(RECORD + member.id, encode(record))])

    def _end_faults(self) -> None:
        self.note("all", "faults end")
        for process in self.processes.values():
            process.crashes.clear()
            process.ahead = 0.0

    def counts(self) -> dict[str, int]:
        """Return how often things happened."""
        return {
            "events": self.scheduler.steps,
            "messages": self.network.messages,
            "transactions": self.truth.changes,
            "grants": self.truth.grants,
            "answers": sum(client.answers for client in self.clients),
            "crashes": sum(process.starts - 1 for process in self.processes.values()),
        }


def run_plan(plan: Plan, folder: Path | None = None) -> Outcome:
    """Run a plan.

    Parameters
    ----------
    plan : Plan
        The plan.
    folder : Path, optional
        Holds the nodes' folders while the plan runs; None for a temporary folder, in memory if possible.
    """
    parent = folder or next((path for path in (Path("/dev/shm"),) if path.is_dir()), None)
    with tempfile.TemporaryDirectory(prefix="farpool-sim-", dir=parent) as own:
        world = World(plan, Path(own))
        violation = None
        try:
            world.run()
        except Violation as error:
            violation = error
        except Exception as error:  # a process ended by itself
            text = "".join(traceback.format_exception(error, limit=-4))
            violation = Violation("error", text)
        finally:
            world.scheduler.close()
            for member in world.members:
                if member.is_up:
                    member.is_up = False
                    member.ended()
            NodeServer.simulate_time(0.0)
        if violation is not None:
            world.note("all", f"a rule is broken: {violation}")
        return Outcome(plan, violation, tuple(world.log), world.counts())
