"""A tier in the memory of other processes and hosts, striped over leases from several nodes.

Each node lends the same number of bytes. The tier keeps a checksum of each extent that is written, and compares it with
the bytes that are read. So neither the network nor the node's memory can change a byte unnoticed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

from msgspec.structs import force_setattr

from farpool._native import ReplaceablePort, StripedPort, VerifiedPort
from farpool.abc.membership import MemberInfo, Membership
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.cluster.leases.location import is_pool
from farpool.cluster.members.named import named_nodes
from farpool.cluster.wire.access import AccessKey, client_key
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.channel import Channel, Transport
from farpool.cluster.wire.lease import Lease
from farpool.cluster.wire.settings import checked_timeout, checked_transport
from farpool.errors import ConfigError, TierError
from farpool.memory.tiers.leased import Leased
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.remote_members import Following, MemberPart, find_address, refuse_twins, usable
from farpool.memory.tiers.remote_nodes import Contact, Part, borrow, free_bytes, give_back, port_to
from farpool.memory.tiers.space import CACHE_LINE_BYTES, ExtentSpace
from farpool.memory.tiers.spec import TierSpec
from farpool.memory.tiers.striped import STRIPE
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["STRIPE", "Remote", "RemoteSpec", "node_addresses"]


class Remote(PortTier):
    """A tier in memory that nodes lend (``farpool node``).

    The bytes are spread over all nodes in stripes of 1 MiB. When the tier is opened, either all nodes lend their parts
    or none does. When it is closed, the nodes get their parts back. If the program ends without closing the tier, the
    nodes get their parts back soon afterwards. A node that is restarted still has its part. If the node is ephemeral, a
    restart loses the bytes, and reading them is an error. The tier verifies its reads, so a pool does not wrap it in
    `Verified`.

    A tier over a registry or a `Membership` follows the list of members while the tier is open. A member that gets a
    new address keeps its part. If a member drains or leaves, its part is copied to another member while transfers go
    on, and `nodes` then shows the new member. If no member has room for the part, the part stays, and `notes` and a
    warning report that. A new member receives only the parts of members that leave: the tier keeps its size and its
    number of parts until it is closed.

    Parameters
    ----------
    *nodes : str or Membership
        Addresses, for example ``"tcp://10.0.0.7:7471"``; or the address of the registry in which the nodes register,
        like ``"etcd://10.0.0.1:2379"``; or one `Membership`, such as `farpool.StaticMembers`. Without any, the
        environment names them (``FARPOOL_NODES``, or else ``FARPOOL_POOL``).
    size : int or str, optional
        Bytes on all nodes together, or a size such as ``"8GiB"``; rounded up to whole stripes on each node. With None,
        each node lends the same number of bytes: as many as are free on the node with the least free memory. The tier
        asks the nodes for this number when it first needs it.
    name : str
        Name of the tier.
    key : AccessKey or str, optional
        Access key for nodes that require one; a string is ``NAME:SECRET``. With None, the key is read from the
        environment variable ``FARPOOL_KEY`` or from the file that ``FARPOOL_KEY_FILE`` names.
    timeout : float
        Seconds within which a node must answer when the tier is opened, and for each piece of a transfer. When the tier
        is opened, a node gets one additional second for each 512 MiB, because it backs its part with memory before it
        answers.
    transport : str
        ``mapped`` maps the memory of nodes on this host, ``tcp`` sends every byte over a connection, ``auto`` maps
        if that is possible. The name of a fabric such as ``nixl`` selects one-sided reads and writes (docs/nixl.md).

    Raises
    ------
    ConfigError
        No node is given, a node is given twice, or a setting is wrong. The message names the node or the setting.
    """

    def __init__(
        self,
        *nodes: str | Membership,
        size: int | str | None = None,
        name: str = "remote",
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
    ) -> None:
        super().__init__()
        self._name = _checked_name(name)
        self._named = named = named_nodes(nodes, f"nodes of {name}")
        self._follows = bool(named.registry) or named.membership is not None
        self._membership = named.membership
        """The list that the tier follows; the list of a registry only while the tier is open."""
        self._addresses = () if self._follows else node_addresses(named.addresses, name)
        self._size = None if size is None else _checked_size(size, name)
        self._timeout = checked_timeout(timeout, f"timeout of {name}")
        self._transport = checked_transport(transport, f"transport of {name}")
        self._key = None if key is None else client_key(key)
        self._known: TierInfo | None = None
        if self._size is not None and not self._follows:
            self._known = self._info_of(_share(self._size, len(self._addresses)), len(self._addresses))
        self._space: ExtentSpace | None = None
        self._parts: list[Part] = []
        self._contacts: list[Contact] = []
        self._verified: VerifiedPort | None = None
        self._owner = 0
        self._high = 0

    @property
    def info(self) -> TierInfo:
        """Description of the tier. If no size is configured, the first use asks the nodes for their free memory.

        Raises
        ------
        ConfigError
            A node does not answer, or the list of members has no member that may lend memory.
        """
        if (known := self._known) is not None:
            return known
        with self._lifecycle:
            # Another thread may have asked the nodes while this one waited for the lock.
            if self._known is not None:
                return self._known
            with self._list() as membership:
                members = self._present(membership)
            if self._size is not None:  # not remembered, because the list may change before the tier is opened
                return self._info_of(_share(self._size, len(members)), len(members))
            channels = self._ways(members)
            try:
                self._known = self._info_of(self._free_share(channels), len(members))
            finally:
                for channel in channels:
                    channel.close()
            return self._known

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes that have a part; while the tier is closed, addresses of all nodes that would get one.

        When the address of a draining member is not listed here any more, that member may be stopped.
        """
        parts = self._parts
        if parts:
            return tuple(part.channel.name for part in parts)
        with self._list() as membership:
            return tuple(info.addresses[0] for info in self._present(membership))

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each part that cannot move, or reason why the list may be old; `Pool.explain` shows them.

        A part should move if its member drains or has left the list, and cannot if no other member has room.
        """
        listed = self._membership
        return (
            *[note for contact in self._contacts for note in contact.notes],
            *(() if listed is None else listed.notes),
        )

    @property
    def mapped(self) -> tuple[bool, ...]:
        """For each node, True if its part is mapped into this process; empty while the tier is closed."""
        return tuple(part.lease.address is not None for part in self._parts)

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""
        port = self._verified
        return 0 if port is None else port.tracked

    @property
    def touched(self) -> int:
        """Bytes of mapped memory up to the end of the highest extent that was ever reserved. The nodes own it."""
        mapped = self.mapped
        return self._high * sum(mapped) // len(mapped) if mapped else 0

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
                f"{self._name}: the memory was lent to the process that opened the tier and this one was forked off "
                "it; call close() and open() here",
                tier=self._name,
            )
        return port

    @property
    def reserved(self) -> int:
        space = self._space
        return 0 if space is None else space.reserved

    def reserve(self, nbytes: int) -> Extent:
        with self._lifecycle:
            self.port  # noqa: B018 - raises if the tier is closed
            extent = self._extents().reserve(nbytes)
            self._high = max(self._high, extent.offset + extent.nbytes)
            return extent

    def free(self, extent: Extent) -> None:
        # reserve() must not come between the two steps, or the next owner of this offset would lose its checksum.
        with self._lifecycle:
            self._extents().free(extent)
            if self._verified is not None:
                self._verified.forget(extent.offset)

    def _open_port(self) -> Port:
        membership = self._named.open(self._timeout) if self._follows else None
        try:
            port = self._borrow_from(self._present(membership), membership)
        except BaseException:
            self._named.close(membership)
            raise
        self._membership = membership
        return port

    def _borrow_from(self, members: list[MemberInfo], membership: Membership | None) -> Port:
        """Borrow a part from each of these members, or from none, and make the tier's port over them."""
        channels = self._ways(members)
        leases: list[Lease] = []
        contacts: list[Contact] = []
        try:
            share = self._free_share(channels) if self._size is None else _share(self._size, len(members))
            leases = borrow(channels, share, self._name, self._timeout)
            parts = self._parts_of(members, channels, leases)
            port = StripedPort(self._name, [part.port for part in parts], stripe=STRIPE, share=share)
            contacts.append(Contact(self, parts, self._timeout))
            if membership is not None:
                contacts.append(self._following(parts, membership))
        except BaseException:
            for contact in contacts:
                contact.end()
            give_back(leases, time.monotonic() + self._timeout)
            for channel in channels:
                channel.close()
            raise
        self._known = self._info_of(share, len(parts))
        self._space = ExtentSpace(self._name, self._known.capacity, CACHE_LINE_BYTES)
        self._parts, self._contacts, self._owner = parts, contacts, os.getpid()
        self._verified = VerifiedPort(port, self._name)
        return self._verified

    def _parts_of(self, members: list[MemberInfo], channels: list[Channel], leases: list[Lease]) -> list[Part]:
        """Make a part for each lease. If the tier follows a list of members, parts can move to other nodes."""
        parts: list[Part] = []
        for info, channel, lease in zip(members, channels, leases, strict=True):
            port = port_to(channel, lease, self._name, self._timeout)
            if not self._follows:
                parts.append(Part(channel, lease, port))
            else:
                movable = ReplaceablePort(self._name, port, nbytes=lease.nbytes, chunk=STRIPE)
                parts.append(MemberPart(channel, lease, movable, info))
        if self._follows:
            refuse_twins(channels, self._name)
        return parts

    def _following(self, parts: list[Part], membership: Membership) -> Following:
        members = cast("list[MemberPart]", parts)
        return Following(self, members, membership, self._connect(), self._name, self._timeout)

    def _close_port(self) -> None:
        contacts, self._contacts = self._contacts, []
        parts, self._parts = self._parts, []
        self._verified = self._space = None
        self._high = 0
        membership, self._membership = self._membership, self._named.membership
        if os.getpid() != self._owner:
            self._named.close(membership)
            return  # threads, leases and connections belong to the parent process
        # The threads end first, because they may connect again or move a part to a new lease.
        for contact in reversed(contacts):
            contact.end()
        self._named.close(membership)
        give_back([part.lease for part in parts], time.monotonic() + self._timeout)
        for part in parts:
            part.channel.close()

    def _check_extent(self, extent: Extent) -> None:
        self._extents().require(extent)

    def _extents(self) -> ExtentSpace:
        if self._space is None:
            raise ValueError(f"{self._name}: no extent is reserved, because the tier is not open")
        return self._space

    @contextlib.contextmanager
    def _list(self) -> Iterator[Membership | None]:
        """Provide the list of members in the block; None over addresses.

        A closed tier opens the registry for the time of the block.
        """
        if self._membership is not None or not self._follows:
            yield self._membership
            return
        membership = self._named.open(self._timeout)
        try:
            yield membership
        finally:
            self._named.close(membership)

    def _present(self, membership: Membership | None) -> list[MemberInfo]:
        """Return the nodes that may lend memory now, as entries of a list of members."""
        if membership is not None:
            return usable(membership, self._name)
        return [MemberInfo((str(address),)) for address in self._addresses]

    def _connect(self) -> Callable[[str], Channel]:
        """Make the function that returns a channel to an address. The function has no reference to the tier."""
        # A bound method would keep the tier alive through its contact's thread, so it would never be collected.
        return partial(_channel_to, client_key(self._key), self._transport)

    def _ways(self, members: Sequence[MemberInfo]) -> list[Channel]:
        connect = self._connect()
        channels = [connect(info.addresses[0]) for info in members]
        if self._follows:
            for channel, info in zip(channels, members, strict=True):
                channel.expected = info.identity
                find_address(channel, info, self._timeout)
        return channels

    def _free_share(self, channels: Sequence[Channel]) -> int:
        """Bytes that each node lends: the free bytes of the node with the fewest, rounded down to whole stripes."""
        free = free_bytes(channels, self._name, time.monotonic() + self._timeout)
        if free < STRIPE:
            raise ConfigError(
                f"nodes of {self._name}: one of {', '.join(channel.name for channel in channels)} has only "
                f"{format_size(free)} free, expected {format_size(STRIPE)} or more; start a node with more memory or "
                "leave it out",
                setting="nodes",
            )
        return free - free % STRIPE

    def _info_of(self, share: int, parts: int) -> TierInfo:
        return TierInfo(self._name, "remote", share * parts, CACHE_LINE_BYTES)


