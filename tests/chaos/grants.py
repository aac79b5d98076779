"""The history of all grants, as the registry tells it: no memory is lent twice, and none is taken within an epoch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from farpool.abc.registry import Entry
from farpool.cluster.leases.records import LEASE, ORDERS, LeaseRecord, OrderRecord, decode
from farpool.cluster.members.records import RECORD, MemberRecord
from farpool.cluster.members.records import decode as decode_member

__all__ = ["Extent", "Grants"]

Extent = tuple[str, int]
"""A member's identity in hexadecimal digits, and the number of an extent there."""
_EXPIRED = "it expired"


class Grants:
    """Follows the changes of leases, orders and members, and notes each one that breaks a rule.

    Parameters
    ----------
    clock : callable
        Returns the time in seconds since 1970.

    Attributes
    ----------
    revision : int
        All changes up to this revision of the registry are known.
    owners : dict
        The lease of each extent that was ever lent.
    freed : dict
        Revision at which a node had confirmed the end of an extent.
    expired : set of str
        Leases that managers ended because nobody renewed them.
    violations : list of str
        Broken rules.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.revision = 0
        self.owners: dict[Extent, str] = {}
        self.freed: dict[Extent, int] = {}
        self.expired: set[str] = set()
        self.violations: list[str] = []
        self.grants = 0
        self._clock = clock
        self._leases: dict[str, LeaseRecord] = {}
        self._orders: dict[str, OrderRecord] = {}
        self._members: dict[str, MemberRecord] = {}
        self._epochs: dict[str, int] = {}

    @property
    def lent(self) -> dict[Extent, str]:
        """The lease of each extent that is part of one now."""
        return {(one.member, one.number): lease for lease, record in self._leases.items() for one in record.extents}

    @property
    def ending(self) -> set[Extent]:
        """Extents whose end a node has not confirmed yet."""
        return {(order.member, order.extent) for order in self._orders.values()}

    def feed(self, entries: Sequence[Entry], revision: int) -> None:
        """Follow changes, in the order of their revisions, and check each transaction."""
        for at, changes in groupby(entries, lambda entry: entry.revision):
            self._change(at, list(changes))
        self.revision = max(self.revision, revision)

    def check_held(self, member: str, held: Sequence[tuple[str, int]], known: int) -> None:
        """Check the leases and numbers of the extents that a member's node has.

        `known` is the revision up to which all changes were known before the node was asked.
        """
        for lease, number in held:
            owner = self.owners.get((member, number))
            text = f"member {member[:8]} holds extent {number} for lease {lease[:8]}"
            if owner is not None and owner != lease:
                self.violations.append(f"lent twice: {text}, but it was lent to {owner[:8]}")
            if self.freed.get((member, number), known + 1) <= known:
                self.violations.append(f"not freed: {text}, whose end it had confirmed")

    def _change(self, revision: int, changes: Sequence[Entry]) -> None:
        before, sizes = self.lent, self._sizes()
        former = dict(self._leases)
        for entry in changes:
            self._enter(entry, revision, former)
        now = self.lent
        self._check_owners(before, now, revision)
        for extent in before.keys() - now.keys():
            lease = before[extent]
            order = next((one for one in self._orders.values() if (one.member, one.extent) == extent), None)
            if order is None:
                self._note(revision, f"extent {_shown(extent)} left lease {lease[:8]} without an order")
            elif order.epoch <= former[lease].epoch:
                self._note(revision, f"extent {_shown(extent)} left lease {lease[:8]} within its epoch {order.epoch}")
        for member, size in self._sizes().items():
            record = self._members.get(member)
            if size > sizes[member] and record is not None and size > record.media.get("dram", 0):
                self._note(revision, f"member {member[:8]} has lent {size} bytes of {record.media.get('dram', 0)}")

    def _check_owners(self, before: dict[Extent, str], now: dict[Extent, str], revision: int) -> None:
        count = Counter((one.member, one.number) for record in self._leases.values() for one in record.extents)
        twice = {extent for extent, times in count.items() if times > 1} | (now.keys() & self.ending)
        for extent in twice:
            self._note(revision, f"lent twice: extent {_shown(extent)} is in two leases, or in one and an order")
        for extent, lease in now.items():
            owner = self.owners.setdefault(extent, lease)
            if owner != lease or (extent not in before and extent in self.freed):
                self._note(revision, f"lent twice: extent {_shown(extent)}, first of {owner[:8]}, now of {lease[:8]}")

    def _enter(self, entry: Entry, revision: int, former: Mapping[str, LeaseRecord]) -> None:
        if entry.key.startswith(LEASE):
            self._enter_lease(entry, revision)
        elif entry.key.startswith(ORDERS):
            if entry.deleted:
                order = self._orders.pop(entry.key)
                self.freed[order.member, order.extent] = revision
            else:
                order = self._orders[entry.key] = decode(entry.key, entry.value, OrderRecord)
                self._grow_epoch(order.lease, order.epoch, revision)
                if order.reason == _EXPIRED:
                    self._expire(order.lease, former.get(order.lease), revision)
        elif entry.key.startswith(RECORD) and not entry.deleted:
            self._members[entry.key.removeprefix(RECORD)] = decode_member(entry, MemberRecord)

    def _enter_lease(self, entry: Entry, revision: int) -> None:
        lease = entry.key.removeprefix(LEASE)
        if entry.deleted:
            self._leases.pop(lease, None)
            return
        record = decode(entry.key, entry.value, LeaseRecord)
        self.grants += lease not in self._leases
        self._leases[lease] = record
        self._grow_epoch(lease, record.epoch, revision)

    def _expire(self, lease: str, record: LeaseRecord | None, revision: int) -> None:
        self.expired.add(lease)
        if record is not None and self._clock() < record.expires:
            early = record.expires - self._clock()
            self._note(revision, f"lease {lease[:8]} was ended as expired {early:.1f} s before its expiry")

    def _grow_epoch(self, lease: str, epoch: int, revision: int) -> None:
        floor = self._epochs.get(lease, 0)
        if epoch < floor:
            self._note(revision, f"the epoch of lease {lease[:8]} fell from {floor} to {epoch}")
        self._epochs[lease] = max(floor, epoch)

    def _sizes(self) -> Counter[str]:
        sizes: Counter[str] = Counter()
        for record in self._leases.values():
            for one in record.extents:
                sizes[one.member] += one.bytes
        for order in self._orders.values():
            sizes[order.member] += order.bytes
        return sizes

    def _note(self, revision: int, text: str) -> None:
        self.violations.append(f"revision {revision}: {text}")


def _shown(extent: Extent) -> str:
    return f"{extent[1]} of member {extent[0][:8]}"
