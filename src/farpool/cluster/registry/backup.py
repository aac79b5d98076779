"""Back up a registry to a file, and restore it: the entries of one revision, of either kind of registry.

A backup is a registry in a SQLite file, so each of its entries has a checksum. Entries that are bound to a lease are
left out: they record what programs did at that moment. All entries of a restored registry have new revisions, so the
changes of a program that read the registry before the restore fail.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from farpool.abc.registry import LARGEST_OPERATIONS, LARGEST_VALUE, Condition, Entry, Put, Registry
from farpool.cluster.registry.sqlite import SqliteRegistry
from farpool.errors import ConfigError, RegistryAwayError

__all__ = ["back_up", "replace", "restore"]


_LOGS = ("-wal", "-shm", "-journal")
"""Ends of the names of files that SQLite makes next to a file."""


def back_up(registry: Registry, path: Path) -> int:
    """Write the entries of a registry, as they are at one revision, to a new file; return how many.

    Raises
    ------
    ConfigError
        The file is there, or cannot be made.
    RegistryDamagedError
        An entry is damaged. Nothing is written then.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already, expected a new file for the backup", setting="file")
    entries = _lasting(registry)
    with _new_file(path) as made:
        _write(made, entries)
    return len(entries)


def restore(path: Path, registry: Registry) -> int:
    """Write the entries of a backup to a registry that has none; return how many.

    Raises
    ------
    ConfigError
        The registry has entries, or there is no such file.
    RegistryDamagedError
        The backup is damaged. Nothing is written then.
    """
    entries = _entries_of(path)
    there = registry.range("").entries
    if there:
        raise ConfigError(
            f"the registry {registry.address} has {len(there)} entries, such as {there[0].key!r}, expected none. "
            "Restore to another file or prefix; a file can also be replaced (--replace)",
            setting="registry",
        )
    _write(registry, entries)
    return len(entries)


def replace(path: Path, registry: Path) -> int:
    """Put the entries of a backup in the place of a registry's file that no program has open; return how many.

    Raises
    ------
    ConfigError
        There is no such file.
    RegistryAwayError
        A program has the registry open. Nothing is changed then.
    RegistryDamagedError
        The backup is damaged. Nothing is changed then.
    """
    entries = _entries_of(path)
    registry = registry.resolve()  # a symbolic link is kept, and points to the new file
    with _new_file(registry, _alone(registry)) as made:
        _write(made, entries)
    return len(entries)


def _entries_of(path: Path) -> tuple[Entry, ...]:
    if not path.is_file() or not path.stat().st_size:  # opening an empty file would make a registry of it
        raise ConfigError(
            f"{path} is no file or an empty one, expected a backup of `farpool registry backup`", setting="file"
        )
    with SqliteRegistry(path) as backup:
        return _lasting(backup)


def _lasting(registry: Registry) -> tuple[Entry, ...]:
    return tuple(entry for entry in registry.range("").entries if not entry.lease)


def _write(registry: Registry, entries: Sequence[Entry]) -> None:
    batch: list[Entry] = []
    for entry in (*entries, None):
        full = entry is None or sum(len(one.value) for one in (*batch, entry)) > LARGEST_VALUE
        if batch and (full or len(batch) == LARGEST_OPERATIONS):
            done = registry.commit([Condition(one.key, 0) for one in batch], [Put(e.key, e.value) for e in batch])
            if not done.succeeded:
                raise ConfigError(
                    f"another program writes to {registry.address} at the same time, such as {batch[0].key!r}; stop "
                    "it, and restore to an empty registry",
                    setting="registry",
                )
            batch = []
        if entry is not None:
            batch.append(entry)


@contextmanager
def _new_file(path: Path, old: sqlite3.Connection | None = None) -> Iterator[Registry]:
    """Write a registry to a hidden file, and move it to `path` when it is whole; `old` is the locked file there."""
    hidden = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with SqliteRegistry(hidden) as made:
            yield made
        with closing(sqlite3.connect(hidden, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE")  # one file, without a log next to it
        with hidden.open("rb") as file:
            if path.exists():  # the programs that could use the old file can use the new one
                was = path.stat()
                os.fchown(file.fileno(), was.st_uid, was.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
            os.fsync(file.fileno())
        for end in _LOGS:  # SQLite leaves these next to a file that it found damaged
            with suppress(FileNotFoundError):
                os.unlink(f"{path}{end}")
        os.rename(hidden, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    finally:
        for end in ("", *_LOGS):
            with suppress(FileNotFoundError):
                os.unlink(f"{hidden}{end}")
        if old is not None:
            old.close()


def _alone(path: Path) -> sqlite3.Connection | None:
    """Lock a registry's file that no other program has open; None without one.

    The mode without a log needs such a lock; in it SQLite leaves no log of the old file next to the new one.
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
            f"the registry sqlite://{path} cannot be locked ({error}); stop the programs that have it open, and "
            "restore it then",
            registry=f"sqlite://{path}",
        ) from error
    return connection