def _channel_to(key: AccessKey | None, transport: Transport, address: str) -> Channel:
    return Channel(parse_address(address), key=key, transport=transport)


def node_addresses(nodes: Iterable[str], name: str) -> tuple[Address, ...]:
    """Parse and check the addresses of a tier's nodes.

    Raises
    ------
    ConfigError
        There is no address, an entry is not a valid address, or an address appears twice. The message names the entry.
    """
    what = f"nodes of {name}"
    addresses = tuple(parse_address(node, what) for node in nodes)
    if not addresses:
        raise ConfigError(
            f"{what} are missing, expected one or more, for example 'tcp://10.0.0.7:7471'", setting="nodes"
        )
    for address in addresses:
        if addresses.count(address) > 1:
            raise ConfigError(f"{what} has {address} twice, expected each node once", setting="nodes")
    return addresses


def _checked_name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"name is {name!r}, expected text, for example 'remote'", setting="name")
    return name


def _checked_size(size: int | str, name: str) -> int:
    nbytes = parse_size(size, f"size of {name}")
    if nbytes < 1:
        raise ConfigError(f"size of {name} is {size!r}, expected 1 byte or more, for example '8GiB'")
    return nbytes


def _share(nbytes: int, nodes: int) -> int:
    """Return the bytes on each node: the size divided by the number of nodes, rounded up to whole stripes."""
    return -(-nbytes // (nodes * STRIPE)) * STRIPE


class RemoteSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a `Remote`, a tier in memory of other processes and hosts.

    Attributes
    ----------
    nodes : sequence of str or str
        Addresses of the nodes, as a sequence or as one text with commas, which becomes a tuple of full addresses; or
        the address of their registry; or the address of a pool's managers, ``farpool://...``, for a `Leased` tier.
    size : int, str or None
        As in `Remote`; None for as much memory as the nodes have free.
    key : str, optional
        As in `Remote`. The spec's ``repr`` does not show it.
    timeout : float
        As in `Remote`.
    transport : str
        As in `Remote`.
    """

    kind: ClassVar[str] = "remote"
    short_form: ClassVar[str] = "nodes"
    typical_latency: ClassVar[float] = 3e-6

    nodes: Sequence[str] | str
    size: int | str | None = None
    key: str | None = None
    timeout: float = 5.0
    transport: Transport = "auto"

    def __post_init__(self) -> None:
        name = self.name or self.kind
        if (location := self._location()) is not None:
            force_setattr(self, "nodes", (location,))
            super().__post_init__()
            return
        named = named_nodes(self.nodes, f"nodes of {name}")
        addresses = (named.registry,) if named.registry else node_addresses(named.addresses, name)
        force_setattr(self, "nodes", tuple(str(address) for address in addresses))
        super().__post_init__()

    def _location(self) -> str | None:
        """Return the address of a pool's managers; None if the nodes are named in another way."""
        nodes = self.nodes.strip() if isinstance(self.nodes, str) else self.nodes
        if isinstance(nodes, str):
            return nodes if is_pool(nodes) else None
        return nodes[0] if len(nodes) == 1 and is_pool(nodes[0]) else None

    def make_bare(self) -> Tier:
        if (location := self._location()) is not None:
            return Leased(
                location,
                size=self.size,
                name=self.name,
                key=self.key,
                timeout=self.timeout,
                transport=self.transport,
            )
        return Remote(
            *self.nodes,
            size=self.size,
            name=self.name,
            key=self.key,
            timeout=self.timeout,
            transport=self.transport,
        )

    def __repr__(self) -> str:
        return f"RemoteSpec({', '.join(f'{name}={value!r}' for name, value in self.__rich_repr__())})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        shown = {"nodes": self.nodes if self._location() else named_nodes(self.nodes).shown}
        return [(name, shown.get(name, value)) for name, value in super().__rich_repr__() if name != "key"]
