"""Results and requests that the parts of the store exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import msgspec

from farpool.cluster.store.arguments import Payload
from farpool.cluster.wire.frames import HEAD, Op

__all__ = ["Ask", "Demotion", "Lookup", "ObjectInfo", "PutOutcome", "Touched", "object_head", "results", "seconds_left"]


class PutOutcome(StrEnum):
    """Outcome of a put.

    Attributes
    ----------
    STORED
        Each copy is the value that was put.
    PRESENT
        A copy was there already and has stayed; its bytes may be others.
    """

    STORED = "stored"
    PRESENT = "present"


class Demotion(StrEnum):
    """Outcome of moving a value out of memory.

    Attributes
    ----------
    LOWER
        It lies in the lower tier, or is on its way there.
    PINNED
        It stays in memory, as a program holds it there, reads it, or keeps it for good.
    FULL
        It stays in memory, as the lower tier had no room for it in time.
    NO_LOWER_TIER
        It stays in memory, as nothing lies below.
    """

    LOWER = "lower"
    PINNED = "pinned"
    FULL = "full"
    NO_LOWER_TIER = "no_lower_tier"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """Size and state of a stored object, as one node knows them.

    Attributes
    ----------
    key : bytes
        Its key.
    nbytes : int
        Bytes of its value.
    ttl : float or None
        Seconds until it expires; None for never.
    copies : int
        Number of copies that the program asked for which put it.
    pins : int
        Number of programs that hold it in its place on that node.
    kept : bool
        True if it is never evicted.
    """

    key: bytes
    nbytes: int
    ttl: float | None
    copies: int
    pins: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """Result of a lookup of many keys: which have a value, and of which size.

    Attributes
    ----------
    sizes : sequence of int or None
        Bytes of each key's value, in the order of the keys; None where there is none.
    """

    sizes: Sequence[int | None]

    @property
    def leading(self) -> int:
        """Number of keys, from the first on, that have a value without a gap."""
        return next((number for number, size in enumerate(self.sizes) if size is None), len(self.sizes))

    @property
    def found(self) -> list[bool]:
        """For each key, True if it has a value."""
        return [size is not None for size in self.sizes]


@dataclass(frozen=True, slots=True)
class Touched:
    """Result of a touch: the number of copies that it has reached.

    Attributes
    ----------
    copies : sequence of int
        Number of nodes that have touched their copy, for each key in the order of the keys.
    complete : bool
        True if all nodes have answered. Otherwise those that have not may hold untouched copies.
    marks : sequence of mapping
        For each key the mark of each touched copy, by the number of its node. A copy's mark changes when it is kept or
        released, or gets more time to live. Nodes of earlier releases know no marks and return 0.
    refused : sequence of int
        Positions of the keys of which a node did not touch its copy, because the copy had another mark.
    away : frozenset of str
        Names of the nodes that did not answer, or that have no marks.
    """

    copies: Sequence[int]
    complete: bool
    marks: Sequence[Mapping[int, int]] = ()
    refused: Sequence[int] = ()
    away: frozenset[str] = frozenset()


class Ask(msgspec.Struct, gc=False):
    """One request to one node.

    Attributes
    ----------
    node : int
        Number of the node.
    op : Op
        The operation.
    meta : bytes
        A key or arguments.
    serial : int
        Serial of the object, for operations on a certain one.
    payload : buffer, tuple of buffers or None
        Bytes to send.
    into : buffer, tuple of buffers or None
        Place for the reply's payload; None for new bytes.
    """

    node: int
    op: Op
    meta: bytes
    serial: int = 0
    payload: Payload | bytes | None = None
    into: Payload | None = None


ResultT = TypeVar("ResultT")

_MOST_NAMED = 20
"""Most keys that the note of a failed batch names."""


def results(outcomes: Sequence[ResultT | Exception], keys: Sequence[bytes], done: int = 0) -> list[ResultT]:
    """Return the outcomes if none of them is an error, else raise the first.

    Parameters
    ----------
    outcomes : sequence
        Result or error of each operation.
    keys : sequence of bytes
        Their keys.
    done : int
        Number of operations of the same batch that succeeded before.

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
            named = ", ".join(map(repr, failed[:_MOST_NAMED]))
            more = f" and {len(failed) - _MOST_NAMED} more" if len(failed) > _MOST_NAMED else ""
            error.add_note(
                f"{len(failed)} of {whole} operations of this batch failed; the others were done. Failed: {named}{more}"
            )
        raise error
    return [outcome for outcome in outcomes if not isinstance(outcome, Exception)]


def object_head(ttl: int, copies: int) -> bytes:
    """Pack the properties that a put gives to an object.

    Parameters
    ----------
    ttl : int
        Milliseconds until it expires; 0 for never.
    copies : int
        Number of copies.
    """
    return HEAD.pack(ttl, copies, 0, 1, 0, 0, 0)


def seconds_left(milliseconds: int) -> float | None:
    """Convert a time to live from milliseconds, as on the wire, to seconds; 0, for no end, becomes None."""
    return milliseconds / 1000 if milliseconds else None
