"""Requests that change leases, and the answers to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from farpool.cluster.leases.records import Extent, LeaseRecord, LeaseRequest, OrderRecord

__all__ = [
    "Change",
    "Confirm",
    "Done",
    "End",
    "Expire",
    "Grant",
    "Granted",
    "Mark",
    "Outcome",
    "Reason",
    "Refused",
    "Release",
    "Renew",
    "Replace",
    "Resize",
    "Take",
    "TenantLimits",
]

Extents = tuple[tuple[str, int], ...]
"""Extents, each as the identity of its member and its number."""


class Reason(StrEnum):
    """Why a request was refused.

    Attributes
    ----------
    TENANT
        The policy has no such tenant.
    QUOTA
        The tenant has no room for the bytes: its burst is used up, or the memory is guaranteed to other tenants.
    MEMORY
        The members cannot give the bytes on these terms.
    LEASES
        There are too many leases.
    REQUEST
        The same request was made before, with other terms.
    UNKNOWN
        There is no such lease: it has ended, or it is another tenant's.
    EPOCH
        The request was made for an earlier epoch of the lease.
    REDUNDANCY
        The lease would keep too few copies of some of its bytes.
    EXTENTS
        The lease would have too many extents.
    """

    TENANT = "tenant"
    QUOTA = "quota"
    MEMORY = "memory"
    LEASES = "leases"
    REQUEST = "request"
    UNKNOWN = "unknown"
    EPOCH = "epoch"
    REDUNDANCY = "redundancy"
    EXTENTS = "extents"


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """Bytes that a tenant may lease.

    Attributes
    ----------
    guaranteed : mapping of str to int
        Bytes by medium that no other tenant takes from it.
    most : mapping of str to int
        Most bytes by medium. A medium that is not there has no limit.
    priority : int
        Tenants with a lower number are asked first for memory that is guaranteed to others.
    """

    guaranteed: Mapping[str, int] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Grant:
    """Make a lease."""

    request: LeaseRequest


@dataclass(frozen=True, slots=True)
class Change:
    """Base of the changes of one lease.

    Attributes
    ----------
    lease : str
        Number of the lease.
    tenant : int or None
        The tenant that asks; None for an administrator.
    """

    lease: str
    tenant: int | None = None


@dataclass(frozen=True, slots=True)
class Renew(Change):
    """Move the expiry of a lease to its time to live from now. It never moves back."""


@dataclass(frozen=True, slots=True)
class Resize(Change):
    """Grow a lease to `bytes`, or end parts of it until no more than needed for `bytes` are left."""

    epoch: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Replace(Change):
    """Add an extent on another member for each of `extents`, and for each missing copy. The old extents stay."""

    epoch: int = 0
    extents: Extents = ()


@dataclass(frozen=True, slots=True)
class Release(Change):
    """End extents that their holder no longer uses."""

    epoch: int = 0
    extents: Extents = ()


@dataclass(frozen=True, slots=True)
class End(Change):
    """End a lease. It is no error if it has ended."""

    reason: str = "its holder returned it"


@dataclass(frozen=True, slots=True)
class Expire(Change):
    """End a lease if it has expired."""


@dataclass(frozen=True, slots=True)
class Mark(Change):
    """Ask the holder to release extents within the time that the lease states; it learns of it when it renews."""

    extents: Extents = ()


@dataclass(frozen=True, slots=True)
class Take(Change):
    """End extents without their holder, because it did not release them in time."""

    extents: Extents = ()
    reason: str = "its lender wanted it back and its holder did not release it in time"


@dataclass(frozen=True, slots=True)
class Confirm:
    """Record that a node has freed an extent; its bytes can be lent again.

    Attributes
    ----------
    member, lease : str
        Identity of the member and number of the lease, in hexadecimal digits.
    extent : int
        Number of the extent.
    for_gone : bool
        True if the member was removed from the registry, so that nobody else confirms the order. Then this changes
        nothing if the member is there again. Otherwise the bytes no longer count. The order itself stays without bytes,
        and the next such request deletes it.
    """

    member: str
    lease: str
    extent: int
    for_gone: bool = False


Request = Grant | Renew | Resize | Replace | Release | End | Expire | Mark | Take | Confirm


@dataclass(frozen=True, slots=True)
class Granted:
    """A lease as it is after the request.

    Attributes
    ----------
    lease : str
        Its number: 16 bytes, in hexadecimal digits.
    record : LeaseRecord
        The terms, the extents, the epoch and the expiry: all that a ticket needs.
    """

    lease: str
    record: LeaseRecord

    @property
    def wanted_back(self) -> tuple[Extent, ...]:
        """The extents that their lenders want back, each by the time in its `reclaim_by`."""
        return tuple(one for one in self.record.extents if one.reclaim_by)


@dataclass(frozen=True, slots=True)
class Done:
    """The request was carried out, or there was nothing to do.

    Attributes
    ----------
    orders : tuple of OrderRecord
        Orders to nodes that the request made.
    """

    orders: tuple[OrderRecord, ...] = ()


@dataclass(frozen=True, slots=True)
class Refused:
    """The request was refused and changed nothing.

    Attributes
    ----------
    reason : Reason
        Why, for programs.
    text : str
        Why, for people, with what to do.
    offers : tuple of LeaseRequest
        Terms that would be granted if they were asked for now; the nearest first. To grow a lease, ask for the bytes of
        an offer.
    granted : Granted or None
        The lease as it is, if the request was for a lease of its tenant.
    """

    reason: Reason
    text: str
    offers: tuple[LeaseRequest, ...] = ()
    granted: Granted | None = None


Outcome = Granted | Done | Refused
