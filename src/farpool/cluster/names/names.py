"""Publish, open and watch names."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from farpool.abc.objects import ObjectStore
from farpool.checks import require_seconds
from farpool.closing import Closing
from farpool.cluster.names.context import Context
from farpool.cluster.names.holds import ReaderHolds
from farpool.cluster.names.listing import list_names, list_versions
from farpool.cluster.names.opened import OpenedName
from farpool.cluster.names.records import (
    SWEEPER,
    Holder,
    NameInfo,
    NameRecord,
    checked_name,
    decode,
    encode,
    history_key,
    name_key,
    publication_key,
    writer_key,
)
from farpool.cluster.names.sending import PAUSE_S, clock, wait_for_sweeper
from farpool.cluster.names.sweep import sweep
from farpool.cluster.names.watch import NameWatch
from farpool.cluster.names.writer import Writer
from farpool.cluster.registry import Condition, Entry, Registry, open_registry
from farpool.cluster.roles import Session, holder_of
from farpool.errors import (
    FarpoolError,
    NameHeldError,
    NameMissingError,
    RegistryAwayError,
    RegistryUnwritableError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Names"]

_AWAY_REST_S = 2.0
"""After the registry did not answer, calls that can do without it do not ask it for this many seconds."""
_AWAY_TIMEOUT_S = 0.25
"""Seconds that such calls wait for an answer after this rest. After an answer they wait longer again."""


class Names(Closing):
    """Mutable names for write-once objects. Thread-safe; a context manager.

    Parameters
    ----------
    store : ObjectStore
        Store of the objects, such as `farpool.Store`.
    registry : Registry or str, optional
        Registry of the names, or its address. None stands for the address in ``FARPOOL_REGISTRY``, or for a file of
        this user on this host if that variable is not set.
    writer : str, optional
        Name of this program, which other programs show to people; None for its host name and process number.
    hold : float
        Seconds that a version stays readable after another version has replaced it; 0 for no time.
    lease : float
        Time to live of this program's lease in seconds. If the program does not renew the lease for this long, other
        programs conclude that the program has ended.
    orphan_ttl : float
        Seconds after which objects expire if their publish does not finish.
    timeout : float
        Seconds that a call may wait for the registry.
    """

    def __init__(
        self,
        store: ObjectStore,
        registry: Registry | str | os.PathLike[str] | None = None,
        *,
        writer: str | None = None,
        hold: float = 60.0,
        lease: float = 30.0,
        orphan_ttl: float = 3600.0,
        timeout: float = 5.0,
    ) -> None:
        for value, what, least in ((hold, "hold", 0.0), (lease, "lease", 1.0), (orphan_ttl, "orphan_ttl", 1.0)):
            require_seconds(value, what, least, 1e9)
        self._owned = not isinstance(registry, Registry)
        self._registry = registry if isinstance(registry, Registry) else open_registry(registry, timeout=timeout)
        self._store = store
        self._timeout = timeout
        self._context = Context(
            store, self._registry, writer or f"{socket.gethostname()}:{os.getpid()}", hold, orphan_ttl, timeout
        )
        self._session = Session(self._registry, lease, timeout=timeout, on_renewal=self._tidy_up)
        self._holds = ReaderHolds(self._context, self._session)
        self._sweep_at = math.inf
        # Finalizers append to this at any point of any thread, and `append` takes no lock.
        self._deferred: deque[Callable[[], object]] = deque()
        self._known: dict[str, Entry] = {}  # the last known entry of each name, for times when the registry is away
        self._away, self._away_until = False, 0.0

    # Writing

    def publish(
        self, name: str, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None
    ) -> NameInfo:
        """Publish a value or tensors under a name.

        Objects that nodes already have, from other versions or names, are not sent again. Readers of the previous
        version can continue to read it. It also stays for `hold` seconds, for readers that were about to open it.

        Parameters
        ----------
        name : str
            1 to 200 bytes of printable text.
        value : buffer, iterable of buffers, or mapping of str to tensors
            A value; or its parts, which need not fit into memory together; or tensors such as ``model.state_dict()``.
            Each tensor becomes an object and is copied only while it is sent.
        expect : int, optional
            The version that the name must have now; 0 if nothing was published under it yet.

        Returns
        -------
        NameInfo
            The new version.

        Raises
        ------
        NameHeldError
            Another writer holds the name.
        NameMovedError
            The name has another version than `expect`.
        RegistryAwayError
            The registry did not confirm that the new version is the current one. If the error's `uncertain` is True,
            the version may have become the current one, or may still become it.
        NodeError
            The objects could not be stored.
        """
        with self.writer(name) as writer:
            return writer.publish(value, expect=expect)

    def writer(self, name: str) -> Writer:
        """Become the one writer of a name; return the `Writer`, a context manager, which may publish several times.

        Raises
        ------
        NameHeldError
            Another writer holds the name. The error names the writer and the end of its lease.
        """
        quoted = checked_name(name)
        role, deadline = writer_key(quoted), time.monotonic() + self._timeout
        while True:
            held = self._session.take(role, encode(Holder(self._context.who)), timeout=self._timeout)
            if held is not None:
                return Writer(self._context, name, quoted, held, self._publish_ended, partial(self._learn, quoted))
            holder = holder_of(self._registry, role, timeout=self._timeout)
            if holder is not None:
                who, until = decode(holder.value, Holder, role).who, time.time() + holder.seconds
                raise NameHeldError(
                    f"the name {name!r} is held by the writer {who} until {clock(until)}, longer if that renews its "
                    "lease; try again when it has ended",
                    name=name,
                    holder=who,
                    until=until,
                )
            # The role became free between the two questions, so we ask again.
            if time.monotonic() >= deadline:
                raise NameHeldError(
                    f"other writers took the name {name!r} at each try of {self._timeout:g} s; try again", name=name
                )
            time.sleep(PAUSE_S)

    def unpublish(self, name: str, *, expect: int | None = None) -> NameInfo:
        """Remove a name. Its last version stays for `hold` seconds, or longer if programs still read it.

        Raises
        ------
        NameMissingError
            Nothing is published under the name.
        NameHeldError, NameMovedError, RegistryAwayError
            As in `publish`.
        """
        with self.writer(name) as writer:
            return writer.unpublish(expect=expect)

    def sweep(self) -> int:
        """Release the objects of versions that no program holds; return the number of released objects.

        Each publish sweeps, too. Call this if programs publish rarely and memory is short. Several programs may sweep
        at the same time, and no other call waits for a sweep.
        """
        return sweep(self._store, self._registry, max(1.0, self._context.hold))

    # Reading

    def open(self, name: str, version: int | None = None) -> OpenedName:
        """Open a name for reading; its objects stay until the opened name is closed.

        While the registry does not answer, this opens the last version that this program knows. While the registry can
        only be read, this opens the current version. In both cases the reader does not hold the version
        (`OpenedName.held`): it stays for as long as it is the current version, and for `hold` seconds after that.

        Parameters
        ----------
        name : str
            The name.
        version : int, optional
            An older version that some program still holds; None for the current one.

        Raises
        ------
        NameMissingError
            Nothing is published under the name, or no program holds that version any more.
        NameLostError
            The object that lists the version's objects is lost: no node has it any more.
        RegistryAwayError
            The registry does not answer, and this program has not read the name before.
        """
        quoted = checked_name(name)
        # Without a lease the session has no thread that would do this work.
        self._do_deferred()
        if version is not None:
            return self._open_older(name, quoted, version)
        deadline = time.monotonic() + self._timeout
        while True:
            entry, current = self._entry(quoted)
            if entry is None or not (record := decode(entry.value, NameRecord, entry.key)).publication:
                raise NameMissingError(f"nothing is published under the name {name!r}; publish it first")
            release = None
            if current:
                try:
                    # A sweep may release a version that is no longer the current one, so the hold counts only if the
                    # name is unmoved.
                    unmoved = [Condition(entry.key, entry.revision)]
                    release = self._holds.hold(quoted, record.publication, unmoved, self._patience())
                    if release is None and time.monotonic() < deadline:
                        continue  # another version became the current one
                except RegistryUnwritableError:
                    pass  # the registry can be read, so this is the current version
                except RegistryAwayError:
                    self._note_away()
            return self._opened(name, record, release)

    def info(self, name: str) -> NameInfo | None:
        """Return the current version of a name; None if nothing is published under it.

        While the registry does not answer, return the last version that this program knows.
        """
        entry, _ = self._entry(checked_name(name))
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        return None if record is None or not record.publication else NameInfo.of(name, record)

    def list_names(self, prefix: str = "") -> list[NameInfo]:
        """List the current versions of the names that begin with a prefix, in the order of the names."""
        return list_names(self._registry, prefix, timeout=self._timeout)

    def history(self, name: str) -> list[NameInfo]:
        """List the last versions of a name, at most a hundred, the oldest first."""
        return list_versions(self._registry, name, timeout=self._timeout)

    def watch(self, name: str, after: int = 0) -> NameWatch:
        """Watch a name for versions above `after`.

        If the current version is above `after`, the watch reports it first.
        """
        return NameWatch(self._registry, name, after, self._timeout)

    def close(self) -> None:
        """Release all versions that this program holds, and end its lease. Idempotent."""
        self._session.close()
        if self._owned:
            self._registry.close()

    def _opened(self, name: str, record: NameRecord, release: Callable[[], None] | None) -> OpenedName:
        return OpenedName(self._store, NameInfo.of(name, record), record.manifest, release, self._deferred.append)

    def _publish_ended(self, succeeded: bool) -> None:
        """Sweep old versions after a publish. If the publish failed, a background thread sweeps soon instead."""
        if not succeeded:
            self._sweep_at = time.monotonic()
            return
        # The sweep at that time also does the work of this one, should this one fail.
        self._sweep_at = time.monotonic() + self._context.hold + 1.0
        with suppress(FarpoolError, OSError):
            self.sweep()

    def _tidy_up(self) -> None:
        """Call the deferred functions; sweep if the hold time of a version that this program replaced is over."""
        self._do_deferred()
        if time.monotonic() >= self._sweep_at:
            # Before the sweep, because a publish that ends during the sweep sets the next time.
            self._sweep_at = math.inf
            with suppress(FarpoolError, OSError):  # the store may be closed by now; the next publish sweeps
                self.sweep()

    def _do_deferred(self) -> None:
        while self._deferred:
            with suppress(IndexError, BufferError, FarpoolError, OSError):  # another thread may take the last one
                self._deferred.popleft()()

    def _entry(self, quoted: str) -> tuple[Entry | None, bool]:
        """Return a name's entry, with True if the registry has just returned it, or False if it may be outdated."""
        key, known = name_key(quoted), self._known.get(quoted)
        if known is None or time.monotonic() >= self._away_until:
            try:
                entry = self._registry.get(key, timeout=self._timeout if known is None else self._patience())
            except RegistryAwayError:
                if known is None:
                    raise
                self._note_away()
            else:
                if entry is None:
                    self._away = False
                    self._known.pop(quoted, None)
                else:
                    self._learn(quoted, entry)
                return entry, True
        return known, False

    def _learn(self, quoted: str, entry: Entry) -> None:
        """Note an entry from the registry, which answers again. Another thread may have noted a later one."""
        self._away, self._away_until = False, 0.0
        known = self._known.get(quoted)
        if known is None or entry.revision >= known.revision:
            self._known[quoted] = entry

    def _patience(self) -> float:
        """Return how many seconds a call that can do without the registry waits for it."""
        return min(_AWAY_TIMEOUT_S, self._timeout) if self._away else self._timeout

    def _note_away(self) -> None:
        self._away, self._away_until = True, time.monotonic() + _AWAY_REST_S

    def _open_older(self, name: str, quoted: str, version: int) -> OpenedName:
        entry = self._registry.get(history_key(quoted, version), timeout=self._timeout)
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        deadline = time.monotonic() + self._timeout
        while record is not None and record.publication:
            first = publication_key(quoted, record.publication, 0)
            part = self._registry.get(first, timeout=self._timeout)
            if part is None:
                break
            # A sweep removes the entry before it releases objects.
            unswept = [Condition(first, part.revision), Condition(SWEEPER, 0)]
            release = self._holds.hold(quoted, record.publication, unswept, self._timeout)
            if release is not None:
                return self._opened(name, record, release)
            wait_for_sweeper(self._context, name, deadline)
        raise NameMissingError(f"the name {name!r} is not held in version {version} any more; open the current one")
