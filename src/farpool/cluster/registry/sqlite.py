"""The registry in one SQLite file, for the processes of one host.

Every change is one ``BEGIN IMMEDIATE`` transaction in write-ahead-log mode. If a process is killed at any point, the
file has the whole change or nothing of it. A watch reads the file's change counter (``PRAGMA data_version``) every
`POLL_INTERVAL_S` seconds; SQLite need not read the file for this. So a watch reports a change after at most
`POLL_INTERVAL_S`, and after half of this time on average.

The end of a lease is a time of ``CLOCK_BOOTTIME``. All processes of a host share this clock, no program can set it, and
it goes on while the host sleeps. After a restart of the host, all leases have ended. A program that writes or watches
deletes the entries of leases that have ended; a program that only reads skips these entries.

Checksums are in separate tables, which earlier releases do not use. When an earlier release writes or deletes an entry,
a trigger in the file deletes the entry's old checksum. So a checksum without an entry, or a checksum that does not
match its entry, is a sign of damage.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from farpool import forks
from farpool.abc.registry import Changes, Commit, Condition, Delete, Entry, Operation, Registry, Snapshot, Watch
from farpool.cluster.registry.checks import (
    checked_key,
    checked_transaction,
    checked_ttl,
    checksum,
    damaged,
    deadline_of,
    no_lease,
)
from farpool.errors import (
    RegistryAwayError,
    RegistryCompactedError,
    RegistryDamagedError,
    RegistryDeniedError,
    RegistryError,
    RegistryReplacedError,
    RegistryUnwritableError,
)

__all__ = ["POLL_INTERVAL_S", "SqliteRegistry"]

POLL_INTERVAL_S = 0.005
"""Seconds between two checks. In each check, a watch looks for changes that other connections have made."""
_MAGIC = 0x46505247  # "FPRG", SQLite's application id
_VERSION = 1
_CHANGES_MAX = 20_000
"""Number of changes that the file keeps for watches. Up to a thousand more are kept before the oldest are deleted."""
_IDLE_CONNECTIONS_MAX = 8
_SCHEMA = """
CREATE TABLE state (revision INTEGER NOT NULL, compacted INTEGER NOT NULL, boot TEXT NOT NULL);
CREATE TABLE entry (
    key BLOB PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL, lease INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX entry_lease ON entry (lease) WHERE lease != 0;
CREATE TABLE change (
    revision INTEGER NOT NULL, key BLOB NOT NULL, value BLOB, lease INTEGER NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
CREATE TABLE lease (number INTEGER PRIMARY KEY, milliseconds INTEGER NOT NULL, ends INTEGER NOT NULL);
CREATE INDEX lease_ends ON lease (ends);
"""
_CHECKSUMS = """
CREATE TABLE IF NOT EXISTS entry_checksum (
    key BLOB PRIMARY KEY, revision INTEGER NOT NULL, crc INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS change_checksum (
    revision INTEGER NOT NULL, key BLOB NOT NULL, crc INTEGER NOT NULL, PRIMARY KEY (revision, key)
) WITHOUT ROWID;
CREATE TRIGGER IF NOT EXISTS entry_deleted AFTER DELETE ON entry BEGIN
    DELETE FROM entry_checksum WHERE key = OLD.key; END;
CREATE TRIGGER IF NOT EXISTS entry_written AFTER INSERT ON entry BEGIN
    DELETE FROM entry_checksum WHERE key = NEW.key; END;
CREATE TRIGGER IF NOT EXISTS change_forgotten AFTER DELETE ON change BEGIN
    DELETE FROM change_checksum WHERE revision = OLD.revision AND key = OLD.key; END;
"""
_REVISION_MAX = 1 << 62
_LAST_BYTE = b"\xff"  # above every byte of UTF-8
_making = forks.ModuleLock()
# SQLite has locks for its memory and its files that all connections of a process share.
_calls = forks.ForkGuard()


class SqliteRegistry(Registry):
    """A registry in a SQLite file.

    Parameters
    ----------
    path : str or path
        The file. If it does not exist, it is made with its folder. It must be on a disk of this host, because SQLite's
        locks do not work over network file systems.
    timeout : float
        Seconds that a call may take, unless the call has a `timeout` of its own.

    Raises
    ------
    RegistryError
        The file is not a registry, or is a registry of another version. The file was not changed.
    RegistryDeniedError
        The file cannot be opened or made.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout: float = 5.0) -> None:
        self._path = Path(path).absolute()
        self.address = f"sqlite://{self._path}"
        self._timeout = timeout
        # Protects the idle connections. It is never held during a call of SQLite, which may wait for other processes.
        self._lock = threading.Lock()
        self._idle: list[sqlite3.Connection] = []
        self._closed = False
        self._file: tuple[int, int] | None = None  # device and inode of the file that was opened
        self._sums = False  # the file has tables for checksums
        forks.begin_again(self)
        self._begin(deadline_of(None, timeout))

    def forked(self) -> None:
        """Begin without connections in a forked child. It must neither use nor close the parent's connections."""
        self._lock = threading.Lock()
        _PARENT_CONNECTIONS.extend(self._idle)
        self._idle = []

    # Connections: one for each call that is under way, because a transaction belongs to its connection.

    def _begin(self, deadline: float) -> None:
        try:
            with contextlib.suppress(FileExistsError):
                self._path.parent.mkdir(parents=True, mode=0o700)
            _make(self._path)
            self._file = _identity(os.stat(self._path))
        except OSError as error:
            raise RegistryDeniedError(
                f"{self._path} cannot be opened: {error.strerror}; expected a file for the registry",
                registry=self.address,
            ) from error
        with self._errors("opened"):
            connection = self._borrow(deadline)
            try:
                self._prepare(connection, deadline)
            except BaseException:
                connection.close()
                raise
            self._return(connection)
        # Another program may have replaced the file after we looked at it and before SQLite opened it.
        self._check_place()

    def _check_place(self) -> None:
        """Raise RegistryReplacedError unless the file at the path is still the file that was opened."""
        try:
            there = _identity(os.stat(self._path))
        except OSError:
            there = None
        if there != self._file:
            raise RegistryReplacedError(
                f"the file of the registry {self.address} was {'replaced' if there else 'removed'} while this program "
                "had it open, so other programs do not see the changes of this one; open the registry again",
                registry=self.address,
            )

    def _prepare(self, connection: sqlite3.Connection, deadline: float) -> None:
        """Check that the file is a registry of this version. If the file is empty, make it one."""
        connection.execute("BEGIN")  # all reads then see one state, even while another process makes the file
        try:
            known = self._known(connection)
        finally:
            connection.rollback()
        if not known:
            _begin_writing(connection, deadline)
            try:
                if not self._known(connection):  # no other process made it in the meantime
                    for statement in _SCHEMA.split(";\n") + _CHECKSUMS.split(";\n"):
                        connection.execute(statement)
                    connection.execute("INSERT INTO state VALUES (1, 0, ?)", (_boot(),))
                    connection.execute(f"PRAGMA application_id = {_MAGIC}")
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
                connection.execute("COMMIT")
            except BaseException:
                connection.rollback()
                raise
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:  # SQLite does not wait here while another process does the same
                if time.monotonic() >= deadline:
                    raise
                time.sleep(POLL_INTERVAL_S)

    def _known(self, connection: sqlite3.Connection) -> bool:
        """Return True for a registry of this version, False for an empty file; raise RegistryError otherwise."""
        magic = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if magic == _MAGIC and version == _VERSION:
            return True
        if magic == _MAGIC:
            raise RegistryError(
                f"{self._path} is a registry of version {version}, this farpool reads version {_VERSION}; "
                "use the farpool that made it, or another path",
                registry=self.address,
            )
        if magic or version or connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise RegistryError(
                f"{self._path} is a SQLite file of another program; it was not changed. Choose another path",
                registry=self.address,
            )
        return False

    def _borrow(self, deadline: float) -> sqlite3.Connection:
        """Return a connection that no other thread uses: an idle one, or else a new one."""
        with self._lock:
            if self._closed:
                raise RegistryError(f"the registry {self.address} was closed; open it again", registry=self.address)
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            self._check_place()
            # Without the mode, a file that was removed in the meantime would be made again, empty. Connections move
            # between threads, but only one thread at a time uses a connection.
            connection = sqlite3.connect(
                f"{self._path.as_uri()}?mode=rw", uri=True, isolation_level=None, check_same_thread=False
            )
            # In write-ahead-log mode, NORMAL could lose the last commits if the host loses power.
            connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA busy_timeout = {_milliseconds_left(deadline)}")
        return connection

    def _return(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < _IDLE_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        with _calls:
            connection.close()

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        began = time.monotonic()
        try:
            with _calls:
                yield
        except UnicodeDecodeError as error:  # SQLite quotes damaged text in its errors
            raise damaged(self.address, str(error)) from error
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                waited = time.monotonic() - began
                raise RegistryAwayError(
                    f"the registry {self.address} could not be {done}: another process has had it locked for the "
                    f"{waited:.1f} s of this call; look for a stopped process that uses it",
                    registry=self.address,
                    endpoints={self.address: waited},
                ) from error
            if code in _FULL_CODES or (code in _DENIED_CODES and done == "written"):
                raise RegistryUnwritableError(
                    f"the registry {self.address} cannot be {done} now: {error}; check its disk and its permissions",
                    registry=self.address,
                ) from error
            if code in _DAMAGED_CODES:
                raise damaged(self.address, str(error)) from error
            kind = RegistryDeniedError if code in _DENIED_CODES else RegistryError
            raise kind(f"the registry {self.address} could not be {done}: {error}", registry=self.address) from error

    @contextlib.contextmanager
    def _reading(self, timeout: float | None) -> Iterator[sqlite3.Connection]:
        deadline = deadline_of(timeout, self._timeout)
        with self._errors("read"):
            connection = self._borrow(deadline)
            try:
                connection.execute("BEGIN")
                self._look_for_checksums(connection)
                yield connection
                # Only after the reading is it certain that this file was the registry all the time.
                self._check_place()
            finally:
                # While a read transaction is open, SQLite cannot use the log from its beginning again.
                connection.rollback()
                self._return(connection)

    @contextlib.contextmanager
    def _writing(self, timeout: float | None) -> Iterator[sqlite3.Connection]:
        deadline = deadline_of(timeout, self._timeout)
        with self._errors("written"):
            connection = self._borrow(deadline)
            try:
                _begin_writing(connection, deadline)
                # Asked with the write lock, which `backup.replace` has to take, too.
                self._check_place()
                self._look_for_checksums(connection)
                if not self._sums:  # the file of an earlier release
                    for statement in _CHECKSUMS.split(";\n"):
                        connection.execute(statement)
                _sweep(connection, self.address)
                yield connection
                connection.execute("COMMIT")
                self._check_place()  # before the change is confirmed
            finally:
                connection.rollback()  # this does nothing after the commit
                self._return(connection)

    def _look_for_checksums(self, connection: sqlite3.Connection) -> None:
        if not self._sums:
            made = connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'change_forgotten'").fetchone()
            self._sums = bool(made[0])

    # Entries

    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        data = checked_key(key)
        with self._reading(timeout) as connection:
            found = self._find(connection, data, alive=True)
        return found

    def _find(self, connection: sqlite3.Connection, key: bytes, *, alive: bool = False) -> Entry | None:
        """Return an entry, or None if there is none. With `alive`, also return None if the entry's lease has ended."""
        row = connection.execute(f"{self._select()} WHERE entry.key = ?", (key,)).fetchone()
        if row is None:
            self._check_absent(connection, key, key + b"\0")
            return None
        entry = self._entry(row)
        if alive and entry.lease:
            boot, now = _alive(connection, self.address)
            lease = _lease(connection, self.address, entry.lease)
            if not boot or lease is None or lease[1] <= now:
                return None
        return entry

    def _select(self) -> str:
        return _SELECT_QUERY if self._sums else _UNSUMMED_SELECT_QUERY

    def _entry(self, row: tuple[object, ...]) -> Entry:
        """Make an entry from a row of `entry` or `change`; raise RegistryDamagedError if it fails its checksum."""
        key, value, revision, lease, crc = row[:5]
        try:
            text = key.decode() if isinstance(key, bytes) else ""
        except UnicodeDecodeError:
            text = ""
        if not (text and isinstance(value, bytes) and isinstance(revision, int) and isinstance(lease, int)):
            raise damaged(self.address, f"is not an entry: {key!r}")
        if crc is not None and crc != _crc(text.encode(), value, revision, lease):
            raise damaged(self.address, "does not match its checksum", text)
        return Entry(text, value, revision, lease, bool(row[5]) if len(row) == 6 else False)

    def _check_absent(self, connection: sqlite3.Connection, begin: bytes, end: bytes) -> None:
        """Raise RegistryDamagedError if a key from `begin` up to (not including) `end` has a checksum but no entry."""
        lost = self._sums and connection.execute(f"{_LOST_KEYS_QUERY} LIMIT 1", (begin, end)).fetchone()
        if lost:
            raise damaged(self.address, "was written and is missing", bytes(lost[0]).decode(errors="replace"))

    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        wanted = [checked_key(prefix, "prefix", fewest=0) for prefix in prefixes]
        entries: list[Entry] = []
        with self._reading(timeout) as connection:
            revision = _revision(connection, self.address)
            alive = _alive(connection, self.address)
            for prefix in wanted:
                self._check_absent(connection, prefix, prefix + _LAST_BYTE)
                rows = connection.execute(
                    f"{self._select()} WHERE entry.key >= ? AND entry.key < ? AND {_ALIVE_TEST} ORDER BY entry.key",
                    (prefix, prefix + _LAST_BYTE, *alive),
                )
                entries += map(self._entry, rows)
        return Snapshot(revision, tuple(entries))

    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        checked_transaction(conditions, operations)
        with self._writing(timeout) as connection:
            for condition in conditions:
                # Entries of ended leases were deleted when this transaction began, so each entry that is found counts.
                found = self._find(connection, condition.key.encode())
                if (found.revision if found else 0) != condition.revision:
                    return Commit(False, _revision(connection, self.address))
            changes: list[tuple[bytes, bytes | None, int]] = []
            for operation in operations:
                key = operation.key.encode()
                if isinstance(operation, Delete):
                    if self._find(connection, key):
                        changes.append((key, None, 0))
                    continue
                if operation.lease and not _lease(connection, self.address, operation.lease):
                    raise no_lease(self.address, operation.lease)
                changes.append((key, bytes(operation.value), operation.lease))
            return Commit(True, (_apply if changes else _unchanged)(connection, self.address, changes))

    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        entries: list[Entry] = []
        wrong: list[str] = []
        with self._reading(timeout) as connection:
            try:
                lines = [str(line) for (line,) in connection.execute("PRAGMA integrity_check").fetchall()]
                wrong += [] if lines == ["ok"] else lines
                _state(connection, self.address)
                lost = connection.execute(_LOST_KEYS_QUERY, (b"", _LAST_BYTE)).fetchall() if self._sums else []
                wrong += [f"the entry {bytes(key).decode(errors='replace')!r} is missing" for (key,) in lost]
                for row in connection.execute(f"{self._select()} ORDER BY entry.key").fetchall():
                    try:
                        entries.append(self._entry(row))
                    except RegistryDamagedError as error:
                        wrong.append(str(error))
            except (sqlite3.DatabaseError, RegistryDamagedError, UnicodeDecodeError) as error:
                wrong.append(str(error))
        return tuple(entries), tuple(wrong)

    def watch(self, prefix: str, after: int) -> Watch:
        return _SqliteWatch(self, checked_key(prefix, "prefix", fewest=0), after)

    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        with self._writing(timeout) as connection:
            now = _revision(connection, self.address)
            if revision > now:
                raise RegistryError(
                    f"the registry {self.address} is at revision {now}; it cannot be compacted at {revision}",
                    registry=self.address,
                )
            _delete_changes(connection, revision)

    # Leases

    def grant(self, ttl: float, *, timeout: float | None = None) -> int:
        milliseconds = max(1, round(checked_ttl(ttl) * 1000))
        number = secrets.randbelow(2**62) + 1
        with self._writing(timeout) as connection:
            connection.execute("INSERT INTO lease VALUES (?, ?, ?)", (number, milliseconds, _now() + milliseconds))
        return number

    def keep_alive(self, lease: int, *, timeout: float | None = None) -> float:
        with self._writing(timeout) as connection:
            row = _lease(connection, self.address, lease)
            if row is None:
                raise no_lease(self.address, lease)
            connection.execute("UPDATE lease SET ends = ? WHERE number = ?", (_now() + row[0], lease))
        return row[0] / 1000

    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        with self._reading(timeout) as connection:
            row, boot, now = _lease(connection, self.address, lease), *_alive(connection, self.address)
            if row is None or row[1] <= now or not boot:
                raise no_lease(self.address, lease)
        return (row[1] - now) / 1000

    def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        with self._writing(timeout) as connection:
            _end_leases(connection, self.address, [lease])

    def close(self) -> None:
        with self._lock:
            idle, self._idle, self._closed = self._idle, [], True
        with _calls:
            for connection in idle:
                connection.close()


_PARENT_CONNECTIONS: list[sqlite3.Connection] = []
"""Connections that a fork copied from the parent process. They are never closed: that could remove files in use."""
_SELECT_QUERY = (
    "SELECT entry.key, value, entry.revision, lease, crc FROM entry LEFT JOIN entry_checksum "
    "ON entry_checksum.key = entry.key"
)
_UNSUMMED_SELECT_QUERY = "SELECT key, value, revision, lease, NULL FROM entry"  # in the file of an earlier release
_LOST_KEYS_QUERY = (
    "SELECT key FROM entry_checksum WHERE key >= ? AND key < ? "
    "AND NOT EXISTS (SELECT 1 FROM entry WHERE entry.key = entry_checksum.key)"
)
# An entry exists if it has no lease or its lease has not ended. `_alive` returns the parameters.
_ALIVE_TEST = "(lease = 0 OR (? AND EXISTS (SELECT 1 FROM lease WHERE number = entry.lease AND ends > ?)))"
_DENIED_CODES = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY)
_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
# Two equal rows show that a number is damaged, and an error without a code shows that a text is not UTF-8.
_DAMAGED_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CONSTRAINT, sqlite3.SQLITE_MISMATCH, 0)


class _SqliteWatch(Watch):
    def __init__(self, registry: SqliteRegistry, prefix: bytes, after: int) -> None:
        self._registry = registry
        self._prefix = prefix
        self._after = after
        self._seen = -1  # the change counter at the last look
        self._connection: sqlite3.Connection | None = None  # its own, because each connection has its own counter
        self._closed = False
        forks.begin_again(self)

    def forked(self) -> None:
        """Begin without a connection in a forked child. It must neither use nor close the parent's connection."""
        if self._connection is not None:
            _PARENT_CONNECTIONS.append(self._connection)
        self._connection, self._seen = None, -1

    def next(self, timeout: float) -> Changes:
        registry = self._registry
        deadline = deadline_of(timeout, 0.0)
        while True:
            if self._closed:
                raise RegistryError(f"this watch of {registry.address} was closed", registry=registry.address)
            with registry._errors("watched"):
                # Read before the entries: a change that comes in between changes the counter again, and the next look
                # sees it.
                counter = self._counter(deadline)
                if counter != self._seen:
                    changes = self._look(max(0.0, deadline - time.monotonic()))
                    self._seen = counter
                    if changes.entries:
                        return changes
            left = deadline - time.monotonic()
            if left <= 0:
                return Changes(self._after, ())
            time.sleep(min(POLL_INTERVAL_S, left))

    def _counter(self, deadline: float) -> int:
        """Delete the entries of leases that have ended, then return the change counter of the file.

        The counter changes when another connection has changed the file.
        """
        self._registry._check_place()
        if self._connection is None:
            self._connection = self._registry._borrow(deadline)
        if self._connection.execute("SELECT 1 FROM lease WHERE ends <= ? LIMIT 1", (_now(),)).fetchone():
            # If another process has the lock, it writes, and deletes these entries itself.
            with contextlib.suppress(RegistryAwayError), self._registry._writing(0.0):
                pass
        return int(self._connection.execute("PRAGMA data_version").fetchone()[0])

    def _release_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._registry._return(connection)
        self._seen = -1

    def _look(self, timeout: float) -> Changes:
        registry = self._registry
        with registry._reading(timeout) as connection:
            revision, compacted, _ = _state(connection, registry.address)
            if self._after < compacted:
                raise RegistryCompactedError(
                    f"the registry {registry.address} keeps changes after revision {compacted}, expected changes after "
                    f"{self._after}; read the entries again and watch from there",
                    registry=registry.address,
                    oldest=compacted,
                )
            crc = "(SELECT crc FROM change_checksum AS c WHERE c.revision = change.revision AND c.key = change.key)"
            crc = crc if registry._sums else "NULL"
            rows = connection.execute(
                f"SELECT key, coalesce(value, x''), revision, lease, {crc}, value IS NULL FROM change WHERE "
                "revision > ? AND key >= ? AND key < ? ORDER BY revision, key",
                (self._after, self._prefix, self._prefix + _LAST_BYTE),
            ).fetchall()
            changes = Changes(max(self._after, revision), tuple(map(registry._entry, rows)))
        self._after = changes.revision
        return changes

    def close(self) -> None:
        self._closed = True
        self._release_connection()


def _crc(key: bytes, value: bytes, revision: int, lease: int) -> int:
    return checksum(key, revision.to_bytes(8, "little", signed=True) + lease.to_bytes(8, "little", signed=True) + value)


def _make(path: Path) -> None:
    """Make an empty file unless the file exists, and check that this process may read and write it.

    An existing file is not opened. Closing it again would drop all locks that connections of this process have on the
    file. Another program would then see no user of the file, and remove the log to which this program writes.
    """
    with _making.lock:  # then no connection of this process is open before the new file is closed
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR)) from None
            if not os.access(path, os.R_OK | os.W_OK, effective_ids=True):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def _milliseconds_left(deadline: float) -> int:
    return max(0, min(1_000_000_000, int((deadline - time.monotonic()) * 1000)))


