"""``/v1/names``: names and their versions."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.abc.registry import Registry
from farpool.cluster.manager.dependencies import Limit, ManagerPart, Reader, page_of
from farpool.cluster.manager.problems import Problem, refused_as
from farpool.cluster.names.listing import list_names, list_versions
from farpool.cluster.names.records import NameInfo, checked_name

__all__ = ["router"]

router = APIRouter(prefix="/v1/names", tags=["names"])


class VersionModel(BaseModel):
    """One version of a name. `time` is in seconds since 1970, by the writer's clock."""

    name: str
    version: int
    published: bool
    nbytes: int
    objects: int
    tensors: bool
    time: float
    writer: str


class NamePage(BaseModel):
    """A page of current versions, by name. `next` is the value of `after` for the next page."""

    names: list[VersionModel]
    next: str | None


class VersionPage(BaseModel):
    """A page of the versions of a name, the latest first. `next` is the value of `before` for the next page."""

    versions: list[VersionModel]
    next: int | None


def _model(info: NameInfo) -> VersionModel:
    return VersionModel(**{field: getattr(info, field) for field in VersionModel.model_fields})


@router.get("")
async def list_current(
    manager: ManagerPart, _: Reader, prefix: str = "", after: str = "", limit: Limit = 100
) -> NamePage:
    """List the current versions of the names that begin with a prefix."""
    with refused_as(422, prefix):
        if prefix:
            checked_name(prefix)
    found = await manager.ask(lambda registry: list_names(registry, prefix))
    page, following = page_of(found, lambda one: one.name, after, limit)
    return NamePage(names=[_model(one) for one in page], next=following)


@router.get("/{name:path}")
async def list_history(
    manager: ManagerPart, _: Reader, name: str, before: int | None = None, limit: Limit = 100
) -> VersionPage:
    """List the last versions of a name, at most a hundred. A slash in the name may be written as it is."""
    with refused_as(422, name):
        checked_name(name)

    def read(registry: Registry) -> list[NameInfo]:
        return list_versions(registry, name)

    versions = await manager.ask(read)
    if not versions:
        raise Problem(404, f"nothing was published under the name {name!r}; publish it first", value=name)
    rest = [one for one in reversed(versions) if before is None or one.version < before]
    page = rest[:limit]
    return VersionPage(versions=[_model(one) for one in page], next=page[-1].version if len(rest) > limit else None)
