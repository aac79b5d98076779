"""A pool for people: members, tenants, leases, exposure and alarms, from its registry or from a manager."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from farpool.abc.registry import Registry
from farpool.cluster.leases.exchange import Exchange
from farpool.cluster.leases.records import LEASE, LEASES, ORDERS, LeaseRecord, MemberAccount, TenantAccount
from farpool.cluster.leases.records import MEMBER as ACCOUNT
from farpool.cluster.leases.records import TENANT as TENANT_ACCOUNT
from farpool.cluster.leases.records import decode as decode_lease
from farpool.cluster.manager.alarm_watch import read_alarms
from farpool.cluster.manager.records import LEADER, RUNNING, ManagerRecord, decode
from farpool.cluster.members.administration import list_members
from farpool.cluster.tenants.administration import list_tenants
from farpool.cluster.wire.address import Address
from farpool.decoding import prepared
from farpool.errors import ConfigError, ManagerAwayError, ManagerError, RegistryDamagedError

__all__ = [
    "AlarmStatus",
    "Loss",
    "ManagerStatus",
    "MemberStatus",
    "PoolStatus",
    "RepairStatus",
    "TenantStatus",
    "ask_manager",
    "read_status",
    "repair_statuses",
]

_PATH = "/v1/status"
_LOSSES_MAX = 100
"""Losses of each tenant in the answer of a manager, the costliest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """A manager that runs."""

    manager: str
    address: str
    version: str
    leads: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """A member. `state` is None if its record cannot be read. `lends` and `leased` are bytes by medium."""

    identity: str
    name: str
    state: str | None
    lends: dict[str, int]
    leased: dict[str, int]
    labels: dict[str, str]
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantStatus:
    """A tenant that has a policy or leases. `guaranteed`, `burst` and `leased` are bytes by medium."""

    number: int
    name: str
    guaranteed: dict[str, int]
    burst: dict[str, int]
    leases: int
    leased: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Cost of the loss of a member (`member` is its identity) or of all members with a label value (``rack=r1``).

    `objects` and `nbytes` would be lost; `below` objects would have too few copies until they are repaired.
    """

    member: str
    label: str
    objects: int
    nbytes: int
    below: int
    below_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairStatus:
    """Repair of a tenant's objects. `failed` objects could not be repaired.

    `losses` are the costliest ones, as of the last scan.
    """

    tenant: int
    objects: int
    nbytes: int
    lacking: int
    waiting: int
    failed: int
    losses: list[Loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmStatus:
    """An alarm that is raised, since a time in seconds since 1970."""

    kind: str
    subject: str
    about: str
    text: str
    since: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStatus:
    """A pool. `repair` is None if no leading manager was asked; `orders` are extents that their nodes have yet to free.

    `registry` is the registry's address, `time` the time of the answer in seconds since 1970, and `notes` say what
    could not be read.
    """

    registry: str
    time: float
    managers: list[ManagerStatus]
    members: list[MemberStatus]
    tenants: list[TenantStatus]
    leases: int
    orders: int
    alarms: list[AlarmStatus]
    repair: list[RepairStatus] | None = None
    notes: list[str] = field(default_factory=list)


def read_status(registry: Registry) -> PoolStatus:
    """Read the state of a pool from its registry, which knows all but the copies of objects."""
    notes: list[str] = []
    leased = _Leased(registry, notes)
    tenants = _tenants(registry, leased, notes)
    members = [
        MemberStatus(
            identity=one.identity,
            name=one.record.name if one.record else "",
            state=None if one.state is None else str(one.state),
            lends=dict(one.record.media) if one.record else {},
            leased=leased.members.get(one.identity, {}),
            labels=dict(one.record.labels) if one.record else {},
            version=one.record.version if one.record else "",
        )
        for one in list_members(registry)
    ]
    alarms = [
        AlarmStatus(kind=one.kind, subject=one.subject, about=one.about, text=one.text, since=one.since)
        for one in read_alarms(registry)
    ]
    return PoolStatus(
        registry=registry.address,
        time=time.time(),
        managers=_managers(registry, notes),
        members=members,
        tenants=tenants,
        leases=sum(leased.leases.values()),
        orders=leased.orders,
        alarms=alarms,
        notes=notes,
    )


class _Leased:
    """Leases as the registry counts them.

    Attributes
    ----------
    members, tenants : dict
        Bytes by medium of each member and of each tenant.
    leases : Counter of int
        Number of leases by tenant.
    orders : int
        Extents that wait for their nodes.
    """

    def __init__(self, registry: Registry, notes: list[str]) -> None:
        self.members: dict[str, dict[str, int]] = {}
        self.tenants: dict[int, dict[str, int]] = {}
        self.leases: Counter[int] = Counter()
        self.orders = 0
        for entry in registry.range(LEASES).entries:
            try:
                if entry.key.startswith(LEASE):
                    self.leases[decode_lease(entry.key, entry.value, LeaseRecord).terms.tenant] += 1
                elif entry.key.startswith(ACCOUNT):
                    account = decode_lease(entry.key, entry.value, MemberAccount)
                    lent = {medium: sum(by_tenant.values()) for medium, by_tenant in account.lent.items()}
                    self.members[entry.key.removeprefix(ACCOUNT)] = lent
                elif entry.key.startswith(TENANT_ACCOUNT):
                    held = decode_lease(entry.key, entry.value, TenantAccount)
                    self.tenants[int(entry.key.removeprefix(TENANT_ACCOUNT))] = dict(held.lent)
                else:
                    self.orders += entry.key.startswith(ORDERS)
            except (RegistryDamagedError, ValueError) as error:
                notes.append(str(error))


def _tenants(registry: Registry, leased: _Leased, notes: list[str]) -> list[TenantStatus]:
    try:
        found = list_tenants(registry)
        policies = found.tenants
        notes += [f"tenant {number}: {text}" for number, text in found.damage.items()]
    except RegistryDamagedError as error:
        notes.append(str(error))
        policies = {}
    numbers = {*policies, *leased.leases, *(number for number, lent in leased.tenants.items() if any(lent.values()))}
    shown = []
    for number in sorted(numbers):
        policy = policies.get(number)
        media = policy.media if policy else {}
        shown.append(
            TenantStatus(
                number=number,
                name=policy.name if policy else "",
                guaranteed={medium: one.guaranteed for medium, one in media.items() if one.guaranteed},
                burst={medium: one.burst for medium, one in media.items() if one.burst},
                leases=leased.leases[number],
                leased=leased.tenants.get(number, {}),
            )
        )
    return shown


def _managers(registry: Registry, notes: list[str]) -> list[ManagerStatus]:
    leader, records = "", []
    for entry in registry.range(LEADER, RUNNING).entries:
        try:
            record = decode(entry, ManagerRecord)
        except RegistryDamagedError as error:
            notes.append(str(error))
            continue
        if entry.key == LEADER:
            leader = record.manager
        else:
            records.append(record)
    return [
        ManagerStatus(manager=one.manager, address=one.address, version=one.version, leads=one.manager == leader)
        for one in records
    ]


def repair_statuses(tenants: Mapping[int, Mapping[str, Any]]) -> list[RepairStatus]:
    """Return the repair of all tenants whose objects were scanned, from the status of a `RepairService`."""
    found = []
    for tenant, one in sorted(tenants.items()):
        exposure = one["exposure"]
        if exposure is None:
            continue
        losses = [
            *(Loss(member=name, label="", **cost) for name, cost in sorted(exposure["members"].items())),
            *(Loss(member="", label=name, **cost) for name, cost in sorted(exposure["labels"].items())),
        ]
        losses.sort(key=lambda loss: (loss.objects, loss.below), reverse=True)
        found.append(
            RepairStatus(
                tenant=tenant,
                objects=exposure["objects"],
                nbytes=exposure["nbytes"],
                lacking=one["lacking"],
                waiting=one["waiting"],
                failed=len(one["left"]),
                losses=losses[:_LOSSES_MAX],
            )
        )
    return found


def ask_manager(urls: Sequence[str], token: str, timeout: float) -> PoolStatus:
    """Ask managers for the state of their pool: one after the other until one answers, and then the one that leads.

    Parameters
    ----------
    urls : sequence of str
        The managers, such as ``http://127.0.0.1:7470``.
    token : str
        Token to show; empty for none.
    timeout : float
        Seconds for each manager.

    Raises
    ------
    ManagerAwayError
        No manager answered.
    ManagerError
        A manager refused the credentials.
    """
    failures = []
    for url in urls:
        try:
            status = _asked(url, token, timeout)
        except ManagerAwayError as error:
            failures.append(str(error))
            continue
        for leader in _leaders(status, url):
            with suppress(ManagerError):  # the first answer has all but the copies of objects
                return _asked(leader, token, timeout)
        return status
    raise ManagerAwayError("; ".join(failures) or "no manager runs", manager=", ".join(urls))


def _leaders(status: PoolStatus, asked: str) -> Iterator[str]:
    """Yield the address of the leading manager if it was not the one that answered."""
    if status.repair is None:
        yield from (one.address for one in status.managers if one.leads and one.address != asked)


def _asked(url: str, token: str, timeout: float) -> PoolStatus:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"the manager is {url!r}, expected a URL such as http://127.0.0.1:7470", setting="manager")
    is_secure = parts.scheme == "https"
    port = parts.port or (443 if is_secure else 80)
    exchange = Exchange(Address("tcp", parts.hostname, port), url, time.monotonic() + timeout, is_secure=is_secure)
    try:
        code, answer, _ = exchange.run("GET", _PATH, None, token)
    except OSError as error:
        raise ManagerAwayError(f"{url}: {error.strerror or error or type(error).__name__}", manager=url) from error
    if code in (401, 403):
        raise ManagerError(
            f"{url}: it refused the credentials; give a token with the role operator in FARPOOL_TOKEN, or a "
            "certificate in FARPOOL_TLS",
            manager=url,
            status=code,
        )
    if code != 200:
        raise ManagerAwayError(f"{url}: it answered with status {code}", manager=url, status=code)
    try:
        return msgspec.json.decode(answer, type=prepared(PoolStatus))
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ManagerError(f"{url}: its answer is no state of a pool: {error}", manager=url, status=code) from error
