"""Worker processes for peers that take over much of the process they run in; questions and answers are lines."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence

from farpool.errors import FarpoolError

__all__ = ["Worker"]

_PATIENCE = 300.0
"""Seconds to wait for an answer; long, as some peers compile parts of themselves when they first run."""


class Worker:
    """A worker process that runs a Python module and answers questions line by line.

    Parameters
    ----------
    module : str
        Prints ``ready``, then a line for each line on its standard input, until that ends.
    arguments : sequence of str
        Arguments of its command line.
    environment : mapping of str to str
        Variables beside those of this process.
    python : str
        Interpreter that runs it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(environment or {})},
        )

    def start(self) -> None:
        """Wait until the worker is ready.

        Raises
        ------
        ValueError
            It has ended; the message has its last words.
        """
        self._answer("ready")

    def ask(self, question: str, word: str) -> str:
        """Ask a question, and return the text after `word` in the next line that begins with it.

        Raises
        ------
        OSError
            It has ended before.
        ValueError
            It has ended instead of answering; the message has its last words.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(f"{question}\n")
        self._process.stdin.flush()
        return self._answer(word)

    def seconds(self, who: str, question: str) -> float:
        """Ask a question that is answered with seconds.

        Raises
        ------
        FarpoolError
            It has ended; the message has `who` and its last words.
        """
        try:
            return float(self.ask(question, "seconds"))
        except (OSError, ValueError) as error:
            raise FarpoolError(f"{who} failed: {error}") from error

    def close(self) -> None:
        """Stop the process."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def _answer(self, word: str) -> str:
        assert self._process.stdout is not None
        watchdog = threading.Timer(_PATIENCE, self._process.kill)
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.split(" ", 1)[0].strip() == word:
                    return line.removeprefix(word).strip()
        finally:
            watchdog.cancel()
        self._errors.seek(0)
        lines = self._errors.read().splitlines()
        raise ValueError(f"its process ended: {lines[-1] if lines else 'no message'}")
