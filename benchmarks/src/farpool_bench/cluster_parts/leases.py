"""Operations of leases: grants, renewals and ends of many threads at once, as one manager carries them out.

The threads call the service of leases in a manager, so HTTP is not measured. Leases spread over 16 registered members.
SQLite commits to the disk of ``--folder``; etcd has three members on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from farpool.abc.registry import Operation, Put
from farpool.cluster.leases.records import GRAIN_BYTES, LeaseRequest
from farpool.cluster.leases.requests import Done, Granted, Refused
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.members.records import AliveRecord, MemberRecord, alive_key, encode, record_key
from farpool.cluster.registry import open_registry
from farpool.errors import FarpoolError
from farpool_bench.cluster_parts.figures import at_least, noted
from farpool_bench.cluster_parts.running import registries
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn
from farpool_bench.render import middle

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

THREADS = 32
_MEMBERS = 16
_BYTES = 4 << 40
_PER_THREAD = 60
"""Leases of each thread in a sample of a second."""
_TARGETS = {"SQLite": 2000, "etcd": 500}
_KINDS = ("grant", "renew", "end")


def member_operations(number: int, *, port: int = 7471) -> list[Operation]:
    """Operations that write a member that is no real node, without a lease of the registry."""
    identity = number.to_bytes(16, "big")
    # Each has an address of its own on loopback, where no node listens.
    address = f"tcp://127.{1 + number // 60_000}.{number // 250 % 250}.{number % 250 + 1}:{port}"
    record = MemberRecord(addresses=(address,), name=f"member-{number}", media={"dram": _BYTES})
    alive = AliveRecord(ready=True, process="benchmark")
    return [Put(record_key(identity), encode(record)), Put(alive_key(identity), encode(alive))]


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure the registries that can run here, in turn."""
    services = {}
    for name, made in registries(bench.folder):
        registry = stack.enter_context(open_registry(stack.enter_context(made), timeout=60.0))
        for number in range(_MEMBERS):
            registry.commit([], member_operations(number))
        services[name] = stack.enter_context(LeaseService(registry, timeout=60.0))
    threads = stack.enter_context(ThreadPoolExecutor(THREADS))
    count = max(1, round(_PER_THREAD * bench.seconds))
    found: dict[str, list[dict[str, float]]] = {name: [] for name in services}

    def sample(name: str) -> float:
        found[name].append(_cycle(services[name], threads, count))
        return sum(found[name][-1].values())

    works: list[Callable[[], float]] = [lambda name=name: sample(name) for name in services]  # type: ignore[misc]
    in_turn(works, bench.rounds, "Lease operations", bench.progress)
    operations = THREADS * count
    figures, rows = [], []
    for name, cycles in found.items():
        rates = [len(_KINDS) * operations / sum(cycle.values()) for cycle in cycles]
        figures.append(at_least(f"operations, {THREADS} at once, {name}", middle(rates), _TARGETS[name], "1/s"))
        for kind in _KINDS:
            seconds = tuple(cycle[kind] / operations for cycle in cycles)
            figures.append(noted(f"{kind}s, {name}", 1 / middle(seconds), "1/s"))
            rows.append(Row(registry=name, kind=kind, seconds=seconds))
    missing = None if "etcd" in services else "etcd is not installed (Debian and Ubuntu: apt-get install etcd-server)"
    return Row(figures=tuple(figures), threads=THREADS, operations=operations, seconds=tuple(rows), missing=missing)


def _cycle(service: LeaseService, threads: ThreadPoolExecutor, count: int) -> dict[str, float]:
    """Grant leases, renew each and end each, with all threads; return the seconds of each kind of operation."""
    leases: list[list[Granted]] = [[] for _ in range(THREADS)]
    ended: list[Done] = []

    def grant(number: int) -> None:
        for _ in range(count):
            leases[number].append(_granted(service.grant(LeaseRequest(tenant=1, holder="b", bytes=GRAIN_BYTES))))

    def renew(number: int) -> None:
        for lease in leases[number]:
            _granted(service.renew(lease.lease))

    def end(number: int) -> None:
        for lease in leases[number]:
            done = service.end(lease.lease)
            if not isinstance(done, Done):
                raise FarpoolError(f"a lease did not end: {done.text}")
            ended.append(done)

    seconds = {kind: _seconds(threads, work) for kind, work in zip(_KINDS, (grant, renew, end), strict=True)}
    # As nodes that have freed the memory. Without this, the orders would fill the registry.
    service.confirm_all(order for done in ended for order in done.orders)
    return seconds


def _seconds(threads: ThreadPoolExecutor, work: Callable[[int], Any]) -> float:
    start = time.perf_counter()
    for _ in threads.map(work, range(THREADS)):
        pass
    return time.perf_counter() - start


def _granted(outcome: Granted | Refused) -> Granted:
    if isinstance(outcome, Refused):
        raise FarpoolError(f"a lease was refused: {outcome.text}")
    return outcome
