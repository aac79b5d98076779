"""``/v1/tenants``: what the pool gives each tenant."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Header, Path, Request, Response
from pydantic import BaseModel, Field

from farpool.abc.registry import Registry
from farpool.cluster.manager.dependencies import Administrator, Anyone, Limit, ManagerPart, Operator, page_of
from farpool.cluster.manager.problems import Problem
from farpool.cluster.manager.records import Role
from farpool.cluster.tenants import administration
from farpool.cluster.tenants.administration import RegisteredTenants, TenantChange
from farpool.cluster.tenants.records import MEDIA, NUMBER_MAX, PRIORITY_MAX, SHARE_MAX, SHARE_MIN, TenantPolicy
from farpool.errors import ConfigError
from farpool.sizes import parse_rate, parse_size

__all__ = ["router"]

router = APIRouter(prefix="/v1/tenants", tags=["tenants"])

Size = int | Annotated[str, Field(pattern="^[ -~]{1,40}$")]
_Medium = Annotated[str, Field(pattern="^[a-z0-9]{1,32}$")]


class MediumModel(BaseModel):
    """Bytes of one medium, in all members together. `burst` is 0 for no limit."""

    guaranteed: int
    burst: int


class BandwidthModel(BaseModel):
    """Bandwidth of each node, in bytes per second. `cap` is 0 for no limit."""

    share: float
    guarantee: int
    cap: int


class TenantModel(BaseModel):
    """A tenant's policy. `damage` says why it cannot be read; the other fields are then empty."""

    number: int
    name: str = ""
    media: dict[str, MediumModel] = Field(default={})
    bandwidth: BandwidthModel | None = None
    priority: int = 0
    damage: str | None = None


class TenantPage(BaseModel):
    """A page of tenants, by number. `next` is the value of `after` for the next page.

    `revision` is the whole policy's, for If-Match. `pool` has the bytes that all members lend.
    """

    tenants: list[TenantModel]
    revision: int
    oversubscription: dict[str, float]
    pool: dict[str, int]
    next: int | None


class TenantAnswer(BaseModel):
    """A tenant's policy, and the revision of the whole policy."""

    tenant: TenantModel
    revision: int


class NewMedium(BaseModel, extra="forbid", strict=True):
    """Bytes of one medium: numbers, or sizes such as ``64GiB``."""

    guaranteed: Size = 0
    burst: Size = 0


