"""The registry's contract: a small consistent key-value store for the control plane.

Each successful transaction with changes has a revision of its own, higher than all earlier ones. An entry has the
revision that wrote it. A transaction compares such revisions and changes everything or nothing. Entries may be bound to
a lease and are deleted with it. A watch reports each change after a revision, once and in order.

Every call has a deadline. Until then it tries again, also at other endpoints. The contract is a part of etcd's own; the
registry in a SQLite file keeps it, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.closing import Closing

__all__ = [
    "KEY_BYTES_MAX",
    "LARGEST_OPERATIONS",
    "LARGEST_VALUE",
    "LONGEST_KEY",
    "OPERATIONS_MAX",
    "VALUE_BYTES_MAX",
    "Changes",
    "Commit",
    "Condition",
    "Delete",
    "Entry",
    "Operation",
    "Put",
    "Registry",
    "Snapshot",
    "Watch",
]

KEY_BYTES_MAX = 1024
"""Longest key, in bytes of UTF-8."""
VALUE_BYTES_MAX = 1 << 20
"""Largest value. An etcd accepts requests of 1.5 MiB by default."""
OPERATIONS_MAX = 100
"""Number of conditions, and of operations, in one transaction. An etcd accepts 128 of each by default."""
# Names of earlier releases.
LONGEST_KEY, LARGEST_VALUE, LARGEST_OPERATIONS = KEY_BYTES_MAX, VALUE_BYTES_MAX, OPERATIONS_MAX


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value.

    Attributes
    ----------
    key : str
        The key.
    value : bytes
        The value; empty in an entry that reports a deletion.
    revision : int
        The revision that wrote (or deleted) the entry.
    lease : int
        The lease that the entry is bound to; 0 for none.
    deleted : bool
        True if the change was a deletion. Only the changes of a watch have such entries.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries with certain prefixes, as they were at one revision.

    Attributes
    ----------
    revision : int
        A watch after this revision reports all later changes.
    entries : tuple of Entry
        Entries in the order of their keys, prefix by prefix.
    """

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a transaction: a key has not changed since it was read.

    Attributes
    ----------
    key : str
        The key.
    revision : int
        The revision of its entry; 0 if the key must have no entry.
    """

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value, bound to a lease unless that is 0."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key. A key without an entry is no error."""

    key: str


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class Commit:
    """Outcome of a transaction.

    Attributes
    ----------
    succeeded : bool
        True if all conditions held and all operations were done. Otherwise nothing was changed.
    revision : int
        The revision of the changes; if nothing was changed, a revision at which the outcome was right.
    """

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that one wait of a watch returns; empty if there was none in time.

    Attributes
    ----------
    revision : int
        A watch after this revision continues after these changes.
    entries : tuple of Entry
        Entries in the order of their revisions. All changes of one transaction are in the same result.
    """

    revision: int
    entries: tuple[Entry, ...]


class Watch(Closing, ABC):
    """Watches keys under a prefix for changes, one wait after another. Use it from one thread at a time."""

    @abstractmethod
    def next(self, timeout: float) -> Changes:
        """Wait for changes.

        Parameters
        ----------
        timeout : float
            Seconds to wait at most; with 0 the call only looks. If the watch has to find a member of a cluster first,
            the call may take a second longer.

        Raises
        ------
        RegistryCompactedError
            The registry has already deleted changes after that revision.
        RegistryAwayError
            The registry did not answer until the end of the wait. The next wait goes on at the same revision.
        """

    @abstractmethod
    def close(self) -> None:
        """End the watch. Idempotent."""


class Registry(Closing, ABC):
    """A small consistent key-value store. Thread-safe; a forked child makes its own connections.

    Keys are text of 1 to 1024 bytes, values bytes of at most 1 MiB. All calls raise `RegistryAwayError` when the
    registry cannot be reached before the deadline, `RegistryDeniedError` if the user lacks the right, and
    `ConfigError` for arguments that no registry takes. Calls that change something raise `RegistryUnwritableError`
    while the registry can only be read. A registry stores a checksum with each entry, which earlier releases did not. A
    call raises `RegistryDamagedError` if an entry does not match its checksum, or was written and is missing. All calls
    raise `RegistryReplacedError` once the registry is not the one that was opened.

    Attributes
    ----------
    address : str
        Where the registry is, without secrets; named in errors.
    """

    address: str

    @abstractmethod
    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return a key's entry, with all changes that were confirmed before; None if there is none.

        Parameters
        ----------
        key : str
            The key.
        timeout : float, optional
            Seconds that the call may take; None for the registry's default.
        """

    @abstractmethod
    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        """Read all entries whose keys begin with one of the prefixes, at one revision.

        Parameters
        ----------
        *prefixes : str
            Beginnings of keys, at most 100. All keys begin with the empty prefix.
        timeout : float, optional
            Seconds that the call may take; None for the registry's default.
        """

    @abstractmethod
    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        """Do all operations if all conditions hold; otherwise change nothing.

        A transaction that changes a key of its own conditions is done at most once, even if it is sent again because
        a reply is lost. Any other transaction may then be done twice.

        Parameters
        ----------
        conditions : sequence of Condition
            At most 100. Without conditions the operations are always done.
        operations : sequence of Put or Delete
            At most 100, each on a different key.
        timeout : float, optional
            Seconds that the call may take; None for the registry's default.

        Raises
        ------
        RegistryLeaseError
            An operation names a lease that does not exist. Nothing was changed.
        RegistryAwayError
            With `uncertain` if the transaction was sent and its outcome is not known.
        """

    @abstractmethod
    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        """Read all entries, even if some are damaged; return the undamaged ones, and a description of each damage."""

    @abstractmethod
    def watch(self, prefix: str, after: int) -> Watch:
        """Watch for changes of keys that begin with a prefix.

        Parameters
        ----------
        prefix : str
            Beginning of the keys.
        after : int
            The watch reports changes after this revision, which a snapshot, a commit or earlier changes have returned.
        """

    @abstractmethod
    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """Forget the changes up to a revision. Entries stay; watches of the changes raise `RegistryCompactedError`."""

    @abstractmethod
    def grant(self, ttl: float, *, timeout: float | None = None) -> int:
        """Make a lease that ends after `ttl` seconds unless it is kept alive; return its number.

        The registry may round the time up to whole seconds, and to the shortest time that it supports.
        """

    @abstractmethod
    def keep_alive(self, lease: int, *, timeout: float | None = None) -> float:
        """Restart a lease's time to live, and return its seconds.

        Raises
        ------
        RegistryLeaseError
            The lease has ended.
        """

    @abstractmethod
    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        """Return the seconds after which a lease ends unless it is kept alive.

        Raises
        ------
        RegistryLeaseError
            The lease has ended.
        """

    @abstractmethod
    def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        """End a lease now and delete the entries that are bound to it. A lease that does not exist is no error."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Idempotent. Leases end by themselves."""
