"""Parts of a simulated pool that all its processes share."""

from __future__ import annotations

import random
from collections.abc import Callable

from farpool.cluster.leases.records import GRAIN_BYTES, OrderRecord
from farpool.cluster.leases.requests import TenantLimits
from farpool.cluster.leases.tickets import Order, SigningKey, Ticket, sign
from farpool.sim.network import Network, Process
from farpool.sim.plan import FAULTS_END_S, Plan
from farpool.sim.registry import RegistryServer, SimulatedRegistry
from farpool.sim.scheduler import Scheduler
from farpool.sim.truth import Truth

__all__ = ["World"]

_POLICIES = {
    1: TenantLimits(guaranteed={"dram": 8 * GRAIN_BYTES}, most={"dram": 24 * GRAIN_BYTES}),
    2: TenantLimits(guaranteed={"dram": 6 * GRAIN_BYTES}),
    3: TenantLimits(most={"dram": 20 * GRAIN_BYTES}, priority=1),
}


class World:
    """The time, the network, the registry and the log of a simulated pool.

    Parameters
    ----------
    plan : Plan
        Steps of programs, and faults.
    confirmed : callable
        Called with each order before the registry records that a node has carried it out.
    """

    def __init__(self, plan: Plan, confirmed: Callable[[OrderRecord], None]) -> None:
        self.seed = plan.seed
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
        self.truth = Truth(self.policies, lambda: self.scheduler.now, confirmed)
        self.server = RegistryServer(lambda: self.scheduler.now, self.truth.check)

    def note(self, name: str, text: str) -> None:
        """Write a line into the log."""
        self.log.append(f"{self.scheduler.now - self.begun:10.4f} {name:>9} {text}")

    def registry_for(self, process: Process) -> SimulatedRegistry:
        """Return the registry as a process reaches it."""
        return SimulatedRegistry(self.server, self.network, process)

    def sign(self, message: Ticket | Order) -> bytes:
        """Return a signed ticket or order, as all managers do, and remember its content for checks."""
        data = sign(message, self.key)
        self.signed[data] = message
        return data
