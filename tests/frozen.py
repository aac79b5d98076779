"""What a process has imported for the tests is kept out of every later collection of garbage.

A pool that is left looks at every object that there is, also at those that are frozen: half a second, in a process
that has imported all tests.
"""

from __future__ import annotations

import gc

__all__ = ["freeze", "thaw"]

_count = gc.get_freeze_count


def freeze() -> None:
    """Freeze all objects, and hide it: `farpool.tensors.leaving` would thaw them to look for tensors of a pool."""
    gc.collect()
    gc.freeze()
    gc.get_freeze_count = lambda: 0


def thaw() -> None:
    """Undo it."""
    gc.get_freeze_count = _count
    gc.unfreeze()
