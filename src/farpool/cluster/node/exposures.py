"""Exposures over a one-sided fabric (``farpool node --fabric NAME``).

An exposure gives one session access to one of the node's segments. The exposure ends when the session gives its lease
back or closes its last control connection. From then on the session can no longer reach the bytes.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable

from farpool.abc.fabric import Exposed, Exposure
from farpool.cluster.wire.fabrics import load_fabric
from farpool.errors import ConfigError, LeaseLostError, NodeError

__all__ = ["Exposures"]


class Exposures:
    """The node's present exposures over a one-sided fabric. Thread-safe.

    `fabric` is the fabric's name. If `loopback` is True, only programs of this host can use the exposures. Raises
    ConfigError if the fabric is not installed or does not work here.
    """

    def __init__(self, fabric: str, *, loopback: bool) -> None:
        self.fabric = fabric
        self._fabric = load_fabric(fabric, "--fabric")
        self._loopback = loopback
        self._exposures: dict[tuple[int, str], Exposure] = {}
        self._connections: Counter[int] = Counter()
        """Number of control connections by session."""
        self._wanted = ""
        """Path of the segment whose exposure is starting; empty if the segment was withdrawn since the start."""
        # `_starting` lets one exposure start at a time, which may take long. `_lock` protects the tables and the path,
        # and is never held while a fabric works, so connections can begin and end in the meantime.
        self._starting = threading.Lock()
        self._lock = threading.Lock()
        self._check()

    def connect(self, session: int) -> None:
        """Count a new control connection of the session."""
        with self._lock:
            self._connections[session] += 1

    def disconnect(self, session: int) -> None:
        """Record that a control connection has ended. If it was the session's last, end the session's exposures."""
        with self._lock:
            self._connections[session] -= 1
            gone = not self._connections[session]
            if gone:
                del self._connections[session]
        # Outside the lock, which `_withdraw` takes itself.
        if gone:
            self._withdraw(lambda owner, _: owner == session)

    def expose(self, session: int, path: str, opened: Callable[[], int] | None = None, failed: bytes = b"") -> Exposed:
        """Expose the whole segment at `path` to a session that has a control connection.

        If `opened` is given, it returns the segment's descriptor; otherwise this method opens `path`. If the session
        already has a working exposure of the segment, the method returns this exposure. However, an exposure whose
        metadata is `failed` is always replaced, because a process that is being killed still looks alive for a moment.
        The call may take as long as the start of a process.

        Raises NodeError if the exposure fails, and LeaseLostError if the segment is withdrawn while the exposure
        starts.
        """
        key = (session, path)
        with self._starting:
            with self._lock:
                found = self._exposures.get(key)
                # Set before the segment is opened: a lease that was released before that cannot be opened.
                self._wanted = path
            if found is not None and found.is_alive() and found.exposed.metadata != failed:
                return found.exposed
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC) if opened is None else opened()
            try:
                exposure = self._fabric.expose(file, loopback=self._loopback)
            finally:
                os.close(file)
            with self._lock:
                # The session's last connection may have ended while the exposure started, unseen by `disconnect`.
                is_connected = self._connections[session] > 0
                # Another connection of the session may have released the lease, and `withdraw` found no exposure.
                is_wanted = self._wanted == path
                if is_connected and is_wanted:
                    self._exposures[key] = exposure
            if found is not None:
                found.close()
            if not is_connected:
                exposure.close()
                raise NodeError("the session's control connection was closed")
            if not is_wanted:
                exposure.close()
                raise LeaseLostError("the lease was released while its exposure started")
            return exposure.exposed

    def withdraw(self, path: str) -> None:
        """End all exposures of a segment, including an exposure that is just starting."""
        with self._lock:
            if self._wanted == path:
                self._wanted = ""
        self._withdraw(lambda _, exposed: exposed == path)

    def close(self) -> None:
        """End all exposures. Idempotent."""
        self._withdraw(lambda *_: True)

    def _withdraw(self, meant: Callable[[int, str], bool]) -> None:
        with self._lock:
            gone = [self._exposures.pop(key) for key in list(self._exposures) if meant(*key)]
        # Outside the lock, because the fabric may take its time.
        for exposure in gone:
            exposure.close()

    def _check(self) -> None:
        """Expose some memory for a moment. If the fabric does not work, this raises ConfigError at the node's start."""
        file = os.memfd_create("farpool-fabric", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, os.sysconf("SC_PAGE_SIZE"))
            self._fabric.expose(file, loopback=self._loopback).close()
        except NodeError as error:
            raise ConfigError(
                f"--fabric is {self.fabric!r}, which cannot be used: {error}", setting="fabric"
            ) from error
        finally:
            os.close(file)
