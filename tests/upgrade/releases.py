"""Nodes and programs of two releases."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from farpool.cluster.node.process import RunningNode, running_node

CLIENT = Path(__file__).parent / "client.py"
ANSWER_S = 300.0
"""Seconds that a program may take for a call."""


class Program:
    """A running `client.py`. Each of its calls is a method here, by the same name."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        # Isolated, so that the release's own farpool is imported, whichever is in the working directory or PYTHONPATH.
        self._process = subprocess.Popen(
            [python, "-I", str(CLIENT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._said: str | None = None

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self._process.stdin.flush()
            answer = json.loads(self._line())
            assert "error" not in answer, f"{name}{arguments}: {answer['error']}"
            return answer["result"]

        return call

    def _line(self) -> str:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            assert selector.select(ANSWER_S), "a program did not answer in time"
        line = self._process.stdout.readline()
        assert line, "a program ended by itself: " + self._process.communicate()[1]
        return line

    def stop(self) -> str:
        """Close what the program has open, and end it; return what it said on stderr. Idempotent."""
        if self._said is None:
            try:
                if self._process.poll() is None:
                    self.close()
                self._said = self._process.communicate(timeout=ANSWER_S)[1]
            finally:
                self._process.kill()
                self._process.wait()
        return self._said


class Releases:
    """Starts nodes and programs of two releases, ``old`` and ``new``.

    Parameters
    ----------
    pythons : mapping of str to str
        The Python of each release.
    """

    def __init__(self, pythons: Mapping[str, str]) -> None:
        self.pythons = dict(pythons)

    @contextmanager
    def node(self, release: str, dram: str = "64MiB", **options: Any) -> Iterator[RunningNode]:
        """Run a node of a release."""
        with running_node(dram, python=self.pythons[release], **options) as node:
            yield node

    @contextmanager
    def program(self, release: str, environment: Mapping[str, str] | None = None) -> Iterator[Program]:
        """Run a program of a release."""
        program = Program(self.pythons[release], environment or {})
        try:
            yield program
        finally:
            program.stop()

    def become(self, node: RunningNode, release: str, *, kill: bool) -> None:
        """Restart a node as a node of a release, in the same folder and at the same address."""
        if kill:
            node.kill()
        else:
            assert node.terminate() == 0
        node.python = self.pythons[release]
        node.start()


def other(release: str) -> str:
    """Return the other release."""
    return "old" if release == "new" else "new"
