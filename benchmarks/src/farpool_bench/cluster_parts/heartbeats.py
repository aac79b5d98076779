"""The processor time and memory of a manager while many members renew their leases in the registry.

One process simulates all members: each has an entry and a lease, which it renews three times in ``--member-ttl``
seconds, and at least every five seconds, as a node does. No node listens at their addresses. The manager runs with its
default settings and leads. The registry is an etcd of three members, or a SQLite file if etcd is not installed.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farpool_bench.cluster_parts.figures import at_most, noted
from farpool_bench.cluster_parts.running import RunningManager, registries, running_manager, wait_for
from farpool_bench.harness import Row, told
from farpool_bench.measure import processor_seconds, resident_bytes
from farpool_bench.render import middle
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

_MIB = 1 << 20
_WINDOWS = 5
"""A window is this many times as long as other samples."""
_PAGE = 500


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure the manager without members, and with all of them."""
    kind, made = list(registries(bench.folder))[-1]
    address = stack.enter_context(made)
    manager = stack.enter_context(running_manager(address))
    wait_for(lambda: manager.get("/readyz")["leads"], "the manager's lead")
    idle = _processors(bench, manager)
    idle_bytes = resident_bytes(manager.pid)
    words = [address, str(bench.members), repr(bench.member_ttl)]
    members = Worker("cluster_parts.members", words).started(stack)
    wait_for(lambda: _active(manager) >= 0.9 * bench.members, "the registration of the members")
    before, since, busy = _beats(members), time.monotonic(), []
    for _ in told(bench.progress, "Heartbeats", range(bench.rounds)):
        busy.append(_processors(bench, manager))
    after, seconds = _beats(members), time.monotonic() - since
    rate, late = (after[0] - before[0]) / seconds, after[1] - before[1]
    nbytes = resident_bytes(manager.pid)
    figures = (
        at_most(f"processors of the manager, {bench.members:,} members, {kind}", middle(busy), 0.5),
        at_most("resident memory of the manager", nbytes / _MIB, 200, "MiB"),
        noted("processors of the manager without members", idle),
        noted("resident memory of the manager without members", idle_bytes / _MIB, "MiB"),
        noted("heartbeats that came", rate, "1/s"),
        noted("heartbeats that came too late", late),
    )
    return Row(figures=figures, registry=kind, members=bench.members, ttl=bench.member_ttl, processors=tuple(busy))


def _processors(bench: Bench, manager: RunningManager) -> float:
    start, used = time.monotonic(), processor_seconds(manager.pid)
    time.sleep(_WINDOWS * bench.seconds)
    return (processor_seconds(manager.pid) - used) / (time.monotonic() - start)


def _active(manager: RunningManager) -> int:
    """Number of members that the manager counts as active."""
    count, after = 0, ""
    while True:
        page = manager.get(f"/v1/members?limit={_PAGE}" + (f"&after={after}" if after else ""))
        count += len([member for member in page["members"] if member["state"] == "active"])
        after = page.get("next") or ""
        if not after:
            return count


def _beats(members: Worker) -> tuple[int, int]:
    beats, lost = members.ask("", "beats").split()
    return int(beats), int(lost)
