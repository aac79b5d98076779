"""The manager's entry in the registry, and its attempts to become the leader."""

from __future__ import annotations

import logging
import threading
import time

from farpool.abc.registry import Registry
from farpool.closing import Closing
from farpool.cluster.manager.records import LEADER, ManagerRecord, encode, running_key
from farpool.cluster.node.logs import log
from farpool.cluster.roles import HeldRole, Session
from farpool.errors import RegistryError

__all__ = ["Presence"]

_INTERVAL_S = 0.5


class Presence(Closing):
    """Keeps a manager listed while it runs, and takes the role of the leader whenever it is free. Thread-safe.

    Parameters
    ----------
    registry : Registry
        The registry.
    record : ManagerRecord
        The manager's entry.
    ttl : float
        Seconds without a sign of this manager after which another one becomes the leader.
    """

    def __init__(self, registry: Registry, record: ManagerRecord, ttl: float) -> None:
        self.record = record
        self._ttl = ttl
        self._session = Session(registry, ttl, timeout=ttl)
        self._ended = threading.Event()
        self._entry: HeldRole | None = None
        self._leading: HeldRole | None = None
        self._confirmed = 0.0
        self._thread = threading.Thread(target=self._keep, name="farpool-manager-presence", daemon=True)

    @property
    def leads(self) -> bool:
        """True if this manager was the leader a moment ago. A leader's changes need `leadership` nevertheless."""
        return self.leadership is not None

    @property
    def leadership(self) -> HeldRole | None:
        """The role of the leader, whose `commit` makes the leader's changes; None if another manager may have it."""
        held = self._leading
        fresh = time.monotonic() - self._confirmed < self._ttl
        return held if held is not None and fresh and not held.lost else None

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Give up the role and the entry, so that another manager leads at once. Idempotent."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._session.close(timeout=1.0)

    def _keep(self) -> None:
        while True:
            try:
                self._entry = self._kept(self._entry, running_key(self.record.manager))
                began = time.monotonic()
                self._leading = self._kept(self._leading, LEADER)
                if self._leading is not None:
                    self._confirmed = began
            except RegistryError:
                pass  # the registry is away, and the role ends with it
            except Exception as error:  # the session keeps the role, so no manager would lead without this thread
                log("the role of the leader could not be confirmed", level=logging.ERROR, reason=str(error))
            if self._ended.wait(_INTERVAL_S):
                return

    def _kept(self, held: HeldRole | None, role: str) -> HeldRole | None:
        """Confirm a role, or try to take it."""
        if held is not None and not held.lost:
            try:
                held.confirm()
                return held
            except RegistryError:
                if not held.lost:
                    raise
        return self._session.take(role, encode(self.record))
