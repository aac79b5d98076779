"""Resets objects in forked children: each object registers here, and its method `forked` runs in every forked child."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

__all__ = ["ModuleLock", "begin_again"]


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


def _forked() -> None:
    for one in list(_registered):
        one.forked()


os.register_at_fork(after_in_child=_forked)
