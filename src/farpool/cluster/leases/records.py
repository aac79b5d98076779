"""Records and keys of leases in the registry. ID is 32 hexadecimal digits.

========================== ==========================================================================================
``leases/lease/ID``        the terms, the extents, the expiry and the epoch of a lease (`LeaseRecord`)
``leases/member/ID``       bytes that a member has lent, and the number of its next extent (`MemberAccount`)
``leases/tenant/NUMBER``   bytes that a tenant has on all members together (`TenantAccount`)
``leases/orders/ID/ID-N``  member, lease and extent: the member's node must free this extent (`OrderRecord`). The bytes
                           count as lent until the node confirms the order, and the entry is deleted
``leases/burst``           written by each grant beyond its tenant's guarantee (`Burst`), so that two of them do not use
                           the same free memory that a third tenant's guarantee needs
``leases/turns``           the managers that wait for their turn, while they get in each other's way (`Turns`)
========================== ==========================================================================================

Managers alone write these entries, and each transaction has the condition that all entries that it used are as they
were read. So two managers never lend the same bytes.
"""

from __future__ import annotations

import hashlib
import math
from typing import Annotated, TypeVar

import msgspec

from farpool.cluster.registry.records import decode_record, encode_record
from farpool.cluster.wire.access import LONGEST_NAME
from farpool.errors import ConfigError, RegistryDamagedError

__all__ = [
    "BURST",
    "COPIES_MAX",
    "EXTENTS_MAX",
    "GRAIN_BYTES",
    "LEASE",
    "LEASES",
    "MEMBER",
    "ORDERS",
    "TENANT",
    "TENANT_MAX",
    "TEXT_MAX",
    "TTL_MAX_S",
    "TTL_MIN_S",
    "TURNS",
    "Burst",
    "Extent",
    "LeaseRecord",
    "LeaseRequest",
    "MemberAccount",
    "OrderRecord",
    "Record",
    "TenantAccount",
    "Turns",
    "account_key",
    "check_request",
    "decode",
    "encode",
    "is_lease_id",
    "lease_id",
    "lease_key",
    "order_key",
    "tenant_key",
]

