"""The registry's contract: a small consistent key-value store for the control plane.

Each transaction that changes entries gets a new revision: a number higher than all earlier revisions. An entry has the
revision of the transaction that wrote it. The conditions of a transaction compare revisions of entries. If all
conditions hold, the transaction makes all its changes, otherwise it makes none. An entry may be bound to a registry
lease, and is deleted when that lease ends. A watch reports each change after a given revision, once and in order.

Every call has a deadline. If a request fails before the deadline, it is sent again, possibly to another endpoint (the
address of a server of the registry). etcd offers all of this and more; the registry in a SQLite file behaves in the
same way.
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
"""Length of the longest key, in bytes of UTF-8."""
VALUE_BYTES_MAX = 1 << 20
"""Size of the largest value, in bytes. An etcd accepts requests of 1.5 MiB by default."""
OPERATIONS_MAX = 100
"""Maximum number of conditions in one transaction, and of operations. An etcd accepts 128 of each by default."""
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
        Revision of the transaction that wrote (or deleted) the entry.
    lease : int
        The lease that the entry is bound to; 0 for none.
    deleted : bool
        True if the change was a deletion. Only a watch reports such entries.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All entries whose keys begin with certain prefixes, as they were at one revision.

    Attributes
    ----------
    revision : int
        Revision at which the entries were read. A watch after this revision reports all later changes.
    entries : tuple of Entry
        Entries, prefix by prefix; the entries of one prefix are in the order of their keys.
    """

    revision: int
    entries: tuple[Entry, ...]


@dataclass(frozen=True, slots=True)
class Condition:
    """Condition of a transaction: a key's entry still has a given revision.

    Attributes
    ----------
    key : str
        The key.
    revision : int
        The revision that the key's entry must have; 0 if the key must have no entry.
    """

    key: str
    revision: int


@dataclass(frozen=True, slots=True)
class Put:
    """Write a value under a key. The entry is bound to `lease`; 0 for no lease."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key's entry. It is no error if the key has none."""

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
        The revision of the changes. If nothing was changed, a revision at which a condition did not hold, or at which
        there was nothing to change.
    """

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that one call of `Watch.next` returns; empty if there were none before its timeout.

    Attributes
    ----------
    revision : int
        A new watch after this revision reports the changes that follow these.
    entries : tuple of Entry
        Entries in the order of their revisions. All changes of one transaction are in the same `Changes`.
    """

    revision: int
    entries: tuple[Entry, ...]


class Watch(Closing, ABC):
    """Reports changes of keys that begin with a prefix. Use it from one thread at a time."""

    @abstractmethod
    def next(self, timeout: float) -> Changes:
        """Wait for changes.

        Parameters
        ----------
        timeout : float
            Maximum seconds to wait; 0 to return the changes that are already there. If the watch must first find a
            server that answers, the call may take a second longer.

        Raises
        ------
        RegistryCompactedError
            The registry has already deleted changes that this watch has not reported.
        RegistryAwayError
            The registry did not answer before the end of the wait. The next call continues at the same revision.
        """

    @abstractmethod
    def close(self) -> None:
        """End the watch. Idempotent."""


class Registry(Closing, ABC):
    """A small consistent key-value store. Thread-safe; a forked child makes its own connections.

    Keys are text of 1 to 1024 bytes; values are at most 1 MiB. All calls raise `RegistryAwayError` if the registry
    cannot be reached before the deadline, `RegistryDeniedError` if the user lacks the right, and `ConfigError` for
    arguments that no registry accepts. Calls that change something raise `RegistryUnwritableError` while the registry
    can only be read. A registry stores a checksum with each entry; entries that earlier releases wrote have none. A
    call raises `RegistryDamagedError` if an entry does not match its checksum, or if a checksum's entry is missing. All
    calls raise `RegistryReplacedError` if another registry has taken the place of the registry that was opened.

    Attributes
    ----------
    address : str
        Address of the registry without secrets, for errors.
    """

    address: str

    @abstractmethod
    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Return a key's entry, or None if the key has none. The result includes all changes confirmed before the call.

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
            Beginnings of keys, at most 100. The empty prefix stands for all keys.
        timeout : float, optional
            Seconds that the call may take; None for the registry's default.
        """

    @abstractmethod
    def commit(
        self, conditions: Sequence[Condition], operations: Sequence[Operation], *, timeout: float | None = None
    ) -> Commit:
        """Do all operations if all conditions hold; otherwise change nothing.

        If the reply to a transaction is lost, the transaction is sent again. A transaction that changes the key of one
        of its own conditions is still done at most once. Any other transaction may be done twice.

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
            The registry did not answer. `uncertain` is True if the transaction was sent and its outcome is unknown.
        """

    @abstractmethod
    def check(self, *, timeout: float | None = None) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
        """Read all entries; return the undamaged entries, and a description of each damage."""

    @abstractmethod
    def watch(self, prefix: str, after: int) -> Watch:
        """Watch for changes of keys that begin with a prefix.

        Parameters
        ----------
        prefix : str
            Beginning of the keys.
        after : int
            The watch reports changes after this revision. A `Snapshot`, a `Commit` and `Changes` each have a revision
            to use here.
        """

    @abstractmethod
    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """Delete the record of changes up to a revision; entries stay.

        A watch that still has to report one of these changes raises `RegistryCompactedError`.
        """

    @abstractmethod
    def grant(self, ttl: float, *, timeout: float | None = None) -> int:
        """Make a lease that ends after `ttl` seconds unless it is kept alive; return the lease's number.

        The registry may round the time up to whole seconds, or to the shortest time that it supports.
        """

    @abstractmethod
    def keep_alive(self, lease: int, *, timeout: float | None = None) -> float:
        """Renew a lease; return the seconds after which it ends unless it is renewed again.

        Raises
        ------
        RegistryLeaseError
            The lease has ended.
        """

    @abstractmethod
    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        """Return the seconds after which a lease ends unless it is renewed.

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
