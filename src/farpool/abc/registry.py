"""The registry's contract: a small consistent key-value store for the control plane.

It is the part of etcd's contract that both back ends keep. Each successful transaction that changes anything has a
revision of its own, higher than all earlier ones. An entry has the revision that wrote it. A transaction compares such
revisions and changes everything or nothing. Entries may be bound to a lease and are deleted with it. A watch reports
each change after a revision, once and in order.

Every call has a deadline. Until then it tries again, at other endpoints too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

__all__ = [
    "LARGEST_OPERATIONS",
    "LARGEST_VALUE",
    "LONGEST_KEY",
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

LONGEST_KEY = 1024
"""Longest key, in bytes of UTF-8."""
LARGEST_VALUE = 1 << 20
"""Largest value, in bytes. An etcd takes requests of 1.5 MiB by default."""
LARGEST_OPERATIONS = 100
"""Most conditions, and most operations, in one transaction. An etcd takes 128 of each by default."""


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
        The revision that wrote (or deleted) it.
    lease : int
        The lease that it is bound to; 0 for none.
    deleted : bool
        The change was a deletion. Only in the changes of a watch.
    """

    key: str
    value: bytes
    revision: int
    lease: int = 0
    deleted: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries as they were at one revision.

    Attributes
    ----------
    revision : int
        A watch after this revision reports all later changes.
    entries : tuple of Entry
        In the order of their keys, prefix by prefix.
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
        All conditions held and all operations were done. Otherwise nothing was changed.
    revision : int
        The revision of the changes; if nothing was changed, a revision at which the outcome held.
    """

    succeeded: bool
    revision: int


@dataclass(frozen=True, slots=True)
class Changes:
    """Changes that one wait of a watch returns; empty if none came in time.

    Attributes
    ----------
    revision : int
        A watch after this revision continues behind these changes.
    entries : tuple of Entry
        In the order of their revisions. All changes of one transaction come together.
    """

    revision: int
    entries: tuple[Entry, ...]


class Watch(ABC):
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
            Changes in between are no longer kept.
        RegistryAwayError
            The registry could not be asked until the end of the wait. The next wait goes on at the same revision.
        """

    @abstractmethod
    def close(self) -> None:
        """End the watch. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Registry(ABC):
    """A small consistent key-value store. Thread-safe; a forked child makes its own connections.

    Keys are text of 1 to 1024 bytes, values bytes of at most 1 MiB. All calls raise `RegistryAwayError` when the
    registry cannot be reached before the deadline, `RegistryDeniedError` if the user lacks the right, and
    `ConfigError` for arguments that no registry takes. Calls that change something raise `RegistryUnwritableError`
    while the registry can only be read. A registry stores a checksum with each entry, which earlier releases did not. A
    call raises `RegistryDamagedError` if an entry differs from what was written, or was written and is missing. All
    calls raise `RegistryReplacedError` once the registry is not the one that was opened.

    Attributes
    ----------
    address : str
        Where the registry is, without secrets; named in errors.
    """

    address: str

    @abstractmethod
    def get(self, key: str, *, timeout: float | None = None) -> Entry | None:
        """Read a key's present entry, with all changes that have been confirmed; None if there is none.

        Parameters
        ----------
        key : str
            The key.
        timeout : float, optional
            Seconds that the call may take; None for the registry's own.
        """

    @abstractmethod
    def range(self, *prefixes: str, timeout: float | None = None) -> Snapshot:
        """Read all entries whose keys begin with one of the prefixes, at one revision.

        Parameters
        ----------
        *prefixes : str
            At most 100; all keys begin with the empty prefix.
        timeout : float, optional
            Seconds that the call may take; None for the registry's own.
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
            At most 100. Without any, the operations are always done.
        operations : sequence of Put or Delete
            At most 100, each on a different key.
        timeout : float, optional
            Seconds that the call may take; None for the registry's own.

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
            Text that the keys begin with.
        after : int
            The watch reports changes after this revision, which a snapshot, a commit or earlier changes have returned.
        """

    @abstractmethod
    def compact(self, revision: int, *, timeout: float | None = None) -> None:
        """Forget the changes up to a revision. Entries stay; watches from before it raise `RegistryCompactedError`."""

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
            It has ended.
        """

    @abstractmethod
    def remaining(self, lease: int, *, timeout: float | None = None) -> float:
        """Seconds after which a lease ends unless it is kept alive.

        Raises
        ------
        RegistryLeaseError
            It has ended.
        """

    @abstractmethod
    def revoke(self, lease: int, *, timeout: float | None = None) -> None:
        """End a lease now and delete the entries that are bound to it. A lease that does not exist is no error."""

    @abstractmethod
    def close(self) -> None:
        """Close all connections. Idempotent. Leases end by themselves."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
