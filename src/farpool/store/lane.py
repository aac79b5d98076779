"""Requests to one node, many under way at once on one connection."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from farpool.errors import ChecksumError, ConfigError, FarpoolError, NodeError
from farpool.store.deadline import share_of
from farpool.store.member import ONCE, Member, may_be_stale
from farpool.store.messages import Answer, BusyError, Reply, Request
from farpool.transport.frames import COMMIT, OFFSET, Op, Status

if TYPE_CHECKING:
    from farpool._native import Connection, ObjectReader

__all__ = ["THROUGH_MEMORY", "WINDOW", "WINDOW_BYTES", "Lane", "Local", "look"]

OwnerT = TypeVar("OwnerT")

WINDOW = 64
"""Requests under way on one connection."""
WINDOW_BYTES = 8 << 20
"""Bytes of their payloads."""
THROUGH_MEMORY = 64 << 10
"""Bytes above which a payload is written into mapped memory rather than sent."""
_GRACE = 0.05
"""Seconds for a reply that came while another node was waited for."""


@dataclass(frozen=True, slots=True)
class Local:
    """A reply that did not need the node."""

    generation: int
    payload: bytes | None
    nbytes: int
    status: int = Status.DONE
    meta: bytes = b""


def look(reader: ObjectReader, request: Request) -> Reply | None:
    """What mapped memory says; None if the node has to be asked."""
    if request.into is not None:
        read = reader.get_into(request.meta, request.into)
        return None if read is None else Local(read[1], None, read[0])
    found = reader.get(request.meta)
    return None if found is None else Local(found[1], found[0], len(found[0]))


@dataclass(slots=True, eq=False)
class _Item(Generic[OwnerT]):
    """A request on its way.

    Attributes
    ----------
    owner : OwnerT
        Whose it is.
    op : Op
        As which it travels.
    offset, crc : int
        Of a payload that was written into mapped memory.
    until : float
        When the reply has to be here.
    slot : bool
        It holds one of the node's slots for writes.
    failure : Exception or None
        Why what was prepared is aborted.
    """

    owner: OwnerT
    request: Request
    op: Op
    nbytes: int
    offset: int = 0
    crc: int = 0
    until: float = 0.0
    slot: bool = False
    failure: Exception | None = None


class Lane(Generic[OwnerT]):
    """A connection to one node and what is under way on it. Used by one thread.

    Parameters
    ----------
    member : Member
        The node.
    deadline : float
        Of everything, by the monotonic clock.
    """

    def __init__(self, member: Member, deadline: float) -> None:
        self._member = member
        self._deadline = deadline
        self._waiting: deque[_Item[OwnerT]] = deque()
        self._sent: deque[_Item[OwnerT]] = deque()
        self._unended: set[_Item[OwnerT]] = set()
        self._nbytes = 0
        self._stack = ExitStack()
        self._connection: Connection | None = None
        self._renewed = False
        self._dead: NodeError | None = None

    @property
    def is_receiving(self) -> bool:
        """Whether replies are outstanding."""
        return bool(self._sent)

    def add(self, owner: OwnerT, request: Request) -> None:
        """Put a request in line."""
        nbytes = 0 if request.payload is None else memoryview(request.payload).nbytes
        item = _Item(owner, request, request.op, nbytes)
        self._unended.add(item)
        self._waiting.append(item)

    def send(self) -> Iterator[tuple[OwnerT, Answer]]:
        """Send what the window allows; gives what is answered without the node's reply."""
        while self._waiting and len(self._sent) < WINDOW and (not self._sent or self._nbytes < WINDOW_BYTES):
            item = self._waiting.popleft()
            answer: Answer | None
            try:
                answer = self._look(item)
                if answer is None:
                    connection = self._open(self._until(item.request))
                    if not self._take_slot(item):
                        self._waiting.appendleft(item)
                        return
                    self._start(item, connection)
            except NodeError as error:
                if self._connection is not None and self._connection.broken:
                    self._waiting.appendleft(item)
                    yield from self._lose(error)
                    continue
                answer = error
            except ConfigError:  # of the store itself, not of this request
                raise
            except (FarpoolError, ValueError) as error:
                answer = error
            if answer is not None:
                yield from self._end(item, answer)

    def receive(self) -> Iterator[tuple[OwnerT, Answer]]:
        """Wait for the reply to the oldest request under way; gives what is answered by it."""
        item = self._sent[0]
        assert self._connection is not None
        answer: Answer
        try:
            until = max(item.until, time.monotonic() + _GRACE)
            answer = self._connection.receive(until, item.request.into)
        except NodeError as error:
            yield from self._lose(error)
            return
        except (ChecksumError, ValueError) as error:
            answer = error
        self._sent.popleft()
        self._nbytes -= item.nbytes
        if not self._member.breaker.untroubled:
            self._member.succeeded()
        if item.op == Op.PREPARE and not isinstance(answer, Exception) and answer.status == Status.DONE:
            self._fill(item, answer)
            return
        yield from self._end(item, answer)

    def close(self) -> None:
        """Give the connection back; one on which something has not ended is of no more use."""
        # What an interrupt has left may have been prepared, and only the end of its connection has the node free it.
        if self._unended and self._connection is not None:
            self._connection.close()
        for item in self._unended:
            self._give_back(item, False)
        self._stack.close()

    def _look(self, item: _Item[OwnerT]) -> Reply | None:
        if item.op != Op.GET:
            return None
        reader = self._member.channel.reader
        if reader is not None:
            return look(reader, item.request)
        found = self._member.get_one_sided(item.request.meta, self._until(item.request), item.request.into)
        return None if found is None else Local(found[1], found[0], found[2])

    def _open(self, until: float) -> Connection:
        if self._dead is not None:
            raise self._dead
        if self._connection is None:
            try:
                loan = self._member.open(until)
                try:
                    self._connection = self._stack.enter_context(loan)
                except NodeError as error:
                    self._member.failed(error)
                    raise
            except NodeError as error:
                self._dead = error
                raise
        return self._connection

    def _take_slot(self, item: _Item[OwnerT]) -> bool:
        """Whether a write may go; False if replies have to be received first."""
        member = self._member
        if item.op == Op.PUT and not item.slot and not member.breaker.untroubled:
            if not member.begin_write():
                if self._sent:
                    return False
                if not item.request.patient:
                    raise BusyError(
                        f"{member.name} has just come back and is given few writes at once", node=member.name
                    )
                member.wait_for_slot(self._until(item.request))
            item.slot = True
        return True

    def _start(self, item: _Item[OwnerT], connection: Connection) -> None:
        request = item.request
        meta, payload = request.meta, request.payload
        if item.op == Op.PUT and item.nbytes > THROUGH_MEMORY and self._member.channel.reader is not None:
            item.op = Op.PREPARE
        if item.op == Op.PREPARE:
            meta, payload = OFFSET.pack(item.nbytes) + meta, None
        elif item.op == Op.COMMIT:
            meta, payload = COMMIT.pack(item.offset, item.crc, 0), None
        elif item.op == Op.ABORT:
            meta, payload = OFFSET.pack(item.offset), None
        item.until = self._until(request)
        connection.send(item.op, meta, item.until, generation=request.generation, payload=payload)
        self._sent.append(item)
        self._nbytes += item.nbytes

    def _fill(self, item: _Item[OwnerT], prepared: Reply) -> None:
        """Write a payload into the memory that was prepared for it, to be committed next."""
        reader, payload = self._member.channel.reader, item.request.payload
        (item.offset,) = OFFSET.unpack_from(prepared.meta)
        item.op = Op.ABORT
        try:
            if reader is None or payload is None:
                item.failure = NodeError(
                    f"{self._member.name} was lost while an object was written", node=self._member.name
                )
            else:
                item.crc = reader.write(item.offset, payload)
                item.op = Op.COMMIT
        except (FarpoolError, ValueError) as error:
            item.failure = error
        self._waiting.appendleft(item)

    def _until(self, request: Request) -> float:
        return share_of(self._deadline, last=request.last)

    def _lose(self, error: NodeError) -> Iterator[tuple[OwnerT, Answer]]:
        """The connection has failed: once everything goes out again on a new one, then it is given up."""
        self._stack.close()
        self._connection = None
        lost, self._sent, self._nbytes = list(self._sent), deque(), 0
        again = may_be_stale(error) and not self._renewed
        self._renewed = True
        if not again:
            self._dead = error
            self._member.failed(error)
        kept = [item for item in lost if again and item.op not in ONCE]
        for item in kept:
            if item.op == Op.PREPARE:
                item.op = Op.PUT  # the new connection may be without mapped memory
        self._waiting.extendleft(reversed(kept))
        for item in lost:
            if item not in kept:
                yield from self._end(item, error)

    def _end(self, item: _Item[OwnerT], answer: Answer) -> Iterator[tuple[OwnerT, Answer]]:
        self._give_back(item, not isinstance(answer, Exception) and answer.status == Status.DONE)
        self._unended.discard(item)
        yield item.owner, item.failure or answer

    def _give_back(self, item: _Item[OwnerT], succeeded: bool) -> None:
        if item.slot:
            item.slot = False
            self._member.end_write(succeeded)
