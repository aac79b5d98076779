"""The extents of a lease at their nodes: ports to them, and copies from one to another while transfers go on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from farpool._native import CopiesPort, PythonPort, ReplaceablePort
from farpool.abc.membership import MemberInfo
from farpool.cluster.leases.client import LeasedExtent
from farpool.cluster.wire.address import parse_address
from farpool.errors import NodeError, TicketError, TierError
from farpool.memory.tiers.remote_members import find_address
from farpool.memory.tiers.remote_nodes import BACKED_PER_SECOND, PERIOD_S, give_back, port_to
from farpool.memory.tiers.striped import STRIPE

if TYPE_CHECKING:
    from farpool._native import Port
    from farpool.cluster.wire.channel import Channel
    from farpool.cluster.wire.lease import Lease

__all__ = ["LeasedParts", "Slot"]

_PAUSE_S = 0.05
"""Seconds between two attempts to show a new ticket to a node that does not know the manager's key yet."""


class _Nothing:
    """The place of a slot's bytes while the slot has no extent."""

    def __init__(self, tier: str) -> None:
        self._tier = tier

    def _refuse(self, *_: Any) -> None:
        raise TierError(f"{self._tier}: no memory was leased for this offset", tier=self._tier)

    read_into = write_from = _refuse


class Slot:
    """A range of the tier's space, which one extent at a time provides, or several with the same bytes.

    Parameters
    ----------
    tier : str
        Name of the tier, for errors.

    Attributes
    ----------
    port : ReplaceablePort
        Port to `movable`; transfers through it fail until there is one.
    movable : ReplaceablePort or None
        Port to the extents.
    extents : tuple of LeasedExtent
        The extents, one for each copy; empty for a slot that is not used.
    copies : CopiesPort or None
        Port to the copies, in the order of `extents`, if there are several.
    """

    def __init__(self, tier: str) -> None:
        # It never copies, so it need not know how many bytes the extent will have.
        self.port = ReplaceablePort(tier, PythonPort(_Nothing(tier)), nbytes=1, chunk=1)
        self.movable: ReplaceablePort | None = None
        self.extents: tuple[LeasedExtent, ...] = ()
        self.copies: CopiesPort | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the slot; 0 if it is not used."""
        return self.extents[0].bytes if self.extents else 0


class _Claimed:
    """An extent that the node lets this program use."""

    def __init__(self, channel: Channel, lease: Lease, port: Port) -> None:
        self.channel, self.lease, self.port = channel, lease, port


class LeasedParts:
    """A tier's slots, and the nodes that lend their memory. The tier and its lease's thread may call it.

    Parameters
    ----------
    tier : str
        Name of the tier, for errors.
    slots : tuple of Slot
        All slots that the tier may ever use.
    connect : callable
        Returns a channel to the node at an address.
    timeout : float
        Seconds that a node may take for an answer.
    """

    def __init__(self, tier: str, slots: tuple[Slot, ...], connect: Callable[[str], Channel], timeout: float) -> None:
        self.slots = slots
        self._tier = tier
        self._connect = connect
        self._timeout = timeout
        # Protects the tables. Not held during calls to nodes.
        self._lock = threading.Lock()
        self._claiming: Counter[str] = Counter()
        """Number of threads that show a ticket to each member."""
        self._channels: dict[str, Channel] = {}
        self._unlisted: set[str] = set()
        """Members with a channel of which the manager knows no address any more."""
        self._claimed: dict[tuple[str, int], _Claimed] = {}
        self._remade: set[tuple[str, int]] = set()
        """Claimed extents that the node made again without their bytes: they need a new port."""

    @property
    def _used(self) -> Iterator[LeasedExtent]:
        return (one for slot in self.slots for one in slot.extents)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Addresses of the nodes that have a part of the bytes."""
        with self._lock:
            return tuple(self._channels[one.member].name for one in self._used)

    @property
    def mapped(self) -> tuple[bool, ...]:
        """For each part and copy, True if it is mapped into this process."""
        with self._lock:
            return tuple(self._claimed[one.key].lease.address is not None for one in self._used)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each part whose node lost its bytes."""
        return tuple(f"{one.shown} are lost: {why}" for one, why in self._emptied())

    def _emptied(self) -> list[tuple[LeasedExtent, str]]:
        """Return the extents whose nodes do not have their bytes any more, each with the reason."""
        with self._lock:
            emptied = {(member, one) for member, channel in self._channels.items() for one in channel.emptied}
            # A member without an address may still answer at its old one, until another node answers there.
            replaced = {member for member in self._unlisted if self._channels[member].stranger}
            return [
                *((one, "the node was started again without them") for one in self._used if one.key in emptied),
                *(
                    (one, "the node has left the pool, and another one is at its address")
                    for one in self._used
                    if one.member in replaced
                ),
            ]

    def faults(self) -> Mapping[tuple[str, int], str]:
        """Return the copies that are out of use while other copies of their bytes are in use, each with the reason."""
        by_key = {one.key: (slot, index) for slot in self.slots for index, one in enumerate(slot.extents)}
        for one, why in self._emptied():
            slot, index = by_key.get(one.key, (None, 0))
            if slot is None or slot.copies is None or not slot.copies.take_out(index, why):
                continue
            with self._lock:
                channel = self._channels.get(one.member)
                if channel is not None and one.number in channel.emptied:
                    channel.emptied.discard(one.number)
                    self._remade.add(one.key)
        return {
            one.key: why
            for slot in self.slots
            if (copies := slot.copies) is not None
            for one, why in zip(slot.extents, copies.faults, strict=True)
            if why
        }

    def claim(self, member: str, ticket: bytes, extents: tuple[LeasedExtent, ...]) -> None:
        """Show a ticket to a member, and make ports to the extents among `extents` that it lends and that have none.

        Raises
        ------
        NodeError
            The member does not answer, refuses the ticket or has no room.
        """
        own = {one.number: one for one in extents if one.member == member}
        with self._lock:
            self._claiming[member] += 1
        try:
            self._claim(ticket, own)
        finally:
            with self._lock:
                self._claiming[member] -= 1

    def _claim(self, ticket: bytes, own: dict[int, LeasedExtent]) -> None:
        channel = self._channel(next(iter(own.values())))
        # A node whose copies are out of use often does not answer, and the lease's thread has other things to do.
        is_away = own and {one.key for one in own.values()} <= self.faults().keys()
        deadline = time.monotonic() + (min(self._timeout, PERIOD_S) if is_away else self._timeout)
        with self._lock:
            known = self._claimed.keys() - self._remade
            new = {number: one for number, one in own.items() if one.key not in known}
        if new:
            # A node backs new memory with pages before it answers.
            deadline += sum(one.bytes for one in new.values()) / BACKED_PER_SECOND
            self._claim_new(channel, ticket, new, deadline)
        else:
            result = channel.call("claim", deadline, ticket=ticket)
            channel.emptied |= {number for number, _, _, made in result["extents"] if made and number in own}
        channel.ticket = ticket

    def _claim_new(self, channel: Channel, ticket: bytes, new: dict[int, LeasedExtent], deadline: float) -> None:
        for one in self._claims(channel, ticket, deadline):
            if (extent := new.get(one.number)) is not None:
                port = port_to(channel, one.lease, self._tier, self._timeout)
                with self._lock:
                    self._claimed[extent.key] = _Claimed(channel, one.lease, port)
                    self._remade.discard(extent.key)
        missing = [one for one in new.values() if one.key not in self._claimed]
        if missing:
            raise NodeError(f"{channel.name}: the ticket does not name {missing[0].shown}", node=channel.name)

    def _claims(self, channel: Channel, ticket: bytes, deadline: float) -> Any:
        """Show a ticket; try again for a while if the node may not know the manager's newest key yet."""
        while True:
            try:
                return channel.claim(ticket, deadline)
            except TicketError:
                if time.monotonic() + _PAUSE_S >= deadline:
                    raise
                time.sleep(_PAUSE_S)

    def use(self, slot: Slot, extents: tuple[LeasedExtent, ...]) -> None:
        """Use claimed extents, copies of the same bytes, for a slot that has none."""
        with self._lock:
            ports = [self._claimed[one.key].port for one in extents]
        copies = CopiesPort(self._tier, ports) if len(ports) > 1 else None
        movable = ReplaceablePort(self._tier, copies or ports[0], nbytes=extents[0].bytes, chunk=STRIPE)
        slot.port.set_target(movable, same_bytes=True)
        slot.port.replace()
        with self._lock:
            slot.extents, slot.copies, slot.movable = extents, copies, movable

    def move(self, old: LeasedExtent, new: LeasedExtent, go_on: Callable[[], bool]) -> bool:
        """Copy the bytes of `old` to `new`, which was claimed, and use `new` from then on.

        If another extent has a copy of the bytes, they may come from there, and `new` may be `old`. Transfers go on
        during the copy. Each chunk is read back and compared.

        Raises
        ------
        NodeError, TierError
            A node failed. The bytes stay.
        """
        slot, index = next(
            ((slot, at) for slot in self.slots for at, one in enumerate(slot.extents) if one.key == old.key), (None, 0)
        )
        if slot is None or slot.movable is None:
            raise TierError(f"{self._tier}: {old.shown} are not used", tier=self._tier)
        after = (*slot.extents[:index], new, *slot.extents[index + 1 :])
        with self._lock:
            ports = [self._claimed[one.key].port for one in after]
            source = self._claimed[old.key]
        copies = slot.copies
        if copies is not None:
            copies = CopiesPort(self._tier, ports, before=copies, fresh=index)
        port = slot.movable
        port.set_target(ports[index])
        with contextlib.ExitStack() as undo:
            undo.callback(port.drop_target)
            while port.copy_chunks():
                if not go_on():
                    return False
            port.replace(copies)
            undo.pop_all()
        with self._lock:
            slot.extents, slot.copies = after, copies
            if old.key == new.key:
                return True
            del self._claimed[old.key]
            self._remade.discard(old.key)
        # The lease's thread renews the lease next, so it may not wait long here.
        give_back([source.lease], time.monotonic() + min(self._timeout, PERIOD_S))
        self._close_idle(old.member)
        return True

    def drop(self, extents: tuple[LeasedExtent, ...]) -> None:
        """Forget extents, except the ones that a slot uses."""
        with self._lock:
            for key in {one.key for one in extents} - {one.key for one in self._used}:
                self._claimed.pop(key, None)
                self._remade.discard(key)
        for member in {one.member for one in extents}:
            self._close_idle(member)

    def close(self) -> None:
        """End the use of all extents. Idempotent."""
        with self._lock:
            claimed, self._claimed = list(self._claimed.values()), {}
            channels, self._channels = list(self._channels.values()), {}
            self._unlisted.clear()
            self._remade.clear()
            for slot in self.slots:
                slot.extents, slot.copies = (), None
        give_back([one.lease for one in claimed], time.monotonic() + self._timeout)
        for channel in channels:
            channel.close()

    def _channel(self, extent: LeasedExtent) -> Channel:
        """Return the channel to a member, which follows the member's addresses."""
        with self._lock:
            channel = self._channels.get(extent.member)
        addresses = tuple(str(parse_address(one)) for one in extent.addresses)
        if channel is None:
            if not addresses:
                raise NodeError(f"{extent.shown}: the manager knows no address of this node", node=extent.name)
            identity = bytes.fromhex(extent.member)
            channel = self._connect(addresses[0])
            channel.expected = identity
            find_address(channel, MemberInfo(addresses, identity), self._timeout)
            with self._lock:
                return self._channels.setdefault(extent.member, channel)
        with self._lock:
            if addresses:
                self._unlisted.discard(extent.member)
            elif extent.member in self._channels:
                self._unlisted.add(extent.member)
        if addresses and channel.name not in addresses:
            channel.move(addresses[0])
        return channel

    def _close_idle(self, member: str) -> None:
        """Close the channel to a member if it lends nothing any more."""
        with self._lock:
            if self._claiming[member] or any(one == member for one, _ in self._claimed):
                return
            channel = self._channels.pop(member, None)
            self._unlisted.discard(member)
        if channel is not None:
            channel.close()
