"""``/v1/members``: list, drain and remove members."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.abc.registry import Registry
from farpool.cluster.manager.dependencies import Administrator, Anyone, Limit, ManagerPart, Operator, page_of
from farpool.cluster.manager.problems import refused_as
from farpool.cluster.members import administration
from farpool.cluster.members.administration import RegisteredMember

__all__ = ["router"]

router = APIRouter(prefix="/v1/members", tags=["members"])


class MemberModel(BaseModel):
    """A member as the registry has it. `state` is null if its record cannot be read; `damage` then says why."""

    identity: str
    state: str | None
    damage: str | None = None
    name: str = ""
    addresses: list[str] = []
    weight: float = 0.0
    full_weight: float = 0.0
    labels: dict[str, str] = {}
    media: dict[str, int] = {}
    bandwidth: dict[str, int] = {}
    version: str = ""
    draining: bool = False
    joined: float = 0.0
    process: str | None = None


class MemberPage(BaseModel):
    """A page of members, by identity. `next` is the value of `after` for the next page."""

    members: list[MemberModel]
    next: str | None


class MemberChange(BaseModel):
    """A member, and true if the request has changed it."""

    member: MemberModel
    changed: bool


def member_model(member: RegisteredMember) -> MemberModel:
    """Return a member as the API shows it."""
    record = member.record
    if record is None or member.state is None:
        return MemberModel(identity=member.identity, state=None, damage=member.damage)
    return MemberModel(
        identity=member.identity,
        state=str(member.state),
        name=record.name,
        addresses=list(record.addresses),
        weight=record.weight,
        full_weight=record.full_weight,
        labels=record.labels,
        media=record.media,
        bandwidth=record.bandwidth,
        version=record.version,
        draining=record.draining,
        joined=record.joined,
        process=member.alive.process if member.alive else None,
    )


@router.get("")
async def list_members(manager: ManagerPart, _: Anyone, after: str = "", limit: Limit = 100) -> MemberPage:
    """List the members."""
    found = await manager.ask(administration.list_members)
    page, following = page_of(found, lambda one: one.identity, after, limit)
    return MemberPage(members=[member_model(one) for one in page], next=following)


@router.get("/{member}")
async def get_member(manager: ManagerPart, _: Anyone, member: str) -> MemberModel:
    """Return the member with a name, an address or the first digits of an identity."""
    found = await manager.ask(administration.list_members)
    with refused_as(404, member):
        return member_model(administration.find_member(found, member))


@router.post("/{member}/drain")
async def drain(manager: ManagerPart, _: Operator, member: str) -> MemberChange:
    """Let a member get no new objects from now on. The last member that takes objects is not drained."""
    return await _changed(manager, member, lambda registry: administration.drain(registry, member))


@router.post("/{member}/undrain")
async def undrain(manager: ManagerPart, _: Operator, member: str) -> MemberChange:
    """Let a member that drains get new objects again."""
    return await _changed(manager, member, lambda registry: administration.undrain(registry, member))


@router.delete("/{member}")
async def remove(manager: ManagerPart, _: Administrator, member: str, force: bool = False) -> MemberChange:
    """Delete a member's record. With `force`, even if it is up or the last one that takes objects."""
    return await _changed(
        manager, member, lambda registry: (administration.remove(registry, member, force=force), True)
    )


async def _changed(
    manager: ManagerPart, member: str, change: Callable[[Registry], tuple[RegisteredMember, bool]]
) -> MemberChange:
    def find_and_change(registry: Registry) -> MemberChange:
        with refused_as(404, member):
            identity = administration.find_member(administration.list_members(registry), member).identity
        with refused_as(409, member):
            before, changed = change(registry)
        # Read again, because the result of a change is the member before it.
        for one in administration.list_members(registry):
            if one.identity == identity:
                return MemberChange(member=member_model(one), changed=changed)
        return MemberChange(member=member_model(before), changed=changed)

    return await manager.ask(find_and_change)
