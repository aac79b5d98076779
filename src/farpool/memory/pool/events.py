"""Events that a pool sends to its subscribers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Event", "EventKind"]

EventKind = Literal["fetch", "writeback", "stall", "compute", "create", "free"]


@dataclass(frozen=True, slots=True)
class Event:
    """An event in a pool, such as a transfer, a stall or the use of operands.

    Attributes
    ----------
    kind : str
        ``fetch`` (bytes came into the fast tier), ``writeback`` (they left it), ``stall`` (an op
        waited), ``compute`` (an op had its operands, from grant to release), ``create`` and ``free`` (a storage).
    time : float
        Time at which it began, in seconds on the monotonic clock.
    duration : float
        Seconds it took; 0 for an event that takes no time.
    nbytes : int
        Bytes moved, created, freed; bytes pinned for ``compute``.
    block : int
        The block moved or, for a stall, first waited for; -1 if there is none.
    source, target : str
        Names of the tiers for transfers.
    cause : str
        ``demand`` or ``prefetch`` for a fetch; ``evict`` for a write-back; the class of the blocks for ``create``
        and ``free``.
    op : str
        The operation, for ``stall`` and ``compute``.
    resident : int
        Bytes of the fast tier in use at the end of it.
    """

    kind: EventKind
    time: float
    duration: float = 0.0
    nbytes: int = 0
    block: int = -1
    source: str = ""
    target: str = ""
    cause: str = ""
    op: str = ""
    resident: int = 0
