"""Worker processes for peers that take over much of the process they run in; questions and answers are lines."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Self

from farpool.errors import FarpoolError

__all__ = ["StorePeer", "Worker"]

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

    def started(self, stack: ExitStack) -> Self:
        """Wait until the worker is ready, and return it; `stack` closes it.

        Raises
        ------
        ValueError
            It has ended; the message has its last words.
        """
        stack.callback(self.close)
        self._answer("ready")
        return self

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


class StorePeer:
    """A peer in which a worker puts, gets and looks up objects; a context manager that stops its processes.

    Parameters
    ----------
    name : str
        Name of the peer, for messages.
    start : callable
        Starts its processes, which the stack stops, and returns the worker, which `farpool_bench.users.serve` serves.

    Raises
    ------
    FarpoolError
        One of them did not start; the message has its last words.
    """

    def __init__(self, name: str, start: Callable[[ExitStack], Worker]) -> None:
        self._name = name
        self._stack = ExitStack()
        try:
            self._worker = start(self._stack)
        except (OSError, ValueError) as error:
            self.close()
            raise FarpoolError(f"{name} did not start: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def seconds_each(self, write: bool, nbytes: int, count: int, batch: int, seconds: float) -> float:
        """Seconds per object to put or get `count` objects, `batch` of them in a call.

        Raises
        ------
        FarpoolError
            It failed; the message has its last words.
        """
        return self._ask("put" if write else "get", nbytes, count, batch, seconds)

    def lookup_seconds(self, nbytes: int, count: int, seconds: float) -> float:
        """Seconds of a call that looks up `count` keys, in the median.

        Raises
        ------
        FarpoolError
            As for `seconds_each`.
        """
        return self._ask("find", nbytes, count, count, seconds)

    def fetch_seconds(self, nbytes: int, count: int) -> float:
        """Seconds until the objects of `count` keys, which must have been put, are looked up and got; see `User`.

        Raises
        ------
        FarpoolError
            As for `seconds_each`.
        """
        return self._ask("fetch", nbytes, count, count, 0.0)

    def close(self) -> None:
        """Stop the processes."""
        self._stack.close()

    def _ask(self, what: str, nbytes: int, count: int, batch: int, seconds: float) -> float:
        try:
            return float(self._worker.ask(f"{what} {nbytes} {count} {batch} {seconds!r}", "seconds"))
        except (OSError, ValueError) as error:
            raise FarpoolError(f"{self._name} failed: {error}") from error
