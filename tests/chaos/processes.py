"""Processes of a run, which are killed, stopped and started again."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.machines import Disk, Machine
from tests.nodes import stop

__all__ = ["ChaosProcess"]

PATIENCE_S = 90.0


class ChaosProcess:
    """A program on a machine of its own.

    Parameters
    ----------
    name : str
        Its name.
    machine : Machine
        The machine.
    command : sequence of str
        The command. ``{life}`` in a word stands for the number of the start, from 0.
    logs : Path
        Folder for its output.
    environment : mapping
        Environment variables in addition to this process's.
    disk : Disk, optional
        The disk that it writes to.

    Attributes
    ----------
    lives : int
        Number of starts.
    environment : dict
        The environment variables.
    output : Path
        File with its standard output.
    may_end : bool
        True while it is no fault if the process ends by itself.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        command: Sequence[str],
        logs: Path,
        environment: Mapping[str, str],
        disk: Disk | None = None,
    ) -> None:
        self.name, self.machine, self.disk = name, machine, disk
        self.lives = 0
        self.may_end = False
        self.output = logs / f"{name}.out"
        self._log = logs / f"{name}.log"
        self._command = list(command)
        self.environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it. It need not be ready when this returns."""
        words = [word.replace("{life}", str(self.lives)) for word in self._command]
        self.lives += 1
        with open(self._log, "ab") as log, open(self.output, "ab") as output:
            self._process = subprocess.Popen(
                self.machine.command(words),
                stdout=output,
                stderr=log,
                env={**os.environ, **self.environment},
                start_new_session=True,  # a signal for the run is none for its processes
            )

    def wait_until_ready(self) -> None:
        """Wait for the first line of its output."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.output.read_bytes().endswith(b"\n"):
            assert self.code is None, f"{self.name} ended with {self.code}: {self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} is not ready: {self.tail()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """End it with SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(PATIENCE_S)

    def end(self) -> int:
        """End it with SIGTERM, or SIGKILL if that does not help; return the exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def stop(self) -> None:
        """Stop all its threads with SIGSTOP."""
        assert self._process is not None
        if self.code is None:
            stop(self._process.pid)

    def go_on(self) -> None:
        """Let it go on with SIGCONT."""
        assert self._process is not None
        if self.code is None:
            os.kill(self._process.pid, signal.SIGCONT)

    @property
    def log(self) -> str:
        """Its log, of all its lives."""
        return self._log.read_text(errors="replace")

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log[-3000:]
