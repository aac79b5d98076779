"""A transaction that is being made: changes on top of a view, which requests see that are decided later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from farpool.abc.registry import OPERATIONS_MAX, Condition, Delete, Operation, Put
from farpool.cluster.leases.offers import Lender, in_order
from farpool.cluster.leases.records import TENANT, Record, TenantAccount, encode
from farpool.cluster.leases.requests import TenantLimits
from farpool.cluster.leases.view import View

__all__ = ["Draft", "Moment", "NextTransaction"]

_BYTES_MAX = 512 << 10
"""Most bytes of values in a transaction with several requests. An etcd accepts requests of 1.5 MiB, and its gateway
needs a third more for the same bytes."""
_RESERVED = 1
"""Conditions and operations that stay free for the entry of the managers' turns."""
_Kind = TypeVar("_Kind", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Moment:
    """Circumstances of a decision.

    Attributes
    ----------
    now : float
        Time of the wall clock, in seconds since 1970.
    tick : float
        Time of this process, in seconds, which never jumps.
    policies : mapping of int to TenantLimits, or None
        Limits of all tenants; None if there are none.
    seed : bytes
        Decides which members are asked first.
    """

    now: float
    tick: float
    policies: Mapping[int, TenantLimits] | None = None
    seed: bytes = b""


class NextTransaction(Exception):  # noqa: N818 - it is no error
    """A request must be decided after the transaction of the requests before it."""


class Draft:
    """Changes of entries that are not in the registry yet.

    Parameters
    ----------
    view : View
        The entries in the registry.
    moment : Moment
        Circumstances of the decision.
    below : Draft, optional
        Changes of earlier requests, which this draft goes on from.
    """

    def __init__(self, view: View, moment: Moment, below: Draft | None = None) -> None:
        self.view, self.moment = view, moment
        self._below = below
        self._records: dict[str, Record | None] = {}
        self._values: dict[str, bytes] = {}
        self._used: set[str] = set()
        self._taken: dict[tuple[str, str], int] = {}
        self._lenders: dict[str, dict[str, Lender]] = {}
        self._tenants: dict[int, TenantAccount] | None = None
        self._has_offered = False

    def on_top(self) -> Draft:
        """Begin a draft that goes on from this one."""
        return Draft(self.view, self.moment, self)

    # Entries

    def get(self, key: str, kind: type[_Kind]) -> _Kind | None:
        """Return the record of a key with this draft's changes, and make the transaction depend on it."""
        self._used.add(key)
        draft: Draft | None = self
        while draft is not None:
            if key in draft._records:
                record = draft._records[key]
                assert record is None or isinstance(record, kind), key
                return record
            draft = draft._below
        return self.view.get(key, kind)

    def put(self, key: str, record: Record) -> None:
        """Write a record."""
        self._records[key] = record
        self._values[key] = encode(record)
        self._used.add(key)

    def delete(self, key: str) -> None:
        """Delete a key's entry."""
        self._records[key] = None
        self._values[key] = b""
        self._used.add(key)

    def has_deleted(self, key: str) -> bool:
        """Return True if an earlier request of the transaction deletes an entry."""
        return self._below is not None and key in self._below._records and self._below._records[key] is None

    def use(self, key: str) -> None:
        """Make the transaction depend on a key's entry."""
        self._used.add(key)

    # Members and tenants

    def lenders(self, medium: str) -> list[Lender]:
        """Return the members that lend a medium, in the order in which they are asked."""
        if self._below is None:
            if medium not in self._lenders:
                lenders = list(self.view.lenders(medium))
                for one in lenders:
                    one.free -= self._taken.get((medium, one.member), 0)
                order = in_order(lenders, self.moment.seed)
                self._lenders[medium] = {one.member: one for one in order}
            return list(self._lenders[medium].values())
        lenders = self._below.lenders(medium)
        if not self._taken:
            return lenders
        return [replace(one, free=one.free - self._taken.get((medium, one.member), 0)) for one in lenders]

    def take(self, medium: str, member: str, size: int) -> None:
        """Count bytes of a member as lent; a negative number counts them as free again."""
        self._taken[medium, member] = self._taken.get((medium, member), 0) + size

    def reserved(self, tenant: int, medium: str) -> int:
        """Return the bytes that are guaranteed to other tenants and that they do not have."""
        root = self
        while root._below is not None:
            root = root._below
        if root._tenants is None:
            root._tenants = {**self.view.tenants(), **_tenants(root._records)}
        reserved = 0
        for other, limits in (self.moment.policies or {}).items():
            guaranteed = limits.guaranteed.get(medium, 0)
            if other != tenant and guaranteed:
                account = root._tenants.get(other)
                reserved += max(0, guaranteed - (account.lent.get(medium, 0) if account else 0))
        return reserved

    def may_offer(self) -> bool:
        """Return True for the first refusal of the transaction that needs offers.

        Offers take a hundred times as long as a grant, so requests that cannot be kept would hold up all others.
        """
        root = self
        while root._below is not None:
            root = root._below
        is_first, root._has_offered = not root._has_offered, True
        return is_first

    # The end

    def merge(self) -> bool:
        """Add the changes to the lowest draft if all fit into one transaction with it; return False if they do not.

        A request without changes adds its conditions: its answer is right only if the entries are as it saw them.
        """
        below = self._below
        assert below is not None
        used, values = below._used | self._used, below._values | self._values
        room = OPERATIONS_MAX - _RESERVED
        is_large = below._values and sum(map(len, values.values())) > _BYTES_MAX
        if len(used) > room or len(values) > room or is_large:
            return False
        below._used, below._values = used, values
        below._records |= self._records
        for (medium, member), size in self._taken.items():
            below.take(medium, member, size)
            lender = below._lenders.get(medium, {}).get(member)
            if lender is not None:
                lender.free -= size
        if below._tenants is not None:
            below._tenants |= _tenants(self._records)
        return True

    @property
    def changes(self) -> Mapping[str, Record | None]:
        """Records that the transaction writes; None for entries that it deletes."""
        return self._records

    def conditions(self) -> list[Condition]:
        """Return the conditions that the entries are as the view has them."""
        return [Condition(key, self.view.revision_of(key)) for key in sorted(self._used)]

    def operations(self) -> list[Operation]:
        """Return the operations that write the changes."""
        return [
            Put(key, self._values[key]) if record is not None else Delete(key)
            for key, record in sorted(self._records.items())
        ]


def _tenants(records: Mapping[str, Record | None]) -> dict[int, TenantAccount]:
    return {
        int(key.removeprefix(TENANT)): record for key, record in records.items() if isinstance(record, TenantAccount)
    }
