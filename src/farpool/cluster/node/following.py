"""A node follows entries of its pool's registry in a thread, and keeps a copy of them in its folder."""

from __future__ import annotations

import logging
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from farpool.abc.registry import Entry, Registry, Watch
from farpool.closing import Closing
from farpool.cluster.node.copy_file import Copied, CopyFile
from farpool.cluster.registry.location import is_missing_file, open_registry, without_password
from farpool.errors import RegistryAwayError, RegistryCompactedError, RegistryReplacedError

__all__ = ["CALL_TIMEOUT_S", "Following"]

CALL_TIMEOUT_S = 2.0
"""Maximum seconds that the thread waits for an answer of the registry."""
_LOOK_INTERVAL_S = 0.25
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
"""Longest pause after a failure; each is twice as long as the previous one, and then shortened at random by at most
half, so that not all nodes ask a registry that has come back at the same moment."""
_STOP_TIMEOUT_S = 2.0 * CALL_TIMEOUT_S

_Content = TypeVar("_Content", bound=Copied)


class Following(Closing, ABC, Generic[_Content]):
    """Follows entries of a registry. Call `begin`, then `start`, and at the end `close`.

    Parameters
    ----------
    registry : Registry or str or path-like
        The pool's registry, or its address. A registry that is given as an address is opened and closed here, and
        opened again after it was replaced.
    prefixes : sequence of str
        Prefixes of the keys to follow.
    copy : CopyFile
        The file in the node's folder, which this process has locked.
    unchanged : str
        What the log says while the registry cannot be followed.
    kept : bool
        False for a node that keeps nothing when it stops; it then has no copy either.
    log : callable
        Function that logs an event with its `level` and its fields.
    """

    def __init__(
        self,
        registry: Registry | str | os.PathLike[str],
        prefixes: Sequence[str],
        copy: CopyFile[_Content],
        unchanged: str,
        *,
        kept: bool,
        log: Callable[..., None],
    ) -> None:
        self._where = None if isinstance(registry, Registry) else os.fspath(registry)
        self._registry = registry if isinstance(registry, Registry) else None
        self._address = ""  # of the registry, without secrets
        self._prefixes, self._copy, self._unchanged, self._kept, self._log = prefixes, copy, unchanged, kept, log
        self._watches: list[Watch] = []
        self._pause = _FIRST_PAUSE_S
        self._told: set[str] = set()
        self._failure = ""  # the kind of the last one, until the registry answers again
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, address: str, *, is_away: bool) -> None:
        """Take over the copy, and then what the registry has. Raises no error: the node starts anyway.

        Parameters
        ----------
        address : str
            Address of the registry without secrets; empty if it could not be opened. A copy that is from another
            registry is not used.
        is_away : bool
            True if the registry does not answer now. It is then not asked before `start`.
        """
        self._address = address
        if self._kept:
            self._take_copy()
        else:
            self._copy.remove()
        if not is_away:
            self._try_look()
        self._try_settle()

    def start(self) -> None:
        """Follow the registry from now on, in a thread."""
        self._thread = threading.Thread(target=self._follow, name=f"farpool-{self._copy.path.name}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._ended.is_set():
            return
        self._ended.set()
        if self._thread is None:
            self._let_go()
        else:
            self._thread.join(_STOP_TIMEOUT_S)
        if not self._kept:
            self._copy.remove()

    # What the thread, and before it `begin`, does with the entries

    @abstractmethod
    def _recall(self, copy: _Content) -> None:
        """Take over what the node knew when it last ran. Raises ValueError if it cannot be used."""

    @abstractmethod
    def _read(self, registry: Registry) -> int:
        """Read all entries; return the revision from which to watch them."""

    @abstractmethod
    def _change(self, changes: Sequence[Entry]) -> None:
        """Take over the changes that one watch has reported, all of one transaction in the same call."""

    @abstractmethod
    def _confirm(self, registry: Registry, *, has_changed: bool) -> None:
        """Ask the registry for more if that is due, after the watches were read."""

    @abstractmethod
    def _settle(self) -> None:
        """Apply the present entries, and write the copy."""

    # The thread

    def _follow(self) -> None:
        wait = 0.0
        try:
            while not self._ended.wait(wait):
                wait = self._try_look()
                self._try_settle()
        finally:
            self._let_go()

    def _try_look(self) -> float:
        """Look for changes; return the seconds until the next look."""
        try:
            return self._look()
        except Exception as error:  # the thread must not end, or the node would follow nothing any more
            # Watches continue at the same place after the registry was away, and perhaps not after another error.
            if not isinstance(error, RegistryAwayError):
                self._drop_watches()
            if isinstance(error, RegistryReplacedError):
                self._close_registry()
            self._failure = type(error).__name__
            self._tell(self._failure, f"{self._unchanged}: {error}")
            pause, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE_S)
            return pause * random.uniform(0.5, 1.0)

    def _look(self) -> float:
        registry = self._opened()
        if not self._watches:
            revision = self._read(registry)
            self._watches = [registry.watch(prefix, revision) for prefix in self._prefixes]
        has_changed = False
        try:
            for watch in self._watches:
                # Each by itself: if the registry goes away before the next watch, these are not lost.
                if changes := watch.next(0).entries:
                    has_changed = True
                    self._change(changes)
        except RegistryCompactedError:
            self._drop_watches()
            return 0.0
        self._confirm(registry, has_changed=has_changed)
        self._pause = _FIRST_PAUSE_S
        self._told.discard(self._failure)
        return _LOOK_INTERVAL_S

    def _try_settle(self) -> None:
        try:
            self._settle()
        except Exception as error:  # as above
            self._tell(type(error).__name__, f"{self._unchanged}: the change cannot be applied: {error}")

    # The copy

    def _take_copy(self) -> None:
        try:
            copy = self._copy.read()
            if copy is not None and self._address and copy.registry != self._address:
                self._tell("copy", f"the copy {self._copy.path} is from the registry {copy.registry}, so not used")
            elif copy is not None:
                self._recall(copy)
        except (OSError, ValueError) as error:
            self._tell("copy", f"the copy {self._copy.path} is not used: {error}")

    def _write(self, copy: _Content) -> bool:
        """Write the copy; return False, and log the reason, if that fails."""
        try:
            self._copy.write(copy)
        except OSError as error:
            self._tell("write", f"the copy {self._copy.path} cannot be kept: {error.strerror or error}")
            return False
        return True

    # The registry

    def _opened(self) -> Registry:
        if self._registry is None:
            assert self._where is not None
            if is_missing_file(self._where):
                # Opening would make an empty file, which may be in the way of a backup that someone restores.
                where = without_password(self._where)
                raise RegistryAwayError(f"the file of the registry {where} is gone", registry=where)
            self._registry = open_registry(self._where, timeout=CALL_TIMEOUT_S)
        self._address = self._registry.address
        return self._registry

    def _close_registry(self) -> None:
        if self._where is not None and self._registry is not None:
            self._registry.close()
            self._registry = None

    def _drop_watches(self) -> None:
        watches, self._watches = self._watches, []
        for watch in watches:
            with suppress(Exception):  # the registry may be gone
                watch.close()

    def _let_go(self) -> None:
        self._drop_watches()
        self._close_registry()

    def _tell(self, kind: str, event: str) -> None:
        """Log each kind of trouble once, until it is over."""
        if kind not in self._told:
            self._told.add(kind)
            self._log(event, level=logging.WARNING)
