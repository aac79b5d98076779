"""Records and keys of tenants in the registry. NUMBER is a tenant's number, as access keys name it.

========================= ===========================================================================================
``tenants/policy/NUMBER`` what the pool gives the tenant (`TenantPolicy`)
``tenants/fleet``         which tenants have a policy, and how far their guarantees may exceed the pool (`FleetPolicy`)
========================= ===========================================================================================

Each change writes ``tenants/fleet`` in the same transaction, so the revision of this entry is the revision of the whole
policy. A removal is then a change like any other. If the entry is missing, the policy is unknown, which is something
else than empty: the registry never had one, or has lost it.
"""

from __future__ import annotations

import re
from typing import Annotated, TypeVar

import msgspec

from farpool.abc.registry import Entry
from farpool.cluster.registry.records import decode_record, encode_record

__all__ = [
    "CAP_MIN_BYTES_PER_S",
    "FLEET",
    "MEDIA",
    "NUMBER_MAX",
    "POLICY",
    "PRIORITY_MAX",
    "SHARE_MAX",
    "SHARE_MIN",
    "TENANTS",
    "BandwidthPolicy",
    "FleetPolicy",
    "MediumPolicy",
    "TenantPolicy",
    "decode",
    "encode",
    "is_tenant_name",
    "number_of",
    "policy_key",
]

TENANTS = "tenants/"
POLICY = "tenants/policy/"
FLEET = "tenants/fleet"
MEDIA = ("dram",)
"""Media of which nodes limit what a tenant uses. The NVMe file below the memory has no limits by tenant."""
NUMBER_MAX = 2**32 - 1
PRIORITY_MAX = 1000
SHARE_MIN, SHARE_MAX = 1 / 1024, float(1 << 20)
"""Smallest and largest bandwidth share that a node can apply."""
CAP_MIN_BYTES_PER_S = 64 << 10
"""Smallest bandwidth cap that a node can apply."""
_FORMAT = 1
_NAME = re.compile(r"(?![0-9]+\Z)[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_NUMBER = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)
_Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Record = TypeVar("_Record", bound="TenantPolicy | FleetPolicy")


class MediumPolicy(msgspec.Struct, frozen=True):
    """Part of one medium for a tenant, in all members together.

    Attributes
    ----------
    guaranteed : int
        Bytes that no other tenant's use evicts; 0 for no guarantee of its own. The tenant then has on each node the
        share that it has without a policy.
    burst : int
        Most bytes that the tenant may use; 0 for no limit.
    """

    guaranteed: _Bytes = 0
    burst: _Bytes = 0

    def __post_init__(self) -> None:
        if 0 < self.burst < self.guaranteed:
            raise ValueError(f"burst is {self.burst}, expected 0 or at least the guaranteed {self.guaranteed} bytes")


class BandwidthPolicy(msgspec.Struct, frozen=True):
    """Part of the bandwidth of each node for a tenant.

    Attributes
    ----------
    share : float
        Share of the bandwidth that no guarantee takes, relative to the shares of other tenants.
    guarantee : int
        Bytes per second that the tenant gets if it asks for them; 0 for no guarantee.
    cap : int
        Most bytes per second that the tenant gets; 0 for no limit.
    """

    share: Annotated[float, msgspec.Meta(ge=SHARE_MIN, le=SHARE_MAX)] = 1.0
    guarantee: _Bytes = 0
    cap: _Bytes = 0

    def __post_init__(self) -> None:
        if 0 < self.cap < CAP_MIN_BYTES_PER_S:
            raise ValueError(f"cap is {self.cap}, expected 0 or at least {CAP_MIN_BYTES_PER_S} bytes/s")
        if 0 < self.cap < self.guarantee:
            raise ValueError(f"cap is {self.cap}, expected 0 or at least the guarantee of {self.guarantee} bytes/s")


class TenantPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Parts of the pool for a tenant.

    Attributes
    ----------
    name : str
        The tenant's name, for people.
    media : dict of str to MediumPolicy
        Bytes, by medium.
    bandwidth : BandwidthPolicy
        Bytes per second.
    priority : int
        Borrowed bytes of tenants with the lowest priority are evicted first.
    features : int
        Bits of what a policy can say beyond `format`; none are defined yet.
    format : int
        Version of the record's format.
    """

    name: str
    media: dict[str, MediumPolicy] = {}
    bandwidth: BandwidthPolicy = BandwidthPolicy()
    priority: Annotated[int, msgspec.Meta(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] = 0
    features: int = 0
    format: int = _FORMAT


class FleetPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for all tenants together.

    Attributes
    ----------
    tenants : tuple of int
        Numbers of the tenants that have a policy, in order.
    oversubscription : dict of str to float
        By medium, how many times the pool's bytes all guarantees together may be; 1 if a medium is not there.
    features : int
        Bits of what the record can say beyond `format`; none are defined yet.
    format : int
        Version of the record's format.
    """

    tenants: tuple[Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)], ...] = ()
    oversubscription: dict[str, Annotated[float, msgspec.Meta(gt=0)]] = {}
    features: int = 0
    format: int = _FORMAT

    def factor(self, medium: str) -> float:
        """Return how many times the pool's bytes of a medium all guarantees together may be."""
        return self.oversubscription.get(medium, 1.0)


def is_tenant_name(text: str) -> bool:
    """Return True if a tenant can have this name. A name of digits alone would look like a number."""
    return _NAME.fullmatch(text) is not None


def policy_key(number: int) -> str:
    """Return the key of a tenant's policy."""
    return f"{POLICY}{number}"


def number_of(key: str) -> int | None:
    """Return the number of the tenant whose policy has this key; None if it is no such key."""
    text = key.removeprefix(POLICY)
    is_number = text != key and _NUMBER.fullmatch(text) is not None and int(text) <= NUMBER_MAX
    return int(text) if is_number else None


def encode(record: TenantPolicy | FleetPolicy) -> bytes:
    """Encode a record as JSON, so that people can read the registry."""
    return encode_record(record)


def decode(entry: Entry, kind: type[_Record]) -> _Record:
    """Decode an entry's record.

    Raises
    ------
    RegistryDamagedError
        The value is not such a record, or a later release of farpool wrote it in a format that this one cannot read.
    """
    advice = (
        "write it again with 'farpool tenants set'"
        if kind is TenantPolicy
        else "restore the registry from a backup, or delete the entry and write all policies again"
    )
    return decode_record(entry.key, entry.value, kind, known=_FORMAT, advice=advice)
