"""Puts a simulated pool together, runs a plan in it, and checks that it comes to rest."""

from __future__ import annotations

import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farpool._native import NodeServer
from farpool.abc.registry import Put
from farpool.cluster.leases.records import GRAIN_BYTES, OrderRecord
from farpool.cluster.members.records import RECORD, MemberRecord, encode
from farpool.sim.client import Client
from farpool.sim.manager import Manager
from farpool.sim.member import Member
from farpool.sim.network import Process
from farpool.sim.plan import FAULTS_END_S, Fault, Plan
from farpool.sim.registry import NAME
from farpool.sim.violation import Violation, require
from farpool.sim.world import World

__all__ = ["Outcome", "Simulation", "run_plan"]

_PAGES_MAX = 20
_STEPS_END_S = 600.0
"""Seconds within which all programs have ended."""
_REST_S = 120.0
"""Seconds after the end of all programs within which all memory is free again."""


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


class Simulation:
    """A pool in one process, and a plan that runs in it.

    Parameters
    ----------
    plan : Plan
        Steps of programs, and faults.
    folder : Path
        Holds the nodes' folders.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self.world = world = World(plan, self._require_freed)
        self._scheduler = world.scheduler
        self.members = [
            Member(world, f"node{number}", number.to_bytes(16, "big"), folder, _PAGES_MAX * GRAIN_BYTES)
            for number in range(1, plan.members + 1)
        ]
        self._by_id = {member.id: member for member in self.members}
        managers = [Manager(world, f"manager{number}", self._by_id) for number in range(1, plan.managers + 1)]
        self._clients: list[Client] = []
        for number in range(1, plan.clients + 1):
            steps = tuple(step for step in plan.steps if step.client == f"client{number}")
            self._clients.append(Client(world, number, steps, self._by_id, managers, self._clients))
        self._processes: dict[str, Process] = {one.name: one for one in (*self.members, *managers, *self._clients)}
        for name, process in self._processes.items():
            process.note = lambda text, name=name: world.note(name, text)  # type: ignore[misc]

    def _require_freed(self, order: OrderRecord) -> None:
        member = self._by_id[order.member]
        text = f"the end of extent {order.extent} of lease {order.lease[:8]} was confirmed, and {member.name} has it"
        require(not member.has(order.lease, order.extent), "confirmed", text)

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
                media={"dram": self.world.chance.randint(6, _PAGES_MAX) * GRAIN_BYTES},
            )
            self.world.server.commit([], [Put(RECORD + member.id, encode(record))])
        for process in self._processes.values():
            process.start()
        for fault in self._plan.faults:
            if fault.kind == "crash":
                self._processes[fault.target].crashes[fault.number] = fault.seconds
            else:
                self._scheduler.after(fault.at, lambda fault=fault: self._begin_fault(fault))  # type: ignore[misc]
        self._scheduler.after(FAULTS_END_S, self._end_faults)
        is_done = self._scheduler.run(_STEPS_END_S, lambda: all(client.is_done for client in self._clients))
        late = [client.name for client in self._clients if not client.is_done]
        require(is_done, "starves", f"{late} did not end within {_STEPS_END_S:g} s")
        self._scheduler.run(max(0.0, self.world.faults_end - self._scheduler.now))
        self.world.note("all", "programs have ended, and nothing goes wrong any more")
        self._scheduler.run(_REST_S, self._rests)
        leases, orders = sorted(lease[:8] for lease in self.world.truth.leases), sorted(self.world.truth.orders)
        require(not leases and not orders, "rest", f"the leases {leases} and the orders {orders} have not ended")
        for member in self.members:
            member.check_extents()
            require(not member.extents, "rest", f"{member.name} has the extents {member.extents} without a lease")

    def _rests(self) -> bool:
        """Return True if no memory is lent, and all processes are up."""
        is_free = not self.world.truth.leases and not self.world.truth.orders
        return is_free and all(process.is_up for process in self._processes.values())

    # Faults

    def _begin_fault(self, fault: Fault) -> None:
        self.world.note("fault", str(fault))
        match fault.kind:
            case "cut" | "loss" | "slow":
                self._disturb(fault)
            case "clock":
                self._processes[fault.target].ahead = fault.seconds
            case "compact":
                self.world.server.compact(self.world.server.revision)
            case "drain":
                self._change_member(fault.target, draining=True)
                self._scheduler.after(fault.seconds, lambda: self._change_member(fault.target, draining=False))
            case "lend":
                self._change_member(fault.target, pages=fault.number)

    def _disturb(self, fault: Fault) -> None:
        """Disturb the links between two processes, or between one and all others, for a while."""
        others = [fault.other] if fault.other else [NAME, *self._processes]
        links = [
            self.world.network.link(*way)
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
        self._scheduler.after(min(fault.seconds, self.world.faults_end - self._scheduler.now), lambda: change(-1))

    def _change_member(self, name: str, *, draining: bool | None = None, pages: int | None = None) -> None:
        """Do what the lender's owner does to its record."""
        member = self._processes[name]
        assert isinstance(member, Member)
        self.world.truth.has_changed_members = True
        record = self.world.truth.records[member.id]
        if draining is not None:
            record = msgspec.structs.replace(record, draining=draining)
        if pages is not None:
            record = msgspec.structs.replace(record, media={"dram": pages * GRAIN_BYTES})
        self.world.server.commit([], [Put(RECORD + member.id, encode(record))])

    def _end_faults(self) -> None:
        self.world.note("all", "faults end")
        for process in self._processes.values():
            process.crashes.clear()
            process.ahead = 0.0

    def counts(self) -> dict[str, int]:
        """Return how often things happened."""
        return {
            "events": self._scheduler.steps,
            "messages": self.world.network.messages,
            "transactions": self.world.truth.changes,
            "grants": self.world.truth.grants,
            "answers": sum(client.answers for client in self._clients),
            "crashes": sum(process.starts - 1 for process in self._processes.values()),
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
        simulation = Simulation(plan, Path(own))
        violation = None
        try:
            simulation.run()
        except Violation as error:
            violation = error
        except Exception as error:  # a process ended by itself
            text = "".join(traceback.format_exception(error, limit=-4))
            violation = Violation("error", text)
        finally:
            simulation.world.scheduler.close()
            for member in simulation.members:
                if member.is_up:
                    member.is_up = False
                    member.ended()
            NodeServer.simulate_time(0.0)
        if violation is not None:
            simulation.world.note("all", f"a rule is broken: {violation}")
        return Outcome(plan, violation, tuple(simulation.world.log), simulation.counts())
