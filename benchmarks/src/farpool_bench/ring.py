"""Objects that a benchmark writes and reads in turn, with buffers for them; the same for all peers."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence

from farpool._native import Memory
from farpool.errors import FarpoolError
from farpool.sizes import format_size
from farpool_bench.measure import warm

__all__ = ["Ring", "median_call", "seconds_each"]

_ALIGNMENT = 4096


class Ring:
    """A set of objects of one size with random payloads by seed, and buffers to read them into.

    Parameters
    ----------
    nbytes : int
        Bytes of an object.
    count : int
        Number of objects.

    Attributes
    ----------
    keys : list of str
    payloads : list of bytes
        Contents of the objects.
    buffers : list of memoryview
        Memory to read them into, page-aligned.
    addresses : list of int
        Addresses of the buffers.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        source = random.Random(nbytes)
        stride = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = nbytes
        self.keys = [f"bench/{nbytes}/{index}" for index in range(count)]
        self.payloads = [source.randbytes(nbytes) for _ in range(count)]
        self._memory = Memory(stride * count)
        self._memory.touch()
        whole = memoryview(self._memory)
        self.buffers = [whole[index * stride :][:nbytes] for index in range(count)]
        self.addresses = [self._memory.address + index * stride for index in range(count)]

    def __len__(self) -> int:
        return len(self.keys)

    def wipe(self) -> None:
        """Clear a byte of each page of the buffers, so that an earlier read's bytes cannot pass for this one's."""
        warm(memoryview(self._memory))

    def check(self, who: str, read: Sequence[bytes | None] | None = None) -> None:
        """Raise unless each object was read as it was written, into the buffers or, if given, to `read`.

        Raises
        ------
        FarpoolError
            An object was not; the message names `who`.
        """
        found = [bytes(buffer) for buffer in self.buffers] if read is None else read
        for key, payload, got in zip(self.keys, self.payloads, found, strict=True):
            if got != payload:
                raise FarpoolError(f"{who}: object {key!r} of {format_size(self.nbytes)} was read with other bytes")


def seconds_each(work: Callable[[], object], objects: int, seconds: float) -> float:
    """Seconds per object of `work`, which handles `objects` of them and is called until `seconds` have passed.

    One call before that is not counted.
    """
    work()
    calls = 0
    start = now = time.perf_counter()
    while now - start < seconds or not calls:
        work()
        calls += 1
        now = time.perf_counter()
    return (now - start) / (calls * objects)


def median_call(work: Callable[[], object], seconds: float) -> float:
    """Seconds of a call of `work`, the median of as many as there are in `seconds`, after one that is not counted."""
    work()
    taken: list[float] = []
    start = before = time.perf_counter()
    while before - start < seconds or not taken:
        work()
        now = time.perf_counter()
        taken.append(now - before)
        before = now
    return statistics.median(taken)