def _begin_writing(connection: sqlite3.Connection, deadline: float) -> None:
    connection.execute(f"PRAGMA busy_timeout = {_milliseconds_left(deadline)}")
    # IMMEDIATE takes the write lock at once. A transaction that reads first and then writes fails without waiting if
    # another process has written in between.
    connection.execute("BEGIN IMMEDIATE")


def _state(connection: sqlite3.Connection, address: str) -> tuple[int, int, str]:
    """Read the revision, the revision up to which changes are deleted, and the boot id of the last writer."""
    rows = connection.execute("SELECT revision, compacted, boot FROM state").fetchall()
    newest = connection.execute("SELECT max(revision) FROM change").fetchone()[0] or 0
    if (
        len(rows) != 1
        or [type(value) for value in rows[0]] != [int, int, str]
        or not max(newest, rows[0][1]) <= rows[0][0] < _REVISION_MAX
    ):
        raise damaged(address, f"its state is {rows!r} and its newest change {newest!r}")
    state: tuple[int, int, str] = rows[0]
    return state


def _revision(connection: sqlite3.Connection, address: str) -> int:
    return _state(connection, address)[0]


def _unchanged(connection: sqlite3.Connection, address: str, _: object) -> int:
    return _revision(connection, address)


def _now() -> int:
    """Return the milliseconds since the host started, including time in which the host slept."""
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def _boot() -> str:
    """Return the kernel's boot id, which changes when the host restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


_THIS_BOOT = _boot()


def _alive(connection: sqlite3.Connection, address: str) -> tuple[bool, int]:
    """Return the two parameters of `_ALIVE_TEST`: True if the file's leases are from this boot, and the time now."""
    return _state(connection, address)[2] == _THIS_BOOT, _now()


