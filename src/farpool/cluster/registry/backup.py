"""Backups of a registry: the entries at one revision, in a file from which any kind of registry can be restored.

A backup is a registry in a SQLite file, so each of its entries has a checksum. Entries that are bound to a lease are
not in the backup, because they only describe programs that were running at that moment. All entries of a restored
registry have new revisions. So a transaction fails if one of its conditions has the revision of an entry that the
program read before the restore.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from farpool.abc.registry import OPERATIONS_MAX, VALUE_BYTES_MAX, Condition, Entry, Put, Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import ConfigError, RegistryAwayError

__all__ = ["back_up", "replace", "restore"]

_LOG_SUFFIXES = ("-wal", "-shm", "-journal")
"""Suffixes of the files that SQLite makes next to a database file."""


def back_up(registry: Registry, path: Path) -> int:
    """Write the entries of a registry, as they are at one revision, to a new file; return the number of entries.

    Raises
    ------
    ConfigError
        The file exists, or cannot be made.
    RegistryDamagedError
        An entry is damaged. Then no file is written.
    """
    if path.exists():
        raise ConfigError(f"{path} exists already, expected a new file for the backup", setting="file")
    entries = _lasting(registry)
    with _new_file(path) as made:
        _write(made, entries)
    return len(entries)


def restore(path: Path, registry: Registry) -> int:
    """Write the entries of a backup to an empty registry; return the number of entries.

    Raises
    ------
    ConfigError
        The registry has entries, or there is no such file.
    RegistryDamagedError
        The backup is damaged. Then nothing is written.
    """
    entries = _entries_of(path)
    present = registry.range("").entries
    if present:
        raise ConfigError(
            f"the registry {registry.address} has {len(present)} entries, such as {present[0].key!r}, expected none. "
            "Restore to another file or prefix; a file can also be replaced (--replace)",
            setting="registry",
        )
    _write(registry, entries)
    return len(entries)


def replace(path: Path, registry: Path) -> int:
    """Replace a registry's file by a new one with the entries of a backup; return the number of entries.

    No program may have the registry open.

    Raises
    ------
    ConfigError
        There is no backup at `path`.
    RegistryAwayError
        A program has the registry open. Then nothing is changed.
    RegistryDamagedError
        The backup is damaged. Then nothing is changed.
    """
    entries = _entries_of(path)
    registry = registry.resolve()  # so that a symbolic link stays and points to the new file
    with _new_file(registry, _alone(registry)) as made:
        _write(made, entries)
    return len(entries)


def _entries_of(path: Path) -> tuple[Entry, ...]:
    if not path.is_file() or not path.stat().st_size:  # opening an empty file would turn it into a registry
        raise ConfigError(
            f"{path} is not a file or is empty, expected a backup of `farpool registry backup`", setting="file"
        )
    with SqliteRegistry(path) as backup:
        return _lasting(backup)


def _lasting(registry: Registry) -> tuple[Entry, ...]:
    return tuple(entry for entry in registry.range("").entries if not entry.lease)


def _write(registry: Registry, entries: Sequence[Entry]) -> None:
    batch: list[Entry] = []
    for entry in (*entries, None):
        full = entry is None or sum(len(one.value) for one in (*batch, entry)) > VALUE_BYTES_MAX
        if batch and (full or len(batch) == OPERATIONS_MAX):
            # No key may have an entry yet, so two restores, or a running program, cannot mix their entries.
            done = registry.commit([Condition(one.key, 0) for one in batch], [Put(e.key, e.value) for e in batch])
            if not done.succeeded:
                raise ConfigError(
                    f"another program writes to {registry.address} at the same time, for example {batch[0].key!r}; "
                    "stop it, and restore to an empty registry",
                    setting="registry",
                )
            batch = []
        if entry is not None:
            batch.append(entry)


@contextmanager
def _new_file(path: Path, old: sqlite3.Connection | None = None) -> Iterator[Registry]:
    """Yield a registry in a hidden file; after the block, move that file to `path`.

    `old` is a connection that locks the old file at `path`, if there is one. This function closes the connection at
    the end.
    """
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with SqliteRegistry(hidden) as made:
            yield made
        with closing(sqlite3.connect(hidden, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")  # one file, without a log next to it
        with hidden.open("rb") as file:
            if path.exists():  # programs that could use the old file shall be able to use the new one
                was = path.stat()
                os.fchown(file.fileno(), was.st_uid, was.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
            # First the file and then, after the rename, its folder: a crash leaves the old file or the new one, whole.
            os.fsync(file.fileno())
        for suffix in _LOG_SUFFIXES:  # SQLite leaves these next to a file that it found damaged
            with suppress(FileNotFoundError):
                os.unlink(f"{path}{suffix}")
        os.rename(hidden, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    finally:
        for suffix in ("", *_LOG_SUFFIXES):
            with suppress(FileNotFoundError):
                os.unlink(f"{hidden}{suffix}")
        # Only now: while the old file was locked, no program could begin to use it.
        if old is not None:
            old.close()


def _alone(path: Path) -> sqlite3.Connection | None:
    """Lock a registry's file; return the connection with the lock, or None if the file is missing or damaged.

    This function also turns off SQLite's write-ahead log, so that no log of the old file stays next to the new file.
    Raises RegistryAwayError if another program has the file open.
    """
    if not path.exists():
        return None
    connection = sqlite3.connect(path, isolation_level=None, timeout=1.0)
    try:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN EXCLUSIVE")
    except sqlite3.DatabaseError as error:
        connection.close()
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return None  # too damaged to be in use
        raise RegistryAwayError(
            f"the registry sqlite://{path} cannot be locked ({error}); stop the programs that have it open, then "
            "restore it",
            registry=f"sqlite://{path}",
        ) from error
    return connection
