"""The registry's entries of leases and members as one manager knows them: no clock, no thread and no I/O."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from farpool.abc.membership import MemberState
from farpool.abc.registry import Entry, Snapshot
from farpool.cluster.leases.offers import Lender
from farpool.cluster.leases.records import (
    BURST,
    LEASE,
    LEASES,
    MEMBER,
    ORDERS,
    TENANT,
    TURNS,
    Burst,
    LeaseRecord,
    MemberAccount,
    OrderRecord,
    TenantAccount,
    Turns,
    account_key,
    decode,
)
from farpool.cluster.members import records as registered
from farpool.errors import RegistryDamagedError

__all__ = ["PREFIXES", "View"]

PREFIXES = (LEASES, registered.MEMBERS)
"""Prefixes of all entries that a view has."""
_TOMBSTONES_MAX = 10_000
"""Deleted keys that a view remembers, so that a watch that lags behind does not bring their entries back. Without this
memory, a transaction that uses such an entry fails, and the entry is read again."""
_KINDS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    (LEASE, LeaseRecord),
    (ORDERS, OrderRecord),
    (MEMBER, MemberAccount),
    (TENANT, TenantAccount),
    (BURST, Burst),
    (TURNS, Turns),
)
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


class View:
    """All entries of leases and members, each as of the latest revision that this manager has seen. Not thread-safe.

    Attributes
    ----------
    revision : int
        The highest revision of a change that the view has seen.
    epoch : int
        The highest epoch that the view has seen.
    leases : dict of str to tuple of int and LeaseRecord
        Revision and record of each lease that can be read.
    """

    def __init__(self) -> None:
        self.revision = self.epoch = 0
        self.leases: dict[str, tuple[int, LeaseRecord]] = {}
        self._counts: Counter[int] = Counter()  # leases of each tenant
        # Every other entry, and leases that cannot be read (their record is an error).
        self._others: dict[str, tuple[int, msgspec.Struct | RegistryDamagedError]] = {}
        self._deleted: OrderedDict[str, int] = OrderedDict()
        # Keys of orders by member, the first ones first.
        self._orders: dict[str, dict[str, None]] = {}
        self._tenants: dict[int, TenantAccount] = {}
        self._members: set[str] = set()
        # For each member that has orders and no record, the time at which this manager first saw that.
        self._gone: dict[str, float] = {}
        # For each lease, the time at which this manager saw its record; for each extent that its lender wants back, the
        # time at which this manager first saw that. Both are times of this process, so a wrong wall clock of some
        # manager ends no lease.
        self._seen: dict[str, float] = {}
        self._marked: dict[tuple[str, str, int], float] = {}
        # Times of this process at which leases expire unless they are renewed. A renewal adds a later time.
        self._expiries: list[tuple[float, str]] = []

    # Changes

    def read(self, snapshot: Snapshot, tick: float) -> None:
        """Replace all entries by those of a snapshot of `PREFIXES`; `tick` is the time of this process in seconds."""
        self.change(snapshot.entries, tick)
        for key in self.revisions().keys() - {entry.key for entry in snapshot.entries}:
            self.apply(key, snapshot.revision, None, tick)
        self.revision = max(self.revision, snapshot.revision)

    def change(self, entries: Iterable[Entry], tick: float) -> None:
        """Make changes that a watch has reported, or that are in a snapshot."""
        for entry in entries:
            kind = _kind_of(entry.key)
            if kind is None or entry.revision <= self.revision_of(entry.key):
                continue
            record: msgspec.Struct | RegistryDamagedError | None = None
            if not entry.deleted:
                try:
                    record = _read(entry, kind)
                except RegistryDamagedError as error:
                    record = error
            self.apply(entry.key, entry.revision, record, tick)

    def apply(self, key: str, revision: int, record: msgspec.Struct | RegistryDamagedError | None, tick: float) -> None:
        """Change one entry, unless the view knows a later change of it. None deletes the entry."""
        if revision < max(self.revision_of(key), self._deleted.get(key, 0)):
            return
        self.revision = max(self.revision, revision)
        if isinstance(record, LeaseRecord | OrderRecord | MemberAccount):
            self.epoch = max(self.epoch, record.epoch)
        if key.startswith(LEASE):
            self._apply_lease(key, revision, record, tick)
            return
        if record is None:
            self._others.pop(key, None)
            self._bury(key, revision)
        else:
            self._others[key] = revision, record
        if key.startswith(ORDERS):
            member = key.removeprefix(ORDERS).partition("/")[0]
            orders = self._orders.setdefault(member, {})
            if record is None:
                orders.pop(key, None)
            else:
                orders[key] = None
            if not orders:
                del self._orders[member]
        elif key.startswith(TENANT) and key.removeprefix(TENANT).isdecimal():
            self._tenants.pop(int(key.removeprefix(TENANT)), None)
            if isinstance(record, TenantAccount):
                self._tenants[int(key.removeprefix(TENANT))] = record
        elif key.startswith(registered.RECORD):
            member = key.removeprefix(registered.RECORD)
            (self._members.discard if record is None else self._members.add)(member)
            self._gone.pop(member, None)

    def _apply_lease(
        self, key: str, revision: int, record: msgspec.Struct | RegistryDamagedError | None, tick: float
    ) -> None:
        lease = key.removeprefix(LEASE)
        before = self.leases.pop(lease, None)
        self._others.pop(key, None)
        marked = {}
        if before is not None:
            self._counts[before[1].terms.tenant] -= 1
        if isinstance(record, LeaseRecord):
            self._counts[record.terms.tenant] += 1
            self.leases[lease] = revision, record
            self._seen[lease] = tick
            heapq.heappush(self._expiries, (tick + record.terms.ttl, lease))
            if len(self._expiries) > 2 * len(self.leases) + 1000:
                self._expiries = [(self._seen[lease] + one.terms.ttl, lease) for lease, (_, one) in self.leases.items()]
                heapq.heapify(self._expiries)
            marked = {
                (lease, one.member, one.number): self._marked.get((lease, one.member, one.number), tick)
                for one in record.extents
                if one.reclaim_by
            }
        else:
            self._seen.pop(lease, None)
            if record is None:
                self._bury(key, revision)
            else:
                self._others[key] = revision, record
        if before is not None:
            for one in before[1].extents:
                if one.reclaim_by:
                    self._marked.pop((lease, one.member, one.number), None)
        self._marked |= marked

    def _bury(self, key: str, revision: int) -> None:
        self._deleted[key] = revision
        self._deleted.move_to_end(key)
        if len(self._deleted) > _TOMBSTONES_MAX:
            self._deleted.popitem(last=False)

    # Questions

    def leases_of(self, tenant: int) -> int:
        """Return the number of a tenant's leases."""
        return self._counts.get(tenant, 0)

    def has(self, snapshot: Snapshot, keys: Iterable[str]) -> bool:
        """Return True if the view has the entries of some keys as they are in a snapshot, or later ones."""
        found = {entry.key: entry.revision for entry in snapshot.entries}
        return all(
            self.revision_of(key) >= found[key] or self._deleted.get(key, 0) >= found[key]
            if key in found
            else not 0 < self.revision_of(key) <= snapshot.revision
            for key in keys
        )

    def revision_of(self, key: str) -> int:
        """Return the revision of a key's entry; 0 if there is none."""
        found = self.leases.get(key.removeprefix(LEASE)) if key.startswith(LEASE) else None
        found_other = found or self._others.get(key)
        return found_other[0] if found_other else 0

    def get(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return the record of a key; None if it has none.

        Raises
        ------
        RegistryDamagedError
            The entry cannot be read.
        """
        if key.startswith(LEASE) and key.removeprefix(LEASE) in self.leases:
            record: object = self.leases[key.removeprefix(LEASE)][1]
        else:
            record = self._others.get(key, (0, None))[1]
        if isinstance(record, RegistryDamagedError):
            raise record
        assert record is None or isinstance(record, kind), key
        return record

    def orders(self, member: str) -> Iterator[OrderRecord]:
        """Yield the orders that a member has not confirmed, by their keys."""
        for key in sorted(self._orders.get(member, ())):
            record = self._others[key][1]
            if isinstance(record, OrderRecord):
                yield record

    def orders_of_gone(self, tick: float, seconds: float) -> Iterator[OrderRecord]:
        """Yield the orders of members that this manager has seen without a record for some time."""
        for member in sorted(self._orders.keys() - self._members):
            if self._gone.setdefault(member, tick) + seconds < tick:
                yield from self.orders(member)

    def waiting_orders(self, limit: int, without: Container[str] = ()) -> dict[str, list[OrderRecord]]:
        """Return orders by the members that have not confirmed them, at most `limit` of each member.

        Parameters
        ----------
        limit : int
            Most orders of a member; those that this manager saw first.
        without : container of str
            Keys of orders to leave out.
        """
        found = {}
        for member, keys in self._orders.items():
            records = (self._others[key][1] for key in keys if key not in without)
            orders = list(itertools.islice((one for one in records if isinstance(one, OrderRecord)), limit))
            if orders:
                found[member] = orders
        return found

    def orders_count(self) -> int:
        """Return the number of orders that no node has confirmed."""
        return sum(map(len, self._orders.values()))

    def ordered_bytes(self, member: str, medium: str) -> int:
        """Return the bytes of a member's orders in a medium."""
        return sum(order.bytes for order in self.orders(member) if order.medium == medium)

    def wanted_back(self) -> dict[tuple[str, str], int]:
        """Return the bytes that lenders have asked their holders for, by member and medium."""
        found: dict[tuple[str, str], int] = {}
        for lease, member, number in self._marked:
            record = self.leases[lease][1]
            key = member, record.terms.medium
            size = next(one.bytes for one in record.extents if (one.member, one.number) == (member, number))
            found[key] = found.get(key, 0) + size
        return found

    def members(self) -> Iterator[tuple[str, registered.MemberRecord, MemberState]]:
        """Yield the identity, the record and the state of each member whose record can be read."""
        for member in sorted(self._members):
            record = self._others[registered.RECORD + member][1]
            alive = self._others.get(registered.ALIVE + member, (0, None))[1]
            if isinstance(record, registered.MemberRecord):
                role = alive if isinstance(alive, registered.AliveRecord) else None
                yield member, record, registered.member_of(b"", record, role).state

    def known_members(self) -> list[str]:
        """Return the identities of all members, also of those whose records cannot be read."""
        return sorted(self._members)

    def is_damaged(self, key: str) -> bool:
        """Return True if an entry is there and cannot be read."""
        return isinstance(self._others.get(key, (0, None))[1], RegistryDamagedError)

    def lenders(self, medium: str) -> Iterator[Lender]:
        """Yield the members that lend new memory of a medium, with their free bytes.

        A member that has lent more than it lends now has a negative number of free bytes.
        """
        for member, record, state in self.members():
            if state is MemberState.ACTIVE and record.media.get(medium):
                lent = self.lent(member, medium)
                if lent is not None:
                    yield Lender(member, record.media[medium] - lent, record.weight, record.labels)

    def lent(self, member: str, medium: str) -> int | None:
        """Return the bytes that a member has lent in a medium; None if its account cannot be read."""
        account = self._others.get(account_key(member), (0, None))[1]
        if account is None:
            return 0
        return sum(account.lent.get(medium, {}).values()) if isinstance(account, MemberAccount) else None

    def tenants(self) -> Mapping[int, TenantAccount]:
        """Return the accounts of all tenants that can be read."""
        return self._tenants

    def expired(self, now: float, tick: float, tolerance: float, limit: int) -> list[str]:
        """Return leases that have expired for longer than a tolerance, by the wall clock and by the own clock.

        Parameters
        ----------
        now, tick : float
            Time of the wall clock, and of this process.
        tolerance : float
            Seconds by which the wall clocks of managers may differ.
        limit : int
            Most leases to return.
        """
        found: dict[str, None] = {}
        again: list[tuple[float, str]] = []
        while self._expiries and self._expiries[0][0] + tolerance < tick and len(found) < limit:
            due, lease = heapq.heappop(self._expiries)
            stored = self.leases.get(lease)
            if stored is None or lease in found or due < self._seen[lease] + stored[1].terms.ttl:
                continue
            if self.has_expired(lease, now, tick, tolerance):
                found[lease] = None
                again.append((due, lease))
            else:
                again.append((tick, lease))  # the wall clock is behind: looked at again after the tolerance
        for one in again:
            heapq.heappush(self._expiries, one)
        return list(found)

    def has_expired(self, lease: str, now: float, tick: float, tolerance: float) -> bool:
        """Return True if a lease has expired, as `expired` judges."""
        stored = self.leases.get(lease)
        if stored is None:
            return False
        _, record = stored
        ttl = record.terms.ttl
        return self._seen[lease] + ttl + tolerance < tick and _is_past(record.expires, ttl, now, tolerance)

    def overdue(self, now: float, tick: float, tolerance: float) -> dict[str, list[tuple[str, int]]]:
        """Return the extents, by lease, that their holders have not released in time for lenders that want them."""
        found: dict[str, list[tuple[str, int]]] = {}
        for (lease, member, number), since in self._marked.items():
            record = self.leases[lease][1]
            by = next(one.reclaim_by for one in record.extents if (one.member, one.number) == (member, number))
            seconds = record.terms.reclaim_ms / 1000
            if since + seconds + tolerance < tick and _is_past(by, seconds, now, tolerance):
                found.setdefault(lease, []).append((member, number))
        return found

    def revisions(self) -> dict[str, int]:
        """Return the revision of each entry by its key."""
        leases = {LEASE + lease: revision for lease, (revision, _) in self.leases.items()}
        return leases | {key: revision for key, (revision, _) in self._others.items()}


def _is_past(end: float, seconds: float, now: float, tolerance: float) -> bool:
    """Return True if an end is past by the wall clock, or so far ahead that a wrong clock must have set it.

    Such an end would keep memory for as long as the clock was wrong. The own clock alone decides then.
    """
    return end + tolerance < now or end > now + seconds + tolerance


def _read(entry: Entry, kind: type[msgspec.Struct]) -> msgspec.Struct:
    if issubclass(kind, registered.MemberRecord | registered.AliveRecord):
        return registered.decode(entry, kind)
    return decode(entry.key, entry.value, kind)


def _kind_of(key: str) -> type[msgspec.Struct] | None:
    if key.startswith(registered.RECORD):
        return registered.MemberRecord
    if key.startswith(registered.ALIVE):
        return registered.AliveRecord
    return next((kind for prefix, kind in _KINDS if key.startswith(prefix)), None)
