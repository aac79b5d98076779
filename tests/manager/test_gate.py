"""What a manager does with requests that come slowly, and with those that its own end cuts off."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.server import ServerState

from farpool.cluster.manager import gate, peer
from farpool.cluster.manager.audit import AuditLog
from farpool.cluster.manager.gate import Gate
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.metrics import Metrics
from farpool.cluster.manager.peer import PeerProtocol

PATIENCE = 30.0


def gated(app: ASGIApp, audit: AuditLog | None = None) -> Gate:
    manager = SimpleNamespace(audit=audit, settings=SimpleNamespace(record=SimpleNamespace(manager="1f")))
    return Gate(app, cast(Manager, manager), cast(Metrics, SimpleNamespace(answered=lambda *_: None)))


def scope() -> dict[str, Any]:
    return {"type": "http", "method": "POST", "path": "/v1/tokens", "client": ("127.0.0.1", 1)}


async def sent(_: Message) -> None:
    pass


async def never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


def test_a_change_whose_request_is_cut_off_is_in_the_audit_log(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["audited"] = True
        begun.set()
        await never()

    async def run(audit: AuditLog) -> None:
        task = asyncio.create_task(gated(app, audit)(scope(), never, sent))
        await begun.wait()
        task.cancel()
        await asyncio.wait([task])

    with AuditLog(tmp_path / "audit") as audit:
        asyncio.run(asyncio.wait_for(run(audit), PATIENCE))
    [line] = map(json.loads, (tmp_path / "audit").read_text().splitlines())
    assert (line["event"], line["path"], line["status"]) == ("called", "/v1/tokens", None)


def test_a_body_that_does_not_come_is_given_up_and_the_end_of_a_connection_is_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_BODY_TIMEOUT_S", 0.05)
    messages: list[Message] = [
        {"type": "http.request", "body": b"x", "more_body": True},
        {"type": "http.request", "body": b"x", "more_body": False},
    ]
    got: list[object] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while True:
            try:
                got.append((await receive())["type"])
            except Exception as error:
                got.append(getattr(error, "status_code", error))
                return

    async def run() -> None:
        await asyncio.wait_for(gated(app)(scope(), never, sent), PATIENCE)
        assert got == [408]
        got.clear()
        whole = iter(messages)

        async def receive() -> Message:
            message = next(whole, None)
            return message if message is not None else await never()

        with pytest.raises(TimeoutError):  # it waits, longer than for a body
            await asyncio.wait_for(gated(app)(scope(), receive, sent), 0.5)
        assert got == ["http.request", "http.request"]

    asyncio.run(run())


class Transport(asyncio.Transport):
    """A connection without a socket."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.closed = b"", asyncio.Event()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed.set()

    def is_closing(self) -> bool:
        return self.closed.is_set()

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@pytest.mark.parametrize("first", [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_request_that_comes_in_small_parts_does_not_hold_its_connection(
    first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_REQUEST_TIMEOUT_S", 0.1)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body"})

    async def run() -> None:
        config = uvicorn.Config(app, http=PeerProtocol, ws="none", lifespan="off", log_config=None)
        config.load()
        protocol, transport = PeerProtocol(config, ServerState(), {}), Transport()
        protocol.connection_made(transport)
        if first:
            protocol.data_received(first)
        while first and b"204" not in transport.written:
            await asyncio.sleep(0.01)
        while not transport.closed.is_set():
            protocol.data_received(b"G")
            await asyncio.sleep(0.02)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
