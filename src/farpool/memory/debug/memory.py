"""Access to an arena's bytes for debug mode: methods that poison bytes, find changed poison, and compute checksums."""

from __future__ import annotations

import sys
from typing import Protocol

from farpool._native import DeviceQueue, crc32c
from farpool.memory.tiers.device import HostArena

__all__ = ["POISON", "DeviceMemory", "HostMemory", "Memory"]

POISON = b"\xdb\xff"
"""Content of free bytes, repeated from even offsets on. It is NaN in each floating-point type of two bytes or more."""
_CHUNK_BYTES = 1 << 20
_POISONED = POISON * (_CHUNK_BYTES // 2 + 1)


class Memory(Protocol):
    """Interface to the bytes of an arena; offsets are from its start."""

    readable: bool
    """True if the program can read the bytes without waiting for the device."""

    def fill(self, place: int, nbytes: int) -> None:
        """Poison a range. On a device, this happens after the work that the program has already queued."""
        ...

    def checksum(self, place: int, nbytes: int) -> int: ...

    def first_change(self, place: int, nbytes: int) -> int:
        """Return the offset of the first byte in a poisoned range that is not poison; -1 if there is none."""
        ...


class HostMemory:
    """Bytes of an arena in host memory."""

    readable = True

    def __init__(self, arena: HostArena) -> None:
        self._arena = arena

    def fill(self, place: int, nbytes: int) -> None:
        view = self._arena.view()
        for start in range(place, place + nbytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, place + nbytes)
            view[start:stop] = _expected(start, stop)

    def checksum(self, place: int, nbytes: int) -> int:
        return crc32c(self._arena.view()[place : place + nbytes])

    def first_change(self, place: int, nbytes: int) -> int:
        view = self._arena.view()
        for start in range(place, place + nbytes, _CHUNK_BYTES):
            stop = min(start + _CHUNK_BYTES, place + nbytes)
            found, expected = bytes(view[start:stop]), _expected(start, stop)
            if found != expected:
                return start + next(i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
        return -1


def _expected(start: int, stop: int) -> bytes:
    # We return bytes, because Python compares bytes at the speed of memory, but memoryviews item by item.
    return _POISONED[start % 2 : start % 2 + stop - start]


class DeviceMemory:
    """Bytes of an arena on a device. Debug mode poisons them but never reads them.

    A read would wait for the device. That wait would hide the missing waits that debug mode looks for.

    Parameters
    ----------
    address : int
        Where the arena begins.
    queue : DeviceQueue
        The queue of the arena's transfers, which fills ranges in order with the program's work.
    """

    readable = False

    def __init__(self, address: int, queue: DeviceQueue) -> None:
        self._address = address
        self._queue = queue

    def fill(self, place: int, nbytes: int) -> None:
        start, stop = place + place % 2, (place + nbytes) // 2 * 2
        if start < stop:
            self._queue.fill(self._address + start, stop - start, int.from_bytes(POISON, sys.byteorder))

    def checksum(self, place: int, nbytes: int) -> int:
        raise AssertionError("the bytes of a device are not looked at")

    def first_change(self, place: int, nbytes: int) -> int:
        raise AssertionError("the bytes of a device are not looked at")
