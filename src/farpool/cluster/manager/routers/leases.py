"""``/v1/leases``: leases of members' memory, each answer with a signed ticket for the nodes (docs/leases.md)."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, Field

from farpool.abc.registry import Registry
from farpool.cluster.leases.records import LeaseRecord, LeaseRequest, decode, lease_key
from farpool.cluster.leases.requests import Done, Granted, Outcome, Reason, Refused
from farpool.cluster.leases.service import LeaseService
from farpool.cluster.manager.access import Denied, Principal
from farpool.cluster.manager.dependencies import Anyone, Lessee, Limit, ManagerPart, MetricsPart
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics
from farpool.cluster.manager.peer import EXTENSION, Peer
from farpool.cluster.manager.problems import Problem, ProblemDocument, refused_as
from farpool.cluster.manager.records import Role
from farpool.sizes import parse_size

__all__ = ["router"]

router = APIRouter(prefix="/v1/leases", tags=["leases"])

_RENEWED_BELOW_S = 1.0
_Hex = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_Label = Annotated[str, Field(pattern="^[!-~]{1,256}$")]
Size = int | Annotated[str, Field(pattern="^[ -~]{1,40}$")]


class Terms(BaseModel):
    """Terms of a lease, as docs/leases.md describes them."""

    tenant: int
    holder: str
    bytes: int
    request: str
    medium: str
    redundancy: str
    spread: list[str]
    bandwidth_share: float
    reclaim_ms: int
    ttl: float
    rights: str


class NewLease(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Terms to ask for. `bytes` is a number of bytes or a size such as ``2GiB``.

    `tenant` is the caller's by default, and `holder` the common name of its certificate. A caller without either must
    give them. The same `request` twice gets the same lease.
    """

    bytes: Size
    tenant: int | None = Field(default=None, ge=0, le=2**32 - 1)
    holder: str | None = Field(default=None, pattern="^[A-Za-z0-9._-]{0,64}$")
    request: str = Field(default="", pattern="^[ -~]{0,256}$")
    medium: str = Field(default="dram", pattern="^[a-z0-9]{1,32}$")
    redundancy: str = Field(default="none", pattern="^(none|copies:[1-8])$")
    spread: list[_Label] = Field(default=[], max_length=8)
    bandwidth_share: float = Field(default=1.0, gt=0, le=1e6)
    reclaim_ms: int = Field(default=60_000, ge=1, le=86_400_000)
    ttl: float = Field(default=60.0, ge=1, le=7 * 86_400)
    rights: Literal["r", "rw"] = "rw"


class Renewal(BaseModel, extra="forbid", strict=True):
    """Rights of the new ticket: the lease's, or reading only."""

    rights: Literal["r", "rw"] = "rw"


class NewSize(BaseModel, extra="forbid", strict=True):
    """Usable bytes from now on, and the lease's epoch as the caller knows it."""

    bytes: Size
    epoch: int = Field(ge=0, lt=2**63)


class ExtentName(BaseModel, extra="forbid", strict=True):
    """An extent: the identity of its member and its number."""

    member: _Hex
    number: int = Field(ge=0, lt=2**32)


class ExtentNames(BaseModel, extra="forbid", strict=True):
    """Extents, and the lease's epoch as the caller knows it."""

    extents: list[ExtentName] = Field(default=[], max_length=100)
    epoch: int = Field(ge=0, lt=2**63)


class ExtentModel(BaseModel):
    """Consecutive bytes on a member. With copies, several extents have the same `part`, each with another `replica`."""

    member: str
    name: str
    addresses: list[str]
    number: int
    bytes: int
    part: int
    replica: int


class ReclaimModel(BaseModel):
    """An extent that its lender wants back, and the time by which it must be released, in seconds since 1970."""

    member: str
    number: int
    by: float


class LeaseModel(BaseModel):
    """A lease. Times are in seconds since 1970."""

    id: str
    terms: Terms
    epoch: int
    expires: float
    granted: float
    extents: list[ExtentModel]
    reclaims: list[ReclaimModel]


