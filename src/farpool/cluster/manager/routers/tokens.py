"""``/v1/tokens``: API tokens, which are shown once."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic import BaseModel, Field

from farpool.cluster.manager import credentials
from farpool.cluster.manager.credentials import Stored
from farpool.cluster.manager.dependencies import Administrator, ManagerPart
from farpool.cluster.manager.problems import Problem, refused_as
from farpool.cluster.manager.records import Role

__all__ = ["Rights", "StoredModel", "router", "stored_model"]

router = APIRouter(prefix="/v1/tokens", tags=["access"])


class Rights(BaseModel, extra="forbid"):
    """Rights to give. `tenant` belongs to the role `tenant` alone."""

    role: Role
    tenant: int | None = Field(default=None, ge=0, le=2**32 - 1)


class NewToken(Rights):
    """A token to make. `name` tells people what it is for."""

    name: str = Field(default="", max_length=200)


class StoredModel(BaseModel):
    """A token, by its ID, or a certificate's identity. `role` is null if the record cannot be read."""

    id: str
    role: Role | None
    tenant: int | None = None
    name: str = ""
    created: float = 0.0
    by: str = ""


class MadeToken(StoredModel):
    """A new token. The manager keeps only its SHA-256, so this is the only time that it is shown."""

    token: str


class Tokens(BaseModel):
    """All tokens, by ID."""

    tokens: list[StoredModel]


def stored_model(stored: Stored) -> StoredModel:
    """Return a token or an identity as the API shows it."""
    known = stored.credential
    if known is None:
        return StoredModel(id=stored.id, role=None)
    return StoredModel(
        id=stored.id, role=known.role, tenant=known.tenant, name=known.name, created=known.created, by=known.by
    )


@router.get("")
async def list_tokens(manager: ManagerPart, _: Administrator) -> Tokens:
    """List the tokens, without the tokens themselves."""
    return Tokens(tokens=[stored_model(one) for one in await manager.ask(credentials.list_tokens)])


@router.post("", status_code=201)
async def create_token(manager: ManagerPart, who: Administrator, wanted: NewToken, request: Request) -> MadeToken:
    """Make a token. The first one must have the role admin, because from then on every caller needs one."""
    with refused_as(409, wanted.role.value):
        token, stored = await manager.ask(
            lambda registry: credentials.create_token(
                registry, wanted.role, name=wanted.name, tenant=wanted.tenant, by=who.name
            )
        )
    request.state.audit_fields = {"token": stored.id, "given": wanted.role.value, "to_tenant": wanted.tenant}
    return MadeToken(token=token, **stored_model(stored).model_dump())


@router.delete("/{id}")
async def delete_token(manager: ManagerPart, _: Administrator, id: str) -> StoredModel:
    """Delete the token with an ID. Its streams of events end."""
    with refused_as(409, id):
        found = await manager.ask(lambda registry: credentials.delete_token(registry, id))
    if found is None:
        raise Problem(404, f"there is no token with the ID {id!r}, expected one of GET /v1/tokens", value=id)
    return stored_model(found)
