"""Regions four times their budget, compared with a bare loop that answers page faults, and with the lower tier alone.

A native program measures all of it, so that no interpreter takes part; `make test-native` builds it in a clone. The
lower tier is warm memory of the process, and then a file past the page cache.

Faults: one byte of each of 10,000 pages in random order, from memory below. The bare loop is a thread that copies the
page and evicts the page that came first; it has no policy, and spins as a region's thread does.

Sweeps: all bytes are written in order, saved, and read in order. The bare loop moves runs of 2 MiB, one at a time. The
tier alone moves pieces of 2 MiB, one at a time, from and to one buffer; no program uses their bytes.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar

import msgspec

from farpool.errors import ConfigError, FarpoolError
from farpool_bench import harness
from farpool_bench.harness import Option, Row
from farpool_bench.measure import median_ratio
from farpool_bench.render import Grid

_TIMEOUT_S = 600.0


class Bench(harness.Benchmark):
    """Random faults, and sweeps with each lower tier."""

    name = "region"
    limit = "a bare loop that answers page faults, and the lower tier alone"
    rounds: Annotated[int, Option("Samples of each", least=1)] = 9
    build: Annotated[Path, Option("Folder in which make test-native has built the program", "FOLDER")] = Path(
        "build/native-tests"
    )
    folder: Annotated[Path, Option("Of the file that is a lower tier", "FOLDER")] = Path("/var/tmp")
    mib: int = 256  # of a region
    QUICK: ClassVar = {"rounds": 1, "mib": 16}

    def open(self) -> None:
        self._program = self.build / "region_speed"
        if not self._program.exists():
            raise ConfigError(
                f"build {self.build} has no region_speed; run `make test-native` in a clone of farpool, and pass its "
                "folder build/native-tests with --build"
            )
        if not self.folder.is_dir():
            raise ConfigError(f"folder {self.folder} is no folder; choose another with --folder")
        self._faults = Row()

    def cases(self) -> Iterable[str]:
        return ("memory", "file")

    def measure(self, case: str) -> Row:
        self.progress(f"Lower tier: {case}", 0, 1)
        with tempfile.TemporaryDirectory(prefix="farpool-", dir=self.folder) as folder:
            where = [str(Path(folder) / "tier")] if case == "file" else []
            command = [str(self._program), str(self.rounds), str(self.mib), *where]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise FarpoolError(f"{self._program} failed with {done.returncode}: {done.stderr.strip()}")
        samples: dict[str, list[float]] = msgspec.json.decode(done.stdout)
        self.progress(f"Lower tier: {case}", 1, 1)
        if "random" in samples:
            ours, bare = samples["random"], samples["bare_random"]
            self._faults = Row(ours=ours, bare=bare, ratio=median_ratio(ours, bare))
        return Row(tier=case, sweeps=tuple(_sweep(samples, way) for way in ("write", "read")))

    def facts(self) -> dict[str, Any]:
        return {"nbytes": self.mib << 20, "faults": self._faults}

    @staticmethod
    def tables(outcome: Any) -> Iterable[Grid | str]:
        columns = "region, µs {ours:1e6*.1f}|bare loop, µs {bare:1e6*.1f}|region / bare {ratio:.2f}"
        yield Grid.of("A random fault, medians", columns, [outcome.faults])
        columns = "<lower tier {tier}|sweep {way}|region, GB/s {ours:1e-9*.2f}|bare loop {bare:1e-9*.2f}"
        columns += "|tier alone {alone:1e-9*.2f}|of bare {of_bare:.2f}|of tier {of_alone:.2f}"
        rows = [Row(sweep, tier=case.tier) for case in outcome.cases for sweep in case.sweeps]
        yield Grid.of("Sweeps of a region four times its budget, medians", columns, rows)


def _sweep(samples: dict[str, list[float]], way: str) -> Row:
    ours, alone, bare = samples[way], samples[f"alone_{way}"], samples.get(f"bare_{way}")
    return Row(
        way=way,
        ours=ours,  # bytes per second of each round
        bare=bare,
        alone=alone,
        of_bare=bare and median_ratio(ours, bare),
        of_alone=median_ratio(ours, alone),
    )
