"""A tier in the memory of other processes and hosts, striped over leases from several nodes.

Each node lends the same number of bytes. The tier keeps a checksum of each extent that is written and compares it when
the bytes are read, so neither the network nor the node's memory can change a byte unnoticed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec.structs import force_setattr

from farpool._native import PythonPort, RemotePort, StripedPort, VerifiedPort
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.cluster.wire.access import AccessKey, client_key
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.channel import Channel, Transport
from farpool.cluster.wire.lease import Lease
from farpool.cluster.wire.settings import checked_timeout, checked_transport
from farpool.errors import ConfigError, TierError
from farpool.memory.tiers.port_tier import PortTier
from farpool.memory.tiers.remote_nodes import Contact, borrow, free_bytes, give_back
from farpool.memory.tiers.remote_one_sided import OneSidedLease
from farpool.memory.tiers.space import CACHE_LINE, ExtentSpace
from farpool.memory.tiers.spec import TierSpec
from farpool.memory.tiers.striped import STRIPE
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool._native import Port

__all__ = ["STRIPE", "Remote", "RemoteSpec", "node_addresses"]


class Remote(PortTier):
    """A tier in memory that nodes lend (``farpool node``).

    The bytes are spread over all nodes in stripes of 1 MiB. At open, either all nodes lend their parts or none does. At
    close they get the parts back; if the program ends without a close, they get them back soon afterwards. A node that
    is restarted still has its part, unless it is ephemeral: then the bytes are lost, and reading them is an error. The
    tier verifies its reads, so a pool does not wrap it in `Verified`.

    Parameters
    ----------
    *nodes : str
        Addresses, for example ``"tcp://10.0.0.7:7471"``.
    size : int or str, optional
        Bytes on all nodes together, or a size such as ``"8GiB"``; rounded up to whole stripes on each node. None takes
        as many bytes from each node as the node with the least free memory has free. The tier asks the nodes when it
        first needs this number.
    name : str
        Name of the tier.
    key : AccessKey or str, optional
        Access key for nodes that ask for one; a string is ``NAME:SECRET``. None takes the key in the environment
        variable ``FARPOOL_KEY`` or in the file that ``FARPOOL_KEY_FILE`` names.
    timeout : float
        Seconds within which a node must answer: at open, and for each piece of a transfer. At open a node gets one
        additional second for each 512 MiB, because it backs them with memory before it answers.
    transport : str
        ``mapped`` maps the memory of nodes on this host, ``tcp`` sends every byte over a connection, ``auto`` maps
        if that is possible, and the name of a fabric such as ``nixl`` reads and writes one-sided (docs/nixl.md).

    Raises
    ------
    ConfigError
        No node is given, a node is given twice, or a setting is wrong. The message names the node or the setting.
    """

    def __init__(
        self,
        *nodes: str,
        size: int | str | None = None,
        name: str = "remote",
        key: AccessKey | str | None = None,
        timeout: float = 5.0,
        transport: Transport = "auto",
    ) -> None:
        super().__init__()
        self._name = _checked_name(name)
        self._addresses = node_addresses(nodes, name)
        self._wanted = None if size is None else _share(size, len(nodes), name)
        self._timeout = checked_timeout(timeout, f"timeout of {name}")
        self._transport = checked_transport(transport, f"transport of {name}")
        self._key = None if key is None else client_key(key)
        self._known = None if self._wanted is None else self._info_of(self._wanted)
        self._space: ExtentSpace | None = None
        self._channels: list[Channel] = []
        self._leases: list[Lease] = []
        self._verified: VerifiedPort | None = None
        self._contact: Contact | None = None
        self._owner = 0
        self._high = 0

    @property
    def info(self) -> TierInfo:
        """Description of the tier; without a configured size, the nodes are asked for their free memory, once.

        Raises
        ------
        ConfigError
            The nodes cannot be asked.
        """
        if (known := self._known) is not None:
            return known
        with self._lifecycle:
            if self._known is None:
                channels = self._ways()
                try:
                    self._known = self._info_of(self._free_share(channels, time.monotonic() + self._timeout))
                finally:
                    for channel in channels:
                        channel.close()
            return self._known

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes."""
        return tuple(str(address) for address in self._addresses)

    @property
    def mapped(self) -> tuple[bool, ...]:
        """For each node, True if its part is mapped into this process; empty while the tier is closed."""
        return tuple(lease.address is not None for lease in self._leases)

    @property
    def tracked(self) -> int:
        """Number of extents with a checksum."""
        port = self._verified
        return 0 if port is None else port.tracked

    @property
    def touched(self) -> int:
        """Bytes of mapped memory up to the end of the highest extent that was ever reserved. The nodes own them."""
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
        channels = self._ways()
        leases: list[Lease] = []
        try:
            share = self._wanted or self._free_share(channels, time.monotonic() + self._timeout)
            leases = borrow(channels, share, self._name, self._timeout)
            ports = [self._port_of(*pair) for pair in zip(channels, leases, strict=True)]
            port = StripedPort(self._name, ports, stripe=STRIPE, share=share)
            contact = Contact(self, channels, self._timeout)
        except BaseException:
            give_back(leases, time.monotonic() + self._timeout)
            for channel in channels:
                channel.close()
            raise
        self._known = self._info_of(share)
        self._space = ExtentSpace(self._name, self._known.capacity, CACHE_LINE)
        self._channels, self._leases, self._contact, self._owner = channels, leases, contact, os.getpid()
        self._verified = VerifiedPort(port, self._name)
        return self._verified

    def _port_of(self, channel: Channel, lease: Lease) -> Port:
        if channel.one_sided is not None:
            return PythonPort(OneSidedLease(channel.one_sided, lease.id, self._timeout))
        return RemotePort(self._name, lease.end(self._timeout), timeout=self._timeout)

    def _close_port(self) -> None:
        contact, self._contact = self._contact, None
        leases, self._leases = self._leases, []
        channels, self._channels = self._channels, []
        self._verified = self._space = None
        self._high = 0
        if os.getpid() != self._owner:
            return  # thread, leases and connections are the parent's
        if contact is not None:
            contact.end()
        give_back(leases, time.monotonic() + self._timeout)
        for channel in channels:
            channel.close()

    def _check_extent(self, extent: Extent) -> None:
        self._extents().require(extent)

    def _extents(self) -> ExtentSpace:
        if self._space is None:
            raise ValueError(f"{self._name}: no extent is reserved, because the tier is not open")
        return self._space

    def _ways(self) -> list[Channel]:
        key = client_key(self._key)
        return [Channel(address, key=key, transport=self._transport) for address in self._addresses]

    def _free_share(self, channels: list[Channel], deadline: float) -> int:
        """Bytes of whole stripes that fit into the free memory of each node."""
        free = free_bytes(channels, self._name, deadline)
        if free < STRIPE:
            raise ConfigError(
                f"nodes of {self._name}: one of {', '.join(self.nodes)} has only {format_size(free)} free, expected "
                f"{format_size(STRIPE)} or more; start a node with more memory or leave it out",
                setting="nodes",
            )
        return free - free % STRIPE

    def _info_of(self, share: int) -> TierInfo:
        return TierInfo(self._name, "remote", share * len(self._addresses), CACHE_LINE)


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


def _share(size: int | str, nodes: int, name: str) -> int:
    """Bytes on each node: the size divided by the number of nodes, rounded up to whole stripes."""
    nbytes = parse_size(size, f"size of {name}")
    if nbytes < 1:
        raise ConfigError(f"size of {name} is {size!r}, expected 1 byte or more, for example '8GiB'")
    return -(-nbytes // (nodes * STRIPE)) * STRIPE


class RemoteSpec(TierSpec, frozen=True, kw_only=True):
    """Specification of a tier in memory of other processes and hosts, a `Remote`.

    Attributes
    ----------
    nodes : sequence of str or str
        Addresses of the nodes, or one text with commas between them; becomes a tuple of full addresses.
    size : int, str or None
        As in `Remote`: None takes the memory that the nodes have free.
    key : str, optional
        As in `Remote`; not shown in the spec's text.
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
        nodes = self.nodes.replace(",", " ").split() if isinstance(self.nodes, str) else self.nodes
        addresses = node_addresses(nodes, self.name or self.kind)
        force_setattr(self, "nodes", tuple(str(address) for address in addresses))
        super().__post_init__()

    def make_bare(self) -> Tier:
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
        return [(name, value) for name, value in super().__rich_repr__() if name != "key"]
