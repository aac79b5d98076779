"""The fast tier in host memory: one preallocated arena that computation reads.

On a machine without a GPU, the arena is a budgeted part of DRAM. The arena reserves address space for later growth, but
takes memory only for the budget.
"""

from __future__ import annotations

import os

from farpool._native import Memory
from farpool.errors import ConfigError
from farpool.sizes import format_size

__all__ = ["HostArena"]


class HostArena:
    """The fast tier's arena in host memory, for pools whose device is the CPU.

    Parameters
    ----------
    nbytes : int
        Bytes that are backed with memory immediately, so that page faults do not slow the first transfers.
    """

    kind = "dram"
    page_locked = 0
    alignment = 64
    """Alignment in bytes, equal to the alignment of torch's own memory. With another alignment, torch would select
    other kernels, whose results may differ in the last bits."""

    def __init__(self, nbytes: int) -> None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # The address of the arena must not change when it grows, because views and transfers hold addresses in it.
        self._memory = Memory(max(nbytes, memory))
        self._memory.touch(0, nbytes)
        self.nbytes = nbytes
        self.address = self._memory.address

    @property
    def limit(self) -> int:
        """Maximum size of the arena in bytes."""
        return self._memory.nbytes

    @property
    def touched(self) -> int:
        """Bytes of the arena that are backed with memory."""
        return self.nbytes

    def view(self) -> memoryview:
        """The whole address range, writable. Use only the first `nbytes` bytes."""
        return memoryview(self._memory)

    def resize(self, nbytes: int) -> None:
        """Change the number of bytes that are backed with memory; return the rest to the operating system.

        Raises
        ------
        ConfigError
            The machine has less memory than `nbytes`.
        """
        if nbytes > self.limit:
            raise ConfigError(
                f"fast: {format_size(nbytes)} is more than this machine's memory ({format_size(self.limit)}); "
                "give a smaller budget"
            )
        if nbytes > self.nbytes:
            self._memory.touch(self.nbytes, nbytes - self.nbytes)
        else:
            self._memory.discard(nbytes, self.nbytes - nbytes)
        self.nbytes = nbytes

    def release(self) -> None:
        """Return the memory to the operating system; the arena must not be accessed after that."""
        self._memory.release()
