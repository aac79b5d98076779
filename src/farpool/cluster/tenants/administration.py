"""Work of people on the policy of a pool's tenants: they list it, set it and remove it, as the registry has it.

A change is made on the condition that the whole policy still has the revision that was read. So of two people who each
guarantee the last free bytes at the same time, one is refused with the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from farpool.abc.registry import Condition, Delete, Entry, Operation, Put, Registry
from farpool.cluster.members.records import RECORD, MemberRecord
from farpool.cluster.members.records import decode as decode_member
from farpool.cluster.tenants.records import (
    CAP_MIN_BYTES_PER_S,
    FLEET,
    MEDIA,
    NUMBER_MAX,
    PRIORITY_MAX,
    SHARE_MAX,
    SHARE_MIN,
    TENANTS,
    BandwidthPolicy,
    FleetPolicy,
    MediumPolicy,
    TenantPolicy,
    decode,
    encode,
    is_tenant_name,
    number_of,
    policy_key,
)
from farpool.errors import ConfigError, RegistryDamagedError
from farpool.sizes import format_size

__all__ = ["RegisteredTenants", "TenantChange", "list_tenants", "oversubscribe", "remove_tenant", "set_tenant"]

_BYTES_MAX = 2**62
_FACTOR_MAX = 1000.0
_TENANTS_MAX = 10_000
"""Most tenants with a policy: the entry `FLEET` has all of their numbers, and a registry's value is at most 1 MiB."""


