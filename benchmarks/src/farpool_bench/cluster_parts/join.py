"""An empty member that joins a pool while a program reads and puts objects.

Starting a process takes processor time that, on one machine, the program lacks. So a window in which a node starts and
joins is compared with a window in which the same node starts and joins no pool. The windows alternate. A manager
runs, so objects also move to the new member.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from farpool.cluster.node.process import running_node
from farpool_bench.cluster_parts.figures import at_most, noted
from farpool_bench.cluster_parts.running import running_manager, running_sqlite
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn, median_ratio
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

_NODES = 3
_OBJECTS, _NBYTES = 500, 64 << 10
_WINDOWS = 5
"""A window is this many times as long as other samples."""
_SLOW_START_WINDOWS = 2
"""The weight of the new member grows over this many windows."""
_REST_S = 0.5


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure windows with a join and windows without one."""
    registry = stack.enter_context(running_sqlite(bench.folder))
    for _ in range(_NODES):
        stack.enter_context(running_node("256MiB", ephemeral=True, registry=registry, slow_start=0))
    stack.enter_context(running_manager(registry, "--repair-rate", str(bench.repair_rate)))
    words = [registry, str(_OBJECTS), str(_NBYTES)]
    program = Worker("cluster_parts.program", words).started(stack)
    time.sleep(bench.seconds)
    windows: dict[bool, list[Any]] = {False: [], True: []}

    def sample(joins: bool) -> float:
        windows[joins].append(_window(bench, program, registry if joins else None))
        return float(windows[joins][-1]["get_p99"])

    before, joined = in_turn([partial(sample, joins) for joins in (False, True)], bench.rounds, "Join", bench.progress)
    puts = tuple(tuple(window["put_p99"] for window in windows[joins]) for joins in (False, True))
    failed = sum(window["failed"] for of_one in windows.values() for window in of_one)
    gets = sum(window["gets"] for window in windows[True])
    figures = (
        at_most("p99 of gets while an empty member joins, over without a join", median_ratio(joined, before), 1.2),
        at_most("p99 of puts while an empty member joins, over without a join", median_ratio(puts[1], puts[0]), 1.2),
        at_most(f"failed gets of {gets:,}", failed, 0),
        noted("p99 of gets while it joins", 1e3 * sum(joined) / len(joined), "ms"),
    )
    return Row(
        figures=figures, get_p99=Row(without=before, joined=joined), put_p99=Row(without=puts[0], joined=puts[1])
    )


def _window(bench: Bench, program: Worker, registry: str | None) -> Any:
    """Start a node, which joins the pool of a registry if one is given, and describe the program's requests then."""
    seconds = _WINDOWS * bench.seconds
    options: dict[str, Any] = {"registry": registry, "slow_start": _SLOW_START_WINDOWS * seconds} if registry else {}
    program.ask("", "window")
    with running_node("256MiB", ephemeral=True, **options) as node:
        time.sleep(seconds)
        window = msgspec.json.decode(program.ask("", "window"))
        node.terminate()
    time.sleep(_REST_S)
    return window
