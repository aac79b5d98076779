"""A shared pool: what tenants, members, managers and leases cost, and what their failures cost.

Each part starts real processes on this machine: nodes, managers, programs, and an etcd of three members if it is
installed. Samples are taken in pairs that alternate, and the median of the ratios of the pairs is quoted. The memory of
nodes is written before anything is measured.

All processes share the processors of one machine here, and would not in a pool of several machines. So a waiting time
next to other programs is compared with the waiting time next to a process that uses as much processor time as they do
and asks the node for nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, ClassVar

from farpool.errors import ConfigError
from farpool.observe.provenance import provenance
from farpool_bench import harness
from farpool_bench.harness import Option, Result, Row, check_known, told
from farpool_bench.render import Grid

PARTS = (
    "victim",
    "fair",
    "path",
    "leases",
    "leased",
    "join",
    "heartbeats",
    "failover",
    "repair",
    "stranding",
)
"""The parts. Each is a module of `farpool_bench.cluster_parts`."""


class Bench(harness.Benchmark):
    """The parts that were named, or all of them."""

    name = "cluster"
    limit = "the same work without the other tenant, the failure, the policy or the lease"
    named: Annotated[
        tuple[str, ...], Option(f"Parts to measure; all by default: {', '.join(PARTS)}", "PART", positional=True)
    ] = ()
    seconds: Annotated[float, Option("Seconds of each sample", "S", least=0.05)] = 1.0
    rounds: Annotated[int, Option("Pairs of samples", least=1)] = 7
    connections: Annotated[int, Option("Connections of the tenant that floods", least=1)] = 64
    lookup_keys: Annotated[int, Option("Keys of each lookup of the flood", least=1)] = 100_000
    members: Annotated[int, Option("Members that send heartbeats to one registry", least=1)] = 1000
    member_ttl: Annotated[float, Option("Seconds after which such a member is down", "S", least=1)] = 15.0
    repair_rate: Annotated[int, Option("Bytes per second that repair may copy", "BYTES", least=1)] = 40_000_000
    folder: Annotated[
        Path | None, Option("Folder on a disk, for registries; by default for temporary files", "DIR")
    ] = None
    previous: Annotated[
        Path | None, Option("Python of the previous release, whose node is measured, too", "PYTHON")
    ] = None
    pods: Annotated[Path | None, Option("Pods of a trace of a GPU cluster, for the part stranding", "CSV")] = None
    hosts: Annotated[Path | None, Option("Hosts of this trace", "CSV")] = None
    group: Annotated[int, Option("Hosts that share a pool, for the part stranding", least=1)] = 16
    far: Annotated[float, Option("Largest part of a pod's memory that may be in the pool", "PART", least=0)] = 0.5
    into: Annotated[
        Path | None, Option("Result file that gets each part when it is measured, and keeps the others", "FILE.json")
    ] = None
    QUICK: ClassVar = {
        "seconds": 0.1,
        "rounds": 1,
        "connections": 4,
        "lookup_keys": 8000,
        "members": 20,
        "member_ttl": 3.0,
        "repair_rate": 20_000_000,
    }

    def open(self) -> None:
        for name in self.named:
            check_known("part", name, PARTS)
        if self.folder is not None and not self.folder.is_dir():
            raise ConfigError(f"--folder: {self.folder} is no folder; name one on a disk")
        if not self.far <= 1:
            raise ConfigError(f"--far: {self.far} is no part, expected a number from 0 to 1")
        for file in filter(None, (self.pods, self.hosts, self.previous)):
            if not file.is_file():
                raise ConfigError(f"{file} is no file")
        if (self.pods is None) != (self.hosts is None):
            raise ConfigError("a trace has two files: name both with --pods and --hosts")
        self._kept = Row() if self.into is None else self._kept_in(self.into)

    def cases(self) -> Iterable[str]:
        return told(self.progress, "Parts", [name for name in PARTS if name in (self.named or PARTS)])

    def measure(self, case: str) -> tuple[str, Row]:
        """Measure one part; returns its name and its row."""
        start = time.monotonic()
        with ExitStack() as stack:
            row: Row = importlib.import_module(f"farpool_bench.cluster_parts.{case}").measure(self, stack)
        if self.into is not None:
            row = Row(row, command=provenance().command, took=time.monotonic() - start)
            self._kept[case] = row
            self._write(self.into)
            print(f"{case} took {row.took:.0f} s and is in {self.into}", file=sys.stderr)
        return case, row

    def outcome(self, found: list[tuple[str, Row]]) -> Row:
        parts = self._kept | dict(found)
        return Row(parts=Row({name: parts[name] for name in PARTS if name in parts}))

    def _kept_in(self, file: Path) -> Row:
        """Parts that a result file has; none if there is no such file yet."""
        if not file.exists():
            if not os.access(file.parent, os.W_OK | os.X_OK):
                raise ConfigError(f"{file} cannot be written; name a file in a folder that can be")
            return Row()
        result = Result.read(file)
        if result.benchmark.name != self.name:
            raise ConfigError(f"--into: {file} has a result of {result.benchmark.name}, not of {self.name}")
        return Row(result.outcome.parts)

    def _write(self, file: Path) -> None:
        """Replace the result file, so that it is whole at each moment."""
        part = file.with_name(f"{file.name}.part")
        part.write_text(Result(type(self), self.outcome([]), provenance()).encode() + "\n")
        part.replace(file)

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        rows = [
            Row(one, part=part, shown=f"{one.value:,.0f}" if one.value >= 100 else f"{one.value:.3g}")
            for part, row in outcome.parts.items()
            for one in row.figures
        ]
        columns = "=part {part}|<measured {what}|value {shown}|=unit {unit}|target {target}|met {met:yes}"
        yield Grid.of("Targets", columns, rows)
        for part, row in outcome.parts.items():
            if row.get("skipped"):
                yield f"{part} was not measured: {row.skipped}"
            if row.get("missing"):
                yield f"{part} was measured in part: {row.missing}"
