"""Check farpool on a machine with a GPU, part by part: build it, test it, measure it.

    scripts/gpu-check                      list the parts
    scripts/gpu-check PART ...             build farpool, then run these parts; all: each one, as listed
    scripts/gpu-check --fetch-wheels       where there is a network: bring what the machine may lack, into wheels/
    scripts/gpu-check PART --device cpu --quick
                                           the same on small sizes without a GPU, with the farpool that is installed

The machine needs torch with CUDA, pip and a C++20 compiler; without a GPU, an installed farpool and farpool-bench.

Each part is a process of its own with a time limit of less than ten minutes. It writes one file,
gpu-check-PART.jsonl, of JSON objects, one a line: the machine first, then each figure as soon as it is known, and last
how the part ended. So a part that is cut off leaves what it has measured. docs/gpu.md says what the figures mean.
The exit status is 1 if any part failed or did not fit.

Needs the standard library only; the parts themselves are in gpu_parts.py.
"""

from __future__ import annotations

import argparse
import contextlib
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
PACKAGES = (
    *("cryptography", "msgspec", "prometheus-client", "rich", "typer", "safetensors"),
    *("scikit-build-core", "nanobind", "cmake", "ninja"),
    *("pytest", "pytest-timeout", "hypothesis"),
)
"""What farpool, its build and its tests need beside torch and numpy; pip adds what these need."""
LEAST = 5.0
"""Seconds that must be left for a part to be begun."""
GRACE = 3.0
"""Seconds kept for the end, and between asking a part to end and killing it."""
TAIL = 2000
"""Characters of a failed part's output that its file has, too."""
POLL = 0.1
"""Seconds between looks at a part that runs."""


@dataclass(frozen=True)
class Part:
    """A part of the check: a function of this name in gpu_parts.py, what it does, and the seconds that it may take."""

    name: str
    what: str
    seconds: float


BUILD = Part("build", "farpool, from the sources beside this script", 240)
PARTS = (
    Part("tests", "the tests on a GPU, and of CUDA graphs", 420),
    Part("copies", "GB/s between host and GPU, by size and kind of memory, and what a pool reaches", 120),
    Part("streaming", "forward passes: transfers 0.5, 1 and 2 times as long as computing, layers of 1, 3, 10 ms", 540),
    Part("decode", "tokens of a language model of 30 GB in bf16 with 8 GB fast", 420),
    Part("training", "AdamW steps of 1.3 billion fp32 weights, with and without step_in_backward", 540),
    Part("experts", "tokens of a mixture of experts of Mixtral's shape: bytes moved, by implementation", 420),
    Part("cache", "tokens over a long context: DynamicCache against FarpoolCache", 420),
    Part(
        "peers", "accelerate, DeepSpeed ZeRO-Offload, torchao, bitsandbytes where they are, the reason otherwise", 540
    ),
    Part("profile", "a trace of torch.profiler, and the gaps between kernels on the compute stream", 180),
)


