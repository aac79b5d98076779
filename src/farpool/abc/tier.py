"""The interface of tiers, which every tier implements.

A tier holds bytes in *extents*: ranges of its space that a caller reserves. A transfer reads or writes a whole extent,
because a block always moves as a whole. The content of a new extent is unspecified. Reserving moves no bytes, so it is
quick. Transfers take as long as the medium needs, and the pool's transfer queue makes them in its own threads.

A tier may be written in Python alone (implement :meth:`Tier.read_into` and :meth:`Tier.write_from`). The queue's native
threads then take the interpreter lock only while they call these methods. A tier that also has a native data path
(:class:`HasPort`) is read and written without the interpreter lock. Each ability that only some tiers have is a
runtime-checkable protocol.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from types import TracebackType

    from farpool._native import Port

__all__ = ["Extent", "HasNotes", "HasPort", "HoldsMemory", "Mapped", "Tier", "TierInfo", "Verifies"]


@dataclass(frozen=True, slots=True)
class Extent:
    """A contiguous range of bytes in a tier.

    Attributes
    ----------
    offset : int
        Beginning of the extent, in bytes from the start of the tier's own space.
    nbytes : int
        Bytes that the owner may use. The tier may reserve more because of alignment, never less.
    """

    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TierInfo:
    """Description of a tier: its name, kind, size and measured speed.

    Attributes
    ----------
    name : str
        Name for errors and statistics, for example ``dram``; unique within a pool.
    kind : str
        Name of a registered kind, such as ``dram``, ``remote`` or ``nvme``. Shown in statistics; nothing depends on it.
    capacity : int
        Total bytes that can be reserved.
    alignment : int
        Reservations are rounded up to a multiple of this many bytes.
    latency : float or None
        Measured seconds until the first byte; None if it was not measured.
    read_bandwidth, write_bandwidth : float or None
        Measured bytes per second; None if it was not measured.
    """

    name: str
    kind: str
    capacity: int
    alignment: int
    latency: float | None = None
    read_bandwidth: float | None = None
    write_bandwidth: float | None = None


class Tier(ABC):
    """Base class of tiers, kinds of memory with a capacity, a latency and a bandwidth.

    The constructor of a tier checks its arguments and does nothing else; :meth:`open` acquires the resources and
    :meth:`close` releases them. Both may be called repeatedly. A closed tier can be opened again, and is then empty.
    All methods are safe to call from several threads.
    """

    @property
    @abstractmethod
    def info(self) -> TierInfo:
        """Description of the tier, available even before the tier is opened."""

    @property
    def in_process(self) -> bool:
        """True if the bytes never leave the memory of this process. The default is False.

        If this is False, a pool verifies the bytes that it reads: it wraps the tier in `Verified`, unless the tier
        verifies them itself.
        """
        return False

    @abstractmethod
    def open(self) -> None:
        """Acquire the tier's resources, such as memory or a file; opening an open tier does nothing.

        Raises
        ------
        ConfigError
            The resources are not available as configured (path not writable, more memory than the machine has).
        PoolFileError
            The file is in use, is no pool file, or has a newer version.
        """

    @abstractmethod
    def close(self) -> None:
        """Wait for transfers that are under way, then release the resources; closing a closed tier does nothing."""

    @abstractmethod
    def reserve(self, nbytes: int) -> Extent:
        """Reserve an extent of `nbytes` bytes (at least 1).

        Raises
        ------
        TierFullError
            There is no room; nothing was reserved.
        """

    @abstractmethod
    def free(self, extent: Extent) -> None:
        """Free an extent. The caller must have no transfer of this extent under way.

        Raises
        ------
        ValueError
            The extent is not reserved (freed twice, or never reserved).
        """

    @property
    @abstractmethod
    def reserved(self) -> int:
        """Bytes reserved at the moment, including alignment."""

    @abstractmethod
    def read_into(self, extent: Extent, into: memoryview) -> None:
        """Read the whole extent into a writable, contiguous buffer of exactly ``extent.nbytes`` bytes.

        The tier does not use the buffer after the call has returned. Several threads may transfer different extents at
        the same time; the caller orders the transfers of one extent.

        Raises
        ------
        TierError
            The read failed (`TierTimeoutError`: it took too long); the buffer's bytes are unspecified.
        ValueError
            The buffer is read-only, not contiguous or of another size, or the tier has no such extent.
        """

    @abstractmethod
    def write_from(self, extent: Extent, data: memoryview) -> None:
        """Write the whole extent from a contiguous buffer of exactly ``extent.nbytes`` bytes.

        The tier does not use the buffer after the call has returned.

        Raises
        ------
        TierError
            The write failed (`TierTimeoutError`: it took too long); the extent's bytes are unspecified.
        ValueError
            The buffer is not contiguous or of another size, or the tier has no such extent.
        """

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@runtime_checkable
class HasPort(Protocol):
    """A tier with a native data path."""

    @property
    def port(self) -> Port:
        """The native port of the tier, valid while the tier is open; native threads move bytes through it."""
        ...


@runtime_checkable
class HasNotes(Protocol):
    """A tier that can report conditions that do not stop the tier, but that its user should change."""

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence about each condition, without the tier's name; `Pool.explain` shows these sentences."""
        ...


@runtime_checkable
class HoldsMemory(Protocol):
    """A tier whose bytes are memory of this host."""

    @property
    def touched(self) -> int:
        """Number of the tier's bytes that may have been used; the system may back only these with memory."""
        ...


@runtime_checkable
class Mapped(Protocol):
    """A tier whose space is one range of this process's memory, in which each extent's bytes are stored unchanged.

    Code that reads or writes this memory directly bypasses the tier. So a wrapper that checks, changes or delays bytes
    must not be `Mapped`.
    """

    def address(self, offset: int) -> int:
        """Return the address in memory of the byte at `offset` of the tier's space, valid until the tier is closed.

        Raises
        ------
        TierError
            The tier is not open.
        """
        ...


@runtime_checkable
class Verifies(Protocol):
    """A tier that verifies by itself the bytes that it reads. A pool does not wrap such a tier in `Verified`."""

    @property
    def tracked(self) -> int:
        """Number of extents whose checksum the tier knows."""
        ...
