"""Members that nodes have registered in a registry, read once and then followed."""

from __future__ import annotations

import os
import random
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from farpool import forks
from farpool.abc.membership import MemberInfo, Membership
from farpool.abc.registry import Entry, Registry, Watch
from farpool.checks import require_seconds
from farpool.closing import Closing
from farpool.cluster.members.entries import MemberEntries
from farpool.cluster.members.records import MEMBERS, record_key
from farpool.cluster.registry import open_registry
from farpool.cluster.registry.location import is_missing_file
from farpool.errors import (
    FarpoolWarning,
    RegistryAwayError,
    RegistryCompactedError,
    RegistryDamagedError,
    RegistryReplacedError,
)

__all__ = ["RegistryMembers"]

_LOOK_INTERVAL_S = 0.1
"""Seconds between two looks for changes. A longer wait inside the watch would delay `RegistryMembers.close`, and the
watch of a SQLite file looks 200 times a second while it waits."""
_CALL_TIMEOUT_S = 2.0
"""Maximum seconds that the thread waits for an answer of the registry. `RegistryMembers.close` waits for the thread."""
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
"""Longest pause after a failure. Each pause is twice as long as the previous one, up to this, and then shortened at
random by at most half, so that not all programs ask a registry that has come back at the same moment."""


class RegistryMembers(Membership, Closing):
    """The members that nodes have registered in a registry (``farpool node --registry``). Thread-safe.

    The list is read when this object is made. Then a thread follows the registry's changes until `close`, or until this
    object is dropped. If the registry cannot be reached, the list stays as it is, and the thread tries again. In a
    forked child, the first use of the list begins to follow the registry again.

    Parameters
    ----------
    registry : Registry, str or path
        The registry, or its address, such as ``etcd://10.0.0.1:2379`` or ``sqlite:///var/lib/farpool/registry.sqlite``.
        A registry that is opened from its address is closed together with this list. It is also opened again if another
        registry takes its place, which is not possible for a `Registry` object.
    timeout : float
        Seconds within which the registry must answer the first time.
    required : bool
        False to begin with an empty list if the registry does not answer, and to go on trying.

    Raises
    ------
    RegistryAwayError
        The registry did not answer, and is `required`.
    RegistryError, ConfigError
        As raised by `farpool.registry.open_registry`.
    """

    def __init__(
        self, registry: Registry | str | os.PathLike[str], *, timeout: float = 5.0, required: bool = True
    ) -> None:
        require_seconds(timeout, "timeout")
        opened = registry if isinstance(registry, Registry) else open_registry(registry, timeout=timeout)
        where = None if isinstance(registry, Registry) else os.fspath(registry)
        self._follower = follower = _Follower(opened, where, timeout)
        try:
            follower.begin(required=required)
        except BaseException:
            if where is not None:
                opened.close()
            raise
        # The thread holds the follower alone, so that this object can be collected, which ends the thread.
        weakref.finalize(self, follower.end).atexit = False

    def __repr__(self) -> str:
        return f"<RegistryMembers {self.address}: {len(self._follower.members)} members>"

    @property
    def address(self) -> str:
        """Address of the registry, without secrets."""
        return self._follower.address

    @property
    def away(self) -> float:
        """Seconds for which the registry has not answered; 0.0 if it answered last."""
        since = self._follower.away_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each reason why the list may be out of date; empty if there is none."""
        return self._follower.notes

    def members(self) -> Sequence[MemberInfo]:
        """Return the present members, in the order of their addresses."""
        if self._follower.thread is None:
            self._follower.start()
        # The tuple is replaced as a whole, so readers take no lock.
        return self._follower.members

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Subscribe to changes: `changed` is called after each one, in the thread that follows the registry."""
        if self._follower.thread is None:
            self._follower.start()
        return self._follower.subscribe(changed)

    def close(self) -> None:
        """Stop following the registry. Idempotent. The list stays as it is, for stores that still use it."""
        self._follower.end()
        thread = self._follower.thread
        # A subscriber may close the list in the thread itself.
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        elif thread is None:  # the thread closes the registry at its end
            self._follower.close_registry()