class LeaseAnswer(BaseModel):
    """A lease, and the ticket to show to the nodes (base64). The ticket expires with the lease or before it.

    Both are null if the lease has ended with the request.
    """

    lease: LeaseModel | None
    ticket: str | None = None
    ticket_expires: float | None = None


class LeasePage(BaseModel):
    """A page of leases, by ID. `next` is the value of `after` for the next page."""

    leases: list[LeaseModel]
    next: str | None


class EndedExtent(BaseModel):
    """An extent that its node has yet to free. Its bytes count as lent until then."""

    member: str
    number: int
    bytes: int


class LeaseEnd(BaseModel):
    """The lease has ended."""

    extents: list[EndedExtent]


class Refusal(ProblemDocument):
    """A refusal: the reason for programs, terms that would be granted (the nearest first), and the lease as it is."""

    reason: str | None = None
    offers: list[Terms] = Field(default=[])
    lease: LeaseModel | None = None


_REFUSALS: dict[int | str, dict[str, Any]] = {
    404: {"model": Refusal, "description": "The tenant has no such lease; it may have ended."},
    409: {"model": Refusal, "description": "Refused, for example because there is no memory for it."},
}
LeaseId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]


@router.post("", status_code=201, responses=_REFUSALS)
async def grant(
    manager: ManagerPart, metrics: MetricsPart, who: Lessee, wanted: NewLease, request: Request
) -> LeaseAnswer:
    """Lease memory of the members to a tenant."""
    terms = _terms(wanted, who, request)
    request.state.audit_fields = {"for_tenant": terms.tenant, "bytes": terms.bytes, "holder": terms.holder}

    def act(service: LeaseService) -> Outcome:
        with refused_as(422, str(wanted.bytes)):
            outcome = service.grant(terms)
        if isinstance(outcome, Granted) and outcome.record.expires < time.time() + _RENEWED_BELOW_S:
            # The same request came before. The lease has expired since, or is about to.
            return service.renew(outcome.lease, tenant=terms.tenant)
        return outcome

    return await _ask(manager, metrics, request, "grant", act)


@router.get("")
async def list_leases(
    manager: ManagerPart,
    who: Anyone,
    tenant: Annotated[int | None, Query(ge=0, le=2**32 - 1)] = None,
    after: str = "",
    limit: Limit = 100,
) -> LeasePage:
    """List the leases. A tenant sees only its own."""
    only = tenant if who.role is not Role.TENANT else who.tenant
    if who.role is Role.TENANT and tenant not in (None, who.tenant):
        raise _another_tenant(who, tenant)

    def read(service: LeaseService) -> LeasePage:
        found = service.leases(tenant=only, after=after, limit=limit + 1)
        page = [_model(one, service) for one in found[:limit]]
        return LeasePage(leases=page, next=page[-1].id if len(found) > limit else None)

    return await manager.lend(read)


@router.get("/{lease}")
async def get_lease(manager: ManagerPart, who: Anyone, lease: LeaseId) -> LeaseModel:
    """Return a lease, without a ticket."""

    def read(service: LeaseService) -> LeaseModel | None:
        # From the registry itself, because this manager may not know yet what another one has granted.
        record = _record(manager.registry, lease)
        if record is None or _tenant_of(who) not in (None, record.terms.tenant):
            return None
        return _model(Granted(lease, record), service)

    found = await manager.lend(read)
    if found is None:
        raise Problem(404, f"there is no lease {lease} of this tenant, expected one of GET /v1/leases", value=lease)
    return found


@router.post("/{lease}/renew", responses=_REFUSALS)
async def renew(
    manager: ManagerPart,
    metrics: MetricsPart,
    who: Anyone,
    lease: LeaseId,
    request: Request,
    wanted: Renewal | None = None,
) -> LeaseAnswer:
    """Move the expiry to the lease's time to live from now, and return a new ticket."""

    def act(service: LeaseService) -> Outcome:
        return service.renew(lease, tenant=_tenant_of(who))

    reads_only = wanted is not None and wanted.rights == "r"
    return await _ask(manager, metrics, request, "renew", act, reads_only=reads_only)


