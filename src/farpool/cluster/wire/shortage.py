"""Recognizes a shortage of descriptors, memory or disk space. A shortage may pass, so a caller may try again."""

from __future__ import annotations

import errno

__all__ = ["is_shortage"]

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ENOSPC})


def is_shortage(error: OSError) -> bool:
    """Return True if a system call failed because descriptors, memory or disk space were short."""
    return error.errno in _SHORTAGES
