"""Members of a remote tier: a thread follows their list, and moves the bytes of members that leave."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from farpool._native import buffer_address
from farpool.abc.membership import MemberInfo, Membership, MemberState
from farpool.cluster.wire.address import parse_address
from farpool.errors import ConfigError, FarpoolError, FarpoolWarning, NodeError
from farpool.memory.tiers.remote_nodes import PERIOD_S, Contact, Part, borrow, give_back, port_to
from farpool.sizes import format_size

if TYPE_CHECKING:
    from farpool._native import ReplaceablePort
    from farpool.cluster.wire.channel import Channel
    from farpool.cluster.wire.lease import Lease

__all__ = ["Following", "MemberPart", "find_address", "refuse_twins", "usable"]

_RETRY_S = 2.0
"""Seconds between two attempts to find a node that has moved, or to move bytes for which no member had room."""
_LENDING = frozenset({MemberState.ACTIVE, MemberState.SUSPECT})
"""States in which a member may get a part."""


def usable(membership: Membership, tier: str) -> list[MemberInfo]:
    """Return the members that may lend memory to a tier.

    Raises
    ------
    ConfigError
        No member may lend memory.
    """
    members = [info for info in membership.members() if info.state in _LENDING]
    if not members:
        raise ConfigError(
            f"nodes of {tier}: the list has no member that is active or suspect, expected one or more", setting="nodes"
        )
    return members


def find_address(channel: Channel, info: MemberInfo, timeout: float) -> None:
    """Try the addresses of a member, except the last one, until the channel is connected.

    If no node answers there, the channel is left with the last address, to which the caller's next call connects. So
    nothing happens if the member has only one address.
    """
    for _ in info.addresses[1:]:
        with contextlib.suppress(NodeError):
            _reach(channel, info, timeout)
            return


def refuse_twins(channels: Sequence[Channel], tier: str) -> None:
    """Raise ConfigError if two channels lead to the same node."""
    met: dict[bytes | None, Channel] = {}
    for channel in channels:
        if (other := met.setdefault(channel.expected, channel)) is not channel:
            raise ConfigError(
                f"nodes of {tier}: {other.name} and {channel.name} are the same node, expected each once",
                setting="nodes",
            )


class MemberPart(Part):
    """One member's part of a tier. If the part moves to another node, its channel and lease are replaced.

    Parameters
    ----------
    channel : Channel
        Channel to the node, which accepts only a node with the expected identity.
    lease : Lease
        The memory that the node lends.
    port : ReplaceablePort
        Reads and writes this memory.
    info : MemberInfo
        Entry for the member in the list.
    """

    port: ReplaceablePort

    def __init__(self, channel: Channel, lease: Lease, port: ReplaceablePort, info: MemberInfo) -> None:
        super().__init__(channel, lease, port)
        self.info = info
        self.is_listed = True
        self.is_away = False
        self.address = channel.name
        """Address that errors of the port give for the node."""

    def is_on(self, info: MemberInfo) -> bool:
        """True if a list entry describes this part's node, by identity if the entry has one, else by address."""
        if info.identity:
            return info.identity == self.channel.expected
        own = {self.channel.name, *_addresses(self.info)}
        return not own.isdisjoint(_addresses(info))

    def follow(self, info: MemberInfo) -> None:
        """Replace the entry for the node by a newer one. If the entry has a new address, the channel moves there."""
        self.info, self.is_listed = info, True
        if self.channel.name not in _addresses(info):
            self.channel.move(info.addresses[0])

    def replace(self, channel: Channel, lease: Lease, info: MemberInfo) -> None:
        """Record that another node has the bytes now."""
        self.channel, self.lease, self.info = channel, lease, info
        self.is_listed, self.is_away = True, False
        self.address = channel.name


