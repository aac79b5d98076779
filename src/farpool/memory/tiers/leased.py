"""A tier in memory that a pool's managers lease to this program: it renews the lease, grows it, and gives it back."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from functools import partial
from typing import TYPE_CHECKING

from farpool._native import StripedPort, VerifiedPort
from farpool.abc.tier import Extent, TierInfo
from farpool.cluster.leases.client import LeasedExtent, ManagerClient, client_token, holder_name
from farpool.cluster.leases.held import HeldLease
from farpool.cluster.leases.holder import LeaseHolder
from farpool.cluster.leases.location import parse_location
from farpool.cluster.wire.access import AccessKey, client_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel, Transport
from farpool.cluster.wire.settings import BUILT_IN, checked_timeout
from farpool.errors import ConfigError, ManagerError, NodeError, TierError, TierFullError
from farpool.memory.tiers.leased_parts import LeasedParts, Slot
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.space import CACHE_LINE_BYTES, ExtentSpace
from farpool.memory.tiers.striped import STRIPE
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["Leased"]

_EXTENTS = 32
"""Most extents of a tier's lease. A lease may have 40, and has a second one for each that moves."""
_SLOT_BYTES = 16 << 30
"""Most bytes by which a lease grows at once. While a node backs them with memory, it takes no later ticket."""
_FIRST_BYTES = 64 << 20
_GROWTHS = 3
"""Attempts to grow for one reservation. A manager may lend the bytes in several parts, each too small."""
_RETRY_S = 2.0
"""Seconds after a refusal before the tier asks for more memory again."""


