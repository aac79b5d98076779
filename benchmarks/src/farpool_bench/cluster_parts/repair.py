"""Repair after the loss of a node, and the reads of a program while it runs.

Three nodes have objects of 1 MiB with two copies each, and one node is killed. While the manager still waits for it
(``--repair-grace``), the program reads with one node missing; then the manager has the lost copies made again. The rate
of repair is compared with the rate that it is allowed, and the program's reads with the reads before the repair.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import msgspec

from farpool.cluster.node.process import running_node
from farpool.errors import FarpoolError
from farpool_bench.cluster_parts.figures import at_least, at_most, noted
from farpool_bench.cluster_parts.running import RunningManager, running_manager, running_sqlite, wait_for
from farpool_bench.harness import Row, told
from farpool_bench.render import middle
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

_NODES = 3
_NBYTES = 1 << 20
_REPAIR_WINDOWS = 6
"""A repair takes this many times as long as other samples."""
_GRACE_WINDOWS = 3
_MEMBER_TTL_S = 1.0
_LOOK_S = 0.02
_LOOK_PART = 0.1
"""Seconds between two looks at a repair under way, for each second of a sample."""
_TIMEOUT_S = 300.0
_ROUNDS_MAX = 3


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Kill a node of a new pool in each round."""
    rounds = min(bench.rounds, _ROUNDS_MAX)
    rows = [_repaired(bench) for _ in told(bench.progress, "Repair", range(rounds))]
    figures = (
        at_least("rate of repair over the rate allowed", middle([row.rate / bench.repair_rate for row in rows]), 0.8),
        at_least("reads while repair runs, over before it", middle([row.during / row.before for row in rows]), 0.9),
        at_most("failed reads", sum(row.failed for row in rows), 0),
        noted("reads with a node missing, over all nodes up", middle([row.before / row.whole for row in rows])),
    )
    return Row(figures=figures, allowed=bench.repair_rate, rounds=tuple(rows))


def _repaired(bench: Bench) -> Row:
    """Lose a node, and describe the repair and the reads."""
    grace = _GRACE_WINDOWS * bench.seconds + _MEMBER_TTL_S
    objects = max(12, round(_REPAIR_WINDOWS * bench.seconds * bench.repair_rate / _NBYTES * _NODES / 2))
    with ExitStack() as stack:
        registry = stack.enter_context(running_sqlite(bench.folder))
        dram = str((objects + 64) * _NBYTES)
        options: dict[str, Any] = {
            "ephemeral": True,
            "registry": registry,
            "slow_start": 0,
            "member_ttl": _MEMBER_TTL_S,
        }
        nodes = [stack.enter_context(running_node(dram, **options)) for _ in range(_NODES)]
        rates = ["--repair-rate", str(bench.repair_rate), "--repair-grace", str(grace)]
        manager = stack.enter_context(running_manager(registry, *rates))
        words = [registry, str(objects), str(_NBYTES), "read"]
        program = Worker("cluster_parts.program", words).started(stack)
        wait_for(lambda: _status(manager)["scans"] > 0, "the first scan")
        windows = [_window(program, bench.seconds * _GRACE_WINDOWS / 2)]
        nodes[0].kill()
        # Requests to the lost node fail at once, and the program learns soon that it is down.
        program.ask("", "window")
        before = _status(manager)
        windows.append(_window(program, bench.seconds * _GRACE_WINDOWS / 2))
        wait_for(lambda: _status(manager)["nbytes"] > before["nbytes"], "the begin of the repair", _TIMEOUT_S)
        program.ask("", "window")
        first, since = _status(manager)["nbytes"], time.monotonic()
        nbytes, seconds, during = _mended(bench, manager, program, first, since)
        windows.append(during)
        rates = [window["gets"] / window["seconds"] for window in windows]
        failed = sum(window["failed"] for window in windows)
        row = Row(zip(("whole", "before", "during"), rates, strict=True))
        return Row(row, rate=nbytes / seconds, nbytes=nbytes, failed=failed)


def _status(manager: RunningManager) -> Any:
    """What the manager has done for the objects of tenant 0."""
    tenants = manager.get("/v1/repairs")["tenants"]
    return tenants.get("0", {"scans": 0, "nbytes": 0, "waiting": 0})


def _mended(
    bench: Bench, manager: RunningManager, program: Worker, first: int, since: float
) -> tuple[int, float, Counter[str]]:
    """Wait until nothing is left to copy.

    Returns
    -------
    nbytes : int
        Bytes that were copied.
    seconds : float
        Seconds until the last of them.
    reads : Counter
        The program's gets, failed gets and seconds until then.
    """
    last, at = first, since
    reads, later = Counter[str](), Counter[str]()
    while True:
        time.sleep(max(_LOOK_S, bench.seconds * _LOOK_PART))  # each look takes time from the reads
        now, status = time.monotonic(), _status(manager)
        window = msgspec.json.decode(program.ask("", "window"))
        later.update({name: window[name] for name in ("gets", "failed", "seconds")})
        if status["nbytes"] > last:
            last, at = status["nbytes"], now
            reads.update(later)
            later.clear()
        if not status["waiting"] and now > at + _MEMBER_TTL_S:
            break
        if now > since + _TIMEOUT_S:
            raise FarpoolError(f"the repair did not end within {_TIMEOUT_S:g} s: {status}")
    if last == first:
        raise FarpoolError("the repair was over before it could be measured; allow a lower --repair-rate")
    return last - first, at - since, reads


def _window(program: Worker, seconds: float) -> Any:
    program.ask("", "window")
    time.sleep(seconds)
    return msgspec.json.decode(program.ask("", "window"))
