"""Reasons why a reader finds nothing although KV of its model is stored: other weights, data types or layouts.

A reader cannot compare keys of other namespaces with its own keys, but a description of each namespace is stored next
to its blocks. From these descriptions a reader learns that KV of the model is stored under other settings, but not
whether that KV belongs to the same tokens.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields

from farpool.errors import FarpoolError
from farpool.kv.journal import record
from farpool.kv.namespace import Namespace
from farpool.kv.reasons import Reason

__all__ = ["Disagreements", "differing_fields"]

_ASK_INTERVAL_S = 60.0
"""Minimum seconds between two requests that ask the nodes for their namespaces."""
_WAITING_LOOKUPS_MAX = 64
"""Maximum number of lookups that wait for the nodes' answer. If more lookups wait, only the latest ones get an entry in
the journal.
"""
_COMMON = ("engine", "model", "tenant")
"""A reader's namespace is compared only with namespaces that have the same values in these fields. The tenant is one of
these fields because tenants must learn nothing about each other."""


class Disagreements:
    """Compares the namespaces that the nodes store with a reader's own namespace. Thread-safe.

    A background thread asks the nodes for their namespaces, at most once a minute, so that no lookup has to wait. A
    lookup uses the latest answer. If no answer has arrived yet, the lookup's journal entry is written when the answer
    arrives.

    Parameters
    ----------
    namespaces : callable
        Returns, by digest, all namespaces that have blocks.
    """

    def __init__(self, namespaces: Callable[[], Mapping[bytes, Namespace]]) -> None:
        self._namespaces = namespaces
        self._known: Mapping[bytes, Namespace] = {}
        self._asked_at = float("-inf")
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Forget waiting lookups in the child of a fork, which has no thread that asks the nodes."""
        self._lock = threading.Lock()
        self._asking: threading.Thread | None = None
        self._waiting: deque[tuple[Namespace, str, int]] = deque(maxlen=_WAITING_LOOKUPS_MAX)

    def reason(self, ours: Namespace, request: str, blocks: int) -> Reason | None:
        """Return the reason why a lookup found nothing, or None if it is not known; write the reason into the journal.

        Parameters
        ----------
        ours : Namespace
            The reader's namespace.
        request : str
            Name of the request.
        blocks : int
            Number of blocks that were looked up.
        """
        reason = _told(self._known.values(), ours, request, blocks)
        with self._lock:
            now = time.monotonic()
            if self._asking is None and now >= self._asked_at + _ASK_INTERVAL_S:
                self._asked_at = now
                asking = threading.Thread(target=self._ask, name="farpool-kv-namespaces", daemon=True)
                with contextlib.suppress(RuntimeError):  # no thread can start now; a later lookup tries again
                    asking.start()
                    # The thread clears `_asking` under the lock that we hold, so it cannot clear it before we set it.
                    self._asking = asking
            if self._asking is not None and reason is None:
                self._waiting.append((ours, request, blocks))
        return reason

    def _ask(self) -> None:
        """Ask the nodes for their namespaces, and write the journal entries of lookups that wait for the answer."""
        known: Mapping[bytes, Namespace] = {}
        try:
            with contextlib.suppress(FarpoolError, OSError):
                known = self._namespaces()
        finally:  # also after an error: otherwise no later lookup would ask again
            with self._lock:
                self._known, self._asking = known, None
                waiting = list(self._waiting)
                self._waiting.clear()
        # The journal is written without the lock, so that no lookup waits for it.
        for ours, request, blocks in waiting:
            _told(known.values(), ours, request, blocks)

    def join(self, timeout: float) -> None:
        """Wait, at most `timeout` seconds, until the thread that asks the nodes has ended."""
        asking = self._asking
        if asking is not None:
            asking.join(timeout)


def _told(known: Iterable[Namespace], ours: Namespace, request: str, blocks: int) -> Reason | None:
    """Write into the journal how the most similar known namespace differs from `ours`; return this as a `Reason`.

    If blocks of `ours` are stored, or if no namespace of the same engine, model and tenant is known, write nothing and
    return None.
    """
    others = [one for one in known if all(getattr(one, name) == getattr(ours, name) for name in _COMMON)]
    if not others or ours in others:  # the reader's own namespace has blocks, so this block is just absent
        return None
    nearest = min(others, key=lambda other: len(differing_fields(ours, other)))
    names = differing_fields(ours, nearest)
    reason = next((reason for name, reason in _REASONS.items() if name in names), Reason.OTHER_LAYOUT)
    said = ", ".join(f"{name} {getattr(nearest, name)!r} instead of {getattr(ours, name)!r}" for name in names)
    record(request, "compare", blocks, 0, {str(reason): blocks}, 0.0, f"there is KV of this model with {said}")
    return reason


def differing_fields(one: Namespace, other: Namespace) -> list[str]:
    """Return the names of the fields in which two namespaces differ."""
    return [field.name for field in fields(Namespace) if getattr(one, field.name) != getattr(other, field.name)]


_REASONS = {"weights": Reason.OTHER_WEIGHTS, "dtype": Reason.OTHER_DTYPE}
"""Maps a field to the reason to report if this field differs. If several of these fields differ, the first one decides.
If only other fields differ, the reason is `Reason.OTHER_LAYOUT`.
"""
