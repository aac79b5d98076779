"""The first and last code that a request meets: it limits the body, counts requests and writes the audit log."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farpool.cluster.manager.access import Principal
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics

__all__ = ["BODY_BYTES_MAX", "Gate"]

BODY_BYTES_MAX = 64 << 10
_DENIALS = (401, 403, 429)
_TOO_LARGE = (
    b'{"type":"about:blank","title":"Request Entity Too Large","status":413,"detail":"the body is larger than 64 KiB, '
    b'expected less; no request of this API needs as much"}'
)
_METHODS = {"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"}


class Gate:
    """Wraps the application.

    Parameters
    ----------
    app : ASGIApp
        The application.
    manager : Manager
        The manager.
    metrics : Metrics
        Its counters.
    """

    def __init__(self, app: ASGIApp, manager: Manager, metrics: Metrics) -> None:
        self._app, self._manager, self._metrics = app, manager, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        state: dict[str, Any] = scope.setdefault("state", {})
        answered = 0

        async def send_recorded(message: Message) -> None:
            nonlocal answered
            if message["type"] == "http.response.start":
                answered = message["status"]
                await self._record(scope, state, answered)
            await send(message)

        try:
            if _is_too_large(scope):
                await _refuse(send_recorded)
            else:
                await self._app(scope, _limited(receive), send_recorded)
        except _TooLargeError:
            if not answered:
                await _refuse(send_recorded)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.answered(method, route, answered or 500, time.monotonic() - began)

    async def _record(self, scope: Scope, state: dict[str, Any], status: int) -> None:
        """Write a change or a denial into the audit log before the caller gets the answer."""
        denied = status in _DENIALS and not state.get("silent")
        if not (denied or state.get("audited")):
            return
        who: Principal | None = state.get("principal")
        client = scope.get("client")
        await self._manager.record(
            "denied" if denied else "called",
            manager=self._manager.settings.record.manager,
            who=who.name if who else None,
            role=who.role.value if who else None,
            tenant=who.tenant if who else None,
            address=client[0] if client else None,
            method=scope["method"],
            path=scope["path"],
            status=status,
            **({"detail": state["detail"]} if "detail" in state else {}),
            **state.get("audit_fields", {}),
        )


class _TooLargeError(Exception):
    pass


def _is_too_large(scope: Scope) -> bool:
    stated = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    return len(stated) > len(str(BODY_BYTES_MAX)) or not stated.isdigit() or int(stated) > BODY_BYTES_MAX


def _limited(receive: Receive) -> Receive:
    nbytes = 0

    async def receive_limited() -> Message:
        nonlocal nbytes
        message = await receive()
        nbytes += len(message.get("body", b""))
        if nbytes > BODY_BYTES_MAX:
            raise _TooLargeError
        return message

    return receive_limited


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/problem+json"),
        (b"content-length", str(len(_TOO_LARGE)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": _TOO_LARGE})
