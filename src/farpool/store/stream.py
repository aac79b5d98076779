"""One node, one connection, many requests under way: the good case only."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from farpool.errors import ChecksumError, NodeError
from farpool.store.lane import WINDOW, WINDOW_BYTES
from farpool.store.member import Member, may_be_stale
from farpool.transport.frames import Op

if TYPE_CHECKING:
    from farpool._native import Reply

__all__ = ["Ask", "stream"]


class Ask(NamedTuple):
    """One request of a stream; `nbytes` of payload, there or back."""

    meta: bytes
    nbytes: int = 0
    generation: int = 0
    payload: memoryview | None = None
    into: memoryview | None = None


def stream(member: Member, op: Op, requests: Sequence[Ask], deadline: float) -> list[Reply | None]:
    """The replies; None for what failed and everything after a failure of the connection.

    Such requests have to be made again, by who knows what to do about failures.
    """
    replies: list[Reply | None] = []
    sent: deque[Ask] = deque()
    under_way = 0
    try:
        loan = member.open(deadline)
    except NodeError:  # the breaker knows
        return [None] * len(requests)
    try:
        with loan as connection:

            def receive() -> int:
                oldest = sent.popleft()
                try:
                    replies.append(connection.receive(deadline, oldest.into))
                except (ChecksumError, ValueError):  # of the payload: the connection goes on
                    replies.append(None)
                return oldest.nbytes

            for request in requests:
                while sent and (len(sent) >= WINDOW or under_way + request.nbytes > WINDOW_BYTES):
                    under_way -= receive()
                connection.send(op, request.meta, deadline, generation=request.generation, payload=request.payload)
                sent.append(request)
                under_way += request.nbytes
            while sent:
                under_way -= receive()
    except NodeError as error:
        # Where a new connection may do, whoever asks again finds out. A probe has to come to an end.
        if not (may_be_stale(error) and member.breaker.untroubled):
            member.failed(error)
    else:
        if not member.breaker.untroubled:
            member.succeeded()
    return replies + [None] * (len(requests) - len(replies))
