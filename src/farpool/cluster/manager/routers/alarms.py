"""``/v1/alarms``: the alarms that are raised now."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from farpool.cluster.manager.alarm_watch import read_alarms
from farpool.cluster.manager.dependencies import ManagerPart, Reader
from farpool.cluster.manager.records import AlarmRecord

__all__ = ["AlarmModel", "alarm_model", "router"]

router = APIRouter(prefix="/v1/alarms", tags=["alarms"])


class AlarmModel(BaseModel):
    """An alarm. `subject` is a member's identity, ``tenant-NUMBER`` or a manager's ID, and `about` the same for people.

    `since` is in seconds since 1970.
    """

    kind: str
    subject: str
    about: str
    text: str
    since: float


class Alarms(BaseModel):
    """The alarms that are raised, by kind and subject."""

    alarms: list[AlarmModel]


def alarm_model(record: AlarmRecord) -> AlarmModel:
    """Return an alarm as the API shows it."""
    return AlarmModel(
        kind=record.kind, subject=record.subject, about=record.about, text=record.text, since=record.since
    )


@router.get("")
async def list_alarms(manager: ManagerPart, _: Reader) -> Alarms:
    """List the alarms that are raised, as the registry has them."""
    return Alarms(alarms=[alarm_model(one) for one in await manager.ask(read_alarms)])
