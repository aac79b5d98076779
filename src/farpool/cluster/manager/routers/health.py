"""``/healthz``, ``/readyz`` and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Response
from pydantic import BaseModel

from farpool.cluster.manager.dependencies import ManagerPart, MetricsPart, Reader

__all__ = ["router"]

router = APIRouter(tags=["health"])


class Health(BaseModel):
    """The manager runs."""

    status: str


class Readiness(BaseModel):
    """The registry answers. `leads` is true on the leading manager."""

    status: str
    leads: bool
    revision: int


@router.get("/healthz")
async def healthz() -> Health:
    """Answer as long as the manager runs. Needs no credentials."""
    return Health(status="ok")


@router.get("/readyz")
async def readyz(manager: ManagerPart) -> Readiness:
    """Answer 200 if the registry answers, else 503. Needs no credentials."""
    revision = await manager.revision()
    return Readiness(status="ready", leads=manager.presence.leads, revision=revision)


@router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
async def metrics(_: Reader, metrics: MetricsPart) -> Response:
    """Return the manager's counters in Prometheus' text format."""
    return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
