"""Processes that run a module of this package: workers that answer questions line by line, and one-shot children."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import msgspec

from farpool.errors import FarpoolError
from farpool_bench.harness import rows_of

_ANSWER_TIMEOUT_S = 300.0
"""Long, because some rivals compile parts of themselves when they first run."""
_CHILD_TIMEOUT_S = 1800.0
# Another interpreter need not have this package; with PYTHONPATH it would get all the others of this one's.
_START = """
import importlib.util, sys
folder, module, *arguments = sys.argv[1:]
places = {"submodule_search_locations": [folder]}
spec = importlib.util.spec_from_file_location("farpool_bench", folder + "/__init__.py", **places)
sys.modules["farpool_bench"] = importlib.util.module_from_spec(spec)
importlib.import_module("farpool_bench." + module).main(*arguments)
"""


def command_of(module: str, arguments: Sequence[str], python: str = sys.executable) -> list[str]:
    """Command line of a process that runs `main` of a module here, with another interpreter if one is named."""
    return [python or sys.executable, "-c", _START, str(Path(__file__).parent), module, *arguments]


def free_port() -> int:
    """Find a TCP port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run_child(module: str, *arguments: int) -> Any:
    """Run a module that prints one row as JSON, and return the row.

    Raises
    ------
    FarpoolError
        It failed; the message has its last words.
    """
    command = command_of(module, [str(one) for one in arguments])
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False)
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise FarpoolError(f"{module} failed (exit code {done.returncode}): {said[-1] if said else 'it said nothing'}")
    return rows_of(msgspec.json.decode(done.stdout))


class Worker:
    """A worker process; its module prints ``ready``, then a line for each line on its standard input.

    FarpoolError has its last words if it ends.
    """

    def __init__(
        self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None, python: str = ""
    ) -> None:
        self._module = module
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            command_of(module, arguments, python),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def started(self, stack: ExitStack) -> Self:
        """Wait until the worker is ready, and return it; `stack` closes it."""
        stack.callback(self.close)
        self._answer("ready")
        return self

    def ask(self, question: str, word: str) -> str:
        """Ask a question, and return the text after `word` in the next line that begins with it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer tells why
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
        return self._answer(word)

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        watchdog = threading.Timer(_ANSWER_TIMEOUT_S, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.split(" ", 1)[0].strip() == word:
                    return line.removeprefix(word).strip()
        finally:
            watchdog.cancel()
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        raise FarpoolError(f"the process of {self._module} ended: {lines[-1] if lines else 'no message'}")
