"""A tier written in Python alone, as a user might write one."""

import threading

from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.errors import TierFullError
from farpool.memory.tiers.buffers import require_buffer


class DictTier(Tier):
    """Bytes in a dictionary; offsets are never used twice."""

    def __init__(self, capacity: int = 16 << 20, name: str = "dict") -> None:
        self._info = TierInfo(name, "dram", capacity, 1)
        self._held: dict[Extent, bytes] = {}
        self._next = 0
        self._lock = threading.Lock()

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def reserved(self) -> int:
        return sum(extent.nbytes for extent in list(self._held))

    def open(self) -> None:
        pass

    def close(self) -> None:
        self._held = {}

    def reserve(self, nbytes: int) -> Extent:
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}, expected 1 or more")
        with self._lock:
            if self.reserved + nbytes > self._info.capacity:
                raise TierFullError(f"{self._info.name}: no room for {nbytes} bytes", tier=self._info.name)
            extent = Extent(self._next, nbytes)
            self._next += nbytes
            self._held[extent] = bytes(nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        if self._held.pop(extent, None) is None:
            raise ValueError(f"{extent} is not reserved")

    def read_into(self, extent: Extent, into: memoryview) -> None:
        require_buffer(extent, into, writable=True)[:] = self._held[extent]

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self._held[extent] = bytes(require_buffer(extent, data, writable=False))
