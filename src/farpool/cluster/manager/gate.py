"""The first and last code that a request meets: it limits the body, counts requests and writes the audit log."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farpool.cluster.manager.access import Principal
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics

__all__ = ["BODY_BYTES_MAX", "Gate"]

BODY_BYTES_MAX = 64 << 10
_BODY_TIMEOUT_S = 30.0
_AUDITED_CHARACTERS_MAX = 500
"""Longest text of a caller in the audit log. With longer ones, a caller that is refused could soon rotate it away."""
_DENIALS = (401, 403, 429)
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
            await self._app(scope, _limited(receive), send_recorded)
        finally:
            if not answered and state.get("audited"):
                # The request was cut off at the end of the manager, and may have changed something nevertheless.
                self._manager.audit.add("called", **self._fields(scope, state, None))
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.answered(method, route, answered or 500, time.monotonic() - began)

    async def _record(self, scope: Scope, state: dict[str, Any], status: int) -> None:
        """Write a change or a denial into the audit log before the caller gets the answer."""
        denied = status in _DENIALS and not state.get("silent")
        if denied or state.get("audited"):
            await self._manager.record("denied" if denied else "called", **self._fields(scope, state, status))

    def _fields(self, scope: Scope, state: dict[str, Any], status: int | None) -> dict[str, Any]:
        """Return the fields of a request's line in the audit log. `status` is None if there is no answer."""
        who: Principal | None = state.get("principal")
        client = scope.get("client")
        return {
            "manager": self._manager.settings.record.manager,
            "who": who.name if who else None,
            "role": who.role.value if who else None,
            "tenant": who.tenant if who else None,
            "address": client[0] if client else None,
            "method": _cut(scope["method"]),
            "path": _cut(scope["path"]),
            "status": status,
            **({"detail": _cut(state["detail"])} if "detail" in state else {}),
            **state.get("audit_fields", {}),
        }


def _cut(text: str) -> str:
    left_out = len(text) - _AUDITED_CHARACTERS_MAX
    return text if left_out <= 0 else f"{text[:_AUDITED_CHARACTERS_MAX]}... ({left_out} more characters)"


def _limited(receive: Receive) -> Receive:
    """Limit the bytes of a request's body and the time in which it has to come, because it comes before the rights."""
    nbytes, has_ended = 0, False
    until = asyncio.get_running_loop().time() + _BODY_TIMEOUT_S

    async def receive_limited() -> Message:
        nonlocal nbytes, has_ended
        try:
            # After the body, this waits for the end of the connection.
            async with asyncio.timeout_at(None if has_ended else until):
                message = await receive()
        except TimeoutError:
            raise HTTPException(408, f"the body did not come within {_BODY_TIMEOUT_S:.0f} s") from None
        has_ended = has_ended or not message.get("more_body", False)
        nbytes += len(message.get("body", b""))
        if nbytes > BODY_BYTES_MAX:
            raise HTTPException(413, f"the body is too large, expected at most {BODY_BYTES_MAX} bytes")
        return message

    return receive_limited
