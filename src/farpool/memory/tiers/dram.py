"""The DRAM tier, which keeps bytes in host memory.

The whole capacity is one range of address space of exactly that size (never rounded up to a power of two). The
operating system backs a page with memory at the first write, and the tier keeps the page until the tier is closed.
If freed pages were returned earlier, a loop that frees and reserves the same extents would have page faults on every
pass, and reach only a fraction of the memory's speed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from farpool._native import Memory, MemoryPort
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.errors import ConfigError
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.space import CACHE_LINE_BYTES, ExtentSpace
from farpool.memory.tiers.spec import TierSpec
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Dram", "DramSpec"]


class Dram(PortTier):
    """A tier in host memory.

    Parameters
    ----------
    capacity : int or str
        Bytes, or a size such as ``"8GiB"``; rounded down to a multiple of 64.
    name : str
        Name of the tier.

    Raises
    ------
    ConfigError
        The capacity is not a valid size, or is less than 64 bytes.
    """

    def __init__(self, capacity: int | str, name: str = "dram") -> None:
        super().__init__()
        nbytes = parse_size(capacity, f"capacity of {name}")
        if nbytes < CACHE_LINE_BYTES:
            raise ConfigError(
                f"capacity of {name} is {nbytes} bytes, expected {CACHE_LINE_BYTES} or more, for example '1GiB'"
            )
        self._info = TierInfo(name, "dram", nbytes - nbytes % CACHE_LINE_BYTES, CACHE_LINE_BYTES)
        self._space = self._empty_space()
        self._memory: Memory | None = None
        self._touched = 0

    @property
    def info(self) -> TierInfo:
        return self._info

    @property
    def reserved(self) -> int:
        return self._space.reserved

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            extent = self._space.reserve(nbytes)
            self._touched = max(self._touched, extent.offset + extent.nbytes)
            return extent

    @property
    def touched(self) -> int:
        """Bytes up to the end of the highest extent reserved so far. The tier keeps them until it is closed."""
        return self._touched

    @property
    def in_process(self) -> bool:
        return True

    def address(self, offset: int) -> int:
        """Address in memory of the byte at `offset`, valid while the tier is open."""
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            assert self._memory is not None
            return self._memory.address + offset

    def free(self, extent: Extent) -> None:
        with self._lifecycle:
            self._space.free(extent)

    def _open_port(self) -> Port:
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        capacity = self._info.capacity
        if capacity > machine:
            raise ConfigError(
                f"capacity of {self._info.name} is {capacity} bytes ({format_size(capacity)}) but this machine has "
                f"{machine} bytes ({format_size(machine)}) of memory"
            )
        try:
            self._memory = Memory(capacity)
        except MemoryError as error:
            raise ConfigError(f"capacity of {self._info.name}: {error}; choose a smaller one") from error
        return MemoryPort(self._memory)

    def _close_port(self) -> None:
        if self._memory is not None:
            self._memory.release()
        self._memory = None
        self._touched = 0
        self._space = self._empty_space()

    def _check_extent(self, extent: Extent) -> None:
        self._space.require(extent)

    def _empty_space(self) -> ExtentSpace:
        return ExtentSpace(self._info.name, self._info.capacity, self._info.alignment)


class DramSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a `Dram`, a tier in host memory."""

    kind: ClassVar[str] = "dram"
    typical_latency: ClassVar[float] = 100e-9

    size: int | str

    def make_bare(self) -> Tier:
        return Dram(self.size, self.name)