LEASES = "leases/"
LEASE = "leases/lease/"
MEMBER = "leases/member/"
TENANT = "leases/tenant/"
ORDERS = "leases/orders/"
BURST = "leases/burst"
TURNS = "leases/turns"
GRAIN_BYTES = 4096
"""Extents are a multiple of this long: a node maps whole pages."""
EXTENTS_MAX = 40
"""Maximum extents of a lease. A grant needs two conditions and one operation for each of its members, and must fit in
one transaction of 100 conditions."""
COPIES_MAX = 8
TTL_MIN_S, TTL_MAX_S = 1.0, 7 * 86_400.0
RECLAIM_MAX_MS = 86_400_000
TEXT_MAX = 256
"""Characters of a text, such as a label's name or the reason of an order."""
TENANT_MAX = 2**32 - 1
RIGHTS = ("r", "rw")
_FORMAT = 1
_Bytes = Annotated[int, msgspec.Meta(ge=0)]
_Record = TypeVar("_Record", bound=msgspec.Struct)


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Terms that a tenant asks for.

    Attributes
    ----------
    tenant : int
        Number of the tenant.
    holder : str
        Name of the program that uses the memory, as in its certificate or access key; a ticket is bound to it.
    bytes : int
        Usable bytes, without further copies; rounded up to whole pages.
    request : str
        Text that identifies this request. If the same request arrives twice, it gets the same lease.
    medium : str
        Kind of memory: ``dram``, ``nvme``.
    redundancy : str
        ``none``, or ``copies:N`` for N copies on N different members.
    spread : tuple of str
        Labels, such as ``rack``: the copies of the same bytes are on members with different values of each of them.
    bandwidth_share : float
        Weight of the lease within its tenant's bandwidth.
    reclaim_ms : int
        Milliseconds within which the holder gives memory back when its lender wants it.
    ttl : float
        Seconds after which the lease expires unless it is renewed.
    rights : str
        ``rw``, or ``r`` for memory that is only read.
    """

    tenant: int
    holder: str
    bytes: int
    request: str = ""
    medium: str = "dram"
    redundancy: str = "none"
    spread: tuple[str, ...] = ()
    bandwidth_share: float = 1.0
    reclaim_ms: int = 60_000
    ttl: float = 60.0
    rights: str = "rw"

    @property
    def copies(self) -> int:
        """Number of copies of all bytes; 1 without redundancy."""
        return 1 if self.redundancy == "none" else int(self.redundancy.removeprefix("copies:"))


class Extent(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Consecutive bytes on one member.

    Attributes
    ----------
    member : str
        Identity of the member, in hexadecimal digits.
    number : int
        Number of the extent. A member never gives the same number twice.
    bytes : int
        Its length.
    part : int
        Part of the lease's bytes that it holds. The parts, in the order of their numbers, make up the bytes. With
        copies, several extents hold the same part.
    copy : int
        Which copy of the part it is, from 0. Two extents are the same copy of a part while one replaces the other.
    reclaim_by : float
        Time (seconds since 1970) by which the holder must have released the extent; 0.0 if its lender does not want
        it back.
    """

    member: str
    number: int
    bytes: int
    part: int = 0
    copy: int = 0
    reclaim_by: float = 0.0


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A lease as it was granted.

    Attributes
    ----------
    terms : LeaseRequest
        The terms. `LeaseRequest.bytes` is the present size.
    extents : tuple of Extent
        The memory.
    epoch : int
        A number that grows with each change that takes memory away. A node refuses tickets of earlier epochs.
    expires : float
        Time (seconds since 1970) at which the lease expires unless it is renewed.
    granted : float
        Time of the grant, by the clock of the manager that granted it; only for people.
    features : int
        Bits of what the lease needs beyond `format`; none are defined yet.
    format : int
        Version of the record's format.
    """

    terms: LeaseRequest
    extents: tuple[Extent, ...]
    epoch: int
    expires: float
    granted: float = 0.0
    features: int = 0
    format: int = _FORMAT


class MemberAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a member has lent, with those of extents whose end its node has not confirmed.

    Attributes
    ----------
    lent : dict of str to dict of int to int
        Bytes by medium and tenant.
    next : int
        Number of the member's next extent.
    epoch : int
        The highest epoch of the orders that its node has confirmed: no new lease begins below it.
    format : int
        Version of the record's format.
    """

    lent: dict[str, dict[int, _Bytes]] = {}
    next: int = 1
    epoch: int = 0
    format: int = _FORMAT


