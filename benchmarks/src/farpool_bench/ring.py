"""Objects that a benchmark writes and reads in turn, with buffers for them; the same for all peers."""

from __future__ import annotations

import random
from collections.abc import Sequence

from farpool._native import Memory
from farpool.errors import FarpoolError
from farpool.sizes import format_size
from farpool_bench.measure import warm

_ALIGNMENT = 4096


class Ring:
    """A set of objects of one size with random payloads by seed, and buffers to read them into.

    `payloads` are their contents; `buffers` is page-aligned memory to read them into, at `addresses`.
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
        """Raise FarpoolError, with the name `who`, unless the buffers, or `read`, have the bytes written."""
        found = [bytes(buffer) for buffer in self.buffers] if read is None else read
        for key, payload, got in zip(self.keys, self.payloads, found, strict=True):
            if got != payload:
                raise FarpoolError(f"{who}: object {key!r} of {format_size(self.nbytes)} was read with other bytes")
