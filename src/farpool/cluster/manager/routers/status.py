"""``/v1/status``: the pool as ``farpool status`` shows it, in one answer."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from fastapi import APIRouter

from farpool.cluster.manager.dependencies import ManagerPart, Reader
from farpool.cluster.manager.status import PoolStatus, read_status, repair_statuses

__all__ = ["router"]

router = APIRouter(prefix="/v1/status", tags=["status"])


@router.get("")
async def show_status(manager: ManagerPart, _: Reader) -> PoolStatus:
    """Return managers, members, tenants, leases and alarms. Only the leader knows the copies of objects (`repair`)."""
    status = await manager.ask(read_status)
    if manager.repairs is None or not manager.presence.leads:
        return status
    found = await asyncio.to_thread(manager.repairs.status)
    return replace(status, repair=repair_statuses(found["tenants"]))