class TenantAccount(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a tenant has on all members together, by medium; the same bytes as in the members' accounts."""

    lent: dict[str, _Bytes] = {}
    format: int = _FORMAT


class OrderRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Order to a node to free an extent, which the node confirms.

    Attributes
    ----------
    member, lease : str
        Identity of the member and number of the lease, in hexadecimal digits.
    extent, bytes : int
        Number and length of the extent.
    tenant : int
        Its tenant.
    medium : str
        Its medium.
    epoch : int
        Epoch of the lease from which on tickets for this extent are refused.
    reason : str
        Why the extent ends, for people.
    issued : float
        Time (seconds since 1970) of the order.
    format : int
        Version of the record's format.
    """

    member: str
    lease: str
    extent: int
    bytes: _Bytes
    tenant: int
    medium: str
    epoch: int
    reason: str
    issued: float
    format: int = _FORMAT

    @property
    def key(self) -> str:
        """The order's key in the registry."""
        return order_key(self.member, self.lease, self.extent)


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Number of grants beyond a tenant's guarantee so far."""

    count: int = 0
    format: int = _FORMAT


class Turns(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the managers that wait. While there are any, only the first one changes leases."""

    waiting: tuple[str, ...] = ()
    format: int = _FORMAT


Record = LeaseRecord | MemberAccount | TenantAccount | OrderRecord | Burst | Turns


def lease_id(tenant: int, request: str) -> str:
    """Return the number of the lease that a request gets: 16 bytes, in hexadecimal digits."""
    return hashlib.sha256(f"farpool lease {tenant} {request}".encode()).hexdigest()[:32]


def is_lease_id(text: str) -> bool:
    """Return True if a text has the form of a lease's number."""
    return len(text) == 32 and all(letter in "0123456789abcdef" for letter in text)


def lease_key(lease: str) -> str:
    """Return the key of a lease."""
    return LEASE + lease


def account_key(member: str) -> str:
    """Return the key of a member's account."""
    return MEMBER + member


def tenant_key(tenant: int) -> str:
    """Return the key of a tenant's account."""
    return f"{TENANT}{tenant}"


def order_key(member: str, lease: str, extent: int) -> str:
    """Return the key of the order to end an extent."""
    return f"{ORDERS}{member}/{lease}-{extent}"


def encode(record: Record) -> bytes:
    """Encode a record as JSON, so that people can read the registry."""
    return encode_record(record)


def decode(key: str, value: bytes, kind: type[_Record]) -> _Record:
    """Decode an entry's record.

    Raises
    ------
    RegistryDamagedError
        The value is not such a record, or a later release of farpool wrote it in a format that this one cannot read.
    """
    advice = "restore it from a backup, or end the leases that it belongs to and delete it"
    record = decode_record(key, value, kind, known=_FORMAT, advice=advice)
    if features := getattr(record, "features", 0):
        raise RegistryDamagedError(
            f"the registry's entry {key!r} has features {features:#x}, expected none; a later release of farpool has "
            "written it, so update this program",
            key=key,
        )
    return record


def check_request(request: LeaseRequest) -> None:
    """Raise ConfigError for terms that no pool could keep, whatever it lends."""
    wrong = ""
    kind, _, copies = request.redundancy.partition(":")
    copies_fit = kind == "copies" and copies.isascii() and copies.isdecimal() and 1 <= int(copies[:3]) <= COPIES_MAX
    texts = (request.holder, request.request, request.medium, *request.spread)
    if not 0 <= request.tenant <= TENANT_MAX:
        wrong = f"tenant is {request.tenant}, expected a tenant's number, at most {TENANT_MAX}"
    elif any("\ud800" <= letter <= "\udfff" for text in texts for letter in text):
        wrong = "a text has a character that UTF-8 cannot encode"
    elif not 0 < len(request.holder) <= LONGEST_NAME:
        wrong = f"holder has {len(request.holder)} characters, expected 1 to {LONGEST_NAME}"
    elif not 0 < len(request.request) <= TEXT_MAX:
        wrong = f"request has {len(request.request)} characters, expected 1 to {TEXT_MAX}"
    elif not 0 < request.bytes < 1 << 60:
        wrong = f"bytes is {request.bytes}, expected a positive number of bytes"
    elif not 0 < len(request.medium) <= TEXT_MAX:
        wrong = f"medium is {request.medium!r}, expected a medium such as 'dram'"
    elif request.redundancy != "none" and not copies_fit:
        wrong = f"redundancy is {request.redundancy!r}, expected 'none' or 'copies:N' with N from 1 to {COPIES_MAX}"
    elif len(request.spread) > 8 or any(not 0 < len(label) <= TEXT_MAX for label in request.spread):
        wrong = f"spread is {request.spread!r}, expected at most 8 names of labels"
    elif not 0 < request.bandwidth_share <= 1e6:
        wrong = f"bandwidth_share is {request.bandwidth_share}, expected a positive weight"
    elif not 0 < request.reclaim_ms <= RECLAIM_MAX_MS:
        wrong = f"reclaim_ms is {request.reclaim_ms}, expected 1 to {RECLAIM_MAX_MS} milliseconds"
    elif not TTL_MIN_S <= request.ttl <= TTL_MAX_S or math.isnan(request.ttl):
        wrong = f"ttl is {request.ttl}, expected {TTL_MIN_S:g} to {TTL_MAX_S:g} seconds"
    elif request.rights not in RIGHTS:
        wrong = f"rights is {request.rights!r}, expected one of {', '.join(RIGHTS)}"
    if wrong:
        raise ConfigError(f"the request for a lease cannot be used: {wrong}")
