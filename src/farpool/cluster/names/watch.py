"""Watch a name for new versions."""

from __future__ import annotations

import time

from farpool.closing import Closing
from farpool.cluster.names.records import NameInfo, NameRecord, checked_name, decode, name_key
from farpool.cluster.registry import Registry, Watch
from farpool.errors import RegistryCompactedError

__all__ = ["NameWatch"]


class NameWatch(Closing):
    """Watches for new versions of a name; a context manager. Not thread-safe."""

    def __init__(self, registry: Registry, name: str, after: int, timeout: float) -> None:
        self._registry = registry
        self._name, self._key = name, name_key(checked_name(name))
        self._after = after
        self._timeout = timeout
        self._watch: Watch | None = None

    def next(self, timeout: float) -> NameInfo | None:
        """Wait for a newer version; return None if there was none in time.

        The returned version may be an unpublish (`NameInfo.published` is False). Versions that newer versions have
        already replaced are skipped.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait; 0 checks once without waiting.

        Raises
        ------
        RegistryAwayError
            The registry did not answer during the wait. The next call waits for the same versions.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._watch is None:
                snapshot = self._registry.range(self._key, timeout=max(timeout, self._timeout))
                # From the revision of the snapshot on, so no change between the two is lost.
                self._watch = self._registry.watch(self._key, snapshot.revision)
                entries = snapshot.entries
            else:
                try:
                    entries = self._watch.next(max(0.0, deadline - time.monotonic())).entries
                except RegistryCompactedError:
                    self.close()
                    continue
            # The key is also a prefix of the keys of longer names.
            records = [decode(one.value, NameRecord, one.key) for one in entries if one.key == self._key and one.value]
            if records and records[-1].version > self._after:
                self._after = records[-1].version
                return NameInfo.of(self._name, records[-1])
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """End the watch. Idempotent; the next call of `next` begins the watch again."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()