class Following(Contact):
    """A thread that follows the list of a tier's members.

    A node that has moved is found by its identity, and the tier then uses its part at the new address. The bytes of a
    member that drains or left the list are copied to another member: preferably to a member without a part, else to a
    member that has room for a second part. If no member accepts the bytes, they stay in place, and the thread
    tries again later.

    Parameters
    ----------
    owner : object
        Object that needs the sessions, as for `Contact`.
    parts : sequence of MemberPart
        All parts of the tier.
    membership : Membership
        The list of members.
    connect : callable
        Returns a channel to the node at an address.
    tier : str
        Name of the tier, for errors.
    timeout : float
        Seconds that a node may take for an answer.
    """

    def __init__(
        self,
        owner: object,
        parts: Sequence[MemberPart],
        membership: Membership,
        connect: Callable[[str], Channel],
        tier: str,
        timeout: float,
    ) -> None:
        self._members = tuple(parts)
        self._membership = membership
        self._connect = connect
        self._tier = tier
        self._has_changed = False
        self._failure = ""
        """Reason why the last attempt to follow the list failed; the thread then tries again. Empty if it succeeded."""
        self._retry_at = 0.0
        self._notes: dict[MemberPart, str] = {}
        super().__init__(owner, parts, timeout)

    @property
    def notes(self) -> tuple[str, ...]:
        """One sentence for each part whose bytes should move but cannot."""
        return tuple(self._notes.copy().values())

    def _run(self) -> None:
        # Subscribe before the first look at the list, so that no change falls between the two.
        unsubscribe = self._membership.subscribe(self._changed)
        try:
            self._changed()  # the list may have changed between the opening of the tier and the subscription
            super()._run()
        finally:
            unsubscribe()

    def _changed(self) -> None:
        self._has_changed = True
        self._woken.set()

    def _keep(self) -> None:
        for part in self._members:
            if self._ended:
                return
            self._try_to_reach(part)
        unsettled = bool(self._failure) or any(part.is_away or part in self._notes for part in self._members)
        if self._has_changed or (unsettled and time.monotonic() >= self._retry_at):
            self._has_changed = False  # before the list is read, so that no later change is missed
            try:
                self._follow()
                self._failure = ""
            except Exception as error:  # a list of the user's own may have addresses that are none
                before, self._failure = self._failure, f"the list of members cannot be followed: {error}"
                if self._failure != before:
                    self._warn(self._failure)
            self._retry_at = time.monotonic() + _RETRY_S

    def _try_to_reach(self, part: MemberPart) -> None:
        try:
            _reach(part.channel, part.info, min(self._timeout, PERIOD_S))
        except NodeError:
            part.is_away = True
            return
        part.is_away = False
        if part.address != part.channel.name:
            # The node still has the bytes and only its address is new, so nothing is copied.
            part.port.set_target(port_to(part.channel, part.lease, self._tier, self._timeout), same_bytes=True)
            part.port.replace()
            part.address = part.channel.name

    def _follow(self) -> None:
        listed = [info for info in self._membership.members() if info.state is not MemberState.GONE]
        for part in self._members:
            info = next((info for info in listed if part.is_on(info)), None)
            if info is None:
                part.is_listed = False
            else:
                part.follow(info)
        silent = self._find_moved([info for info in listed if not any(part.is_on(info) for part in self._members)])
        for part in self._members:
            if self._ended:
                return
            if part.is_listed and part.info.state is not MemberState.DRAINING:
                self._notes.pop(part, None)
            elif silent and part.is_away and not part.is_listed:
                self._note(
                    part,
                    f"{part.channel.name} is no longer in the list of members and does not answer; {silent[0]}, which "
                    "may be its new address, does not answer either",
                )
            else:
                self._vacate(part, listed)

    def _find_moved(self, strangers: Sequence[MemberInfo]) -> list[str]:
        """Look for lost nodes at the addresses of members without a part.

        A node is lost if it has a part, but does not answer or is not in the list.

        Returns
        -------
        list of str
            The addresses that did not answer.
        """
        silent: list[str] = []
        astray = {part for part in self._members if part.is_away or not part.is_listed}
        for info in strangers:
            if self._ended or not astray:
                break
            identity = self._identity_at(info)
            if not identity:
                silent.append(info.addresses[0])
            for part in [part for part in astray if part.channel.expected == identity]:
                astray.discard(part)
                part.follow(info)
                self._try_to_reach(part)
        return silent

    def _identity_at(self, info: MemberInfo) -> bytes:
        """Return the identity of the node at a member's addresses; empty if no node answers."""
        channel = self._connect(info.addresses[0])
        try:
            find_address(channel, info, min(self._timeout, PERIOD_S))
            return channel.connect(time.monotonic() + min(self._timeout, PERIOD_S)).identity
        except NodeError:
            return b""
        finally:
            channel.close()

    def _vacate(self, part: MemberPart, listed: Sequence[MemberInfo]) -> None:
        """Move a part to another member, or record in `notes` why the part stays."""
        state = "is draining" if part.is_listed else "is no longer in the list of members"
        about = f"{format_size(part.lease.nbytes)} on {part.channel.name}, which {state}"
        try:
            self._require_readable(part)
        except FarpoolError as error:
            self._note(part, f"{about}, cannot be moved to another member, because they cannot be read: {error}")
            return
        why = "there is no other member that is active"
        for info in self._targets(part, listed):
            try:
                self._move(part, info)
            except (FarpoolError, OSError, MemoryError) as error:
                why = str(error)
            else:
                return
        self._note(part, f"{about}, stay there, so keep that node running: no other member takes them ({why})")

    def _require_readable(self, part: MemberPart) -> None:
        """Raise an error if the part cannot be read.

        Called first, so that no other member provides memory for a part that cannot be copied.
        """
        buffer = bytearray(1)
        part.port.read(0, buffer_address(buffer), 1)

    def _targets(self, part: MemberPart, listed: Sequence[MemberInfo]) -> list[MemberInfo]:
        """Members that may receive a part: members without a part first, members that may be down last."""
        targets = [info for info in listed if info.state in _LENDING and not part.is_on(info)]
        return sorted(
            targets,
            key=lambda info: (info.state is MemberState.SUSPECT, sum(other.is_on(info) for other in self._members)),
        )

    def _move(self, part: MemberPart, info: MemberInfo) -> None:
        """Copy a part to a member while transfers go on, then give the old memory back.

        If the tier closes during the copy, the part stays where it is.

        Raises
        ------
        ConfigError
            The member cannot be reached, cannot lend as much memory, or is the node that has the part.
        NodeError, TierError
            A node failed during the copy. The part stays at its old node.
        """
        channel = self._connect(info.addresses[0])
        with contextlib.ExitStack() as undo:
            undo.callback(channel.close)
            channel.expected = info.identity
            find_address(channel, info, self._timeout)
            (lease,) = borrow([channel], part.lease.nbytes, self._tier, self._timeout)
            undo.callback(lambda: give_back([lease], time.monotonic() + self._timeout))
            # After the contact, because only then the identity of the node is known for certain.
            refuse_twins([part.channel, channel], self._tier)
            part.port.set_target(port_to(channel, lease, self._tier, self._timeout))
            undo.callback(part.port.drop_target)
            if not self._copied(part):
                return
            # From here on transfers go to the new memory, so nothing may be undone.
            undo.pop_all()
        old_channel, old_lease = part.channel, part.lease
        part.replace(channel, lease, info)
        self._notes.pop(part, None)
        # The old memory goes back last, when `replace` has ended the transfers that used it.
        give_back([old_lease], time.monotonic() + self._timeout)
        old_channel.close()

    def _copied(self, part: MemberPart) -> bool:
        """Copy a part's bytes, then switch to the new memory; return False if the tier closes before the switch."""
        while part.port.copy_chunks():
            if self._ended:
                return False
        part.port.replace()
        return True

    def _note(self, part: MemberPart, note: str) -> None:
        if self._ended:
            return
        is_new = part not in self._notes
        self._notes[part] = note
        if is_new:
            self._warn(f"{note} (Pool.explain reports it as long as it is so)")

    def _warn(self, text: str) -> None:
        with contextlib.suppress(FarpoolWarning):  # if warnings are errors, no caller can catch it
            warnings.warn(f"{self._tier}: {text}", FarpoolWarning, stacklevel=1)


def _reach(channel: Channel, info: MemberInfo, timeout: float) -> None:
    """Connect the channel if it is not connected. After a failure, select the member's next address and raise."""
    try:
        channel.connect(time.monotonic() + timeout)
    except NodeError as error:
        addresses = _addresses(info)
        if len(addresses) > 1 and not error.refused and channel.name in addresses:
            channel.move(addresses[(addresses.index(channel.name) + 1) % len(addresses)])
        raise


def _addresses(info: MemberInfo) -> list[str]:
    """Return the member's addresses in the form in which channels name them."""
    return [str(parse_address(address)) for address in info.addresses]