@dataclass(frozen=True, slots=True)
class RegisteredTenants:
    """The policy as the registry has it, and the pool that it divides.

    Attributes
    ----------
    revision : int
        Revision of the policy; 0 if the registry has none.
    fleet : FleetPolicy
        What holds for all tenants together.
    tenants : dict of int to TenantPolicy
        Policies by the tenants' numbers.
    damage : dict of int to str
        Why a listed tenant's policy cannot be read. Nodes keep the one that they know.
    media : dict of str to int
        Bytes that all members lend together, by medium.
    members : int
        Number of members.
    """

    revision: int
    fleet: FleetPolicy
    tenants: dict[int, TenantPolicy]
    damage: dict[int, str]
    media: dict[str, int]
    members: int

    def guaranteed(self, medium: str) -> int:
        """Return the bytes of a medium that are guaranteed to all tenants together."""
        return sum(one.media[medium].guaranteed for one in self.tenants.values() if medium in one.media)

    def find(self, name: str) -> int | None:
        """Return the number of the tenant with a name; None if there is none."""
        return next((number for number, one in self.tenants.items() if one.name == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantChange:
    """Changes of a tenant's policy. Fields that are None and media that are missing stay as they are.

    Attributes
    ----------
    guaranteed, burst : mapping of str to int
        Bytes by medium; 0 for no guarantee of its own, and no limit.
    share : float or None
        Share of the bandwidth, as in `BandwidthPolicy`.
    guarantee, cap : int or None
        Bytes per second, as in `BandwidthPolicy`.
    priority : int or None
        As in `TenantPolicy`.
    """

    guaranteed: Mapping[str, int] = field(default_factory=dict)
    burst: Mapping[str, int] = field(default_factory=dict)
    share: float | None = None
    guarantee: int | None = None
    cap: int | None = None
    priority: int | None = None


def list_tenants(registry: Registry) -> RegisteredTenants:
    """Read the policy.

    Raises
    ------
    RegistryDamagedError
        The entry that lists the tenants cannot be read.
    """
    return _read(registry)[0]


def set_tenant(
    registry: Registry, name: str, change: TenantChange, *, number: int | None = None, revision: int | None = None
) -> tuple[int, TenantPolicy, int]:
    """Write a tenant's policy.

    Parameters
    ----------
    registry : Registry
        The registry.
    name : str
        The tenant's name.
    change : TenantChange
        What to change.
    number : int, optional
        The tenant's number, as access keys name it. Needed for a tenant that has no policy yet.
    revision : int, optional
        Revision that the whole policy must have; None for any.

    Returns
    -------
    number : int
        The tenant's number.
    policy : TenantPolicy
        Its policy from now on.
    revision : int
        Revision of the whole policy from now on.

    Raises
    ------
    ConfigError
        The tenant is unknown, a value is wrong, or the pool cannot keep the guarantees. Nothing was changed.
    """
    _check_name(name)
    _check_change(change)

    def make(present: RegisteredTenants) -> tuple[RegisteredTenants, list[Operation]]:
        own = _own_number(present, name, number)
        policy = _changed(present.tenants.get(own) or TenantPolicy(name=name), change)
        numbers = tuple(sorted({*present.fleet.tenants, own}))
        if len(numbers) > _TENANTS_MAX:
            raise ConfigError(f"{len(numbers)} tenants would have a policy, expected at most {_TENANTS_MAX}")
        after = RegisteredTenants(
            present.revision,
            msgspec.structs.replace(present.fleet, tenants=numbers),
            {**present.tenants, own: policy},
            {other: text for other, text in present.damage.items() if other != own},
            present.media,
            present.members,
        )
        for medium in change.guaranteed:
            if after.guaranteed(medium) > present.guaranteed(medium):
                _check_guarantees(after, medium)
        return after, [Put(policy_key(own), encode(policy))]

    after = _change(registry, make, revision)
    own = after.find(name)
    assert own is not None
    return own, after.tenants[own], after.revision


def remove_tenant(registry: Registry, name: str, *, revision: int | None = None) -> tuple[int, int]:
    """Delete a tenant's policy. Nodes then treat the tenant as if it never had one; its objects stay.

    Parameters
    ----------
    registry : Registry
        The registry.
    name : str
        The tenant's name; its number, if the policy is damaged.
    revision : int, optional
        Revision that the whole policy must have; None for any.

    Returns
    -------
    number : int
        The tenant's number.
    revision : int
        Revision of the whole policy from now on.

    Raises
    ------
    ConfigError
        No tenant has this name, or, as a number, this damaged policy.
    """

    def make(present: RegisteredTenants) -> tuple[RegisteredTenants, list[Operation]]:
        own = present.find(name)
        if own is None and name.isdecimal() and int(name) in present.damage:
            own = int(name)  # its name cannot be read
        if own is None:
            raise _unknown(present, name)
        removed.append(own)
        after = RegisteredTenants(
            present.revision,
            msgspec.structs.replace(
                present.fleet, tenants=tuple(number for number in present.fleet.tenants if number != own)
            ),
            {number: one for number, one in present.tenants.items() if number != own},
            {number: text for number, text in present.damage.items() if number != own},
            present.media,
            present.members,
        )
        return after, [Delete(policy_key(own))]

    removed: list[int] = []
    after = _change(registry, make, revision)
    return removed[-1], after.revision


def oversubscribe(
    registry: Registry, factors: Mapping[str, float], *, revision: int | None = None
) -> RegisteredTenants:
    """State how many times the pool's bytes of a medium all guarantees together may be.

    Parameters
    ----------
    registry : Registry
        The registry.
    factors : mapping of str to float
        Factors by medium; 1 for guarantees that all can be kept at the same time.
    revision : int, optional
        Revision that the whole policy must have; None for any.

    Returns
    -------
    RegisteredTenants
        The policy from now on.

    Raises
    ------
    ConfigError
        A factor is wrong, or the present guarantees are more than it allows. Nothing was changed.
    """
    for medium, factor in factors.items():
        _check_medium(medium)
        if not (math.isfinite(factor) and 0 < factor <= _FACTOR_MAX):
            raise ConfigError(
                f"oversubscription of {medium} is {factor!r}, expected a number above 0 and at most {_FACTOR_MAX:g}"
            )

    def make(present: RegisteredTenants) -> tuple[RegisteredTenants, list[Operation]]:
        fleet = msgspec.structs.replace(present.fleet, oversubscription={**present.fleet.oversubscription, **factors})
        after = RegisteredTenants(
            present.revision, fleet, present.tenants, present.damage, present.media, present.members
        )
        for medium, factor in factors.items():
            if factor < present.fleet.factor(medium):
                _check_guarantees(after, medium)
        return after, []

    return _change(registry, make, revision)


_Make = Callable[[RegisteredTenants], tuple[RegisteredTenants, list[Operation]]]


def _change(registry: Registry, make: _Make, revision: int | None) -> RegisteredTenants:
    """Read the policy, and make the change that `make` returns, again if others made changes in the meantime."""
    while True:
        present, revisions = _read(registry)
        if revision not in (None, present.revision):
            raise ConfigError(
                f"the policy has the revision {present.revision}, expected {revision}: someone has changed it; look at "
                "it again",
                setting="revision",
            )
        after, operations = make(present)
        # Also on the tenants' own entries, because a person may have written one by hand.
        keys = {FLEET, *(operation.key for operation in operations)}
        conditions = [Condition(key, revisions.get(key, 0)) for key in sorted(keys)]
        done = registry.commit(conditions, [Put(FLEET, encode(after.fleet)), *operations])
        if done.succeeded:
            return RegisteredTenants(
                done.revision, after.fleet, after.tenants, after.damage, after.media, after.members
            )


def _read(registry: Registry) -> tuple[RegisteredTenants, dict[str, int]]:
    """Return the policy, and the revision of each of its entries."""
    entries = {entry.key: entry for entry in registry.range(TENANTS, RECORD).entries}
    entry = entries.get(FLEET)
    # Without that entry, nodes keep all policies. The next change then lists the tenants whose entries are still there.
    left = {number for number in map(number_of, entries) if number is not None}
    fleet = FleetPolicy(tenants=tuple(sorted(left))) if entry is None else decode(entry, FleetPolicy)
    tenants: dict[int, TenantPolicy] = {}
    damage: dict[int, str] = {}
    for number in fleet.tenants:
        known = entries.get(policy_key(number))
        if known is None:
            damage[number] = f"the registry has no entry {policy_key(number)!r}"
            continue
        try:
            tenants[number] = decode(known, TenantPolicy)
        except RegistryDamagedError as error:
            damage[number] = str(error)
    media, members = _pool(entries.values())
    revisions = {key: one.revision for key, one in entries.items() if key == FLEET or number_of(key) is not None}
    revision = 0 if entry is None else entry.revision
    return RegisteredTenants(revision, fleet, tenants, damage, media, members), revisions


def _pool(entries: Iterable[Entry]) -> tuple[dict[str, int], int]:
    media: dict[str, int] = {}
    members = 0
    for entry in entries:
        if entry.key.startswith(RECORD):
            members += 1
            with suppress(RegistryDamagedError):  # its bytes cannot be counted on
                for medium, nbytes in decode_member(entry, MemberRecord).media.items():
                    media[medium] = media.get(medium, 0) + max(nbytes, 0)
    return media, members


def _own_number(present: RegisteredTenants, name: str, number: int | None) -> int:
    """Return the number of the tenant that is to be written."""
    known = present.find(name)
    if number is None:
        if known is None:
            raise _unknown(present, name, "; give --number for a new one")
        return known
    if isinstance(number, bool) or not 0 <= number <= NUMBER_MAX:
        raise ConfigError(f"--number is {number!r}, expected a tenant's number, 0 to {NUMBER_MAX}", setting="number")
    if known is not None and known != number:
        raise ConfigError(
            f"--number is {number}, but the tenant {name!r} has the number {known}; two tenants cannot have one name",
            setting="number",
        )
    if number in present.tenants and present.tenants[number].name != name:
        raise ConfigError(
            f"--number is {number}, which is the tenant {present.tenants[number].name!r}; choose another number, or "
            "remove that tenant's policy first",
            setting="number",
        )
    return number


def _unknown(present: RegisteredTenants, name: str, advice: str = "") -> ConfigError:
    names = ", ".join(sorted(one.name for one in present.tenants.values())) or "none"
    return ConfigError(f"there is no tenant {name!r} with a policy; tenants are: {names}{advice}", setting="name")


def _changed(policy: TenantPolicy, change: TenantChange) -> TenantPolicy:
    media = dict(policy.media)
    for medium in {*change.guaranteed, *change.burst}:
        former = media.get(medium, MediumPolicy())
        guaranteed = change.guaranteed.get(medium, former.guaranteed)
        burst = change.burst.get(medium, former.burst)
        if 0 < burst < guaranteed:
            raise ConfigError(
                f"the burst of {medium} would be {format_size(burst)}, which is below the guarantee of "
                f"{format_size(guaranteed)}; expected at least the guarantee, or 0 for no limit",
                setting="burst",
            )
        media[medium] = MediumPolicy(guaranteed, burst)
    former_bandwidth = policy.bandwidth
    share = former_bandwidth.share if change.share is None else change.share
    guarantee = former_bandwidth.guarantee if change.guarantee is None else change.guarantee
    cap = former_bandwidth.cap if change.cap is None else change.cap
    if 0 < cap < guarantee:
        raise ConfigError(
            f"the bandwidth cap would be {cap} bytes/s, which is below the guarantee of {guarantee}; expected at "
            "least the guarantee, or 0 for no limit",
            setting="bandwidth_cap",
        )
    return msgspec.structs.replace(
        policy,
        media=media,
        bandwidth=BandwidthPolicy(share, guarantee, cap),
        priority=policy.priority if change.priority is None else change.priority,
    )


def _check_name(name: str) -> None:
    if not is_tenant_name(name):
        raise ConfigError(
            f"the tenant's name is {name!r}, expected 1 to 64 letters, digits, dots, dashes or underscores, a letter "
            "or digit first, and not only digits",
            setting="name",
        )


def _check_medium(medium: str) -> None:
    if medium not in MEDIA:
        raise ConfigError(
            f"{medium!r} is no medium that nodes divide among tenants, expected one of: {', '.join(MEDIA)}",
            setting="medium",
        )


def _check_change(change: TenantChange) -> None:
    for what, of_media in (("guarantee", change.guaranteed), ("burst", change.burst)):
        for medium, nbytes in of_media.items():
            _check_medium(medium)
            if isinstance(nbytes, bool) or not 0 <= nbytes <= _BYTES_MAX:
                raise ConfigError(
                    f"the {what} of {medium} is {nbytes!r}, expected bytes, at least 0 and at most {_BYTES_MAX}",
                    setting=what,
                )
    if change.share is not None and not SHARE_MIN <= change.share <= SHARE_MAX:
        raise ConfigError(
            f"the bandwidth share is {change.share!r}, expected a number from {SHARE_MIN} to {SHARE_MAX:.0f}",
            setting="bandwidth_share",
        )
    for what, rate in (("guarantee", change.guarantee), ("cap", change.cap)):
        if rate is not None and not 0 <= rate <= _BYTES_MAX:
            raise ConfigError(
                f"the bandwidth {what} is {rate!r}, expected bytes per second, at least 0 and at most {_BYTES_MAX}",
                setting=f"bandwidth_{what}",
            )
    if change.cap is not None and 0 < change.cap < CAP_MIN_BYTES_PER_S:
        raise ConfigError(
            f"the bandwidth cap is {change.cap}, expected at least {CAP_MIN_BYTES_PER_S} bytes per second, or 0 for no "
            "limit",
            setting="bandwidth_cap",
        )
    if change.priority is not None and not -PRIORITY_MAX <= change.priority <= PRIORITY_MAX:
        raise ConfigError(
            f"the priority is {change.priority!r}, expected a number from {-PRIORITY_MAX} to {PRIORITY_MAX}",
            setting="priority",
        )


def _check_guarantees(policy: RegisteredTenants, medium: str) -> None:
    """Refuse guarantees that are more than the pool's bytes times the stated oversubscription."""
    pool, factor = policy.media.get(medium, 0), policy.fleet.factor(medium)
    total = policy.guaranteed(medium)
    if total > math.floor(pool * factor):
        raise ConfigError(
            f"all guarantees of {medium} together would be {format_size(total)} ({total} bytes), but the pool "
            f"lends {format_size(pool)} ({pool} bytes, members: {policy.members}), times an oversubscription of "
            f"{factor:g}; guarantee less, start more nodes, or state a higher one with 'farpool tenants oversubscribe'",
            setting="guarantee",
        )