def _lease(connection: sqlite3.Connection, address: str, number: int) -> tuple[int, int] | None:
    """Return a lease's time to live and its end (a time of `_now`), both in milliseconds; None if there is no lease."""
    row: tuple[int, int] | None = connection.execute(
        "SELECT milliseconds, ends FROM lease WHERE number = ?", (number,)
    ).fetchone()
    if row is not None and [type(value) for value in row] != [int, int]:
        raise damaged(address, f"its lease {number} is {row!r}")
    return row


def _sweep(connection: sqlite3.Connection, address: str) -> None:
    """End the leases whose time has passed, or all leases after a restart of the host. Delete the leases' entries."""
    boot, now = _alive(connection, address)
    if boot:
        ended = connection.execute("SELECT number FROM lease WHERE ends <= ?", (now,)).fetchall()
    else:
        ended = connection.execute("SELECT number FROM lease").fetchall()
        connection.execute("UPDATE state SET boot = ?", (_THIS_BOOT,))
    _end_leases(connection, address, [number for (number,) in ended])


def _end_leases(connection: sqlite3.Connection, address: str, numbers: list[int]) -> None:
    for number in numbers:
        bound = connection.execute("SELECT key FROM entry WHERE lease = ? AND lease != 0", (number,)).fetchall()
        if bound:
            _apply(connection, address, [(key, None, 0) for (key,) in bound])
        connection.execute("DELETE FROM lease WHERE number = ?", (number,))


