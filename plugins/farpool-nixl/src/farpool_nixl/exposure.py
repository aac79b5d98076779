"""A segment file of a node, exposed by a process of its own, which maps that one file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec

from farpool.abc.fabric import Exposed
from farpool.decoding import prepared
from farpool.errors import NodeError

__all__ = ["NixlExposure"]

_START_TIMEOUT_S = 20.0


class NixlExposure:
    """Process that exposes a segment file; with `loopback` it listens on the loopback interface only.

    Raises
    ------
    NodeError
        The process did not start, or cannot expose the file.
    """

    def __init__(self, file: int, *, loopback: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "farpool_nixl.worker", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[file],
            env={**os.environ, "UCX_NET_DEVICES": "lo"} if loopback else None,
            start_new_session=True,  # what a terminal sends to the node is the node's to act on
        )
        try:
            self.exposed = self._answer()
        except BaseException:
            self.close()
            raise

    def is_alive(self) -> bool:
        """Return True if the process runs."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        with self._process:  # which waits for it and closes its pipes
            self._process.kill()

    def _answer(self) -> Exposed:
        assert self._process.stdout is not None
        timer = threading.Timer(_START_TIMEOUT_S, self._process.kill)
        timer.start()
        try:
            line = self._process.stdout.readline()
        finally:
            timer.cancel()
        try:
            said = msgspec.json.decode(line, type=prepared(Exposed | str))
        except msgspec.DecodeError as error:
            raise NodeError(
                f"the process for one-sided transfers ended, or did not start within {_START_TIMEOUT_S:g} s; it said "
                f"{line[:80]!r}"
            ) from error
        if isinstance(said, str):
            raise NodeError(f"memory cannot be exposed for one-sided transfers: {said}")
        return said