class Report:
    """The file of a part: JSON objects, one a line, each on the disk when `add` returns.

    Parameters
    ----------
    path : path
        Its folder is made.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path

    def begin(self) -> None:
        """Empty the file."""
        self.path.write_text("")

    def add(self, **record: Any) -> None:
        """Append an object."""
        with self.path.open("a+b") as file:
            if file.tell() and self.path.read_bytes()[-1:] != b"\n":
                file.write(b"\n")  # after a line that a killed part has not finished
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def perform(part: Part, command: Sequence[str], seconds: float, report: Report, log: Path, env: dict[str, str]) -> bool:
    """Run a part's command for at most so many seconds, show what it prints, and report how it ended.

    Parameters
    ----------
    log : path
        File for all that the part prints.

    Returns
    -------
    bool
        True if it passed.
    """
    start = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output, log.open(errors="replace") as shown:
        child = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=env, start_new_session=True)
        try:
            while (code := child.poll()) is None and time.monotonic() - start < seconds:
                print(shown.read(), end="", flush=True)
                time.sleep(POLL)
        finally:
            _end(child)
        print(shown.read(), end="")
    record: dict[str, Any] = {"end": "passed", "seconds": round(time.monotonic() - start, 1)}
    if code is None:
        record |= {"end": "cut off", "why": f"not done after {seconds:.0f} s"}
    elif code != 0:
        record |= {"end": "failed", "why": f"exit status {code}"}
    if code != 0:
        record["tail"] = log.read_text(errors="replace")[-TAIL:]
    _finish(part, report, record)
    return code == 0


def _finish(part: Part, report: Report, record: dict[str, Any]) -> None:
    report.add(**record)
    why = f": {record['why']}" if "why" in record else ""
    took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
    print(f"gpu-check: {part.name} {record['end']}{took}{why}", flush=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a part and all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGTERM)
        if child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(GRACE)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def check(
    parts: Sequence[Part], command: Sequence[str], results: Path, logs: Path, seconds: float, env: dict[str, str]
) -> bool:
    """Run parts one after the other, within so many seconds altogether; True if all of them passed.

    A part that no longer fits, or that needs a build that failed, is reported as not run.

    Parameters
    ----------
    command : sequence of str
        What runs a part; its name and its file are appended.
    results, logs : path
        Folders of the parts' files, and of what they print.
    """
    deadline = time.monotonic() + seconds - GRACE
    passed: list[bool] = []
    why = ""
    for part in parts:
        report = Report(results / f"gpu-check-{part.name}.jsonl")
        report.begin()
        left = deadline - GRACE - time.monotonic()
        if why or left < LEAST:
            _finish(part, report, {"end": "not run", "why": why or "out of time"})
            passed.append(False)
            continue
        line = [*command, part.name, str(report.path)]
        print(f"gpu-check: {part.name} begins, for at most {min(part.seconds, left):.0f} s", flush=True)
        passed.append(perform(part, line, min(part.seconds, left), report, logs / f"{part.name}.log", env))
        if part is BUILD and not passed[-1]:
            why = "the build failed"
    return all(passed)


def fetch_wheels(folder: Path) -> None:
    """Download what a machine with CPython 3.12 and torch may lack."""
    platforms = [f"--platform=manylinux{version}_x86_64" for version in ("2014", "_2_17", "_2_28")]
    download = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    wanted = ["--only-binary=:all:", "--implementation=cp", "--python-version=3.12", *platforms, *PACKAGES]
    subprocess.run([*download, "--dest", str(folder), *wanted], check=True)
    print(f"gpu-check: {len(list(folder.glob('*.whl')))} wheels in {folder}")


def _listing() -> str:
    rows = [f"  {part.name:<10} {part.what} (at most {part.seconds / 60:g} minutes)" for part in PARTS]
    return "\n".join(["parts:", *rows, "  all        each of them, in this order"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description=__doc__,
        epilog=_listing(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="see below; without any, they are listed")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument("--quick", action="store_true", help="sizes that take seconds: to see that all works")
    parser.add_argument("--installed", action="store_true", help="build nothing, use the farpool that is installed")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="default: $OUT, or benchmarks/results on a GPU")
    parser.add_argument("--seconds", type=float, metavar="N", help="for everything; default: the parts' own limits")
    parser.add_argument("--fetch-wheels", action="store_true", help="only download wheels for CPython 3.12")
    parser.add_argument("--wheels", type=Path, default=ROOT / "wheels", metavar="FOLDER", help="default: wheels/")
    parser.add_argument("--work", type=Path, default=ROOT / "build/gpu-check", metavar="FOLDER", help="to build in")
    return parser


def _environment(given: argparse.Namespace) -> dict[str, str]:
    """Environment of the parts: what they were asked for, and where to import farpool from."""
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    flags = [*(["--device cpu"] if given.device == "cpu" else []), *(["--quick"] if given.quick else [])]
    env["GPU_CHECK_FLAGS"] = " ".join(flags)
    env |= {"GPU_CHECK_WHEELS": str(given.wheels.resolve()), "GPU_CHECK_WORK": str(given.work.resolve())}
    if given.device == "cuda":
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if not given.installed:
        site = given.work.resolve() / "site"
        env["PYTHONPATH"] = f"{site}{os.pathsep}{env.get('PYTHONPATH', '')}".rstrip(os.pathsep)
        env["PATH"] = f"{site / 'bin'}{os.pathsep}{env.get('PATH', '')}"
    return env


def main() -> int:
    """Read the command line."""
    parser = _parser()
    given = parser.parse_args()
    names = [part.name for part in PARTS]
    if unknown := set(given.parts) - {*names, "all"}:
        parser.error(f"{', '.join(sorted(unknown))}: not known; expected {', '.join(names)} or all")
    if given.seconds is not None and not given.seconds > 0:
        parser.error(f"--seconds is {given.seconds:g}, expected more than 0, for example 570")
    if given.fetch_wheels:
        fetch_wheels(given.wheels)
        return 0
    if not given.parts:
        print(_listing())
        return 0
    given.installed |= given.device == "cpu"
    by_name = {part.name: part for part in PARTS}
    wanted = PARTS if "all" in given.parts else [by_name[name] for name in dict.fromkeys(given.parts)]
    parts = [*wanted] if given.installed else [BUILD, *wanted]
    seconds = given.seconds or sum(part.seconds + 2 * GRACE for part in parts) + LEAST
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs, too
    # What is small or without a GPU must not take the place of results that are kept.
    default = given.work if given.quick or given.device == "cpu" else ROOT / "benchmarks/results"
    results = given.results or Path(os.environ.get("OUT") or default)
    size = "quick" if given.quick else "full"
    command = [sys.executable, str(ROOT / "scripts/gpu_parts.py"), given.device, size]
    done = check(parts, command, results.resolve(), given.work.resolve() / "logs", seconds, _environment(given))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
