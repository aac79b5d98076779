"""A program's lease in the registry, kept alive for as long as the program uses names."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from farpool.cluster.registry import Registry
from farpool.errors import RegistryError, RegistryLeaseError

__all__ = ["Session"]


class Session:
    """One lease, granted when it is first needed and renewed by a thread. Thread-safe.

    Parameters
    ----------
    registry : Registry
        Registry that grants the lease.
    ttl : float
        Seconds after which others see that this program is gone.
    turn : callable
        Called by the thread at each renewal.
    """

    def __init__(self, registry: Registry, ttl: float, turn: Callable[[], None]) -> None:
        self._registry = registry
        self._ttl = ttl
        self._turn = turn
        self._lock = threading.Lock()
        self._lease = 0
        self._pid = 0
        self._ended = threading.Event()
        self._closed = False

    def lease(self, timeout: float) -> int:
        """Return the lease's number; grant one in `timeout` seconds if there is none, it was lost, or after a fork."""
        with self._lock:
            if self._closed:
                raise RegistryError("the names were closed; make new ones", registry=self._registry.address)
            if self._lease and self._pid == os.getpid():
                return self._lease
            self._lease = self._registry.grant(self._ttl, timeout=timeout)
            if self._pid != os.getpid():  # threads do not survive a fork
                self._pid, self._ended = os.getpid(), threading.Event()
                threading.Thread(target=self._keep, args=(self._ended,), name="farpool-names", daemon=True).start()
            return self._lease

    def lost(self, lease: int) -> None:
        """Forget a lease that has ended, so that the next call of `lease` grants a new one."""
        with self._lock:
            if self._lease == lease:
                self._lease = 0

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(self._ttl / 3):
            lease = self._lease
            try:
                if lease:
                    self._registry.keep_alive(lease, timeout=self._ttl / 3)
            except RegistryLeaseError:
                self.lost(lease)
            except RegistryError:
                continue  # away; perhaps it is back in time
            self._turn()

    def close(self) -> None:
        """Revoke the lease, and with it all entries that are bound to it. Idempotent."""
        with self._lock:
            self._closed = True
            self._ended.set()
            lease, self._lease = self._lease, 0
        if lease and self._pid == os.getpid():
            with contextlib.suppress(RegistryError):  # the lease ends by itself; an error would hide the program's own
                self._registry.revoke(lease)
