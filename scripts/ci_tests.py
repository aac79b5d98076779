"""Run make targets of tests; run what failed once more, alone: ``python scripts/ci_tests.py test test-long``.

A test that fails and then passes alone is forgiven if people wrote it into ``tests/flaky.txt``, if it is not one of
`NEVER`, and if there are at most `FLAKY_MAX` in the whole run. Each is printed as ``FLAKY: name``, forgiven or not.
Everything else that fails, and everything that keeps pytest from finishing, makes the exit status 1. The last lines
repeat pytest's closing line of each target.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FLAKY_MAX = 2
RETRIES_MAX = 10
"""Failed tests of a target that are run once more. With more failures something is broken, and the log says so."""
RETRY_SECONDS_MAX = 1200
NEVER = (
    "tests/attacks/",
    "tests/chaos/",
    "tests/faults/",
    "tests/kv/differential/",
    "tests/kv/integrity/",
    "tests/kv/test_generation_with_faults.py",
    "tests/kv/test_recovery.py",
    "tests/node/test_fuzz.py",
    "tests/node/test_node_adoption.py",
    "tests/node/test_node_crashes.py",
    "tests/node/test_node_races.py",
    "tests/process/test_faults.py",
    "tests/registry/",
    "tests/roles/",
    "tests/store/",
    "tests/tiers/test_nvme.py",
    "tests/upgrade/",
)
"""Tests that kill processes, look for lost data or wrong bytes, or run under sanitizers. Each failure is a finding."""
_CLOSING = re.compile(r"(passed|failed|error|skipped|no tests ran).* in [0-9.]+s")
_TESTS_RAN = 1  # pytest's exit status where all tests ran and some failed; others mean that it did not finish


class FlakyListError(ValueError):
    """``tests/flaky.txt`` has a line that cannot be read."""


@dataclass
class Run:
    """One target's outcome."""

    target: str
    closing: str = "no closing line"
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    trouble: str = ""


def read_flaky(text: str) -> dict[str, int]:
    """Return how often each test of the list was seen to fail by chance.

    Parameters
    ----------
    text : str
        Contents of ``tests/flaky.txt``.

    Raises
    ------
    FlakyListError
        If a line has another form, names a test twice, or names one that is never forgiven.
    """
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        times, _, rest = line.partition(" | ")
        test, _, reason = rest.rpartition(" | ")  # a parameter of the test may hold the separator
        if not times.strip().isdigit() or not test.strip() or not reason.strip():
            raise FlakyListError(f"line {number} is {line!r}; expected 'times seen | test | reason'")
        if test.strip() in seen:
            raise FlakyListError(f"line {number} names {test.strip()} a second time; keep one line a test")
        if test.strip().startswith(NEVER):
            raise FlakyListError(f"line {number} names {test.strip()}, which is never forgiven; repair the test")
        seen[test.strip()] = int(times)
    return seen


def verdict(runs: list[Run], listed: dict[str, int]) -> list[str]:
    """Return the reasons why the run fails; none if it passes.

    Parameters
    ----------
    runs : list of Run
        Outcome of each target.
    listed : dict of str to int
        Tests of ``tests/flaky.txt``.
    """
    reasons = [f"make {run.target}: {run.trouble}" for run in runs if run.trouble]
    reasons += [f"{test} failed" for run in runs for test in run.failed]
    flaky = [test for run in runs for test in run.flaky]
    reasons += [f"{test} is flaky and never forgiven: it guards data" for test in flaky if test.startswith(NEVER)]
    reasons += [
        f"{test} is flaky and not in tests/flaky.txt"
        for test in flaky
        if test not in listed and not test.startswith(NEVER)
    ]
    if len(flaky) > FLAKY_MAX:
        reasons.append(f"{len(flaky)} tests are flaky; expected at most {FLAKY_MAX}")
    return reasons


def run_target(target: str) -> Run:
    """Run a target, show its output, and run its failed tests once more."""
    run = Run(target)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        arguments = f"ARGS=-p tests.outcome --outcome={path}"
        with subprocess.Popen(
            ["make", target, arguments],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if _CLOSING.search(line):
                    run.closing = line.strip()
        if process.returncode == 0:
            return run
        outcome = _read(path)
    failed: list[str] = outcome.get("failed", [])
    if outcome.get("exit") != _TESTS_RAN or not failed:
        run.trouble = f"exit status {process.returncode}, and pytest did not finish its tests; see the log above"
    elif len(failed) > RETRIES_MAX:
        run.trouble = f"{len(failed)} tests failed; at most {RETRIES_MAX} are run once more"
    else:
        for test in failed:
            (run.flaky if passes_alone(test) else run.failed).append(test)
    return run


def passes_alone(test: str) -> bool:
    """Run one test in a process of its own; return True if it ran and passed."""
    print(f"\nrunning {test} once more, alone", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "outcome.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.outcome", f"--outcome={path}", test]
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                errors="replace",
                timeout=RETRY_SECONDS_MAX,
            )
        except subprocess.TimeoutExpired:
            print(f"it did not end within {RETRY_SECONDS_MAX} s", flush=True)
            return False
        passed = done.returncode == 0 and _read(path).get("passed") == 1
    if not passed:
        print(done.stdout[-20_000:], done.stderr[-5_000:], sep="\n", flush=True)
    return passed


def _read(path: Path) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # the run ended before pytest could write it
        return {}
    return outcome


def main(targets: list[str]) -> int:
    """Run the targets and print the verdict; return the exit status."""
    listed = read_flaky((ROOT / "tests" / "flaky.txt").read_text())
    runs = [run_target(target) for target in targets]
    reasons = verdict(runs, listed)
    print()
    for run in runs:
        for test in run.flaky:
            print(f"FLAKY: {test} (seen {listed.get(test, 0)} times before)")
    for reason in reasons:
        print(f"FAILED: {reason}")
    for run in reversed(runs):  # the quick tests last: their closing line ends the log
        print(f"make {run.target}: {run.closing}")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
