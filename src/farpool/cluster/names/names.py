"""Publish, open and watch names."""

from __future__ import annotations

import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from farpool.abc.objects import ObjectStore
from farpool.cluster.names.opened import OpenedName
from farpool.cluster.names.records import (
    HISTORY_KEPT,
    SWEEPER,
    Holder,
    NameInfo,
    NameRecord,
    checked_name,
    decode,
    encode,
    history_key,
    hold_key,
    name_key,
    name_of,
    publication_key,
    writer_key,
)
from farpool.cluster.names.sending import PAUSE, Sending, clock, wait_for_sweeper, writer_lost
from farpool.cluster.names.session import Session
from farpool.cluster.names.sweep import sweep
from farpool.cluster.registry import Condition, Delete, Entry, Operation, Put, Registry, Watch, open_registry
from farpool.errors import (
    ConfigError,
    FarpoolError,
    NameHeldError,
    NameMissingError,
    NameMovedError,
    RegistryAwayError,
    RegistryCompactedError,
    RegistryError,
    RegistryLeaseError,
    RegistryUnwritableError,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["NameWatch", "Names", "Writer"]

# Seconds for which calls that can read without the registry leave it alone after it was away, and seconds that they
# wait for it afterwards.
_RETRY_AWAY, _PROBE = 2.0, 0.25


class Names:
    """Mutable names for write-once objects. Thread-safe; a context manager.

    Parameters
    ----------
    store : ObjectStore
        Store of the objects, such as `farpool.Store`.
    registry : Registry or str, optional
        Registry of the names, or its address; None for that of the environment (``FARPOOL_REGISTRY``), else a file of
        this user on this host.
    writer : str, optional
        Name of this program that others are shown; None for its host and process number.
    hold : float
        Seconds that a version stays after the name has moved on; 0 for no time.
    lease : float
        Seconds without a sign of life after which others take it that this program is gone.
    orphan_ttl : float
        Seconds that objects live whose name was never moved to them.
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
        for value, what, fewest in ((hold, "hold", 0.0), (lease, "lease", 1.0), (orphan_ttl, "orphan_ttl", 1.0)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not fewest <= value <= 1e9:
                raise ConfigError(f"{what} is {value!r}, expected seconds of at least {fewest:g}", setting=what)
        self._owned = not isinstance(registry, Registry)
        self._registry = registry if isinstance(registry, Registry) else open_registry(registry, timeout=timeout)
        self._store = store
        self._who = writer or f"{socket.gethostname()}:{os.getpid()}"
        self._hold, self._orphan_ttl, self._timeout = hold, orphan_ttl, timeout
        self._session = Session(self._registry, lease, self._tidy_up)
        self._lock, self._reading_lock = threading.Lock(), threading.Lock()
        self._sweep_at = math.inf
        self._deferred: deque[Callable[[], object]] = deque()
        self._known: dict[str, Entry] = {}  # the last known entry of each name, for when the registry is away
        self._away, self._away_until = False, 0.0
        # The readers of a name's publication under a lease: their entry's revision, and how many share it.
        self._reading: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._reader = secrets.token_hex(8)
        self._writing: set[str] = set()

    # Writing

    def publish(
        self, name: str, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None
    ) -> NameInfo:
        """Publish a value or tensors under a name.

        Objects that are there already, of other versions or names, are not sent again. Readers of the version before
        keep it; it stays for `hold` seconds for those who were about to read it.

        Parameters
        ----------
        name : str
            1 to 200 bytes of printable text.
        value : buffer, iterable of buffers, or mapping of str to tensors
            A value; the parts of one, each of which is sent before the next is asked for; or tensors such as
            ``model.state_dict()``, each of which is an object of its own and copied only while it is sent.
        expect : int, optional
            The version that the name has to have now; 0 for none yet.

        Returns
        -------
        NameInfo
            The new version.

        Raises
        ------
        NameHeldError
            Another writer is at work.
        NameMovedError
            The name has another version than `expect`.
        RegistryAwayError
            The name could not be moved. With `uncertain` it may have been, or may still be.
        NodeError
            The objects could not be stored.
        """
        with self.writer(name) as writer:
            return writer.publish(value, expect=expect)

    def writer(self, name: str) -> Writer:
        """Become the one writer of a name, for several publishes; a context manager.

        Raises
        ------
        NameHeldError
            Another writer is at work; it says who and until when.
        """
        quoted = checked_name(name)
        with self._lock:
            ours = quoted in self._writing
            self._writing.add(quoted)
        if ours:
            raise self._held(name, self._who, self._session.lease(self._timeout))
        try:
            return self._become_writer(name, quoted)
        except BaseException:
            with self._lock:
                self._writing.discard(quoted)
            raise

    def _become_writer(self, name: str, quoted: str) -> Writer:
        key, mine = writer_key(quoted), encode(Holder(self._who))
        deadline = time.monotonic() + self._timeout
        while True:
            lease = self._session.lease(self._timeout)
            try:
                done = self._registry.commit([Condition(key, 0)], [Put(key, mine, lease)], timeout=self._timeout)
            except RegistryLeaseError:
                self._session.lost(lease)
                continue
            if done.succeeded:
                return Writer(self, name, quoted, done.revision, lease)
            held = self._registry.get(key, timeout=self._timeout)
            if held is not None and held.lease == lease:  # left there by this program when the registry was away
                return Writer(self, name, quoted, held.revision, lease)
            if held is not None:
                with suppress(RegistryLeaseError):  # it has ended in between
                    raise self._held(name, decode(held.value, Holder, key).who, held.lease)
            if time.monotonic() >= deadline:
                raise NameHeldError(f"the name {name!r} changes its writers all the time; try again", name=name)
            time.sleep(PAUSE)

    def _held(self, name: str, who: str, lease: int) -> NameHeldError:
        until = time.time() + self._registry.remaining(lease, timeout=self._timeout)
        return NameHeldError(
            f"the name {name!r} is held by the writer {who} until {clock(until)}, longer if that renews its lease; "
            "try again when it has ended",
            name=name,
            holder=who,
            until=until,
        )

    def unpublish(self, name: str, *, expect: int | None = None) -> NameInfo:
        """Remove a name; its last version stays for `hold` seconds, and for its readers.

        Raises
        ------
        NameMissingError
            Nothing is published under it.
        NameHeldError, NameMovedError, RegistryAwayError
            As of `publish`.
        """
        with self.writer(name) as writer:
            return writer.unpublish(expect=expect)

    def sweep(self) -> int:
        """Release the objects of versions that no program holds; return how many.

        Each publish does it, too. Call it if programs publish rarely and memory is short. Several programs may sweep at
        the same time, and no other call waits for a sweep.
        """
        return sweep(self._store, self._registry, max(1.0, self._hold))

    # Reading

    def open(self, name: str, version: int | None = None) -> OpenedName:
        """Open a name for reading; its objects stay until it is closed.

        While the registry is away, this opens the last version that this program knows; while the registry can only be
        read, it opens the current version. The reader then does not hold the version (`OpenedName.held`): the version
        stays for as long as it is the current one, and for `hold` seconds after that.

        Parameters
        ----------
        name : str
            The name.
        version : int, optional
            An older version that is still held; None for the current one.

        Raises
        ------
        NameMissingError
            Nothing is published under it, or not in that version any more.
        NameLostError
            An object of it is on no node any more.
        RegistryAwayError
            The registry is away, and this program has not read the name before.
        """
        quoted = checked_name(name)
        self._do_deferred()
        if version is not None:
            return self._open_older(name, quoted, version)
        deadline = time.monotonic() + self._timeout
        while True:
            entry, sure = self._entry(quoted)
            if entry is None or not (record := decode(entry.value, NameRecord, entry.key)).publication:
                raise NameMissingError(f"nothing is published under the name {name!r}; publish it first")
            release = None
            if sure:
                try:
                    unmoved = [Condition(entry.key, entry.revision)]
                    release = self._hold_for_reader(quoted, record, unmoved, self._patience())
                    if release is None and time.monotonic() < deadline:
                        continue  # the name has moved
                except RegistryUnwritableError:
                    pass  # it can be read, so what is current is known
                except RegistryAwayError:
                    self._note_away()
            return self._opened(name, record, release)

    def info(self, name: str) -> NameInfo | None:
        """Return the current version of a name; None if nothing is published under it.

        While the registry is away this is the last version that the program knows.
        """
        entry, _ = self._entry(checked_name(name))
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        return None if record is None or not record.publication else NameInfo.of(name, record)

    def list_names(self, prefix: str = "") -> list[NameInfo]:
        """List the names that begin with a prefix, in their current versions, sorted."""
        quoted = checked_name(prefix) if prefix else ""
        found = []
        for entry in self._registry.range(name_key(quoted), timeout=self._timeout).entries:
            record = decode(entry.value, NameRecord, entry.key)
            if record.publication:
                found.append(NameInfo.of(name_of(entry.key.partition("/")[2]), record))
        return sorted(found, key=lambda one: one.name)

    def history(self, name: str) -> list[NameInfo]:
        """List the versions that were published under a name, the oldest first; at most the last hundred."""
        prefix = history_key(checked_name(name), 0).rpartition("/")[0] + "/"
        entries = self._registry.range(prefix, timeout=self._timeout).entries
        return [NameInfo.of(name, decode(entry.value, NameRecord, entry.key)) for entry in entries]

    def watch(self, name: str, after: int = 0) -> NameWatch:
        """Watch a name for versions above `after`; the current one comes first if it is."""
        return NameWatch(self._registry, name, after, self._timeout)

    def close(self) -> None:
        """Release all versions that are held, and end the lease. Idempotent."""
        self._session.close()
        if self._owned:
            self._registry.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _opened(self, name: str, record: NameRecord, release: Callable[[], None] | None) -> OpenedName:
        return OpenedName(self._store, NameInfo.of(name, record), record.manifest, release, self._deferred.append)

    def _tidy_up(self) -> None:
        """Do deferred work, and sweep once the version that an earlier publish replaced has had its time."""
        self._do_deferred()
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = math.inf
            with suppress(FarpoolError, OSError):  # the store may be closed by now; the next publish does it
                self.sweep()

    def _do_deferred(self) -> None:
        while self._deferred:
            with suppress(IndexError, BufferError, FarpoolError, OSError):  # another thread may be faster
                self._deferred.popleft()()

    def _entry(self, quoted: str) -> tuple[Entry | None, bool]:
        """Return a name's entry, and True if it is current, False if it is the last one known."""
        key, known = name_key(quoted), self._known.get(quoted)
        if known is None or time.monotonic() >= self._away_until:
            try:
                entry = self._registry.get(key, timeout=self._timeout if known is None else self._patience())
            except RegistryAwayError:
                if known is None:
                    raise
                self._note_away()
            else:
                self._away = False
                if entry is None:
                    self._known.pop(quoted, None)
                else:
                    self._known[quoted] = entry
                return entry, True
        return known, False

    def _patience(self) -> float:
        """Return the seconds to wait for the registry in a call that can do without it."""
        return min(_PROBE, self._timeout) if self._away else self._timeout

    def _note_away(self) -> None:
        self._away, self._away_until = True, time.monotonic() + _RETRY_AWAY

    def _open_older(self, name: str, quoted: str, version: int) -> OpenedName:
        entry = self._registry.get(history_key(quoted, version), timeout=self._timeout)
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        deadline = time.monotonic() + self._timeout
        while record is not None and record.publication:
            first = publication_key(quoted, record.publication, 0)
            held = self._registry.get(first, timeout=self._timeout)
            if held is None:
                break
            # A sweep removes the entry before it releases objects.
            there = [Condition(first, held.revision), Condition(SWEEPER, 0)]
            release = self._hold_for_reader(quoted, record, there, self._timeout)
            if release is not None:
                return self._opened(name, record, release)
            wait_for_sweeper(self._registry, name, deadline)
        raise NameMissingError(f"the name {name!r} is not held in version {version} any more; open the current one")

    def _hold_for_reader(
        self, quoted: str, record: NameRecord, conditions: Sequence[Condition], timeout: float
    ) -> Callable[[], None] | None:
        """Hold a publication for a reader; return a function that releases it, None if the conditions did not hold."""
        while True:
            lease = self._session.lease(timeout)
            reading = (quoted, record.publication, lease)
            key = hold_key(quoted, record.publication, f"reader-{self._reader}-{lease}")
            hold: list[Operation] = [Put(key, encode(Holder(self._who)), lease)]
            try:
                with self._reading_lock:  # all readers of this program share one entry
                    if reading not in self._reading:
                        done = self._registry.commit(conditions, hold, timeout=timeout)
                        if not done.succeeded:
                            return None
                        self._reading[reading] = done.revision, 0
                    revision, readers = self._reading[reading]
                    self._reading[reading] = revision, readers + 1
            except RegistryLeaseError:
                self._session.lost(lease)
                continue
            return lambda: self._let_go(reading, key)

    def _let_go(self, reading: tuple[str, str, int], key: str) -> None:
        with self._reading_lock:
            revision, readers = self._reading.pop(reading)
            if readers > 1:
                self._reading[reading] = revision, readers - 1
                return
            # If this deletion is sent again and arrives late, the condition keeps it from deleting the next reader's
            # entry. If our entry was itself sent again and arrived late, it has another revision now, so we read it.
            with suppress(RegistryError):  # it goes with the lease
                if not self._delete_hold(key, revision) and (entry := self._registry.get(key, timeout=self._timeout)):
                    self._delete_hold(key, entry.revision)

    def _delete_hold(self, key: str, revision: int) -> bool:
        return self._registry.commit([Condition(key, revision)], [Delete(key)], timeout=self._timeout).succeeded


class Writer:
    """Exclusive writer of a name, for as long as its lease is kept alive; a context manager."""

    def __init__(self, names: Names, name: str, quoted: str, revision: int, lease: int) -> None:
        self._names = names
        self._registry = names._registry
        self._store = names._store
        self._name, self._quoted = name, quoted
        self._mine = Condition(writer_key(quoted), revision)
        self._lease = lease
        self._closed = False

    def publish(self, value: Buffer | Iterable[Buffer] | Mapping[str, Any], *, expect: int | None = None) -> NameInfo:
        """Publish the next version of the name; see `Names.publish`."""
        entry, record = self._current(expect)
        names = self._names
        sending = Sending(
            *(self._store, self._registry),
            name=self._name,
            quoted=self._quoted,
            writer=self._mine,
            lease=self._lease,
            who=names._who,
            ttl=names._orphan_ttl,
            timeout=names._timeout,
        )
        try:
            key, manifest = sending.send(value)
            made = NameRecord(
                *(record.version + 1 if record else 1, sending.publication, key, manifest.nbytes, len(sending.keys)),
                *(manifest.tensors is not None, time.time(), names._who),
            )
            assert sending.hold is not None
            self._move(entry, record, made, [sending.hold], [Delete(sending.hold.key)])
        except BaseException:
            if sending.hold is not None:
                with suppress(RegistryError):
                    self._registry.commit([sending.hold], [Delete(sending.hold.key)], timeout=names._timeout)
                names._sweep_at = time.monotonic()  # what is kept of it already goes
            raise
        self._sweep()
        return NameInfo.of(self._name, made)

    def unpublish(self, *, expect: int | None = None) -> NameInfo:
        """Remove the name; see `Names.unpublish`."""
        entry, record = self._current(expect)
        if record is None or not record.publication:
            raise NameMissingError(f"nothing is published under the name {self._name!r}")
        made = NameRecord(record.version + 1, "", "", 0, 0, False, time.time(), self._names._who)
        self._move(entry, record, made, [], [])
        self._sweep()
        return NameInfo.of(self._name, made)

    def close(self) -> None:
        """Give up writing, so that others may. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(RegistryError):  # it goes with the lease
            self._registry.commit([self._mine], [Delete(self._mine.key)], timeout=self._names._timeout)
        with self._names._lock:
            self._names._writing.discard(self._quoted)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _current(self, expect: int | None) -> tuple[Entry | None, NameRecord | None]:
        entry = self._registry.get(name_key(self._quoted), timeout=self._names._timeout)
        record = None if entry is None else decode(entry.value, NameRecord, entry.key)
        version = record.version if record else 0
        if expect is not None and expect != version:
            raise NameMovedError(
                f"the name {self._name!r} has version {version}, expected {expect}; nothing was published. Look at the "
                "new version and try again with its number",
                name=self._name,
                version=version,
            )
        return entry, record

    def _move(
        self,
        entry: Entry | None,
        before: NameRecord | None,
        made: NameRecord,
        conditions: list[Condition],
        operations: list[Operation],
    ) -> None:
        names, content = self._names, encode(made)
        operations = [
            *(Put(name_key(self._quoted), content), Put(history_key(self._quoted, made.version), content)),
            *operations,
        ]
        if made.version > HISTORY_KEPT:
            operations.append(Delete(history_key(self._quoted, made.version - HISTORY_KEPT)))
        if before is not None and before.publication and names._hold:
            # A lease that nobody keeps alive is a clock which all hosts agree on.
            lease = self._registry.grant(names._hold, timeout=names._timeout)
            previous = hold_key(self._quoted, before.publication, "previous")
            operations.append(Put(previous, encode(Holder(names._who)), lease))
        current = Condition(name_key(self._quoted), entry.revision if entry else 0)
        try:
            done = self._registry.commit([current, self._mine, *conditions], operations, timeout=names._timeout)
        except RegistryLeaseError as error:
            raise writer_lost(self._registry, self._name, self._quoted) from error
        if not done.succeeded:
            raise writer_lost(self._registry, self._name, self._quoted)

    def _sweep(self) -> None:
        """Sweep old versions, and schedule the next sweep, which makes up for this one if it fails."""
        self._names._sweep_at = time.monotonic() + self._names._hold + 1.0
        with suppress(FarpoolError, OSError):
            self._names.sweep()


class NameWatch:
    """Watch for new versions of a name; a context manager. Not thread-safe."""

    def __init__(self, registry: Registry, name: str, after: int, timeout: float) -> None:
        self._registry = registry
        self._name, self._key = name, name_key(checked_name(name))
        self._after = after
        self._timeout = timeout
        self._watch: Watch | None = None

    def next(self, timeout: float) -> NameInfo | None:
        """Wait for a newer version, which may say that the name was unpublished; None if none came in time.

        Versions that have been superseded meanwhile are skipped.

        Parameters
        ----------
        timeout : float
            Seconds to wait at most; 0 to look only.

        Raises
        ------
        RegistryAwayError
            The registry could not be asked until the end of the wait. The next wait goes on where this one ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self._watch is None:
                snapshot = self._registry.range(self._key, timeout=max(timeout, self._timeout))
                self._watch = self._registry.watch(self._key, snapshot.revision)
                entries = snapshot.entries
            else:
                try:
                    entries = self._watch.next(max(0.0, deadline - time.monotonic())).entries
                except RegistryCompactedError:
                    self.close()
                    continue
            records = [decode(one.value, NameRecord, one.key) for one in entries if one.key == self._key and one.value]
            if records and records[-1].version > self._after:
                self._after = records[-1].version
                return NameInfo.of(self._name, records[-1])
            if time.monotonic() >= deadline:
                return None

    def close(self) -> None:
        """End the watch. Idempotent; the next wait begins it anew."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
