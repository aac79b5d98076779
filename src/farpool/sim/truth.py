"""Checks every transaction of the registry: no memory is lent twice, quotas are kept, and epochs grow."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import msgspec

from farpool.abc.registry import Delete, Operation
from farpool.cluster.leases.records import (
    BURST,
    LEASE,
    MEMBER,
    ORDERS,
    TENANT,
    TURNS,
    Extent,
    LeaseRecord,
    MemberAccount,
    OrderRecord,
    TenantAccount,
    decode,
)
from farpool.cluster.leases.requests import Take, TenantLimits
from farpool.cluster.members.records import ALIVE, RECORD, MemberRecord
from farpool.decoding import prepared
from farpool.sim.plan import CLOCK_ERROR_MAX_S
from farpool.sim.violation import require

__all__ = ["Truth"]

_UNLIMITED = 1 << 60
_EXPIRED = "it expired"
_TAKEN = Take("").reason
_DRAM = "dram"


class Truth:
    """The leases as the registry has them, checked after each transaction.

    Parameters
    ----------
    policies : mapping of int to TenantLimits
        Limits of all tenants, in DRAM.
    clock : callable
        Returns the true time in seconds.
    freed : callable
        Called with each order that a transaction deletes, because its memory can be lent again.
    """

    def __init__(
        self,
        policies: Mapping[int, TenantLimits],
        clock: Callable[[], float],
        freed: Callable[[OrderRecord], None] = lambda order: None,
    ) -> None:
        self.leases: dict[str, LeaseRecord] = {}
        self.orders: dict[str, OrderRecord] = {}
        self.records: dict[str, MemberRecord] = {}
        self.grants = self.changes = 0
        self.has_changed_members = False
        self._policies, self._clock, self._freed = policies, clock, freed
        self._accounts: dict[str, MemberAccount] = {}
        self._tenants: dict[int, TenantAccount] = {}
        self._highest: dict[str, int] = {}
        self._epochs: dict[str, int] = {}
        self._renewed: dict[str, float] = {}
        # Times until which holders may keep the extents that lenders want back.
        self._marked: dict[tuple[str, int], float] = {}

    def check(self, revision: int, operations: Sequence[Operation]) -> None:
        """Check a transaction that the registry has carried out.

        Raises
        ------
        Violation
            It breaks a rule.
        """
        kinds = {one.key.partition("/")[0] for one in operations}
        if "leases" not in kinds:
            self._change_members(operations)
            return
        self.changes += 1
        held = {(extent.member, extent.number) for extent in self._held()}
        before = held | {(order.member, order.extent) for order in self.orders.values()}
        reserved_before, free_before = self._reserved(), self._free()
        expired = {
            one.key.removeprefix(LEASE)
            for one in operations
            if isinstance(one, Delete) and one.key.startswith(LEASE) and self._is_expiry(one.key, operations)
        }
        is_grown = False
        for one in operations:
            value = None if isinstance(one, Delete) else bytes(one.value)
            if one.key.startswith(LEASE):
                record = None if value is None else decode(one.key, value, LeaseRecord)
                self._change_lease(one.key.removeprefix(LEASE), record, revision, expired)
            elif one.key.startswith(ORDERS):
                self._change_order(one.key, value, revision)
            elif one.key.startswith(MEMBER):
                require(value is not None, "account", f"the account {one.key} was deleted")
                assert value is not None
                is_grown |= self._change_account(one.key.removeprefix(MEMBER), decode(one.key, value, MemberAccount))
            elif one.key.startswith(TENANT):
                assert value is not None
                self._tenants[int(one.key.removeprefix(TENANT))] = decode(one.key, value, TenantAccount)
            else:
                require(one.key in (BURST, TURNS), "keys", f"{one.key} was written")
        self._check_extents(before, held)
        self._check_sums()
        if is_grown:
            self._check_limits(is_kept=free_before >= reserved_before)

    def used(self, tenant: int) -> int:
        """Return the bytes that a tenant has, by its account."""
        account = self._tenants.get(tenant)
        return account.lent.get(_DRAM, 0) if account else 0

    def has(self, member: str, lease: str, number: int) -> bool:
        """Return True if a member's extent is part of a lease, or an order to end it is not confirmed."""
        record = self.leases.get(lease)
        return f"{ORDERS}{member}/{lease}-{number}" in self.orders or (
            record is not None and any((one.member, one.number) == (member, number) for one in record.extents)
        )

    # Changes

    def _change_members(self, operations: Sequence[Operation]) -> None:
        for one in operations:
            if one.key.startswith(RECORD) and not isinstance(one, Delete):
                self.records[one.key.removeprefix(RECORD)] = msgspec.json.decode(one.value, type=prepared(MemberRecord))
            else:
                require(one.key.startswith(ALIVE), "keys", f"{one.key} was written")

    def _is_expiry(self, key: str, operations: Sequence[Operation]) -> bool:
        lease = key.removeprefix(LEASE)
        return any(
            decode(one.key, bytes(one.value), OrderRecord).reason == _EXPIRED
            for one in operations
            if not isinstance(one, Delete) and one.key.startswith(ORDERS) and f"/{lease}-" in one.key
        )

    def _change_lease(self, lease: str, record: LeaseRecord | None, revision: int, expired: set[str]) -> None:
        before = self.leases.pop(lease, None)
        if record is None:
            if before is not None and lease in expired:
                age = self._clock() - self._renewed[lease]
                text = f"lease {lease[:8]} was ended as expired {age:.3f} s after a renewal for {before.terms.ttl} s"
                require(age >= before.terms.ttl, "expiry", text)
            return
        self.leases[lease] = record
        self._check_epoch(record.epoch, revision, f"lease {lease[:8]}", is_new=before is None)
        floor = self._epochs.get(lease, 0)
        require(record.epoch >= floor, "epoch", f"the epoch of lease {lease[:8]} fell from {floor} to {record.epoch}")
        if before is None:
            self.grants += 1
            self._renewed[lease] = self._clock()
        else:
            require(record.expires >= before.expires, "expiry", f"the expiry of lease {lease[:8]} moved back")
            if record.expires > before.expires:
                self._renewed[lease] = self._clock()
            kept = {(one.member, one.number) for one in record.extents}
            if any((one.member, one.number) not in kept for one in before.extents):
                text = f"memory was taken from lease {lease[:8]} within its epoch {record.epoch}"
                require(record.epoch > before.epoch, "epoch", text)
        self._epochs[lease] = record.epoch
        for one in record.extents:
            if one.reclaim_by:
                self._marked.setdefault((one.member, one.number), self._clock() + record.terms.reclaim_ms / 1000)
        self._check_parts(lease, record)

    def _check_parts(self, lease: str, record: LeaseRecord) -> None:
        parts = {one.part: one.bytes for one in record.extents}
        name = lease[:8]
        total = sum(parts.values())
        require(total == record.terms.bytes, "parts", f"lease {name} has {total} bytes, not {record.terms.bytes}")
        for part, size in parts.items():
            copies: dict[int, list[Extent]] = {}
            for one in record.extents:
                if one.part == part:
                    require(one.bytes == size, "parts", f"copies of part {part} of lease {name} differ in length")
                    copies.setdefault(one.copy, []).append(one)
            require(set(copies) <= set(range(record.terms.copies)), "parts", f"lease {name} has too many copies")
            apart = [[self.records[one.member] for one in copies[copy]] for copy in sorted(copies)]
            for index, some in enumerate(apart):
                for others in apart[index + 1 :]:
                    for label in record.terms.spread:
                        both = {one.labels[label] for one in some} & {one.labels[label] for one in others}
                        require(not both, "spread", f"two copies of part {part} of lease {name} are in {label} {both}")

    def _change_order(self, key: str, value: bytes | None, revision: int) -> None:
        if value is None:
            self._freed(self.orders.pop(key))
            return
        is_new = key not in self.orders
        order = self.orders[key] = decode(key, value, OrderRecord)
        if is_new and order.reason == _TAKEN:
            until = self._marked.get((order.member, order.extent), math.inf)
            text = f"extent {order.extent} of lease {order.lease[:8]} was taken before {until:.3f} s"
            require(until <= self._clock(), "reclaim", text)
        floor = self._epochs.get(order.lease, 0)
        text = f"an order for lease {order.lease[:8]} has epoch {order.epoch}, after {floor}"
        require(floor <= order.epoch, "epoch", text)
        self._check_epoch(order.epoch, revision, f"an order for lease {order.lease[:8]}")
        self._epochs[order.lease] = order.epoch

    def _check_epoch(self, epoch: int, revision: int, whose: str, *, is_new: bool = False) -> None:
        """Check that an epoch follows from the time in milliseconds, by a clock that is wrong by an hour at most."""
        at, error = self._clock() * 1000, CLOCK_ERROR_MAX_S * 1000
        # Epochs that were raised several times within a millisecond are ahead of the time by less than the revision.
        is_ahead = epoch > at + error + revision
        require(not is_ahead, "epoch", f"{whose} has epoch {epoch} at {at:.0f} ms")
        is_behind = is_new and epoch < int(at - error)
        require(not is_behind, "epoch", f"{whose} begins with epoch {epoch} at {at:.0f} ms")

    def _change_account(self, member: str, account: MemberAccount) -> bool:
        """Enter a member's account; return True if the member has lent more."""
        before = self._accounts.get(member, MemberAccount())
        self._accounts[member] = account
        name = member[-4:]
        require(account.next >= before.next, "account", f"the next extent of member {name} moved back")
        lent = sum(account.lent.get(_DRAM, {}).values())
        if lent <= sum(before.lent.get(_DRAM, {}).values()):
            return False
        lender = self.records[member]
        text = f"member {name} has lent {lent} bytes of {lender.media[_DRAM]}"
        require(lent <= lender.media[_DRAM], "capacity", text)
        require(not lender.draining, "draining", f"member {name} lends memory while it drains")
        return True

    # Checks of the whole

    def _held(self) -> list[Extent]:
        return [one for record in self.leases.values() for one in record.extents]

    def _check_extents(self, before: set[tuple[str, int]], held: set[tuple[str, int]]) -> None:
        """Check the extents; `before` are those before the transaction, and `held` those that were part of a lease."""
        found = [(one.member, one.number) for one in self._held()]
        found += [(order.member, order.extent) for order in self.orders.values()]
        present = set(found)
        require(len(found) == len(present), "lent twice", "an extent is in two leases")
        for member, number in sorted(held - present):
            text = f"extent {number} of member {member[-4:]} counts as free, and its node got no order to end it"
            require(False, "order", text)
        for member, number in sorted(present - before):
            highest = self._highest.get(member, 0)
            text = f"extent {number} of member {member[-4:]} is new, and {highest} was lent before"
            require(number > highest, "lent twice", text)
        for member, number in present - before:
            self._highest[member] = max(number, self._highest.get(member, 0))

    def _check_sums(self) -> None:
        members: dict[str, dict[int, int]] = {}
        tenants: dict[int, int] = {}
        parts = [
            (one.member, record.terms.tenant, one.bytes) for record in self.leases.values() for one in record.extents
        ]
        parts += [(order.member, order.tenant, order.bytes) for order in self.orders.values()]
        for member, tenant, size in parts:
            lent = members.setdefault(member, {})
            lent[tenant] = lent.get(tenant, 0) + size
            tenants[tenant] = tenants.get(tenant, 0) + size
        accounts = {member: account.lent.get(_DRAM, {}) for member, account in self._accounts.items()}
        accounts = {member: lent for member, lent in accounts.items() if lent}
        require(accounts == members, "sums", "the members' accounts are not the sums of their extents")
        for tenant in self._policies:
            text = f"the account of tenant {tenant} has {self.used(tenant)} bytes, its extents {tenants.get(tenant, 0)}"
            require(self.used(tenant) == tenants.get(tenant, 0), "sums", text)

    def _check_limits(self, *, is_kept: bool) -> None:
        for tenant, limits in self._policies.items():
            most = limits.most.get(_DRAM, _UNLIMITED)
            text = f"tenant {tenant} has {self.used(tenant)} bytes of at most {most}"
            require(self.used(tenant) <= most, "quota", text)
        # A manager that has not yet seen that a member drains may grant as if it had granted before.
        if is_kept and not self.has_changed_members:
            text = f"{self._free()} bytes are free, and {self._reserved()} are guaranteed to tenants that lack them"
            require(self._free() >= self._reserved(), "guarantee", text)

    def _free(self) -> int:
        free = 0
        for member, record in self.records.items():
            if not record.draining:
                account = self._accounts.get(member)
                lent = sum(account.lent.get(_DRAM, {}).values()) if account else 0
                free += max(0, record.media[_DRAM] - lent)
        return free

    def _reserved(self) -> int:
        return sum(max(0, one.guaranteed.get(_DRAM, 0) - self.used(tenant)) for tenant, one in self._policies.items())
