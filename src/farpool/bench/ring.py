"""Objects that are written and read in turn, and where they are read to: the same for all that are compared."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from farpool._native import Memory
from farpool.bench.measure import warm
from farpool.errors import FarpoolError
from farpool.sizes import format_size

__all__ = ["Ring", "seconds_each"]

_ALIGNMENT = 4096


class Ring:
    """As many objects of one size, by seed.

    Parameters
    ----------
    nbytes : int
        Bytes of an object.
    count : int
        Objects.

    Attributes
    ----------
    keys : list of str
    payloads : list of bytes
        What the objects are.
    buffers : list of memoryview
        Where they are read to, page-aligned.
    addresses : list of int
        Of the buffers.
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
        """Lose what the buffers hold, so that bytes of an earlier read cannot pass for those of this one."""
        warm(memoryview(self._memory))

    def check(self, who: str, read: Sequence[bytes | None] | None = None) -> None:
        """That each object was read as it was written: into the buffers, or to what is passed.

        Raises
        ------
        FarpoolError
            One was not; the message names `who`.
        """
        found = [bytes(buffer) for buffer in self.buffers] if read is None else read
        for key, payload, got in zip(self.keys, self.payloads, found, strict=True):
            if got != payload:
                raise FarpoolError(f"{who}: object {key!r} of {format_size(self.nbytes)} was read with other bytes")


def seconds_each(work: Callable[[], object], objects: int, seconds: float) -> float:
    """Seconds for one object: `work` handles `objects` of them, and is called until this much time has passed.

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
