"""Copies one object from a member to another. A generator does no I/O: it yields requests, and receives the replies."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from farpool.cluster.repair.messages import Outcome
from farpool.cluster.wire.frames import (
    COPIED,
    HEAD,
    KEPT,
    MARK_OF_NONE,
    PRIORITY_ENDS,
    PRIORITY_SHIFT,
    TOUCH,
    Op,
    Status,
)
from farpool.cluster.wire.refusals import refusal
from farpool.errors import AccessDeniedError, NodeError

if TYPE_CHECKING:
    from farpool._native import Reply

__all__ = ["Copied", "Request", "copying"]

_UNKEPT_MS = 60_000
"""Milliseconds from the end of the time for copying until a new copy expires, unless its node was told to keep it."""


class Request(msgspec.Struct, gc=False):
    """A request to one of the two members.

    Attributes
    ----------
    to : "source" or "target"
        The member.
    op : Op
        The operation.
    meta : bytes
        The packed arguments, and the key.
    serial : int
        The mark that the member's copy must have; 0 for any.
    payload : bytes or None
        Bytes to send.
    """

    to: Literal["source", "target"]
    op: Op
    meta: bytes
    serial: int = 0
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class Copied:
    """Outcome of copying an object.

    Attributes
    ----------
    outcome : Outcome
        What became of it.
    nbytes : int
        Size of the object's value; 0 if the source did not return it.
    failed : Request or None
        The request that failed.
    answer : Reply or Exception or None
        The answer to it.
    """

    outcome: Outcome
    nbytes: int = 0
    failed: Request | None = None
    answer: Reply | Exception | None = None

    @property
    def is_away(self) -> str:
        """The member that did not answer, ``source`` or ``target``; empty if both did."""
        return self.failed.to if self.failed is not None and _is_away(self.answer) else ""

    def reason(self, source: str, target: str) -> str:
        """Return why there is no copy, with these names of the members; empty if there is one."""
        if self.failed is None or self.answer is None:
            return ""
        name = source if self.failed.to == "source" else target
        if isinstance(self.answer, Exception):
            return str(self.answer)
        if self.answer.status == Status.UNKNOWN:
            return f"{name}: it does not keep its copy, because another program has released the object"
        if self.answer.status == Status.MISSING and self.failed.to == "target":
            return f"{name}: it takes no copy, because the key was dropped there lately or the node is in a later epoch"
        said = self.answer.meta.decode(errors="replace")
        return str(refusal(self.answer.status, said, name, self.failed.op, self.nbytes))


Copying = Generator[Request, "Reply | Exception", Copied]


def copying(key: bytes, left_ms: Callable[[], int]) -> Copying:
    """Copy an object from the source to the target.

    The copy gets the remaining time to live. If the source keeps its copy (never evicts it), the target keeps it, too.
    A target where the key was dropped a short time ago refuses the copy, because the drop may have come after the
    object was read from the source. A target in a later epoch than the source also refuses it; the head of the object
    contains its epoch.

    Parameters
    ----------
    key : bytes
        The object's key.
    left_ms : callable
        Returns the milliseconds until the caller gives up.
    """
    get = Request("source", Op.GET, key)
    source = yield get
    if isinstance(source, Exception) or source.status != Status.DONE:
        return Copied(_of_source(source), 0, get, source)
    ttl, *head, flags = HEAD.unpack(source.meta)
    if flags & PRIORITY_ENDS:
        # The head names neither the session nor the time, so neither would end the copy's priority: it gets none.
        flags &= ~(7 << PRIORITY_SHIFT | PRIORITY_ENDS)
    is_kept = bool(flags & KEPT)
    payload = source.payload or b""
    # It includes the time until the deadline, so that a copy which takes minutes to send has not expired when complete.
    meta = HEAD.pack(left_ms() + _UNKEPT_MS if is_kept else ttl, *head, flags & ~KEPT | COPIED) + key
    put = Request("target", Op.PUT, meta, 0, payload)
    answer = yield put
    if isinstance(answer, Exception) or answer.status not in (Status.DONE, Status.PRESENT):
        if not isinstance(answer, Exception) and answer.status == Status.MISSING:
            # A refusal may have another reason than a drop. The object is gone only if its holder has lost it, too.
            there = yield Request("source", Op.STAT, key)
            if not isinstance(there, Exception) and there.status == Status.MISSING:
                return Copied(Outcome.GONE, len(payload), put, answer)
        return Copied(_of_target(answer), len(payload), put, answer)
    if is_kept:
        return (yield from _keep(key, left_ms, len(payload)))
    return Copied(Outcome.DONE, len(payload))


def _keep(key: bytes, left_ms: Callable[[], int], nbytes: int) -> Copying:
    """Tell the target to keep its new copy if the source keeps its own.

    A sweep may release the object at the same time, and must leave no copy kept. So we note the mark of the new copy
    first, and then have the source keep its own copy again, which gives it another mark. A sweep that has not released
    that copy by then is refused, looks at all copies again, and finds the new one. If the sweep releases the new copy
    before we keep it, it has another mark than we noted, and its node does not keep it.
    """
    touch = Request("target", Op.TOUCH, TOUCH.pack(left_ms() + _UNKEPT_MS, 0) + key)
    marked = yield touch
    again = Request("source", Op.TOUCH, TOUCH.pack(0, 1) + key, MARK_OF_NONE)
    kept = yield again
    if isinstance(kept, Exception) or kept.status != Status.DONE:
        is_released = not isinstance(kept, Exception) and kept.status in (Status.MISSING, Status.UNKNOWN)
        return Copied(Outcome.GONE if is_released else _of_source(kept), nbytes, again, kept)
    if isinstance(marked, Exception) or marked.status != Status.DONE:
        return Copied(_of_target(marked), nbytes, touch, marked)
    keep = Request("target", Op.TOUCH, TOUCH.pack(0, 1) + key, marked.serial)
    answer = yield keep
    if isinstance(answer, Exception) or answer.status != Status.DONE:
        return Copied(_of_target(answer), nbytes, keep, answer)
    return Copied(Outcome.DONE, nbytes)


def _of_source(answer: Reply | Exception) -> Outcome:
    if _is_away(answer):
        return Outcome.AWAY
    if isinstance(answer, Exception):
        return Outcome.UNREADABLE
    return Outcome.LOST if answer.status == Status.MISSING else Outcome.UNREADABLE


def _of_target(answer: Reply | Exception) -> Outcome:
    if _is_away(answer):
        return Outcome.AWAY
    if isinstance(answer, Exception):
        return Outcome.REFUSED
    # Damaged on its way to the target, so another attempt may succeed.
    return Outcome.AWAY if answer.status == Status.CHECKSUM else Outcome.REFUSED


def _is_away(answer: object) -> bool:
    return isinstance(answer, NodeError) and not answer.refused and not isinstance(answer, AccessDeniedError)
