"""Interpreters of the engines' environments, and programs run by them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
_PROGRAMS = "tests.kv.connectors.programs"


@pytest.fixture(scope="session")
def engine_python() -> Callable[[str], str]:
    """The interpreter of an engine's environment, by the engine's name; skips the test if there is none.

    For ``transformers`` it is the project's own interpreter.
    """

    def find(name: str) -> str:
        if name == "transformers":
            return sys.executable
        recipe = (ROOT / "scripts/kv_envs" / f"{name}.sh").read_text()
        (version,) = [line.removeprefix("VERSION=") for line in recipe.splitlines() if line.startswith("VERSION=")]
        option = ""
        if os.environ.get("FARPOOL_KV_NEWEST"):
            version, option = "newest", "--newest "
        folder = ROOT / f"build/kv-envs/{name}-{version}"
        if not (folder / ".whole").exists():
            pytest.skip(f"{name} {version} is not installed (scripts/kv-envs {option}{name})")
        return str(folder / "bin/python")

    return find


@pytest.fixture(scope="session")
def run_program(engine_python: Callable[[str], str]) -> Callable[..., dict[str, Any]]:
    """Run a program of `programs/` in an engine's environment; returns the JSON of its last line.

    ``run_program("vllm", "vllm_tier", "tcp", timeout=60)`` is ``python -m tests.kv.connectors.programs.vllm_tier tcp``,
    with the environment's Python. Fails with the program's output if it fails or takes longer.
    """

    def run(engine: str, program: str, *arguments: str, timeout: float = 120.0, **environment: str) -> dict[str, Any]:
        command = [engine_python(engine), "-m", f"{_PROGRAMS}.{program}", *arguments]
        given = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **environment}
        # A session of its own, which ends as a whole: the program's nodes, too.
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, complained = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # faulthandler writes where each thread stands
                time.sleep(1)
                os.killpg(process.pid, signal.SIGKILL)
                _, complained = process.communicate()
                pytest.fail(f"{' '.join(command)} did not end within {timeout:g} s\n{complained[-4000:]}")
        assert process.returncode == 0, f"{' '.join(command)} ended with {process.returncode}\n{complained[-4000:]}"
        found = json.loads(said.splitlines()[-1])
        assert isinstance(found, dict)
        return found

    return run
