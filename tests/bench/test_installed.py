"""``farpool bench`` with and without the package that brings the benchmarks."""

from __future__ import annotations

import json
import subprocess
import tomllib
from pathlib import Path

import pytest

from farpool.cli import bench
from farpool_bench.worker import command_of
from tests.cli.here import command

ROOT = Path(__file__).parents[2]
WITHOUT = """
import importlib.util, sys
sys.meta_path = [finder for finder in sys.meta_path if "farpool_bench" not in type(finder).__module__]
sys.path = [folder for folder in sys.path if "benchmarks" not in folder]
assert importlib.util.find_spec("farpool_bench") is None
"""


def test_the_installed_benchmarks_are_listed(tmp_path: Path) -> None:
    done = command("bench", "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("streaming", "kv-codecs", "report"))
    assert command("bench", "none", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("arguments", [(), ("--help",), ("growth", "--quick")])
def test_without_the_package_the_command_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(bench, "entry_points", lambda **_: ())
    done = command("bench", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install ./benchmarks" in done.stderr
    assert "Measure farpool" in command("--help", cwd=tmp_path).stdout


def test_the_package_needs_what_the_extra_of_farpool_brings() -> None:
    about = tomllib.loads((ROOT / "benchmarks/pyproject.toml").read_text())["project"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert about["version"] == version
    assert about["dependencies"] == [f"farpool[bench]>={version.rpartition('.')[0]},<0.2"]


def test_a_child_runs_in_an_interpreter_that_has_farpool_alone() -> None:
    python, option, code, *arguments = command_of("growth", ["1000", "1024", "1000"])
    done = subprocess.run(
        [python, option, WITHOUT + code, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout)["blocks"] == 1000
