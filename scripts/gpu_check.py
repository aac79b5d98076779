"""Check farpool on a machine with a GPU in one call: build it, test it, measure it, within ten minutes.

    scripts/gpu-check --fetch-wheels    where there is a network: bring what the machine may lack, into wheels/
    scripts/gpu-check                   on the machine, which needs torch with CUDA, pip and a C++20 compiler
    scripts/gpu-check --cpu             without a GPU: what can be checked then, with the farpool that is installed

Each step is a process of its own with a time limit. Its outcome is appended to the report, one JSON object a line, and
is on the disk before the next step begins, so a run that is cut off leaves what it has done. What a step prints is in a
log beside the report, from its first line on. Steps that no longer fit before the deadline are reported as not run.
The exit status is 1 if any step failed or did not fit.

Needs the standard library only; the steps themselves are in gpu_steps.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WHEELS = ROOT / "wheels"
PACKAGES = (
    *("cryptography", "msgspec", "prometheus-client", "rich", "typer", "safetensors"),
    *("scikit-build-core", "nanobind", "cmake", "ninja"),
    *("pytest", "pytest-timeout", "hypothesis"),
)
"""What farpool, its build and its tests need beside torch and numpy; pip adds what these need."""
LEAST = 5.0
"""Seconds that must be left for a step to be begun."""
GRACE = 3.0
"""Seconds kept for the summary, and between asking a step to end and killing it."""
TAIL = 2000
"""Characters of a failed step's log that its record has, too."""


@dataclass(frozen=True)
class Step:
    """A part of the check.

    Attributes
    ----------
    name : str
        Of the function in gpu_steps.py that does it.
    seconds : float
        After which it is ended.
    gpu : bool
        Whether there is nothing to do without a GPU.
    """

    name: str
    seconds: float
    gpu: bool = False


STEPS = (
    Step("versions", 90),
    Step("build", 240),
    Step("rates", 60, gpu=True),
    Step("smoke", 120),
    Step("tests", 240),
    Step("capture", 60, gpu=True),
    Step("streaming", 180),
    Step("training", 150),
)


NEEDED = {"versions", "build"}
"""Steps without which the others cannot be done: there is no device, or no farpool."""


