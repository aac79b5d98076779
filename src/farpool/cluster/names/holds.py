"""Holds: registry entries that keep a version's objects while this program reads the version."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from farpool import forks
from farpool.cluster.names.context import Context
from farpool.cluster.names.records import Holder, encode, hold_key
from farpool.cluster.registry import Condition, Put
from farpool.cluster.roles import Session
from farpool.errors import RegistryError

__all__ = ["ReaderHolds"]

_Reading = tuple[str, str, int]
"""The name as quoted in the registry's keys, the publication, and the lease to which the hold is bound."""


class ReaderHolds:
    """Holds of this program's readers. All readers of one version share one registry entry. Thread-safe.

    The entry is bound to a lease. A forked child begins without holds. If it closes its copies of opened names, that
    releases nothing, because the parent still reads them.
    """

    def __init__(self, context: Context, session: Session) -> None:
        self._context, self._registry, self._session = context, context.registry, session
        self._program = secrets.token_hex(8)
        self._begin()
        forks.begin_again(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._readers: dict[_Reading, tuple[int, int]] = {}  # the entry's revision, and how many readers share it

    def forked(self) -> None:
        """Forget all holds in a forked child, because they belong to the parent."""
        self._begin()

    def hold(
        self, quoted: str, publication: str, conditions: Sequence[Condition], timeout: float
    ) -> Callable[[], None] | None:
        """Hold a publication for one reader.

        Parameters
        ----------
        quoted : str
            The name as quoted in the registry's keys.
        publication : str
            The publication to hold.
        conditions : sequence of Condition
            Conditions under which the registry records the hold.
        timeout : float
            Seconds that each call of the registry may take.

        Returns
        -------
        callable or None
            A function that releases the hold; None if a condition was not true.
        """

        def under(lease: int) -> Callable[[], None] | None:
            reading = (quoted, publication, lease)
            key = hold_key(quoted, publication, f"reader-{self._program}-{lease}")
            # Held during the commit: another reader of this version must wait until the entry that it shares exists.
            with self._lock:
                if reading not in self._readers:
                    entry = Put(key, encode(Holder(self._context.who)), lease)
                    done = self._registry.commit(conditions, [entry], timeout=timeout)
                    if not done.succeeded:
                        return None
                    self._readers[reading] = done.revision, 0
                revision, readers = self._readers[reading]
                self._readers[reading] = revision, readers + 1
            return lambda: self._release(reading, key)

        return self._session.under_lease(under, timeout)

    def _release(self, reading: _Reading, key: str) -> None:
        with self._lock:
            if reading not in self._readers:
                return  # the hold of the process that this one was forked from
            revision, readers = self._readers.pop(reading)
            if readers > 1:
                self._readers[reading] = revision, readers - 1
                return
            # A deletion that is sent again may arrive late. The condition keeps it from deleting the entry of the next
            # reader. If our entry itself was sent again and arrived late, it has another revision now, so we read it.
            lease, timeout = reading[2], self._context.timeout
            if not self._session.delete(Condition(key, revision), lease, timeout=timeout):
                with suppress(RegistryError):  # the registry deletes the entry when the lease ends
                    if entry := self._registry.get(key, timeout=timeout):
                        self._session.delete(Condition(key, entry.revision), lease, timeout=timeout)
