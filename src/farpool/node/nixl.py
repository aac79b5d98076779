"""A node's segments, exposed for one-sided transfers (``farpool node --nixl``): a process for each segment and session.

The process maps that one file. When the session gives its lease back or closes its last control connection, the
process goes, and with it every way to the bytes.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from farpool.errors import ConfigError, NodeError
from farpool.transport.nixl import Exposed
from farpool.transport.nixl_worker import Ready

__all__ = ["Exposures"]

_START_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class _Exposure:
    process: subprocess.Popen[bytes]
    exposed: Exposed


class Exposures:
    """The processes that expose segments. Thread-safe.

    Parameters
    ----------
    loopback : bool
        Whether the node listens on loopback only; the processes then do so, too.

    Raises
    ------
    ConfigError
        NIXL is not there or does not work here.
    """

    def __init__(self, *, loopback: bool) -> None:
        self._environment = dict(os.environ)
        if loopback:
            self._environment["UCX_NET_DEVICES"] = "lo"
        self._exposures: dict[tuple[int, str], _Exposure] = {}
        self._held: Counter[int] = Counter()
        """Control connections by session."""
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._check()

    def hold(self, session: int) -> None:
        """A control connection of the session has come."""
        with self._lock:
            self._held[session] += 1

    def drop(self, session: int) -> None:
        """A control connection of the session has gone; with the last one, what is exposed to the session."""
        with self._lock:
            self._held[session] -= 1
            gone = not self._held[session]
            if gone:
                del self._held[session]
        if gone:
            self._withdraw(lambda owner, _: owner == session)

    def expose(self, session: int, path: str) -> Exposed:
        """Have a session's programs get at a segment file. Takes about a second the first time.

        Parameters
        ----------
        session : int
            Whose it is; it has a control connection.
        path : str
            The file; all of it is exposed, header included.

        Raises
        ------
        NodeError
            The process could not be started, or cannot expose the file.
        """
        key = (session, path)
        with self._starting:
            with self._lock:
                found = self._exposures.get(key)
                if found is not None and found.process.poll() is None:
                    return found.exposed
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                started = self._start(file)
            finally:
                os.close(file)
            with self._lock:
                is_held = self._held[session] > 0
                if is_held:
                    self._exposures[key] = started
            if found is not None:
                _stop(found.process)
            if not is_held:
                _stop(started.process)
                raise NodeError("the session's control connection was closed")
            return started.exposed

    def withdraw(self, path: str) -> None:
        """Expose a file no longer, to anybody."""
        self._withdraw(lambda _, exposed: exposed == path)

    def close(self) -> None:
        """Expose nothing any more. Idempotent."""
        self._withdraw(lambda *_: True)

    def _withdraw(self, meant: Callable[[int, str], bool]) -> None:
        with self._lock:
            gone = [self._exposures.pop(key) for key in list(self._exposures) if meant(*key)]
        for exposure in gone:
            _stop(exposure.process)

    def _check(self) -> None:
        """Expose some memory for a moment: what does not work is to be known when the node starts."""
        file = os.memfd_create("farpool-nixl", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, os.sysconf("SC_PAGE_SIZE"))
            _stop(self._start(file).process)
        except NodeError as error:
            raise ConfigError(f"--nixl: {error}", setting="nixl") from error
        finally:
            os.close(file)

    def _start(self, file: int) -> _Exposure:
        process = subprocess.Popen(
            [sys.executable, "-m", "farpool.transport.nixl_worker", str(file)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[file],
            env=self._environment,
            start_new_session=True,  # what a terminal sends to the node is the node's to act on
        )
        try:
            ready = _answer(process)
        except BaseException:
            _stop(process)
            raise
        return _Exposure(process, Exposed(ready.metadata, ready.address, ready.nbytes))


def _answer(process: subprocess.Popen[bytes]) -> Ready:
    assert process.stdout is not None
    line = b""
    deadline = time.monotonic() + _START_SECONDS
    while not line.endswith(b"\n"):
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise NodeError(f"the process for one-sided transfers did not start within {_START_SECONDS:g} s")
        data = os.read(process.stdout.fileno(), 65536)
        if not data:
            raise NodeError(f"the process for one-sided transfers ended at its start with status {process.wait()}")
        line += data
    try:
        ready = msgspec.json.decode(line, type=Ready)
    except msgspec.DecodeError as error:
        raise NodeError(f"the process for one-sided transfers said {line[:80]!r}") from error
    if ready.error:
        raise NodeError(f"memory cannot be exposed for one-sided transfers: {ready.error}")
    return ready


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(OSError):
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
