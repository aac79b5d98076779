"""The list of members that follows from the registry's entries: no clock, no thread and no I/O."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.registry import Entry
from farpool.cluster.members.records import RECORD, read_members
from farpool.errors import RegistryDamagedError

__all__ = ["RETURN_S", "MemberEntries"]

RETURN_S = 30.0
"""Seconds for which former members stay in the list once a registry that had lost all members has one again. Each node
registers again by itself, within a third of the time to live of its registry lease, but not all at the same moment."""


class MemberEntries:
    """The registry's entries of members, and the list that follows from them. Not thread-safe.

    If the registry has lost its entries (it was wiped, or another one is in its place), the former list stays: nodes
    still have their objects, and a read from an empty list would report them as missing. Once the registry has a member
    again, the former members stay as suspect ones for `RETURN_S` seconds, in which they can register again.

    Parameters
    ----------
    members : sequence of MemberInfo
        The list to begin with.

    Attributes
    ----------
    members : tuple of MemberInfo
        The list, in the order of the members' addresses.
    errors : list of RegistryDamagedError
        An error for each entry that cannot be read, or that has the address of another living member. A member whose
        entry cannot be read keeps its former place in the list.
    is_lost : bool
        True while the registry has no member although the list has some.
    """

    def __init__(self, members: Sequence[MemberInfo] = ()) -> None:
        self.members = tuple(members)
        self.errors: list[RegistryDamagedError] = []
        self.is_lost = False
        self._entries: dict[str, Entry] = {}
        self._former: dict[bytes, MemberInfo] = {}
        self._former_until = 0.0

    @property
    def awaits_return(self) -> bool:
        """True while the list has former members that may register again."""
        return bool(self._former)

    def read(self, entries: Iterable[Entry], now: float, *, is_other: bool = False) -> None:
        """Replace all entries by those of a snapshot.

        Parameters
        ----------
        entries : iterable of Entry
            All present entries of members.
        now : float
            The present time in seconds.
        is_other : bool
            True if this registry has taken the place of the one that was read before, so it may lack members.
        """
        self._entries = {entry.key: entry for entry in entries}
        self._fold(now, may_be_lost=True, is_other=is_other)

    def change(self, entries: Iterable[Entry], now: float) -> None:
        """Make changes that a watch has reported. Without any, only former members whose time is over are removed."""
        entries, is_wiped = list(entries), False
        deletions = Counter(entry.revision for entry in entries if entry.deleted)
        for entry in entries:
            known = self._entries.get(entry.key)
            if known is not None and known.revision >= entry.revision:
                continue  # the snapshot is later than this change
            if not entry.deleted:
                self._entries[entry.key] = entry
            elif self._entries.pop(entry.key, None) is not None and deletions[entry.revision] > 1:
                # A removal deletes the record of one member, and nothing else.
                is_wiped |= not any(key.startswith(RECORD) for key in self._entries)
        self._fold(now, may_be_lost=is_wiped, is_other=is_wiped)

    def _fold(self, now: float, *, may_be_lost: bool = False, is_other: bool = False) -> None:
        before = {info.identity: info for info in self.members}
        members, self.errors = read_members(self._entries.values(), before)
        # If a watch reports that the last member was removed, someone removed it. A snapshot does not say why it is
        # empty.
        if before and not members and (may_be_lost or self.is_lost):
            self.is_lost = True
            return
        if self.is_lost or is_other:
            self.is_lost = False
            self._former, self._former_until = before, now + RETURN_S
        if now >= self._former_until:
            self._former = {}
        owners = {address: identity for identity, info in members.items() for address in info.addresses}
        self._former = {
            identity: info
            for identity, info in self._former.items()
            # A member that only starts is not asked, and may have objects. A node that lost its data has come back at
            # the same address, with another identity.
            if (identity not in members or members[identity].state is MemberState.JOINING)
            and all(owners.get(address, identity) == identity for address in info.addresses)
        }
        for identity, info in self._former.items():
            is_draining = info.state is MemberState.DRAINING
            members[identity] = info if is_draining else replace(info, state=MemberState.SUSPECT)
        self.members = tuple(sorted(members.values(), key=lambda info: info.addresses))
