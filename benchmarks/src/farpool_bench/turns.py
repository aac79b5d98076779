"""Benchmark of how long a tenant waits next to floods of another one, and how two tenants share a node's bytes.

The victim gets an object of 4 KiB again and again, over a connection of its own; its median time is measured alone,
next to a process that uses a processor and asks the node for nothing, and next to each flood of another tenant, with
one connection and with many. Then two equal tenants read objects of 8 MiB as fast as they can, one of them over many
connections. The flooding processes have a lower priority than the node.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group

from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.frames import Op, pack_frame
from farpool.observe.tables import Table
from farpool_bench.turns_flood import KEYS, KINDS, connected, put_of, received_whole

if TYPE_CHECKING:
    import socket

    from farpool_bench.benchmark import Progress

__all__ = ["Outcome", "Settings", "Shared", "Waited", "figures", "run", "table"]

_FLOODING, _VICTIM = "flooding:0123456789abcdef", "victim:0123456789abcdef"
_BEGINNING = 0.5
"""Seconds until a flood is under way."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        ``cpu``: a node computes nothing on a device.
    seconds : float
        Seconds of each measurement.
    rounds : int
        Measurements of each kind, taken in turn.
    connections : int
        Connections of the larger floods.
    """

    device: str = "cpu"
    seconds: float = 1.0
    rounds: int = 3
    connections: int = 64

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(seconds=0.1, rounds=1, connections=4)


@dataclass(frozen=True, slots=True)
class Waited:
    """Median seconds of the victim's gets in each round, next to one kind of flood.

    Attributes
    ----------
    kind : str
        The flood; ``processor`` is a process that asks the node for nothing.
    alone, flooded : tuple of float
        Medians just before the flood, and next to it.
    node : tuple of float
        Processors that the node used during the flood.
    """

    kind: str
    connections: int
    alone: tuple[float, ...]
    flooded: tuple[float, ...]
    node: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Time of a get next to the flood over its time alone, in the median of the rounds."""
        return statistics.median(busy / idle for busy, idle in zip(self.flooded, self.alone, strict=True))


