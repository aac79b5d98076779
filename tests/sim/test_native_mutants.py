"""Defects of the native node that the simulation must find; each one is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
SEEDS_MAX = 100
MUTANTS = {
    "tickets-of-earlier-epochs-are-taken": (
        "native/node/claiming.cpp",
        "if (ticket.epoch < tenure.epoch) {",
        "if (ticket.epoch == 0) {",
        ("stale epoch", "lent twice"),
    ),
    "orders-only-say-that-they-end-extents": (
        "native/node/claiming.cpp",
        "        lending_.end(extent);\n        ended",
        "        ended",
        ("extents",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_defect_of_the_native_node_is_found(name: str, tmp_path: Path) -> None:
    file, old, new, rules = MUTANTS[name]
    built = subprocess.run(
        [ROOT / "scripts" / "native-mutant", tmp_path / "mutant", file, old, new],
        env=os.environ | {"FARPOOL_PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    done = subprocess.run(
        [built.stdout.strip(), "-m", "farpool", "sim", "--seeds", f"0:{SEEDS_MAX}", "--no-shrink", "--json"],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 1, f"{SEEDS_MAX} seeds did not find the defect"
    assert msgspec.json.decode(done.stdout)["violation"]["rule"] in rules
