"""``/v1/repairs``: the work of repair so far, and the cost of losing each member or label value."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.cluster.manager.dependencies import ManagerPart, Reader

__all__ = ["router"]

router = APIRouter(prefix="/v1/repairs", tags=["repairs"])


class LossModel(BaseModel):
    """Objects that would be lost, and objects that would have too few copies."""

    objects: int
    nbytes: int
    below: int
    below_nbytes: int


class ExposureModel(BaseModel):
    """All objects, the ones that have too few copies, and the cost of each loss, as of the last scan."""

    objects: int
    nbytes: int
    below: int
    below_nbytes: int
    groups: int
    members: dict[str, LossModel]
    labels: dict[str, LossModel]


class UnmendedModel(BaseModel):
    """An object that still lacks copies, and why."""

    key: str
    lacking: int
    reasons: list[str]


class TenantRepairs(BaseModel):
    """Work for the objects of a tenant since this manager leads."""

    scans: int
    objects: int
    endangered: int
    mended: int
    copied: int
    nbytes: int
    gone: int
    moved: int
    dropped: int
    held_back: int
    failed: int
    waiting: int
    lacking: int
    left: list[UnmendedModel]
    exposure: ExposureModel | None = None


class RepairsModel(BaseModel):
    """Repair by tenant. Only the leader `acts`. `errors` says which members or tenants are left out, and why."""

    acts: bool
    tenants: dict[int, TenantRepairs]
    errors: dict[str, str]


@router.get("")
async def show_repairs(manager: ManagerPart, _: Reader) -> RepairsModel:
    """Return what this manager does about missing copies. Ask the leader: the others do nothing."""
    if manager.repairs is None:
        return RepairsModel(acts=False, tenants={}, errors={})
    return RepairsModel.model_validate(await asyncio.to_thread(manager.repairs.status))
