"""The HTTP application: routers, errors, and the document that describes both (OpenAPI)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.security import HTTPBearer

from farpool.cluster.manager.gate import Gate
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics
from farpool.cluster.manager.problems import MEDIA_TYPE, ProblemDocument, add_handlers
from farpool.cluster.manager.routers import (
    alarms,
    events,
    health,
    identities,
    leases,
    managers,
    members,
    names,
    objects,
    repairs,
    status,
    tenants,
    tokens,
)

__all__ = ["ROUTERS", "application"]

ROUTERS = (
    status,
    alarms,
    members,
    leases,
    tenants,
    objects,
    repairs,
    names,
    events,
    managers,
    tokens,
    identities,
    health,
)
"""Modules with the paths of the API, each of which has a `router`."""

_DESCRIPTION = (
    "The control plane of a pool. Every error is a problem document (RFC 9457). Lists have pages: give `after` the "
    "value of `next`. See docs/manager.md."
)


def application(manager: Manager) -> Gate:
    """Return the application of a manager. Its start and end start and end the manager's threads."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        manager.start()
        yield
        manager.feed.end_streams()

    app = FastAPI(
        title="farpool manager",
        version=version("farpool"),
        description=_DESCRIPTION,
        lifespan=lifespan,
        # Their pages load scripts of other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        # Only describes the header in the document; the routers' own dependencies decide.
        dependencies=[Depends(HTTPBearer(auto_error=False, scheme_name="token"))],
        responses={"default": {"model": ProblemDocument, "description": "An error."}},
    )
    app.state.manager, app.state.metrics = manager, Metrics(manager)
    add_handlers(app)
    for module in ROUTERS:
        app.include_router(module.router)
    _describe_errors(app)
    return Gate(app, manager, app.state.metrics)


def _describe_errors(app: FastAPI) -> None:
    """Let the document say that errors are problem documents. FastAPI describes only its own form of errors."""
    described = app.openapi()
    for path in described["paths"].values():
        for operation in path.values():
            responses: dict[str, Any] = operation["responses"]
            responses.pop("422", None)
            for code, response in responses.items():
                if code == "default" or int(code) >= 400:
                    [described_as] = response["content"].values()
                    response["content"] = {MEDIA_TYPE: described_as}
    for name in ("HTTPValidationError", "ValidationError"):
        described["components"]["schemas"].pop(name, None)
    app.openapi_schema = described