@router.post("/{lease}/resize", responses=_REFUSALS)
async def resize(
    manager: ManagerPart, metrics: MetricsPart, who: Lessee, lease: LeaseId, wanted: NewSize, request: Request
) -> LeaseAnswer:
    """Grow or shrink a lease while it is in use. It shrinks by whole parts, so it may keep more bytes."""
    size = _size(wanted.bytes)
    request.state.audit_fields = {"bytes": size}

    def act(service: LeaseService) -> Outcome:
        return service.resize(lease, size, epoch=wanted.epoch, tenant=_tenant_of(who))

    return await _ask(manager, metrics, request, "resize", act)


@router.post("/{lease}/replace", responses=_REFUSALS)
async def replace(
    manager: ManagerPart, metrics: MetricsPart, who: Lessee, lease: LeaseId, wanted: ExtentNames, request: Request
) -> LeaseAnswer:
    """Add an extent on another member for each named one and each missing copy; without names, for those wanted back.

    The holder copies the bytes, and releases the old extents then.
    """

    def act(service: LeaseService) -> Outcome:
        extents = _names(wanted)
        if not extents:
            record = _record(manager.registry, lease)
            extents = tuple((one.member, one.number) for one in record.extents if one.reclaim_by) if record else ()
        return service.replace(lease, extents, epoch=wanted.epoch, tenant=_tenant_of(who))

    return await _ask(manager, metrics, request, "replace", act)


@router.post("/{lease}/release", responses=_REFUSALS)
async def release(
    manager: ManagerPart, metrics: MetricsPart, who: Lessee, lease: LeaseId, wanted: ExtentNames, request: Request
) -> LeaseAnswer:
    """End extents that the holder no longer uses. A lease without any extent left ends."""

    def act(service: LeaseService) -> Outcome:
        return service.release(lease, _names(wanted), epoch=wanted.epoch, tenant=_tenant_of(who))

    return await _ask(manager, metrics, request, "release", act)


@router.delete("/{lease}", responses=_REFUSALS)
async def end(manager: ManagerPart, metrics: MetricsPart, who: Lessee, lease: LeaseId, request: Request) -> LeaseEnd:
    """End a lease. It is no error if it has ended."""
    reason = "its holder returned it" if who.role is Role.TENANT else f"{who.name} ended it"

    def act(service: LeaseService) -> Done | Problem:
        outcome = service.end(lease, tenant=_tenant_of(who), reason=reason)
        return _problem(outcome, service) if isinstance(outcome, Refused) else outcome

    outcome = await manager.lend(act)
    if isinstance(outcome, Problem):
        raise _refused(metrics, request, "end", outcome)
    metrics.lease_answered("end", "done")
    ended = [EndedExtent(member=one.member, number=one.extent, bytes=one.bytes) for one in outcome.orders]
    return LeaseEnd(extents=ended)


# Requests


def _terms(wanted: NewLease, who: Principal, request: Request) -> LeaseRequest:
    peer: Peer = request.scope["extensions"][EXTENSION]
    is_user = who.name.startswith("user:")
    tenant = wanted.tenant
    if who.role is Role.TENANT:
        if tenant not in (None, who.tenant):
            raise _another_tenant(who, tenant)
        tenant = who.tenant
    elif tenant is None and is_user:
        tenant = 0  # nodes without access keys serve this user as tenant 0
    holder = wanted.holder
    if holder is None and who.name.startswith("certificate:"):
        holder = peer.common_name or None
    elif holder is None and is_user:
        holder = ""
    if tenant is None or holder is None:
        missing = "tenant" if tenant is None else "holder"
        raise Problem(
            422,
            f"{missing} is missing, expected the tenant and the name of the access key or certificate with which the "
            f"nodes are used; give {missing!r}, because it does not follow from {who.name}",
        )
    fields = wanted.model_dump(exclude={"bytes", "tenant", "holder", "spread"})
    size = _size(wanted.bytes)
    return LeaseRequest(tenant=tenant, holder=holder, bytes=size, spread=tuple(wanted.spread), **fields)


