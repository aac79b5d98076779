"""One copy, one object: the same rules as for many, in few steps."""

from __future__ import annotations

import time
from typing import overload

from farpool.store.core import Core
from farpool.store.lane import THROUGH_MEMORY
from farpool.store.member import Member
from farpool.transport.frames import Op, Status
from farpool.transport.refusals import refusal

__all__ = ["get_single", "publish_single"]

_GET, _PUT = Op.GET, Op.PUT
_DONE, _STALE = int(Status.DONE), int(Status.STALE)
_FINAL = (int(Status.FULL), int(Status.DENIED), int(Status.TOO_LARGE))
"""What another attempt would end in as well."""
_NOTHING = (int(Status.MISSING), int(Status.DELETED))


@overload
def get_single(core: Core, member: Member, key: bytes) -> bytes | None: ...
@overload
def get_single(core: Core, member: Member, key: bytes, into: memoryview) -> int | None: ...


def get_single(core: Core, member: Member, key: bytes, into: memoryview | None = None) -> bytes | int | None:
    """An object of which there is one copy, or its bytes once they are in `into`; None if there is none."""
    reader = member.channel.reader
    if reader is not None:
        if into is None:
            found = reader.get(key)
            if found is not None:
                return found[0]
        else:
            placed = reader.get_into(key, into)
            if placed is not None:
                return placed[0]
    deadline = time.monotonic() + core.timeout
    if member.channel.one_sided is not None:
        read = member.get_one_sided(key, deadline, into)
        if read is not None:
            return read[2] if into is not None else read[0]
    reply = member.exchange(_GET, key, deadline, into=into)
    status = reply.status
    if status == _DONE:
        return reply.nbytes if into is not None else reply.payload or b""
    if status in _NOTHING:
        return None
    raise refusal(status, reply.meta.decode(errors="replace"), member.name, _GET)


def publish_single(core: Core, member: Member, meta: bytes, payload: memoryview) -> int | None:
    """Publish at once where nothing stands in the way; the generation, None if it has not been published."""
    reader = member.channel.reader
    if not member.breaker.untroubled or (reader is not None and payload.nbytes > THROUGH_MEMORY):
        return None
    generation = core.clock.next()
    reply = member.exchange(_PUT, meta, time.monotonic() + core.timeout, generation, payload)
    if reply.status == _DONE:
        return generation
    if reply.status == _STALE:
        core.clock.observe(reply.generation)
    elif reply.status in _FINAL:
        raise refusal(reply.status, reply.meta.decode(errors="replace"), member.name, _PUT, payload.nbytes)
    return None
