"""What goes on beside calls: deletions are brought to nodes that were away."""

from __future__ import annotations

import threading
from collections.abc import Callable

from farpool.errors import FarpoolError

__all__ = ["Upkeep"]

_PAUSE = 0.5
"""Seconds between attempts; a node that is down is asked when its breaker allows it."""


class Upkeep:
    """A thread that is there while there is something to do.

    Parameters
    ----------
    settle : callable
        Brings deletions of this program to nodes that have not confirmed them; returns whether none is left.
    reconcile : callable
        Finishes what any program has left, on all nodes.
    """

    def __init__(self, settle: Callable[[], bool], reconcile: Callable[[], object]) -> None:
        self._settle = settle
        self._reconcile = reconcile
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._returned = False
        self._closing = threading.Event()

    def wake(self) -> None:
        """There is a deletion to bring to a node."""
        with self._lock:
            self._wanted = True
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._work, name="farpool-store-upkeep", daemon=True)
                self._thread.start()

    def node_returned(self) -> None:
        """A node has come back: it may have missed deletions, also those of other programs."""
        self._returned = True
        self.wake()

    def stop(self) -> None:
        """Begin nothing more. Idempotent."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the end of what is under way, after `stop`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                if not self._wanted:
                    self._thread = None
                    return
                self._wanted = False
                returned, self._returned = self._returned, False
            if not self._round(returned):
                with self._lock:
                    self._wanted = True
                self._closing.wait(_PAUSE)

    def _round(self, returned: bool) -> bool:
        try:
            if returned:
                self._reconcile()
            return self._settle()
        except FarpoolError:  # no node could be asked
            return False