@dataclass(frozen=True, slots=True)
class Shared:
    """Share of a tenant with one connection in the bytes that both tenants received, in each round."""

    connections: int
    shares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run."""

    waited: tuple[Waited, ...]
    shared: tuple[Shared, ...]


def run(settings: Settings, progress: Progress) -> Outcome:
    """Run the benchmark against a node of its own.

    Raises
    ------
    RuntimeError
        The node or a flooding process ended.
    """
    counts = (1, settings.connections)
    kinds = [("processor", 1), *((kind, connections) for kind in KINDS for connections in counts)]
    taken: dict[tuple[str, int], list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
    shares: dict[int, list[float]] = {connections: [] for connections in counts}
    with _node() as node:
        victim = connected(node.address, _VICTIM)
        for number in range(settings.rounds):
            for done, (kind, connections) in enumerate(kinds):
                progress("Waiting", number * len(kinds) + done, settings.rounds * len(kinds))
                taken[kind, connections].append(_wait(node, victim, kind, connections, settings.seconds))
            for connections in counts:
                _fill(node, victim)
                shares[connections].append(_share(node, connections, settings.seconds))
        victim.close()
    progress("Waiting", 1, 1)
    waited = tuple(Waited(*kind, *_columns(rounds)) for kind, rounds in taken.items())
    return Outcome(waited, tuple(Shared(count, tuple(parts)) for count, parts in shares.items()))


def _columns(
    rounds: list[tuple[float, float, float]],
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]:
    alone, flooded, node = zip(*rounds, strict=True)
    return alone, flooded, node


@contextmanager
def _node() -> Iterator[RunningNode]:
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.toml")
        keys.touch(mode=0o600)
        keys.write_text(
            "".join(
                f'[keys.{name}]\nsecret = "{secret}"\nrights = ["read", "publish"]\ntenant = {tenant}\n'
                for tenant, (name, secret) in enumerate((key.split(":") for key in (_FLOODING, _VICTIM)), 1)
            )
        )
        with running_node("512MiB", keys=str(keys), ephemeral=True) as node:
            yield node


def _fill(node: RunningNode, victim: socket.socket) -> None:
    """Put the objects that the floods read, in case other floods have evicted them."""
    with connected(node.address, _FLOODING) as flooding:
        objects = [(b"64 KiB", 64 << 10), (b"8 MiB", 8 << 20)]
        for key, nbytes in objects:
            for stream in (flooding, victim):
                stream.sendall(put_of(key, bytes(nbytes)))
                received_whole(stream)
        for number in range(KEYS):
            flooding.sendall(put_of(b"found %d" % number, b"x"))
            received_whole(flooding)
    victim.sendall(put_of(b"4 KiB", bytes(4 << 10)))
    received_whole(victim)


def _median_get(victim: socket.socket, seconds: float) -> float:
    request, times, end = pack_frame(Op.GET, b"4 KiB"), list[float](), time.perf_counter() + seconds
    while not times or times[-1] < end:
        start = time.perf_counter()
        victim.sendall(request)
        received_whole(victim)
        times += [start, time.perf_counter()]
    return statistics.median(after - before for before, after in zip(times[::2], times[1::2], strict=True))


def _wait(
    node: RunningNode, victim: socket.socket, kind: str, connections: int, seconds: float
) -> tuple[float, float, float]:
    """Median seconds of a get alone and next to a flood, and the processors that the node used then."""
    _fill(node, victim)
    alone = _median_get(victim, seconds)
    with _flood(node, _FLOODING, kind, connections):
        time.sleep(_BEGINNING)
        clock = ~node.pid << 3 | 2  # processor time of another process (clock_getcpuclockid)
        start, used = time.monotonic(), time.clock_gettime(clock)
        flooded = _median_get(victim, seconds)
        processors = (time.clock_gettime(clock) - used) / (time.monotonic() - start)
    return alone, flooded, processors


def _share(node: RunningNode, connections: int, seconds: float) -> float:
    with (
        _flood(node, _FLOODING, "gets of 8 MiB", connections) as many,
        _flood(node, _VICTIM, "gets of 8 MiB", 1) as one,
    ):
        time.sleep(_BEGINNING)
        before = [_received(process) for process in (one, many)]
        time.sleep(3 * seconds)
        got = [_received(process) - first for process, first in zip((one, many), before, strict=True)]
    return got[0] / sum(got)


@contextmanager
def _flood(node: RunningNode, key: str, kind: str, connections: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "farpool_bench.turns_flood", node.address, key, kind, str(connections)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None or process.stdout.readline() != "begun\n":
                raise RuntimeError(f"a process that floods the node with {kind} did not begin")
            yield process
        finally:
            process.kill()


def _received(process: subprocess.Popen[str]) -> int:
    """Ask a flood for the bytes that it has received so far."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def table(outcome: Outcome) -> Group:
    """Format the outcome."""
    waits = Table("A get of 4 KiB, median")
    waits.add_texts("flood of another tenant")
    waits.add_figures("connections", "alone, µs", "next to it, µs", "times", "processors of the node")
    for row in outcome.waited:
        alone, flooded = (f"{statistics.median(times) * 1e6:.0f}" for times in (row.alone, row.flooded))
        waits.add_row(
            row.kind, str(row.connections), alone, flooded, f"{row.ratio:.1f}", f"{statistics.median(row.node):.2f}"
        )
    shares = Table("Bytes of a tenant with one connection")
    shares.add_figures("connections of the other tenant", "share")
    for shared in outcome.shared:
        shares.add_row(str(shared.connections), f"{statistics.median(shared.shares):.2f}")
    return Group(waits, shares)


def figures(outcome: Outcome) -> dict[str, Any]:
    """Draw nothing: the table has all results."""
    return {}
