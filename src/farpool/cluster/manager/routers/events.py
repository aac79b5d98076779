"""``/v1/events``: changes of the pool as server-sent events, which continue after any revision at any manager."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Annotated

import msgspec
from fastapi import APIRouter, Header, Query
from fastapi.responses import StreamingResponse

from farpool.cluster.manager.access import Principal
from farpool.cluster.manager.calls import BusyError
from farpool.cluster.manager.dependencies import ManagerPart, MetricsPart, Reader
from farpool.cluster.manager.events import Event, Step
from farpool.cluster.manager.feed import Backlog, revision_of
from farpool.cluster.manager.manager import Manager
from farpool.cluster.manager.problems import Problem
from farpool.errors import FarpoolError

__all__ = ["STREAMS_MAX", "router"]

router = APIRouter(prefix="/v1/events", tags=["events"])

STREAMS_MAX = 200
_SILENCE_S = 10.0
"""Seconds after which a stream without events gets a line, so that both ends notice a broken connection."""
_PAUSE_S = 0.2
_RETRY = b"retry: 1000\n\n"

_DESCRIPTION = (
    "Stream the pool's changes. Each event's `id` is a revision of the registry. A client that sends the last one as "
    "`Last-Event-ID` gets all later events, from any manager; it may get the events of that revision again. The event "
    "`reset` says that events are missing: read the lists again."
)


@router.get(
    "",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}},
    description=_DESCRIPTION,
)
async def events(
    manager: ManagerPart,
    metrics: MetricsPart,
    who: Reader,
    last_event_id: Annotated[str, Header(pattern="^[0-9]{0,19}$")] = "",
    after: Annotated[int | None, Query(ge=0, lt=2**63, description="As Last-Event-ID, which counts more.")] = None,
) -> StreamingResponse:
    """Stream the pool's changes."""
    if metrics.streams >= STREAMS_MAX:
        raise Problem(503, f"there are {STREAMS_MAX} streams, expected fewer; close one", retry_after=1)
    if manager.feed.steps.revision < 0:
        await manager.revision()  # its error says why there are no events yet
        raise Problem(503, "the manager has only begun to follow the registry; try again", retry_after=1)
    position = int(last_event_id) if last_event_id else after

    async def counted() -> AsyncIterator[bytes]:
        metrics.streams += 1
        try:
            async for block in _stream(manager, who, position):
                yield block
        except (FarpoolError, BusyError):
            pass  # the answer has begun, so the client learns the reason when it comes again
        finally:
            metrics.streams -= 1

    return StreamingResponse(counted(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _stream(manager: Manager, who: Principal, position: int | None) -> AsyncIterator[bytes]:
    feed = manager.feed
    yield _RETRY
    if position is None:
        position = feed.steps.revision
        yield _position(position)
    elif position > feed.steps.revision and position > (now := await manager.ask(revision_of)):
        # Of a registry that was restored, or of another one.
        yield _block(now, Event("reset", {"reason": f"the registry is at revision {now}, before {position}"}))
        position = now
    while not feed.is_closing:
        steps = feed.steps.after(position)
        if steps is None:
            async for block, reached in _missed(manager, who, position):
                if block is None:
                    return
                yield block
                position = reached
            continue
        for step in steps:
            if _may_end(who, step):
                return  # the client proves again who it is
            for block in _blocks(step):
                yield block
            position = step.revision
        # Without a look for others first, steps that came while a slow client took these would wait for the next one.
        if steps or await feed.changed(_SILENCE_S) or feed.steps.after(position) != []:
            continue
        # No events up to here, so a client that comes again need not read the changes before.
        position = max(position, feed.steps.revision)
        yield _position(position)


async def _missed(manager: Manager, who: Principal, position: int) -> AsyncIterator[tuple[bytes | None, int]]:
    """Yield what a client has missed, up to the steps that the feed keeps, each with the position after it.

    If the client has to prove again who it is, None comes last.
    """
    feed = manager.feed
    backlog = await manager.ask(lambda registry: Backlog(registry, position))
    try:
        while position < feed.steps.since and not feed.is_closing:
            found = await manager.calls.run(backlog.next)
            if found is None:
                position = feed.steps.revision
                reset = Event("reset", {"reason": "the registry has deleted the changes since then; read all again"})
                yield _block(position, reset), position
                yield None, position  # the client's rights may be among these changes
                return
            steps, revision = found
            for step in steps:
                if _may_end(who, step):
                    yield None, position
                    return
                for block in _blocks(step):
                    yield block, step.revision
            position = max(position, revision)
            yield _position(position), position
    finally:
        backlog.close()


def _may_end(who: Principal, step: Step) -> bool:
    """Return True if a step has changed the rights of a client since they were read."""
    return who.key in step.credentials and step.revision > who.revision


def _blocks(step: Step) -> Iterable[bytes]:
    # Only the last event has the ID: a client that got a part of the step gets all of it again.
    last = len(step.events) - 1
    return (_block(step.revision if i == last else None, event) for i, event in enumerate(step.events))


def _block(revision: int | None, event: Event) -> bytes:
    head = b"" if revision is None else b"id: %d\n" % revision
    return b"%sevent: %s\ndata: %s\n\n" % (head, event.kind.encode(), msgspec.json.encode(event.data))


def _position(revision: int) -> bytes:
    return b"id: %d\n\n" % revision
