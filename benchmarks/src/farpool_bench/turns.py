"""Waiting of a tenant next to floods of another one, and shares of two tenants in a node's bytes.

The victim gets an object of 4 KiB again and again, over a connection of its own; its median time is measured alone,
next to a process that uses a processor and asks the node for nothing, and next to each flood of another tenant, with
one connection and with many. Then two equal tenants read objects of 8 MiB as fast as they can, one of them over many
connections. The flooding processes have a lower priority than the node.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool.cluster.node.process import running_node
from farpool.cluster.wire.frames import Op, pack_frame
from farpool_bench import harness
from farpool_bench.harness import Option, Row, told
from farpool_bench.measure import median_ratio, processor_seconds
from farpool_bench.render import Grid
from farpool_bench.turns_flood import KEYS, KINDS, connected, put_of, received_whole
from farpool_bench.worker import Worker

_FLOODING, _VICTIM = "flooding:0123456789abcdef", "victim:0123456789abcdef"
_BEGINNING_S = 0.5
"""Time until a flood is under way."""


class Bench(harness.Benchmark):
    """Each flood with one connection and with many, in rounds; then the shares of two tenants."""

    name = "turns"
    limit = "the same gets alone, and next to a process that only uses a processor"
    seconds: Annotated[float, Option("Seconds of each measurement", "S", least=0.05)] = 1.0
    rounds: Annotated[int, Option("Measurements of each", least=1)] = 3
    connections: Annotated[int, Option("Connections of the larger floods", least=1)] = 64
    QUICK: ClassVar = {"seconds": 0.1, "rounds": 1, "connections": 4}

    def open(self) -> None:
        keys = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-")), "keys.toml")
        keys.touch(mode=0o600)
        for tenant, (name, secret) in enumerate((key.split(":") for key in (_FLOODING, _VICTIM)), 1):
            access = f'secret = "{secret}"\nrights = ["read", "publish"]\ntenant = {tenant}\n'
            keys.write_text(f"{keys.read_text()}[keys.{name}]\n{access}")
        self._node = self.stack.enter_context(running_node("512MiB", keys=str(keys), ephemeral=True))
        self._victim = self.stack.enter_context(connected(self._node.address, _VICTIM))

    def cases(self) -> Iterable[tuple[str, int]]:
        """Kinds and connections of the floods, once for each round; an empty kind measures the shares."""
        counts = (1, self.connections)
        kinds = [("processor", 1), *((kind, count) for kind in (*KINDS, "") for count in counts)]
        return told(self.progress, "Waiting", kinds * self.rounds)

    def measure(self, case: tuple[str, int]) -> tuple[tuple[str, int], tuple[float, ...]]:
        self._fill()
        return case, self._wait(*case) if case[0] else (self._share(case[1]),)

    def outcome(self, found: list[tuple[tuple[str, int], tuple[float, ...]]]) -> Row:
        waited, shared = [], []
        for kind, connections in dict.fromkeys(case for case, _ in found):
            columns = tuple(zip(*(numbers for case, numbers in found if case == (kind, connections)), strict=True))
            if kind:
                alone, flooded, node = columns
                waited.append(Row(kind=kind, connections=connections, alone=alone, flooded=flooded, node=node))
            else:
                shared.append(Row(connections=connections, shares=columns[0]))
        return Row(waited=tuple(waited), shared=tuple(shared))

    def _fill(self) -> None:
        """Put the objects that the floods read, in case other floods have evicted them."""
        with connected(self._node.address, _FLOODING) as flooding:
            for key, nbytes in ((b"64 KiB", 64 << 10), (b"8 MiB", 8 << 20)):
                for stream in (flooding, self._victim):
                    stream.sendall(put_of(key, bytes(nbytes)))
                    received_whole(stream)
            for number in range(KEYS):
                flooding.sendall(put_of(b"found %d" % number, b"x"))
                received_whole(flooding)
        self._victim.sendall(put_of(b"4 KiB", bytes(4 << 10)))
        received_whole(self._victim)

    def _median_get(self) -> float:
        request, times, end = pack_frame(Op.GET, b"4 KiB"), list[float](), time.perf_counter() + self.seconds
        while not times or times[-1] < end:
            start = time.perf_counter()
            self._victim.sendall(request)
            received_whole(self._victim)
            times += [start, time.perf_counter()]
        return statistics.median(after - before for before, after in zip(times[::2], times[1::2], strict=True))

    def _wait(self, kind: str, connections: int) -> tuple[float, float, float]:
        """Median seconds of a get alone and next to a flood, and the processors that the node used then."""
        alone = self._median_get()
        with ExitStack() as stack:
            self._flood(stack, _FLOODING, kind, connections)
            time.sleep(_BEGINNING_S)
            start, used = time.monotonic(), processor_seconds(self._node.pid)
            flooded = self._median_get()
            processors = (processor_seconds(self._node.pid) - used) / (time.monotonic() - start)
        return alone, flooded, processors

    def _share(self, connections: int) -> float:
        with ExitStack() as stack:
            many = self._flood(stack, _FLOODING, "gets of 8 MiB", connections)
            one = self._flood(stack, _VICTIM, "gets of 8 MiB", 1)
            time.sleep(_BEGINNING_S)
            before = [int(flood.ask("", "received")) for flood in (one, many)]
            time.sleep(3 * self.seconds)
            got = [int(flood.ask("", "received")) - first for flood, first in zip((one, many), before, strict=True)]
        return got[0] / sum(got)

    def _flood(self, stack: ExitStack, key: str, kind: str, connections: int) -> Worker:
        return Worker("turns_flood", [self._node.address, key, kind, str(connections)]).started(stack)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "<flood of another tenant {kind}|connections {connections}|alone, µs {alone:1e6*.0f}"
        columns += "|next to it, µs {flooded:1e6*.0f}|times {times:.1f}|processors of the node {node:1*.2f}"
        rows = [Row(row, times=median_ratio(row.flooded, row.alone)) for row in outcome.waited]
        yield Grid.of("A get of 4 KiB, median", columns, rows)
        columns = "connections of the other tenant {connections}|share {shares:1*.2f}"
        yield Grid.of("Bytes of a tenant with one connection", columns, outcome.shared)