class Report:
    """A file of JSON objects, one a line, each on the disk when `add` returns.

    Parameters
    ----------
    path : path
        Begun anew; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        path.write_text("")

    def add(self, **record: Any) -> None:
        """Append a record, and say so."""
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if "step" in record:
            why = f": {record['why']}" if record.get("why") else ""
            took = f" ({record['seconds']:.0f} s)" if "seconds" in record else ""
            print(f"gpu-check: {record['step']} {record['status']}{took}{why}", flush=True)


def perform(
    step: Step, command: Sequence[str], seconds: float, report: Report, env: dict[str, str] | None = None
) -> str:
    """Run a step's command for at most so many seconds and report how it ended; returns the status."""
    logs = report.path.with_suffix(".logs")
    logs.mkdir(exist_ok=True)
    log, result = logs / f"{step.name}.log", logs / f"{step.name}.json"
    result.unlink(missing_ok=True)
    start = time.monotonic()
    with log.open("w") as output:
        child = subprocess.Popen(
            [*command, str(result)], stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
        try:
            code: int | None = child.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(child)
    status = "passed" if code == 0 else "failed"
    record: dict[str, Any] = {"step": step.name, "status": status, "seconds": round(time.monotonic() - start, 1)}
    if code is None:
        record["why"] = f"not done after {seconds:.0f} s"
    elif code != 0:
        record["why"] = f"exit status {code}, see {log}"
    if code != 0:
        record["tail"] = log.read_text(errors="replace")[-TAIL:]
    with contextlib.suppress(OSError, ValueError):  # a step that was cut off may have written some of it
        record["result"] = json.loads(result.read_text())
    report.add(**record)
    return status


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a step and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
        if child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check(
    steps: Sequence[Step], command: Sequence[str], report: Report, seconds: float, cpu: bool, env: dict[str, str]
) -> bool:
    """Run steps one after the other, within so many seconds altogether; True if all that can be run here passed.

    Parameters
    ----------
    command : sequence of str
        What runs a step; its name and the file for its result are appended.
    """
    deadline = time.monotonic() + seconds - GRACE
    outcomes: dict[str, list[str]] = {"passed": [], "failed": [], "not run": []}
    complete = True
    for step in steps:
        left = deadline - GRACE - time.monotonic()
        why = "needs a GPU" if cpu and step.gpu else "out of time" if left < LEAST else ""
        if missing := NEEDED & {*outcomes["failed"]}:
            why = f"{', '.join(missing)} failed"
        if why:
            complete &= why == "needs a GPU"
            outcomes["not run"].append(step.name)
            report.add(step=step.name, status="not run", why=why)
            continue
        outcomes[perform(step, [*command, step.name], min(step.seconds, left), report, env)].append(step.name)
    complete &= not outcomes["failed"]
    report.add(step="summary", status="passed" if complete else "failed", **outcomes)
    return complete


def fetch_wheels(folder: Path) -> None:
    """Download what a machine with CPython 3.12 and torch may lack."""
    platforms = [f"--platform=manylinux{version}_x86_64" for version in ("2014", "_2_17", "_2_28")]
    download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    wanted = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12", *platforms, *PACKAGES]
    subprocess.run([*download, "--dest", str(folder), *wanted], check=True)
    print(f"gpu-check: {len(list(folder.glob('*.whl')))} wheels in {folder}")


def main() -> int:
    """Read the command line."""
    names = [step.name for step in STEPS]
    parser = argparse.ArgumentParser(
        prog="gpu-check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(names)}; all if none is given")
    parser.add_argument("--cpu", action="store_true", help="do what can be done without a GPU")
    parser.add_argument("--fetch-wheels", action="store_true", help="only download wheels for CPython 3.12")
    parser.add_argument("--wheels", type=Path, default=WHEELS, metavar="FOLDER", help="default: wheels/")
    parser.add_argument(
        "--report", type=Path, metavar="FILE", help="default: gpu-check.jsonl in $OUT or benchmarks/results"
    )
    parser.add_argument("--seconds", type=float, default=570.0, metavar="N", help="for everything; default: 570")
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu-check", metavar="FOLDER", help="to build in")
    given = parser.parse_args()
    if unknown := set(given.steps) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: not known; expected {', '.join(names)}")
    if given.fetch_wheels:
        fetch_wheels(given.wheels)
        return 0
    results = Path(os.environ.get("OUT") or os.environ.get("RESULTS") or ROOT / "benchmarks/results")
    report = Report((given.report or results / "gpu-check.jsonl").resolve())
    report.add(
        report="gpu-check",
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=sys.argv,
        device="cpu" if given.cpu else "cuda",
        seconds=given.seconds,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the step that runs, too
    env = {**os.environ, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "PYTHONUNBUFFERED": "1"}
    if not given.cpu:
        site = given.work.resolve() / "site"
        env["PYTHONPATH"] = f"{site}{os.pathsep}{env['PYTHONPATH']}".rstrip(os.pathsep)
        env["PATH"] = f"{site / 'bin'}{os.pathsep}{env.get('PATH', '')}"
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    env |= {"GPU_CHECK_WHEELS": str(given.wheels.resolve()), "GPU_CHECK_WORK": str(given.work.resolve())}
    command = [sys.executable, str(ROOT / "scripts/gpu_steps.py"), "cpu" if given.cpu else "cuda"]
    steps = [step for step in STEPS if not given.steps or step.name in given.steps]
    return 0 if check(steps, command, report, given.seconds, given.cpu, env) else 1


if __name__ == "__main__":
    sys.exit(main())
