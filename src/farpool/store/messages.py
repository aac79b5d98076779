"""What the rules of the store exchange with whoever carries it out.

An *operation* is a generator: it yields requests that may go out at the same time, is sent their answers in the same
order, and returns its result. So the rules stand without sockets, threads and clocks.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from farpool.errors import NodeError
from farpool.transport.frames import Op

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["Answer", "BusyError", "Group", "ObjectInfo", "Operation", "Reply", "Request"]

ResultT = TypeVar("ResultT")


class BusyError(NodeError):
    """The node has just come back and has as many writes under way as it is given."""


class Reply(Protocol):
    """What a node replied; `farpool._native.Reply` is one."""

    @property
    def status(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def meta(self) -> bytes: ...
    @property
    def payload(self) -> bytes | None: ...
    @property
    def nbytes(self) -> int: ...


Answer = Reply | Exception


@dataclass(slots=True)
class Request:
    """Something to ask one node.

    Attributes
    ----------
    node : int
        Number of the node.
    op : Op
        What is asked.
    meta : bytes
        Key or arguments. A put's meta is that of the operation ``put``; it may travel as ``prepare`` and ``commit``.
    generation : int
        Of the frame.
    payload : buffer or None
        What is sent.
    into : buffer or None
        Where a reply's payload is to be written.
    last : bool
        There is no other node to go to: it may take all the time that is left, else half of it.
    patient : bool
        A write to a node that has just come back waits for its turn; otherwise it is `BusyError` at once.
    """

    node: int
    op: Op
    meta: bytes
    generation: int = 0
    payload: Buffer | None = None
    into: Buffer | None = None
    last: bool = True
    patient: bool = True


Operation = Generator[Sequence[Request], Sequence[Answer], ResultT]


@dataclass(frozen=True, slots=True)
class Group:
    """The nodes among which a key's copies are.

    Attributes
    ----------
    nodes : tuple of int
        In the order of their ranks.
    copies : int
        How many of them have to confirm a put or a delete.
    """

    nodes: tuple[int, ...]
    copies: int

    @property
    def quorum(self) -> int:
        """Of so many nodes at least one has confirmed whatever was confirmed."""
        return len(self.nodes) - self.copies + 1


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """A published object.

    Attributes
    ----------
    key : bytes
        Its key.
    generation : int
        Of its publish.
    nbytes : int
        Of its payload.
    expires : float or None
        Seconds since 1970; None for never.
    pins : int
        How many hold it in its place on the node that was asked.
    """

    key: bytes
    generation: int
    nbytes: int
    expires: float | None
    pins: int