class Leased(PortTier):
    """A tier in memory that a manager of a pool leases to this program (docs/leases.md).

    With a size, the whole memory is leased when the tier is opened. Without one, the lease begins with 64 MiB and grows
    as it is needed. A thread renews the lease. If a lender wants memory back, the thread has it replaced by memory of
    another member and copies the bytes there while transfers go on. The lease ends when the tier is closed; if the
    program ends without that, the lease expires. While no manager answers, the memory can be used until the last ticket
    expires. The tier verifies its reads, so a pool does not wrap it in `Verified`.

    With ``copies=N`` in the address, N members have each byte. If one of them fails, transfers go on with the others,
    and the thread makes the copy again: on the same member if that has come back, or else on another one.

    Parameters
    ----------
    location : str
        The managers and the terms, for example ``"farpool://10.0.0.7:7470?tenant=a"``.
    size : int or str, optional
        Bytes, or a size such as ``"8GiB"``; None for the size in the address, or else for a lease that grows.
    name : str
        Name of the tier.
    key : AccessKey or str, optional
        Access key for the nodes, as in `Remote`.
    timeout : float
        Seconds within which a manager and a node must answer, and for each piece of a transfer.
    transport : str
        ``mapped``, ``tcp`` or ``auto``, as in `Remote`.

    Raises
    ------
    ConfigError
        The address or a setting is wrong. The message names it.
    """

    def __init__(
        self,
        location: str,
        *,
        size: int | str | None = None,
        name: str = "remote",
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
    ) -> None:
        super().__init__()
        self._name = name
        self._location = parse_location(location, f"nodes of {name}")
        if transport not in BUILT_IN:
            raise ConfigError(
                f"transport of {name} is {transport!r}, expected one of {', '.join(BUILT_IN)}: nodes do not lend the "
                "extents of a lease over a fabric",
                setting="transport",
            )
        self._transport = transport
        nbytes = self._location.size if size is None else parse_size(size, f"size of {name}")
        self._size = _whole_stripes(nbytes) if nbytes else 0
        self._slot_bytes = self._size or _SLOT_BYTES
        self._slots = _EXTENTS // self._location.copies
        self._timeout = checked_timeout(timeout, f"timeout of {name}")
        self._key = None if key is None else client_key(key)
        self._owner = 0
        self._spaces: dict[int, ExtentSpace] = {}
        """Reservations in each slot that has an extent."""
        self._highs: dict[int, int] = {}
        self._parts: LeasedParts | None = None
        self._holder: LeaseHolder | None = None
        self._verified: VerifiedPort | None = None
        self._refusal = ""
        self._grow_at = 0.0

    @property
    def info(self) -> TierInfo:
        """Description of the tier. Without a size, the capacity is the most to which the lease may grow."""
        return TierInfo(self._name, "remote", self._size or self._slots * _SLOT_BYTES, CACHE_LINE_BYTES)

    @property
    def lease(self) -> str:
        """Number of the lease; empty while the tier is closed."""
        holder = self._holder
        return "" if holder is None else holder.lease

    @property
    def leased(self) -> int:
        """Bytes that are leased now, without further copies."""
        parts = self._parts
        return 0 if parts is None else sum(slot.nbytes for slot in parts.slots)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes that have a part of the bytes."""
        parts = self._parts
        return () if parts is None else parts.nodes

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence about each condition that a person should know; `Pool.explain` shows them."""
        holder, parts, refusal = self._holder, self._parts, self._refusal
        return (
            *(() if holder is None else holder.notes),
            *(() if parts is None else parts.notes),
            *((f"the lease could not grow: {refusal}",) if refusal else ()),
        )

    @property
    def mapped(self) -> tuple[bool, ...]:
        """For each part and copy, True if it is mapped into this process; empty while the tier is closed."""
        parts = self._parts
        return () if parts is None else parts.mapped

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""
        port = self._verified
        return 0 if port is None else port.tracked

    @property
    def touched(self) -> int:
        """Bytes of mapped memory up to the end of the highest extent that was ever reserved. The nodes own it."""
        return self._location.copies * sum(self._highs.values()) if all(self.mapped) else 0

    @property
    def port(self) -> Port:
        """The native port of the tier, valid while it is open and in the process that opened it.

        Raises
        ------
        TierError
            The tier is not open, or the process is a fork of the one that opened it.
        """
        port = super().port
        if os.getpid() != self._owner:
            raise TierError(
                f"{self._name}: the memory was leased to the process that opened the tier and this one was forked off "
                "it; call close() and open() here",
                tier=self._name,
            )
        return port

    @property
    def reserved(self) -> int:
        return sum(space.reserved for space in list(self._spaces.values()))

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            if nbytes < 1:
                raise ValueError(f"{self._name}: an extent has at least 1 byte, got {nbytes}")
            for _ in range(_GROWTHS):
                extent = self._reserve_in_slots(nbytes)
                if extent is not None:
                    return extent
                if not self._grow(nbytes):
                    break
            extent = self._reserve_in_slots(nbytes)
            if extent is None:
                raise self._full(nbytes)
            return extent

    def free(self, extent: Extent) -> None:
        # reserve() must not come between the two steps, or the next owner of this offset would lose its checksum.
        with self._lifecycle:
            space, inside = self._inside(extent)
            space.free(inside)
            if self._verified is not None:
                self._verified.forget(extent.offset)

    def _reserve_in_slots(self, nbytes: int) -> Extent | None:
        for index, space in self._spaces.items():
            try:
                extent = space.reserve(nbytes)
            except TierFullError:
                continue
            self._highs[index] = max(self._highs.get(index, 0), extent.offset + nbytes)
            return Extent(index * self._slot_bytes + extent.offset, nbytes)
        return None

    def _full(self, nbytes: int) -> TierFullError:
        why = f": {self._refusal}" if self._refusal else ""
        return TierFullError(
            f"{self._name}: no room for {nbytes} bytes: {self.reserved} of the {self.leased} bytes that are leased are "
            f"reserved{why}",
            tier=self._name,
        )

    def _grow(self, nbytes: int) -> bool:
        """Lease more memory, if the lease may grow; return False if that failed."""
        holder = self._holder
        needed = _whole_stripes(nbytes)
        if self._size or holder is None or needed > self._slot_bytes or time.monotonic() < self._grow_at:
            return False
        # Doubled each time, so that a large lease has few parts.
        wanted = max(needed, min(max(self.leased, _FIRST_BYTES), self._slot_bytes))
        for size in dict.fromkeys((wanted, needed)):
            try:
                self._add(holder, holder.grow(size))
            except (ManagerError, NodeError, TierFullError) as error:
                self._refusal = str(error)
            else:
                self._refusal = ""
                return True
        self._grow_at = time.monotonic() + _RETRY_S
        return False

    def _add(self, holder: LeaseHolder, extents: tuple[LeasedExtent, ...]) -> None:
        """Use new extents; if that fails, give back those that are not used."""
        parts = self._parts
        assert parts is not None
        groups: defaultdict[int, list[LeasedExtent]] = defaultdict(list)
        for one in sorted(extents, key=lambda one: one.replica):
            groups[one.part].append(one)
        try:
            if len(groups) > self._slots - len(self._spaces) or any(one.bytes > self._slot_bytes for one in extents):
                raise TierFullError(
                    f"{self._name}: the lease has more than {self._slots} parts; open a second tier", tier=self._name
                )
            for member in dict.fromkeys(one.member for one in extents):
                holder.show(member, tuple(one for one in extents if one.member == member))
            for part in sorted(groups):
                index = next(index for index in range(self._slots) if index not in self._spaces)
                parts.use(parts.slots[index], tuple(groups[part]))
                self._spaces[index] = ExtentSpace(self._name, groups[part][0].bytes, CACHE_LINE_BYTES)
        except BaseException:
            used = {one.key for slot in parts.slots for one in slot.extents}
            unused = tuple(one for one in extents if one.key not in used)
            holder.drop(unused)
            parts.drop(unused)
            raise

    def _open_port(self) -> Port:
        location = self._location
        key = client_key(self._key)
        client = ManagerClient(location, holder=holder_name(location, key), token=client_token(), timeout=self._timeout)
        slots = tuple(Slot(self._name) for _ in range(self._slots))
        parts = LeasedParts(self._name, slots, partial(_channel_to, key, self._transport), self._timeout)
        sent = time.monotonic()
        try:
            granted = client.grant(self._size or _FIRST_BYTES)
        except ManagerError as error:
            raise ConfigError(f"nodes of {self._name}: {error}", setting="nodes") from error
        held = HeldLease(granted, sent=sent, reclaim=location.reclaim_ms / 1000)
        new = held.take()
        holder = LeaseHolder(client, held, parts, owner=self, name=self._name, timeout=self._timeout)
        self._spaces, self._highs, self._refusal, self._grow_at = {}, {}, "", 0.0
        self._parts = parts
        try:
            self._add(holder, new)
            ports = [slot.port for slot in slots]
            port = StripedPort(self._name, ports, stripe=self._slot_bytes, share=self._slot_bytes)
        except (NodeError, TierFullError) as error:
            self._abandon(holder)
            raise ConfigError(
                f"nodes of {self._name}: {format_size(self._size or _FIRST_BYTES)} were leased, but cannot be used: "
                f"{error}",
                setting="nodes",
            ) from error
        except BaseException:
            self._abandon(holder)
            raise
        self._holder, self._owner = holder, os.getpid()
        self._verified = VerifiedPort(port, self._name)
        return self._verified

    def _abandon(self, holder: LeaseHolder) -> None:
        holder.close()
        self._parts, self._spaces = None, {}

    def _close_port(self) -> None:
        holder, self._holder = self._holder, None
        self._parts, self._verified = None, None
        self._spaces, self._highs, self._refusal = {}, {}, ""
        if holder is not None:
            holder.close()

    def _check_extent(self, extent: Extent) -> None:
        space, inside = self._inside(extent)
        space.require(inside)

    def _inside(self, extent: Extent) -> tuple[ExtentSpace, Extent]:
        """Return the reservations of the extent's slot, and the extent as the slot knows it."""
        index, offset = divmod(extent.offset, self._slot_bytes)
        space = self._spaces.get(index)
        if space is None:
            raise ValueError(f"{self._name}: {extent} is not reserved (freed already, or of another tier)")
        return space, Extent(offset, extent.nbytes)


def _channel_to(key: AccessKey | None, transport: Transport, address: str) -> Channel:
    return Channel(parse_address(address), key=key, transport=transport)


def _whole_stripes(nbytes: int) -> int:
    return -(-nbytes // STRIPE) * STRIPE