class _Follower:
    """Follows a registry's members in a thread, which `RegistryMembers` owns only through this object.

    Parameters
    ----------
    registry : Registry
        The registry.
    where : str or None
        The address from which this object's owner opened the registry; None if the registry is another's.
    timeout : float
        Seconds within which the registry must answer the first time.
    """

    def __init__(self, registry: Registry, where: str | None, timeout: float) -> None:
        self.address = registry.address
        self.members: tuple[MemberInfo, ...] = ()
        self.notes: tuple[str, ...] = ()
        self.away_since: float | None = None
        self._registry = registry
        self._where = where
        self._timeout = timeout
        self._has_ended = False
        self._is_other = False
        self._is_replaced = False
        self.forked()
        forks.begin_again(self)

    def forked(self) -> None:
        """Begin without a thread and without subscribers in a forked child, because they belong to the parent."""
        self.thread: threading.Thread | None = None
        # Protects the list and the subscribers while the list is replaced, and the start of the thread.
        self._lock = threading.Lock()
        self._subscribers: dict[object, Callable[[], None]] = {}
        self._ended = threading.Event()
        # The parent's thread may have been in the middle of a change, so the child reads all entries again.
        self._entries = MemberEntries(self.members)
        self._watch: Watch | None = None
        self._warned: set[str] = set()
        self._damage: tuple[str, ...] = ()
        self._pause = _FIRST_PAUSE_S

    def begin(self, *, required: bool) -> None:
        """Read the list for the first time and start the thread.

        Raises
        ------
        RegistryAwayError
            The registry did not answer, and is `required`.
        """
        try:
            self._read(self._timeout)
        except RegistryAwayError as error:
            if required:
                raise RegistryAwayError(
                    f"the list of members cannot be read: {error}; start the registry, or name the nodes' addresses in "
                    "its place",
                    registry=self.address,
                    endpoints=error.endpoints,
                ) from error
            self._failed(error)
        self.members = self._entries.members
        self.start()

    def start(self) -> None:
        """Start the thread unless it was started or has ended."""
        with self._lock:
            if self.thread is None and not self._has_ended:
                thread = threading.Thread(target=self._follow, args=(self._ended,), name="farpool-members", daemon=True)
                # This may fail if the process has too many threads. Then the next use of the list tries again.
                with suppress(RuntimeError):
                    thread.start()
                    self.thread = thread

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Add a subscriber; return the function that removes it."""
        mark = object()
        with self._lock:
            self._subscribers[mark] = changed

        def end() -> None:
            # A forked child does not have the subscriptions of the parent, and a subscriber may end one twice.
            with suppress(KeyError):
                del self._subscribers[mark]

        return end

    def end(self) -> None:
        """End the thread soon."""
        self._has_ended = True
        self._ended.set()

    def close_registry(self) -> None:
        """Close the registry if the owner has opened it from its address."""
        if self._where is not None:
            self._registry.close()

    # Only the thread calls the methods below, except that `begin` reads the list before the thread starts.

    def _follow(self, ended: threading.Event) -> None:
        wait = 0.0
        try:
            while not ended.wait(wait):
                try:
                    wait = self._look()
                except Exception as error:  # a list that nobody follows any more would be worse than any of them
                    wait = self._failed(error)
                self._publish()
        finally:
            self._drop_watch()
            self.close_registry()

    def _look(self) -> float:
        """Read all entries, or the changes since the last look; return the seconds until the next look."""
        if self._is_replaced and self._where is not None:
            self._open_again(self._where)
        if self._watch is None:
            self._read(min(self._timeout, _CALL_TIMEOUT_S))
        assert self._watch is not None
        try:
            changes = self._watch.next(0)
        except RegistryCompactedError:
            self._drop_watch()
            return 0.0
        self.away_since, self._pause = None, _FIRST_PAUSE_S
        if changes.entries or self._entries.awaits_return:
            self._entries.change(changes.entries, time.monotonic())
        if self.notes or self._entries.errors or self._entries.is_lost or self._damage:
            self._take_notes(None)
        return 0.0 if changes.entries else _LOOK_INTERVAL_S

    def _read(self, timeout: float) -> None:
        """Read all entries, and watch from there."""
        try:
            snapshot = self._registry.range(MEMBERS, timeout=timeout)
            entries, revision, self._damage = snapshot.entries, snapshot.revision, ()
        except RegistryDamagedError:
            entries, revision = self._read_undamaged(timeout)
        self._entries.read(entries, time.monotonic(), is_other=self._is_other)
        self._is_other = False
        self._watch = self._registry.watch(MEMBERS, revision)

    def _read_undamaged(self, timeout: float) -> tuple[tuple[Entry, ...], int]:
        """Read the entries whose checksums match. A known member whose record is damaged gets an unreadable one."""
        # A prefix of no key. The watch reports the changes since then again, which is harmless.
        revision = self._registry.range(f"{MEMBERS}\x7f", timeout=timeout).revision
        intact, damage = self._registry.check(timeout=timeout)
        entries = {entry.key: entry for entry in intact if entry.key.startswith(MEMBERS)}
        damage = tuple(text for text in damage if MEMBERS in text)
        for key in {record_key(info.identity) for info in self.members} - entries.keys():
            try:
                self._registry.get(key, timeout=timeout)
            except RegistryDamagedError:
                entries[key] = Entry(key, b"", 0)
                damage = tuple(text for text in damage if key not in text)
        self._damage = damage
        return tuple(entries.values()), revision

    def _open_again(self, where: str) -> None:
        """Open the registry that has taken the place of the one that was followed."""
        if is_missing_file(where):
            # Opening would make an empty file, which may be in the way of a backup that someone restores.
            raise RegistryAwayError(f"the file of the registry {self.address} is gone", registry=self.address)
        opened = open_registry(where, timeout=self._timeout)
        self._registry.close()
        self._registry, self._is_replaced = opened, False
        self._is_other = True

    def _failed(self, error: Exception) -> float:
        """Record that the registry could not be followed; return the seconds until the next attempt."""
        if self.away_since is None:
            self.away_since = time.monotonic()
        # A watch continues at the same place after the registry was away, and perhaps not after another error.
        if not isinstance(error, RegistryAwayError):
            self._drop_watch()
            self._is_replaced = self._is_replaced or isinstance(error, RegistryReplacedError)
        self._take_notes(error)
        pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
        return pause * random.uniform(0.5, 1.0)

    def _publish(self) -> None:
        """Replace the list if it has changed, and call the subscribers."""
        members = self._entries.members
        if members == self.members:
            return
        with self._lock:
            self.members = members
            subscribers = list(self._subscribers.values())
        # Outside the lock, because a subscriber may subscribe to the list itself.
        for changed in subscribers:
            try:
                changed()
            except Exception as error:
                _warn(f"a subscriber to the members in {self.address} failed: {type(error).__name__}: {error}")

    def _take_notes(self, error: Exception | None) -> None:
        """Record why the list may be out of date, and warn once of each reason that does not end by itself."""
        notes: dict[str, str] = {}
        if error is not None:
            # These end by themselves: the registry comes back, or the thread opens it again.
            is_passing = isinstance(error, RegistryAwayError) or (self._is_replaced and self._where is not None)
            kind = "" if is_passing else type(error).__name__
            notes[kind] = f"the list of members stays as it was read last: {error}"
            if self._is_replaced and not is_passing:
                notes[kind] += " (RegistryMembers does so by itself if you give it the registry's address)"
        if self._entries.is_lost:
            notes["lost"] = (
                f"the registry {self.address} has no members any more, so it was wiped or replaced; the list of "
                "members stays as it was, until a node has registered again"
            )
        notes |= {one.key: f"a member's entry is not used: {one}" for one in self._entries.errors}
        notes |= {text: text for text in self._damage}
        for key in notes.keys() - self._warned - {""}:
            _warn(notes[key])
        self._warned = set(notes) if error is None else self._warned | set(notes)
        self.notes = tuple(notes.values())

    def _drop_watch(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close()


def _warn(text: str) -> None:
    with suppress(FarpoolWarning):  # if warnings are errors, no caller can catch it
        warnings.warn(text, FarpoolWarning, stacklevel=1)
