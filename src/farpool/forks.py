"""Resets objects in forked children: each object registers here, and its method `forked` runs in every forked child."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

__all__ = ["ForkGuard", "ModuleLock", "begin_again"]

_FORK_WAIT_S = 1.0
"""Maximum seconds that a fork waits for guarded code to end."""


class _Forked(Protocol):
    def forked(self) -> None:
        """Reset this object in a forked child: make new locks, and leave the parent's connections as they are.

        New locks are needed because the child has only the thread that forked. A lock that another thread of the parent
        held at the fork would stay locked in the child.
        """


_registered: WeakSet[_Forked] = WeakSet()


def begin_again(registered: _Forked) -> None:
    """Call ``registered.forked()`` in every forked child, before the child runs anything else."""
    _registered.add(registered)


class ModuleLock:
    """Lock for the global variables of a module. In each forked child, `lock` is a new lock, which is free."""

    def __init__(self) -> None:
        self.forked()
        begin_again(self)

    def forked(self) -> None:
        """Make a new lock in a forked child, because a thread of the parent may hold the old lock."""
        self.lock = threading.Lock()


class ForkGuard:
    """Context manager of code that no fork may interrupt, such as the calls of a library with locks of its own.

    If a process forks while one of its threads holds a lock inside the library, then the lock stays locked in the
    child, and the child's next call of the library never returns. So a fork waits until no other thread runs guarded
    code, and no thread begins to until the fork is done. The fork waits a second at most: a call of a registry that
    takes longer waits for another process, and then holds no lock that the whole library needs. Guarded code may be
    nested.
    """

    def __init__(self) -> None:
        self.forked()
        begin_again(self)
        os.register_at_fork(before=self._wait, after_in_parent=self._go_on)

    def forked(self) -> None:
        """Begin in a forked child, where no other thread is left."""
        self._changed = threading.Condition()
        self._threads: dict[int, int] = {}  # by thread, how many blocks of guarded code it is in
        self._forker = 0  # the thread that forks, 0 for none

    def __enter__(self) -> None:
        thread = threading.get_ident()
        with self._changed:
            # The thread that forks does not wait for itself: garbage that is collected there may close a registry.
            while self._forker not in (0, thread) and thread not in self._threads:
                self._changed.wait()
            self._threads[thread] = self._threads.get(thread, 0) + 1

    def __exit__(self, *_: object) -> None:
        thread = threading.get_ident()
        with self._changed:
            left = self._threads.pop(thread, 0) - 1
            if left > 0:
                self._threads[thread] = left
            elif self._forker:
                self._changed.notify_all()

    def _wait(self) -> None:
        thread = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._forker)
            self._forker = thread
            self._changed.wait_for(lambda: not self._threads.keys() - {thread}, _FORK_WAIT_S)

    def _go_on(self) -> None:
        with self._changed:
            self._forker = 0
            self._changed.notify_all()


def _forked() -> None:
    for one in list(_registered):
        one.forked()


os.register_at_fork(after_in_child=_forked)
