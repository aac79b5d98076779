"""A kind of tier in one file, as a package outside of farpool adds it: memory that waits before each transfer."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

from farpool.errors import ConfigError, TierError, TierFullError
from farpool.tiers import Extent, Tier, TierInfo, TierSpec


class Slow(Tier):
    """Keeps bytes in a dictionary, and waits `delay` seconds before each transfer."""

    def __init__(self, capacity: int, name: str, delay: float) -> None:
        if not delay >= 0:
            raise ConfigError(f"delay of {name} is {delay!r}, expected 0 or more seconds")
        self._info = TierInfo(name, "slow", capacity, 1, latency=delay)
        self._delay = delay
        self._held: dict[Extent, bytes] | None = None
        self._next = 0
        self._lock = threading.Lock()

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def reserved(self) -> int:
        return sum(extent.nbytes for extent in list(self._held or ()))

    def open(self) -> None:
        if self._held is None:
            self._held = {}

    def close(self) -> None:
        self._held = None

    def reserve(self, nbytes: int) -> Extent:
        if nbytes < 1:
            raise ValueError(f"nbytes is {nbytes}, expected 1 or more")
        with self._lock:
            held = self._open()
            if self.reserved + nbytes > self._info.capacity:
                raise TierFullError(f"{self._info.name}: no room for {nbytes} bytes", tier=self._info.name)
            extent = Extent(self._next, nbytes)
            self._next += nbytes
            held[extent] = bytes(nbytes)
        return extent

    def free(self, extent: Extent) -> None:
        with self._lock:
            if (self._held or {}).pop(extent, None) is None:
                raise ValueError(f"{extent} is not reserved")

    def read_into(self, extent: Extent, into: memoryview) -> None:
        if into.readonly:
            raise ValueError("the buffer is read-only")
        time.sleep(self._delay)
        into[:] = self._open()[extent]

    def write_from(self, extent: Extent, data: memoryview) -> None:
        if data.nbytes != extent.nbytes:
            raise ValueError(f"the buffer has {data.nbytes} bytes, the extent has {extent.nbytes}")
        time.sleep(self._delay)
        self._open()[extent] = bytes(data)

    def _open(self) -> dict[Extent, bytes]:
        if self._held is None:
            raise TierError(f"{self._info.name}: the tier is not open; call open() first", tier=self._info.name)
        return self._held


class SlowSpec(TierSpec, frozen=True, kw_only=True):
    """The kind that the entry point names."""

    kind: ClassVar[str] = "slow"
    typical_latency: ClassVar[float] = 1e-6

    size: int | str
    delay: float = 0.0

    def make_bare(self) -> Tier:
        return Slow(int(self.size), self.name, self.delay)
