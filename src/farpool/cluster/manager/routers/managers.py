"""``/v1/managers``: the managers that run."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.abc.registry import Entry, Registry
from farpool.cluster.manager.dependencies import Anyone, ManagerPart
from farpool.cluster.manager.records import LEADER, RUNNING, ManagerRecord, decode

__all__ = ["router"]

router = APIRouter(prefix="/v1/managers", tags=["managers"])


class ManagerModel(BaseModel):
    """A manager that runs. At most one leads; all of them answer."""

    manager: str
    address: str
    process: str
    version: str
    started: float
    leads: bool


class Managers(BaseModel):
    """All managers that run; `this` is the one that answers."""

    managers: list[ManagerModel]
    this: str


@router.get("")
async def list_managers(manager: ManagerPart, _: Anyone) -> Managers:
    """List the managers that run."""
    entries = await manager.ask(_read)
    leader = next((decode(one, ManagerRecord).manager for one in entries if one.key == LEADER), None)
    records = [decode(one, ManagerRecord) for one in entries if one.key.startswith(RUNNING)]
    return Managers(
        managers=[
            ManagerModel(
                manager=one.manager,
                address=one.address,
                process=one.process,
                version=one.version,
                started=one.started,
                leads=one.manager == leader,
            )
            for one in records
        ],
        this=manager.settings.record.manager,
    )


def _read(registry: Registry) -> tuple[Entry, ...]:
    return registry.range(LEADER, RUNNING).entries
