"""Parts of requests that routers ask for: the manager, the caller, a page of a list."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, TypeVar

from fastapi import Depends, Query, Request

from farpool.cluster.manager.access import Denied, Presented, Principal, authenticate, is_from_a_page
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics
from farpool.cluster.manager.peer import EXTENSION, Peer
from farpool.cluster.manager.problems import Problem
from farpool.cluster.manager.records import Role

__all__ = [
    "Administrator",
    "Anyone",
    "Lessee",
    "Limit",
    "ManagerPart",
    "MetricsPart",
    "Operator",
    "Reader",
    "page_of",
]

_Item = TypeVar("_Item")


def _manager(request: Request) -> Manager:
    manager: Manager = request.app.state.manager
    return manager


def _metrics(request: Request) -> Metrics:
    metrics: Metrics = request.app.state.metrics
    return metrics


def _allow(*roles: Role, audited: bool = False) -> Callable[[Request], Awaitable[Principal]]:
    """Return a dependency that lets callers with one of the roles pass.

    Parameters
    ----------
    *roles : Role
        The roles.
    audited : bool
        True if the audit log gets a line for each request. Then a request is refused while the log cannot be written.
    """

    async def caller(request: Request) -> Principal:
        manager = _manager(request)
        principal = await _authenticated(request, manager)
        request.state.principal = principal
        if principal.role not in roles:
            # As for failures, because a caller that may do little must not push older lines out of the audit log.
            now = time.monotonic()
            if manager.limit.wait(principal.name, now):
                request.state.silent = not manager.limit.tells(principal.name, now)
            else:
                manager.limit.failed(principal.name, now)
            raise Denied(
                403,
                f"{principal.name} has the role {principal.role.value}, which may not do this",
                f"the role {' or '.join(role.value for role in roles)}",
                "ask an administrator for it",
            )
        if audited:
            request.state.audited = True
            if not manager.audit.is_ready:
                raise Problem(
                    503,
                    f"the audit log cannot be written: {manager.audit.trouble or 'too many lines wait'}, and nothing "
                    "is changed without it; make room on its disk",
                    retry_after=1,
                )
        return principal

    return caller


async def _authenticated(request: Request, manager: Manager) -> Principal:
    peer: Peer = request.scope["extensions"][EXTENSION]
    headers, settings = request.headers, manager.settings
    header = headers.get("authorization")
    scheme, _, token = (header or "").partition(" ")
    from_a_page = is_from_a_page(headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site"))
    address = request.client.host if request.client else ""
    # A page that its reader has open must not use up the tries of its reader's programs.
    source = f"a web page at {address}" if from_a_page and settings.is_plain_loopback else address
    shown = f"token {header}" if header is not None else peer.identity and f"certificate {peer.identity}"
    credentials = hashlib.sha256(shown.encode()).digest() if shown else b""
    now = time.monotonic()
    wait = manager.limit.wait(source, now, credentials)
    if wait:
        # One line for many of them, because the caller decides how many there are.
        request.state.silent = not manager.limit.tells(source, now)
        raise Problem(429, f"{source} failed too often to prove who it is; wait {wait:.0f} s", retry_after=wait)

    def find() -> Principal:
        presented = Presented(
            # A header with another scheme is a wrong token, not a missing one.
            token=None if header is None else token.strip() if scheme.lower() == "bearer" else "",
            identity=peer.identity,
            user=peer.user() if header is None and settings.is_plain_loopback else None,
            is_plain_loopback=settings.is_plain_loopback,
            is_from_a_page=from_a_page,
        )
        return authenticate(manager.registry, presented, token_required=settings.token_required)

    try:
        principal = await manager.calls.run(find)
    except Denied:
        manager.limit.failed(source, now, credentials)
        raise
    manager.limit.accepted(credentials)
    return principal


def page_of(
    items: Sequence[_Item], key: Callable[[_Item], str], after: str, limit: int
) -> tuple[list[_Item], str | None]:
    """Return the page of a list after a key, and the key after which the next page begins; None if this is the last.

    Parameters
    ----------
    items : sequence
        The whole list, in any order.
    key : callable
        Returns an item's key.
    after : str
        Key of the last item of the page before; empty for the first page.
    limit : int
        Maximum number of items.
    """
    rest = sorted((item for item in items if not after or key(item) > after), key=key)
    page = rest[:limit]
    return page, key(page[-1]) if len(rest) > limit else None


ManagerPart = Annotated[Manager, Depends(_manager)]
MetricsPart = Annotated[Metrics, Depends(_metrics)]
Anyone = Annotated[Principal, Depends(_allow(*Role))]
Lessee = Annotated[Principal, Depends(_allow(*Role, audited=True))]
Reader = Annotated[Principal, Depends(_allow(Role.ADMIN, Role.OPERATOR))]
Operator = Annotated[Principal, Depends(_allow(Role.ADMIN, Role.OPERATOR, audited=True))]
Administrator = Annotated[Principal, Depends(_allow(Role.ADMIN, audited=True))]
Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of items.")]
