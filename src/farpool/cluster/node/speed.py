"""Measures how fast this host copies memory that a node lends."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Mapping

__all__ = ["copy_rates"]

_NBYTES_MAX = 32 << 20
"""Bytes that are copied; more than most caches have."""
_COPIES = 3


def copy_rates(folder: str | os.PathLike[str], media: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes per second at which bytes of a file in a folder are copied out of a mapping of it.

    It takes some 0.02 s. The best of three copies counts, because other programs only make copies slower.

    Parameters
    ----------
    folder : path-like
        Folder of the node's memory.
    media : mapping of str to int
        Bytes that the node lends, by medium. At most these of ``dram`` are used, and given back.

    Returns
    -------
    dict of str to int
        The rate of ``dram``; empty if the node lends none or the folder has no room for the file.
    """
    nbytes = min(media.get("dram", 0), _NBYTES_MAX)
    if nbytes <= 0:
        return {}
    into = bytearray(nbytes)  # written once, so that the system has backed it
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(into)  # and not through the mapping: a full file system is an error then, and not a signal
            file.flush()
            with mmap.mmap(file.fileno(), nbytes, prot=mmap.PROT_READ) as mapped:
                best = min(_copy_time(mapped, into) for _ in range(_COPIES))
    except OSError:
        return {}
    return {"dram": int(nbytes / best)}


def _copy_time(source: mmap.mmap, into: bytearray) -> float:
    begin = time.perf_counter()
    with memoryview(source) as view:
        into[:] = view
    return max(time.perf_counter() - begin, 1e-9)
