"""Run attacks and write down what came of them, with the machine, the date, the commit and the command.

``python -m tests.attacks.record FOLDER [MODULE ...] [-- ARGUMENTS]``; the arguments go to the programs.
"""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

from tests.attacks.program import MODULES, Result, told

__all__ = ["Recording"]


class Recording(msgspec.Struct):
    """What a program said, and where and when."""

    command: str
    commit: str
    date: str
    cpu: str
    cores: int
    system: str
    results: list[Result]

    def text(self) -> str:
        """The same for people."""
        head = (
            f"# {self.command}\n# commit {self.commit}, {self.date}\n# {self.cores} cores, {self.cpu}, {self.system}\n"
        )
        return head + "\n".join(told(result) for result in self.results) + "\n"


def recorded(module: str, arguments: list[str]) -> Recording:
    """Run a module's attacks."""
    words = ["-m", f"tests.attacks.{module}", *arguments]
    done = subprocess.run([sys.executable, *words, "--json"], stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(f"{module} ended with {done.returncode} before it had a verdict")
    return Recording(
        " ".join(["python", *words]),
        commit(),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        cpu(),
        len(os.sched_getaffinity(0)),
        f"Linux {platform.release()}, Python {platform.python_version()}",
        [msgspec.json.decode(line, type=Result) for line in done.stdout.splitlines()],
    )


def commit() -> str:
    """The last commit that changed the code that is attacked."""
    code = ["src", "native"]
    last = subprocess.run(
        ["git", "log", "-1", "--format=%h", "--", *code], stdout=subprocess.PIPE, text=True, check=True
    ).stdout.strip()
    changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", *code], check=False).returncode != 0
    return last + " with changes" * changed


def cpu() -> str:
    """The name of the processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    """Record the modules that are named, or all."""
    words, _, arguments = " ".join(sys.argv[1:]).partition(" -- ")
    folder, *modules = words.split()
    for module in modules or MODULES:
        recording = recorded(module, arguments.split())
        path = Path(folder) / module
        path.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(recording), indent=1) + b"\n")
        path.with_suffix(".txt").write_text(recording.text())
        print(recording.text(), flush=True)


if __name__ == "__main__":
    main()
