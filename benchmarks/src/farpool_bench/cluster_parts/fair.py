"""Two equal tenants that both ask for as many bytes as they can, one with 1 connection and one with many.

The node should be the limit. A program that waits for a processor has requests at the node only as long as the buffers
of its connections last, and one connection has few. So the programs throw the bytes that they receive away, send the
same payload again and again, and have the processors before the node.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farpool.cluster.tenants.administration import TenantChange
from farpool.errors import FarpoolError
from farpool_bench.cluster_parts.figures import at_most
from farpool_bench.cluster_parts.running import TwoTenants, key_of
from farpool_bench.harness import Row, told
from farpool_bench.render import middle
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    from farpool_bench.cluster import Bench

KINDS = {"gets of 8 MiB": "light gets", "puts of 1 MiB": "light puts"}
"""Programs of the tenants by the kind of their requests.

Puts are so small that the node has room for one on each connection. It refuses others, and then a byte costs it less
work than a byte that it stores; tenants get equal parts of the work.
"""
_BEGINNING_S = 0.5
_WINDOWS = 3
"""Samples are this many times as long as others: a share is a mean over many requests of each tenant."""


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure the bytes of both tenants."""
    pool = TwoTenants(stack, bench.folder)
    pool.limit(flooding=TenantChange(share=1.0), victim=TenantChange(share=1.0))
    _let_others_go_first(pool.node.pid)
    cases = [kind for _ in range(bench.rounds) for kind in KINDS]
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}
    for kind in told(bench.progress, "Equal tenants", cases):
        found[kind].append(_bytes(bench, pool, kind))
    rows = []
    for kind, pairs in found.items():
        rows.append(Row(kind=kind, one=tuple(pair[0] for pair in pairs), many=tuple(pair[1] for pair in pairs)))
    figures = [
        at_most(
            f"difference of bytes, 1 and {bench.connections} connections, {row.kind}",
            abs(1 - middle([one / many for one, many in zip(row.one, row.many, strict=True)])),
            0.05,
        )
        for row in rows
    ]
    return Row(figures=tuple(figures), connections=bench.connections, shares=tuple(rows))


def _let_others_go_first(pid: int) -> None:
    """Give all threads of a process the lowest priority."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))


def _bytes(bench: Bench, pool: TwoTenants, kind: str) -> tuple[int, int]:
    """Bytes of the tenant with one connection and of the tenant with many, in the same time."""
    pool.fill()
    with ExitStack() as stack:
        for name, connections in (("flooding", bench.connections), ("victim", 1)):
            words = [pool.node.address, key_of(name), KINDS[kind], str(connections), "0"]
            Worker("cluster_parts.flood", words).started(stack)
        time.sleep(_BEGINNING_S)
        before = pool.moved()
        time.sleep(_WINDOWS * bench.seconds)
        after = pool.moved()
    one, many = (after[name] - before[name] for name in ("victim", "flooding"))
    if not one or not many:
        raise FarpoolError(
            f"a tenant moved no bytes: {one} with one connection and {many} with many; use more --seconds"
        )
    return one, many
