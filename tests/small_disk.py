"""A file system of a few MiB, which is full soon."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DETACH = 2  # MNT_DETACH: what is still open does not keep it mounted


@contextmanager
def small_disk(mib: int) -> Iterator[Path]:
    """Mount a file system of so many MiB, empty; skip the test where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with tempfile.TemporaryDirectory(prefix="farpool-disk-") as folder:
        if libc.mount(b"farpool-test", os.fsencode(folder), b"tmpfs", 0, b"size=%dm" % mib) != 0:
            pytest.skip(f"cannot mount a small file system here: {os.strerror(ctypes.get_errno())}")
        try:
            yield Path(folder)
        finally:
            libc.umount2(os.fsencode(folder), _DETACH)
