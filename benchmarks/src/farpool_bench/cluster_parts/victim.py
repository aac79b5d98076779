"""A tenant next to another one that floods the node with puts, gets, lookups and lists.

The victim has a bandwidth guarantee of a quarter of the rate that it reaches alone, and an eighth of the share of the
other tenant, so it gets what is guaranteed only if the node keeps guarantees. In each round, next to the flood and next
to a process that uses as much processor time as the flood's programs, three things are measured: the times of gets of
4 KiB, the times of the same gets with a key of the latency class, and the bytes of gets of 64 KiB on four connections.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from farpool.cluster.tenants.administration import TenantChange
from farpool.cluster.wire.frames import Op, pack_frame
from farpool_bench.cluster_parts.figures import at_least, at_most, noted
from farpool_bench.cluster_parts.running import TwoTenants, key_of
from farpool_bench.harness import Row, told
from farpool_bench.measure import median_ratio, processor_seconds, quantile
from farpool_bench.turns_flood import connected, received_whole
from farpool_bench.worker import Worker

if TYPE_CHECKING:
    import socket

    from farpool_bench.cluster import Bench

FLOODS = {
    "puts": ("puts of 4 KiB",),
    "large puts": ("puts of 64 MiB",),
    "gets": ("gets of 64 KiB",),
    "large gets": ("gets of 8 MiB",),
    "lookups": ("lookups",),
    "lists": ("lists",),
    "all": ("puts of 4 KiB", "gets of 8 MiB", "lookups", "lists"),
}
"""Programs of each flood."""
_BEGINNING_S = 0.5
"""Seconds until a flood is under way."""
_VICTIM_CONNECTIONS = 4
_GUARANTEED_PART = 0.25
_FLOOD_SHARE = 8.0


def measure(bench: Bench, stack: ExitStack) -> Row:
    """Measure the victim next to each flood."""
    pool = TwoTenants(stack, bench.folder)
    pool.fill()
    alone = _bytes_per_second(bench, pool)
    guarantee = int(alone * _GUARANTEED_PART)
    pool.limit(flooding=TenantChange(share=_FLOOD_SHARE), victim=TenantChange(share=1.0, guarantee=guarantee))
    gets = {name: stack.enter_context(connected(pool.node.address, key_of(name))) for name in ("victim", "quick")}
    cases = [kind for _ in range(bench.rounds) for kind in FLOODS]
    found: dict[str, list[Row]] = {kind: [] for kind in FLOODS}
    for kind in told(bench.progress, "Victim next to floods", cases):
        found[kind].append(_pair(bench, pool, gets, kind, found[kind]))
    floods = tuple(
        Row(kind=kind, **{name: tuple(row[name] for row in rows) for name in rows[0]}) for kind, rows in found.items()
    )
    return Row(figures=tuple(_figures(floods, guarantee)), guarantee=guarantee, alone=alone, floods=floods)


def _figures(floods: Sequence[Row], guarantee: int) -> Iterator[Row]:
    """The worst figure of all floods counts; the others are in the samples."""
    of_guarantee = {one.kind: statistics.median(one.flooded_rate) / guarantee for one in floods}
    worst = min(of_guarantee, key=of_guarantee.__getitem__)
    yield at_least(f"victim's bytes over its guarantee, next to {worst}", of_guarantee[worst], 0.95)
    for name, text, bound in (("p99", "p99 of gets of 4 KiB", 1.2), ("quick_p99", "p99 of the latency class", 1.3)):
        ratios = {one.kind: median_ratio(one[f"flooded_{name}"], one[f"burnt_{name}"]) for one in floods}
        worst = max(ratios, key=ratios.__getitem__)
        yield at_most(f"{text} over the one next to a processor's user, next to {worst}", ratios[worst], bound)
    for one in floods:
        yield noted(f"p99 of gets of 4 KiB, next to {one.kind}", median_ratio(one.flooded_p99, one.burnt_p99))


def _pair(bench: Bench, pool: TwoTenants, gets: dict[str, socket.socket], kind: str, before: Sequence[Row]) -> Row:
    """Measure next to a flood, and next to a process that uses as much of the processors.

    The first one changes with each round; the flood's use of the processors is known from the second round on.
    """
    pool.fill()
    if len(before) % 2:
        burnt = _burnt(bench, pool, gets, before[-1].processors)
        flooded, processors = _flooded(bench, pool, gets, kind)
    else:
        flooded, processors = _flooded(bench, pool, gets, kind)
        burnt = _burnt(bench, pool, gets, processors)
    samples = {f"flooded_{name}": value for name, value in flooded.items()}
    return Row(samples, **{f"burnt_{name}": value for name, value in burnt.items()}, processors=processors)


def _flooded(bench: Bench, pool: TwoTenants, gets: dict[str, socket.socket], kind: str) -> tuple[Row, float]:
    with ExitStack() as stack:
        programs = FLOODS[kind]
        each = str(max(1, bench.connections // len(programs)))
        words = [pool.node.address, key_of("flooding")]
        floods = [
            Worker("cluster_parts.flood", [*words, one, each, str(bench.lookup_keys)]).started(stack)
            for one in programs
        ]
        time.sleep(_BEGINNING_S)
        start, used = time.monotonic(), sum(processor_seconds(flood.pid) for flood in floods)
        samples = _samples(bench, pool, gets)
        used = sum(processor_seconds(flood.pid) for flood in floods) - used
        return samples, used / (time.monotonic() - start)


def _burnt(bench: Bench, pool: TwoTenants, gets: dict[str, socket.socket], processors: float) -> Row:
    with burning(processors):
        return _samples(bench, pool, gets)


@contextlib.contextmanager
def burning(processors: float) -> Iterator[None]:
    """Use some of the processors, such as 1.5 of them, without the node."""
    with ExitStack() as stack:
        count = max(1, math.ceil(processors))
        for _ in range(count):
            Worker("cluster_parts.burner", [repr(processors / count)]).started(stack)
        time.sleep(_BEGINNING_S)
        yield


def _samples(bench: Bench, pool: TwoTenants, gets: dict[str, socket.socket]) -> Row:
    times, quick = (get_seconds(gets[name], bench.seconds) for name in ("victim", "quick"))
    return Row(
        median=statistics.median(times),
        p99=quantile(times, 0.99),
        quick_median=statistics.median(quick),
        quick_p99=quantile(quick, 0.99),
        rate=_bytes_per_second(bench, pool),
    )


def get_seconds(stream: socket.socket, seconds: float) -> list[float]:
    """Get an object of 4 KiB again and again; return the seconds of each get."""
    request, taken, end = pack_frame(Op.GET, b"4 KiB"), list[float](), time.perf_counter() + seconds
    start = time.perf_counter()
    while start < end or not taken:
        stream.sendall(request)
        received_whole(stream)
        now = time.perf_counter()
        taken.append(now - start)
        start = now
    return taken


def _bytes_per_second(bench: Bench, pool: TwoTenants) -> float:
    with ExitStack() as stack:
        words = [pool.node.address, key_of("victim"), "gets of 64 KiB", str(_VICTIM_CONNECTIONS)]
        flood = Worker("turns_flood", words).started(stack)
        time.sleep(_BEGINNING_S / 2)
        start, before = time.monotonic(), int(flood.ask("", "moved"))
        time.sleep(bench.seconds)
        return (int(flood.ask("", "moved")) - before) / (time.monotonic() - start)
