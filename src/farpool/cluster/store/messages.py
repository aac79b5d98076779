"""Requests and results that the parts of the store exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from farpool.abc.objects import Payload
from farpool.cluster.store.arguments import nbytes_of
from farpool.cluster.wire.frames import HEAD, PRIORITY_SHIFT, Op, Status
from farpool.cluster.wire.refusals import refusal

if TYPE_CHECKING:
    from collections.abc import Container

    from farpool._native import Reply
    from farpool.cluster.store.member import Member

__all__ = ["Ask", "Lookup", "ObjectInfo", "decoded", "object_head", "priority_in", "results", "seconds_left"]


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size and state of a stored object, as one node reports them.

    Attributes
    ----------
    key : bytes
        The object's key.
    nbytes : int
        Size of the object's value in bytes.
    ttl : float or None
        Seconds until the object expires; None for never.
    copies : int
        Number of copies that was requested when the object was put.
    pins : int
        Number of programs that have the object pinned on that node.
    kept : bool
        True if the node never evicts the object.
    priority : int or None
        Objects of a lower priority are evicted first (`Store.retain`). Listings do not report it: None.
    """

    key: bytes
    nbytes: int
    ttl: float | None
    copies: int
    pins: int
    kept: bool
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Lookup:
    """Result of a lookup of many keys: the size of each key's value, if there is one.

    Attributes
    ----------
    sizes : sequence of int or None
        Size of each key's value in bytes, in the order of the keys; None for a key without a value.
    """

    sizes: Sequence[int | None]

    @property
    def leading(self) -> int:
        """Number of keys before the first one that has no value."""
        return next((number for number, size in enumerate(self.sizes) if size is None), len(self.sizes))

    @property
    def found(self) -> list[bool]:
        """For each key, True if it has a value."""
        return [size is not None for size in self.sizes]


class Ask(msgspec.Struct, gc=False):
    """One request to one node.

    Attributes
    ----------
    member : Member
        The node to ask.
    op : Op
        The operation.
    meta : bytes
        The key, or the packed arguments of the operation.
    serial : int
        Serial number of an object, if the operation applies only to this object of the key. For a touch, the mark that
        the node's copy must have. 0 for any.
    payload : buffer, tuple of buffers or None
        Bytes to send.
    into : buffer, tuple of buffers or None
        Buffer for the reply's payload; None for new bytes.
    """

    member: Member
    op: Op
    meta: bytes
    serial: int = 0
    payload: Payload | bytes | None = None
    into: Payload | None = None


def decoded(ask: Ask, answer: Reply | Exception, usual: Container[int] = (Status.DONE,)) -> Reply | Exception:
    """Return an answer unchanged, or the error for its status if it is a reply with an unusual status."""
    if isinstance(answer, Exception) or answer.status in usual:
        return answer
    payload = ask.payload
    nbytes = None if payload is None else len(payload) if isinstance(payload, bytes) else nbytes_of(payload)
    said = answer.meta.decode(errors="replace")
    return refusal(answer.status, said, ask.member.name, Op(ask.op), nbytes)


ResultT = TypeVar("ResultT")

_NAMED_KEYS_MAX = 20
"""Maximum number of keys that the note of a failed batch names."""


def results(outcomes: Sequence[ResultT | Exception], keys: Sequence[bytes], done: int = 0) -> list[ResultT]:
    """Return the outcomes if none of them is an error; otherwise raise the first error.

    Parameters
    ----------
    outcomes : sequence
        Result or error of each operation.
    keys : sequence of bytes
        The key of each operation.
    done : int
        Number of other operations of the same batch that have already succeeded.

    Raises
    ------
    Exception
        The first error, with a note that counts the failed operations and names their keys.
    """
    failed = [key for key, outcome in zip(keys, outcomes, strict=True) if isinstance(outcome, Exception)]
    if failed:
        error = next(outcome for outcome in outcomes if isinstance(outcome, Exception))
        whole = done + len(outcomes)
        if whole > 1:
            named = ", ".join(map(repr, failed[:_NAMED_KEYS_MAX]))
            more = f" and {len(failed) - _NAMED_KEYS_MAX} more" if len(failed) > _NAMED_KEYS_MAX else ""
            error.add_note(
                f"{len(failed)} of {whole} operations of this batch failed; the others were done. Failed: {named}{more}"
            )
        raise error
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def object_head(ttl: int, copies: int, priority: int = 0) -> bytes:
    """Pack the properties that a put gives to an object.

    Parameters
    ----------
    ttl : int
        Milliseconds until the object expires; 0 for never.
    copies : int
        Number of copies.
    priority : int
        From 0 to 7; objects of a lower priority are evicted first.
    """
    return HEAD.pack(ttl, copies, 0, 1, 0, 0, priority << PRIORITY_SHIFT)


def priority_in(flags: int) -> int:
    """Return the priority in the flags of a head."""
    return flags >> PRIORITY_SHIFT & 7


def seconds_left(milliseconds: int) -> float | None:
    """Convert a time to live from milliseconds, the unit of the wire format, to seconds. 0 (no end) becomes None."""
    return milliseconds / 1000 if milliseconds else None