def _size(wanted: Size) -> int:
    with refused_as(422, str(wanted)):
        return parse_size(wanted, "bytes")


def _names(wanted: ExtentNames) -> tuple[tuple[str, int], ...]:
    return tuple((one.member, one.number) for one in wanted.extents)


def _tenant_of(who: Principal) -> int | None:
    """Return the tenant for which a caller may act; None for all of them."""
    return who.tenant if who.role is Role.TENANT else None


def _another_tenant(who: Principal, tenant: int | None) -> Denied:
    return Denied(
        403,
        f"{who.name} asks for tenant {tenant}",
        f"its own tenant {who.tenant}",
        "leave the tenant out, or ask an operator",
    )


def _record(registry: Registry, lease: str) -> LeaseRecord | None:
    entry = registry.get(lease_key(lease))
    return None if entry is None else decode(entry.key, entry.value, LeaseRecord)


# Answers


async def _ask(
    manager: Manager,
    metrics: Metrics,
    request: Request,
    what: str,
    act: Callable[[LeaseService], Outcome],
    *,
    reads_only: bool = False,
) -> LeaseAnswer:
    """Let a thread carry a request out and sign the ticket; count the request, and answer it."""

    def acted(service: LeaseService) -> LeaseAnswer | Problem:
        outcome = act(service)
        if isinstance(outcome, Refused):
            return _problem(outcome, service)
        if isinstance(outcome, Done):
            return LeaseAnswer(lease=None)
        model, ticket = _model(outcome, service), manager.lending.ticket(outcome, reads_only=reads_only)
        if ticket is None:
            return LeaseAnswer(lease=model)
        return LeaseAnswer(lease=model, ticket=base64.b64encode(ticket.data).decode(), ticket_expires=ticket.expires)

    answer = await manager.lend(acted)
    if isinstance(answer, Problem):
        raise _refused(metrics, request, what, answer)
    metrics.lease_answered(what, "done" if answer.lease is None else "granted")
    if answer.lease is not None:
        _audit(request, lease=answer.lease.id, epoch=answer.lease.epoch)
    return answer


def _refused(metrics: Metrics, request: Request, what: str, problem: Problem) -> Problem:
    """Count a refusal, and have the audit log get a line for it, also for requests that it gets no line for else."""
    metrics.lease_answered(what, problem.more["reason"])
    request.state.audited = True
    _audit(request, reason=problem.more["reason"])
    return problem


def _audit(request: Request, **fields: object) -> None:
    """Add fields to the line in the audit log."""
    given: dict[str, object] = getattr(request.state, "audit_fields", {})
    request.state.audit_fields = {**given, **fields}


def _problem(refused: Refused, service: LeaseService) -> Problem:
    more = {
        "reason": refused.reason.value,
        "offers": [_terms_model(one).model_dump() for one in refused.offers],
        "lease": _model(refused.granted, service).model_dump() if refused.granted else None,
    }
    return Problem(404 if refused.reason is Reason.UNKNOWN else 409, refused.text, more=more)


def _terms_model(terms: LeaseRequest) -> Terms:
    values = {name: getattr(terms, name) for name in Terms.model_fields}
    return Terms(**{**values, "spread": list(terms.spread)})


def _model(granted: Granted, service: LeaseService) -> LeaseModel:
    record = granted.record
    extents = []
    for one in record.extents:
        member = service.member(one.member)
        extents.append(
            ExtentModel(
                member=one.member,
                name=member.name if member else "",
                addresses=list(member.addresses) if member else [],
                number=one.number,
                bytes=one.bytes,
                part=one.part,
                replica=one.copy,
            )
        )
    return LeaseModel(
        id=granted.lease,
        terms=_terms_model(record.terms),
        epoch=record.epoch,
        expires=record.expires,
        granted=record.granted,
        extents=extents,
        reclaims=[ReclaimModel(member=one.member, number=one.number, by=one.reclaim_by) for one in granted.wanted_back],
    )