class NewBandwidth(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Bandwidth of each node: numbers of bytes per second, or rates such as ``2GB/s``."""

    share: float = Field(default=1.0, ge=SHARE_MIN, le=SHARE_MAX)
    guarantee: Size = 0
    cap: Size = 0


class NewPolicy(BaseModel, extra="forbid", strict=True):
    """A whole policy. What is left out is 0, or 1 for the share."""

    name: str = Field(pattern="^[A-Za-z0-9._-]{1,64}$")
    media: dict[_Medium, NewMedium] = Field(default={}, max_length=16)
    bandwidth: NewBandwidth = NewBandwidth()
    priority: int = Field(default=0, ge=-PRIORITY_MAX, le=PRIORITY_MAX)


class Oversubscription(BaseModel, extra="forbid", strict=True, allow_inf_nan=False):
    """Factors by which the sum of all guarantees may exceed the pool's bytes, by medium."""

    factors: dict[_Medium, float] = Field(min_length=1, max_length=16)


Number = Annotated[int, Path(ge=0, le=NUMBER_MAX)]
IfMatch = Annotated[
    str | None,
    Header(pattern='^"?[0-9]{1,19}"?$', description="Revision that the whole policy must have; without it, any."),
]


@router.get("")
async def list_tenants(
    manager: ManagerPart, who: Anyone, response: Response, after: int | None = None, limit: Limit = 100
) -> TenantPage:
    """List the tenants that have a policy. A tenant sees only itself."""
    found = await manager.ask(administration.list_tenants)
    models = [one for one in _models(found) if who.role is not Role.TENANT or one.number == who.tenant]
    rest = [one for one in models if after is None or one.number > after]
    page, _ = page_of(rest, lambda one: f"{one.number:010d}", "", limit)
    _tag(response, found.revision)
    return TenantPage(
        tenants=page,
        revision=found.revision,
        oversubscription=dict(found.fleet.oversubscription),
        pool=found.media,
        next=page[-1].number if len(rest) > limit else None,
    )


@router.put("/oversubscription")
async def oversubscribe(
    manager: ManagerPart,
    _: Operator,
    wanted: Oversubscription,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
) -> dict[str, float]:
    """State how many times the pool's bytes all guarantees together may be. All media have 1 at first."""
    request.state.audit_fields = {"factors": wanted.factors}

    def act(registry: Registry) -> RegisteredTenants:
        with _refused("factors"):
            return administration.oversubscribe(registry, wanted.factors, revision=_revision(if_match))

    after = await manager.ask(act)
    _tag(response, after.revision)
    return dict(after.fleet.oversubscription)


@router.get("/{tenant}")
async def get_tenant(manager: ManagerPart, who: Anyone, response: Response, tenant: str) -> TenantAnswer:
    """Return the policy of the tenant with a number or a name."""
    found = await manager.ask(administration.list_tenants)
    for one in _models(found):
        if tenant in (str(one.number), one.name) and (who.role is not Role.TENANT or one.number == who.tenant):
            _tag(response, found.revision)
            return TenantAnswer(tenant=one, revision=found.revision)
    raise Problem(404, f"there is no tenant {tenant!r} with a policy, expected one of GET /v1/tenants", value=tenant)


@router.put("/{tenant}")
async def set_tenant(
    manager: ManagerPart,
    _: Operator,
    tenant: Number,
    wanted: NewPolicy,
    request: Request,
    response: Response,
    if_match: IfMatch = None,
) -> TenantAnswer:
    """Write the whole policy of the tenant with a number. Nodes and managers follow it within a second."""
    change = _change(wanted)
    request.state.audit_fields = {"policy": wanted.model_dump()}

    def act(registry: Registry) -> TenantAnswer:
        with _refused(wanted.name):
            own, policy, revision = administration.set_tenant(
                registry, wanted.name, change, number=tenant, revision=_revision(if_match)
            )
        return TenantAnswer(tenant=_model(own, policy), revision=revision)

    answer = await manager.ask(act)
    _tag(response, answer.revision)
    return answer


@router.delete("/{tenant}")
async def remove_tenant(
    manager: ManagerPart, _: Administrator, response: Response, tenant: str, if_match: IfMatch = None
) -> TenantAnswer:
    """Delete the policy of the tenant with a number or a name; return it as it was. Its objects and leases stay."""

    def act(registry: Registry) -> TenantAnswer:
        found = administration.list_tenants(registry)
        for one in _models(found):
            if tenant in (str(one.number), one.name):
                with _refused(tenant):
                    _, revision = administration.remove_tenant(
                        registry, one.name or str(one.number), revision=_revision(if_match)
                    )
                return TenantAnswer(tenant=one, revision=revision)
        text = f"there is no tenant {tenant!r} with a policy, expected one of GET /v1/tenants"
        raise Problem(404, text, value=tenant)

    answer = await manager.ask(act)
    _tag(response, answer.revision)
    return answer


def _models(found: RegisteredTenants) -> list[TenantModel]:
    models = [_model(number, policy) for number, policy in found.tenants.items()]
    models += [TenantModel(number=number, damage=text) for number, text in found.damage.items()]
    return sorted(models, key=lambda one: one.number)


def _model(number: int, policy: TenantPolicy) -> TenantModel:
    bandwidth = policy.bandwidth
    return TenantModel(
        number=number,
        name=policy.name,
        media={medium: MediumModel(guaranteed=one.guaranteed, burst=one.burst) for medium, one in policy.media.items()},
        bandwidth=BandwidthModel(share=bandwidth.share, guarantee=bandwidth.guarantee, cap=bandwidth.cap),
        priority=policy.priority,
    )


def _change(wanted: NewPolicy) -> TenantChange:
    """Return a change that sets every field, so that nothing of the former policy stays."""
    media: Mapping[str, NewMedium] = {**{medium: NewMedium() for medium in MEDIA}, **wanted.media}
    with _refused(wanted.name):
        return TenantChange(
            guaranteed={medium: _number(one.guaranteed, "guaranteed", parse_size) for medium, one in media.items()},
            burst={medium: _number(one.burst, "burst", parse_size) for medium, one in media.items()},
            share=wanted.bandwidth.share,
            guarantee=_number(wanted.bandwidth.guarantee, "guarantee", parse_rate),
            cap=_number(wanted.bandwidth.cap, "cap", parse_rate),
            priority=wanted.priority,
        )


def _number(wanted: Size, what: str, parse: Callable[[Any, str], float]) -> int:
    return 0 if wanted in (0, "0") else int(parse(wanted, what))


@contextmanager
def _refused(value: str) -> Iterator[None]:
    """Turn a `ConfigError` into a problem: 412 if the policy has another revision, else 409."""
    try:
        yield
    except ConfigError as error:
        raise Problem(412 if error.setting == "revision" else 409, str(error), value=value) from error


def _revision(if_match: str | None) -> int | None:
    return None if if_match is None else int(if_match.strip('"'))


def _tag(response: Response, revision: int) -> None:
    response.headers["ETag"] = f'"{revision}"'