def _apply(connection: sqlite3.Connection, address: str, changes: list[tuple[bytes, bytes | None, int]]) -> int:
    """Make changes (key, value, lease) under a new revision; return it. A value of None deletes the key's entry."""
    revision = _revision(connection, address) + 1
    connection.execute("UPDATE state SET revision = ?", (revision,))
    for key, value, lease in changes:
        crc = _crc(key, value or b"", revision, lease)
        connection.execute("INSERT INTO change VALUES (?, ?, ?, ?)", (revision, key, value, lease))
        connection.execute("INSERT INTO change_checksum VALUES (?, ?, ?)", (revision, key, crc))
        if value is None:
            connection.execute("DELETE FROM entry WHERE key = ?", (key,))
        else:
            connection.execute("INSERT OR REPLACE INTO entry VALUES (?, ?, ?, ?)", (key, value, revision, lease))
            # After the entry, because the trigger `entry_written` deletes the checksum of the key.
            connection.execute("INSERT INTO entry_checksum VALUES (?, ?, ?)", (key, revision, crc))
    if revision % 1000 == 0:
        _delete_changes(connection, revision - _CHANGES_MAX)
    return revision


def _delete_changes(connection: sqlite3.Connection, revision: int) -> None:
    connection.execute("DELETE FROM change WHERE revision <= ?", (revision,))
    connection.execute("UPDATE state SET compacted = max(compacted, ?)", (revision,))
