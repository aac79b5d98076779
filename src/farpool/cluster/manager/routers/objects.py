"""``/v1/objects``: objects and bytes by member and by tenant, as the members report them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.cluster.manager.dependencies import Anyone, Limit, ManagerPart, page_of
from farpool.cluster.manager.member_stats import MemberStats
from farpool.cluster.manager.records import Role
from farpool.cluster.members.administration import list_members

__all__ = ["router"]

router = APIRouter(prefix="/v1/objects", tags=["objects"])

_TENANTS_AGE_S = 2.0
"""Age up to which a tenant gets a former answer, because members charge the work to the manager's tenant, not to it."""


class TenantObjects(BaseModel):
    """Objects and bytes of a tenant: used by objects, lent as private memory, and guaranteed."""

    tenant: int
    objects: int
    used: int
    lent: int
    share: int


class MemberObjects(BaseModel):
    """Objects and bytes of a member. `error` says why the numbers are missing or incomplete; else it is null."""

    identity: str
    name: str
    objects: int | None = None
    object_bytes: int | None = None
    capacity: int | None = None
    tenants: list[TenantObjects] = []
    error: str | None = None


class ObjectsPage(BaseModel):
    """A page of members, by identity, and the sums over this page. `next` is the value of `after` for the next page."""

    members: list[MemberObjects]
    tenants: list[TenantObjects]
    answered: int
    next: str | None


@router.get("")
async def count_objects(manager: ManagerPart, who: Anyone, after: str = "", limit: Limit = 100) -> ObjectsPage:
    """Ask the members how many objects and bytes they have. A member that does not answer has an error in its place.

    Copies count on each member that has one. A tenant sees only its own numbers.
    """
    found = await manager.ask(list_members)
    page, following = page_of(found, lambda one: one.identity, after, limit)
    age_max = _TENANTS_AGE_S if who.role is Role.TENANT else 0.0
    answers = await asyncio.gather(*(manager.answers.ask(one, age_max=age_max) for one in page))
    members = [_model(answer, who.tenant if who.role is Role.TENANT else None) for answer in answers]
    sums: dict[int, TenantObjects] = {}
    for one in (tenant for member in members for tenant in member.tenants):
        known = sums.setdefault(one.tenant, TenantObjects(tenant=one.tenant, objects=0, used=0, lent=0, share=0))
        for field in ("objects", "used", "lent", "share"):
            setattr(known, field, getattr(known, field) + getattr(one, field))
    return ObjectsPage(
        members=members,
        tenants=[sums[number] for number in sorted(sums)],
        answered=sum(answer.stats is not None for answer in answers),
        next=following,
    )


def _model(answer: MemberStats, only: int | None) -> MemberObjects:
    model = MemberObjects(identity=answer.identity, name=answer.name, error=answer.error or None)
    if answer.stats is None:
        return model
    model.tenants = [
        TenantObjects(tenant=number, **{field: counts.get(field, 0) for field in ("objects", "used", "lent", "share")})
        for number, counts in sorted(answer.tenants.items())
        if only in (None, number)
    ]
    if only is None:
        model.objects, model.object_bytes = answer.stats.get("objects"), answer.stats.get("object_bytes")
        model.capacity = answer.stats.get("capacity")
    return model
