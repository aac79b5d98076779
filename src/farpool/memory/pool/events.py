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
        ``fetch`` (bytes were copied into the fast tier), ``writeback`` (bytes were copied to a lower tier), ``stall``
        (an operation waited for its operands), ``compute`` (an operation ran; on the host this is the time from the
        grant of its operands to their release, on a GPU the time in which the GPU computed), ``create`` (a storage was
        made) and ``free`` (a storage was dropped).
    time : float
        Time at which the event began, in seconds on the monotonic clock.
    duration : float
        Seconds that the event took; 0 for an event that takes no time.
    nbytes : int
        Bytes moved, created or freed; for ``compute``, bytes pinned.
    block : int
        The block that was moved; for a stall, the first block that the operation waited for; for ``create``, the first
        block of the storage; -1 if there is none.
    source, target : str
        For a transfer, the names of the tiers from which and to which bytes were copied. For a stall, `source` is the
        tier of the awaited transfer.
    cause : str
        ``demand`` or ``prefetch`` for a fetch; ``evict`` for a write-back; the class of the blocks for ``create``
        and ``free``.
    op : str
        The operation, for ``stall`` and ``compute``.
    resident : int
        Bytes of the fast tier in use when the event was reported; 0 for ``create`` and ``free``.
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
