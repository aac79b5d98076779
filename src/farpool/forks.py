"""Reset of objects in forked children: objects register here, and a method of each runs in every forked child."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet

__all__ = ["begin_again"]


class _Forked(Protocol):
    def forked(self) -> None:
        """Begin again in a forked child: make new locks, and leave the parent's connections as they are.

        If another thread of the parent held a lock at the fork, that lock stays locked in the child, because the child
        does not have that thread.
        """


_registered: WeakSet[_Forked] = WeakSet()


def begin_again(registered: _Forked) -> None:
    """Call ``registered.forked()`` in every forked child, before the child runs anything else."""
    _registered.add(registered)


def _forked() -> None:
    for one in list(_registered):
        one.forked()


os.register_at_fork(after_in_child=_forked)
