"""Tell a shortage of descriptors, memory or room from other errors: it passes, so the caller may try again."""

from __future__ import annotations

import errno

__all__ = ["is_shortage"]

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


def is_shortage(error: OSError) -> bool:
    """Return True if the system had too few descriptors, too little memory or too little room for a call."""
    return error.errno in _SHORTAGES
