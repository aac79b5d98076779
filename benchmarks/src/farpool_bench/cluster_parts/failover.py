"""The time until another manager leads after the leader was killed, and until the pool notices that a node was killed.

Both run with their default settings: three seconds without a sign of life (``farpool manager --ttl``, ``farpool node
--member-ttl``). The longest time counts.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farpool.abc.membership import MemberState
from farpool.cluster.manager.records import LEADER, ManagerRecord, decode
from farpool.cluster.members import RegistryMembers
from farpool.cluster.node.process import running_node
from farpool.cluster.registry import Registry, open_registry
from farpool_bench.cluster_parts.figures import at_most
from farpool_bench.cluster_parts.running import RunningManager, registries, running_manager, wait_for
from farpool_bench.harness import Row, told

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

_SETTLE_S = 0.37
"""Seconds between two kills differ by multiples of this, so that they fall between different signs of life."""


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Kill managers and nodes of a pool over each registry that can run here."""
    figures, rows = [], []
    for kind, made in registries(bench.folder):
        with ExitStack() as pool:
            address = pool.enter_context(made)
            registry = pool.enter_context(open_registry(address, timeout=60.0))
            leads, noticed = [], []
            for number in told(bench.progress, f"Failures, {kind}", range(bench.rounds)):
                leads.append(_leaderless(address, registry, number))
                noticed.append(_unnoticed(address, number))
            figures.append(at_most(f"without a leader, {kind}", max(leads), 5, "s"))
            figures.append(at_most(f"until a lost member is noticed, {kind}", max(noticed), 3, "s"))
            rows.append(Row(registry=kind, leads=tuple(leads), noticed=tuple(noticed)))
    return Row(figures=tuple(figures), seconds=tuple(rows))


def _leader(registry: Registry) -> str:
    entry = registry.get(LEADER)
    return "" if entry is None else decode(entry, ManagerRecord).manager


def _leaderless(address: str, registry: Registry, number: int) -> float:
    """Seconds from the end of the leader until another manager leads."""
    with ExitStack() as stack:
        managers: list[RunningManager] = [stack.enter_context(running_manager(address)) for _ in range(2)]
        names = {manager.name: manager for manager in managers}
        wait_for(lambda: _leader(registry) in names, "an election")
        time.sleep(_SETTLE_S * (number % 3 + 1))
        leader = names[_leader(registry)]
        leader.kill()
        start = time.monotonic()
        wait_for(lambda: _leader(registry) in names.keys() - {leader.name}, "the election of another leader")
        return time.monotonic() - start


def _unnoticed(address: str, number: int) -> float:
    """Seconds from the end of a node until programs that follow the registry see it as down."""
    with running_node("64MiB", ephemeral=True, registry=address) as node, RegistryMembers(address) as members:

        def state() -> MemberState | None:
            return next((one.state for one in members.members() if node.address in one.addresses), None)

        wait_for(lambda: state() is MemberState.ACTIVE, "the registration of a node")
        time.sleep(_SETTLE_S * (number % 3 + 1))
        node.kill()
        start = time.monotonic()
        wait_for(lambda: state() is not MemberState.ACTIVE, "the loss of a node")
        return time.monotonic() - start
