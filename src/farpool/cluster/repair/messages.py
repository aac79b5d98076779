"""Input and output of the engine: actions for its driver, and objects that members hold."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Action", "Check", "CopyOrder", "DropOrder", "Held", "ListPage", "Outcome", "Settings", "Unmended"]


@dataclass(frozen=True, slots=True)
class Held:
    """An object as a member has it.

    Attributes
    ----------
    key : bytes
        The object's key.
    nbytes : int
        Size of the object's value in bytes.
    copies : int
        Number of copies that the publisher asked for; 0 if the answer does not say that.
    is_kept : bool
        True if the member never evicts its copy.
    """

    key: bytes
    nbytes: int
    copies: int = 0
    is_kept: bool = False


@dataclass(frozen=True, slots=True)
class ListPage:
    """Ask a member for the next page of its objects, and call `RepairEngine.listed`.

    Attributes
    ----------
    member : bytes
        The member.
    is_first : bool
        True to begin the list.
    """

    member: bytes
    is_first: bool


@dataclass(frozen=True, slots=True)
class Check:
    """Ask a member which of the keys it has, and call `RepairEngine.checked`.

    Attributes
    ----------
    number : int
        Number of this check.
    member : bytes
        The member.
    keys : tuple of bytes
        The keys.
    is_exact : bool
        True if the answer has to say how many copies are wanted, and if the member keeps its copy.
    """

    number: int
    member: bytes
    keys: tuple[bytes, ...]
    is_exact: bool


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy an object from one member to another, and call `RepairEngine.copied`.

    Attributes
    ----------
    number : int
        Number of this order.
    key : bytes
        The object's key.
    source, target : bytes
        The members.
    nbytes : int
        Size of the object's value in bytes.
    timeout : float
        Seconds after which the engine counts the order as failed.
    """

    number: int
    key: bytes
    source: bytes
    target: bytes
    nbytes: int
    timeout: float


@dataclass(frozen=True, slots=True)
class DropOrder:
    """Drop a copy that is not needed any more, and call `RepairEngine.dropped`.

    Attributes
    ----------
    number : int
        Number of this order.
    key : bytes
        The object's key.
    member : bytes
        The member that drops its copy.
    """

    number: int
    key: bytes
    member: bytes


Action = ListPage | Check | CopyOrder | DropOrder


class Outcome(StrEnum):
    """Outcome of a copy order."""

    DONE = "done"
    """The target has a copy, and keeps it if the source does."""
    GONE = "gone"
    """The object was dropped, released or expired."""
    LOST = "lost"
    """The source does not have the object any more."""
    UNREADABLE = "unreadable"
    """The source has the object, but cannot return it."""
    REFUSED = "refused"
    """The target does not take the object."""
    AWAY = "away"
    """A member did not answer, or is busy; the order may be given again later."""


@dataclass(frozen=True, slots=True)
class Unmended:
    """Object that still has too few copies.

    Attributes
    ----------
    key : bytes
        Key of the object.
    lacking : int
        Number of copies that the object still lacks.
    reasons : tuple of str
        Reasons why nodes have not stored the missing copies.
    """

    key: bytes
    lacking: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of an engine.

    Attributes
    ----------
    grace : float
        Seconds for which a member may be silent before its copies count as lost.
    follows : bool
        True to scan again when members change.
    rebalances : bool
        True to move objects to the members they rank on.
    settle : float
        Seconds without a change of the members before copies are dropped.
    pressure : float
        Seconds after an eviction for which a member gets no copy of an object that it might evict.
    pages_max : int
        Pages of lists in memory at the same time.
    queue_max : int
        Objects that wait for copies at the same time. Others are found again by a later scan.
    in_flight_max : int
        Orders at the same time from or to one member.
    tries_max : int
        Number of times that an order is given to members that do not answer.
    first_pause, pause_max : float
        Seconds before such an order is given again. Each pause is twice as long as the one before.
    order_timeout : float
        Seconds that an order may take, in addition to the time for its bytes.
    slowest : float
        Bytes per second that an order makes at least.
    left_max : int or None
        Number of failures to remember, until the next scan; None to remember all of them, and to try none again.
    """

    grace: float = 30.0
    follows: bool = True
    rebalances: bool = True
    settle: float = 60.0
    pressure: float = 60.0
    pages_max: int = 4
    queue_max: int = 10_000
    in_flight_max: int = 4
    tries_max: int = 5
    first_pause: float = 0.5
    pause_max: float = 30.0
    order_timeout: float = 10.0
    slowest: float = 10e6
    left_max: int | None = 1000
