"""One way to survive a fork: an object that is registered here begins again in each forked child."""

from __future__ import annotations

import os
import threading
from typing import Protocol
from weakref import WeakSet

__all__ = ["ModuleLock", "begin_again"]


class _Forked(Protocol):
    def forked(self) -> None:
        """Begin again in a forked child: make new locks, and leave the parent's connections as they are.

        The child has none of the parent's other threads, and such a thread may hold a lock forever.
        """


_registered: WeakSet[_Forked] = WeakSet()


def begin_again(registered: _Forked) -> None:
    """Have every forked child call ``registered.forked()`` before it does anything else."""
    _registered.add(registered)


class ModuleLock:
    """Lock of a module: `lock` is another, free lock in each forked child."""

    def __init__(self) -> None:
        self.forked()
        begin_again(self)

    def forked(self) -> None:
        """Make a free lock in a forked child: a thread of the parent may hold the old one."""
        self.lock = threading.Lock()


def _forked() -> None:
    for one in list(_registered):
        one.forked()


os.register_at_fork(after_in_child=_forked)
