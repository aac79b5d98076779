"""``/v1/identities``: rights of the owners of client certificates."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel

from farpool.cluster.manager import credentials
from farpool.cluster.manager.dependencies import Administrator, ManagerPart
from farpool.cluster.manager.problems import Problem, refused_as
from farpool.cluster.manager.routers.tokens import Rights, StoredModel, stored_model

__all__ = ["router"]

router = APIRouter(prefix="/v1/identities", tags=["access"])


class Identities(BaseModel):
    """All identities that have rights."""

    identities: list[StoredModel]


@router.get("")
async def list_identities(manager: ManagerPart, _: Administrator) -> Identities:
    """List the identities that have rights."""
    return Identities(identities=[stored_model(one) for one in await manager.ask(credentials.list_identities)])


@router.put("/{identity:path}")
async def set_identity(
    manager: ManagerPart, who: Administrator, identity: str, wanted: Rights, request: Request
) -> StoredModel:
    """Give rights to the owners of certificates with this SPIFFE URI, or with this common name if they have none."""
    with refused_as(409, identity):
        stored = await manager.ask(
            lambda registry: credentials.set_identity(
                registry, identity, wanted.role, tenant=wanted.tenant, by=who.name
            )
        )
    request.state.audit_fields = {"given": wanted.role.value, "to_tenant": wanted.tenant}
    return stored_model(stored)


@router.delete("/{identity:path}", status_code=204, response_model=None)
async def delete_identity(manager: ManagerPart, _: Administrator, identity: str) -> None:
    """Take all rights from an identity."""
    if not await manager.ask(lambda registry: credentials.delete_identity(registry, identity)):
        raise Problem(
            404, f"the identity {identity!r} has no rights, expected one of GET /v1/identities", value=identity
        )
