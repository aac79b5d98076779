"""Runs the command in a process of its own, as a user does, with one thread so that others do not disturb it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", "from farpool.cli.main import main; main()", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(program, cwd=cwd, env=environment, capture_output=True, text=True, timeout=110, check=False)
