"""A pool's running account: totals of transfers by link, stalls, and the events for subscribers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from farpool.memory.pager import Kind
from farpool.memory.pager.messages import Ended
from farpool.memory.pool.events import Event
from farpool.memory.pool.stats import LinkStats, Stall

__all__ = ["Account"]

_KEPT_STALLS_MAX = 8
_QUEUED_MAX = 8192
"""Maximum number of operations for whose device times we wait. The times of some operations never come: if the host
runs far ahead, the native queue measures several operations together."""


class Account:
    """Counts a pool's stalls, and queues the pool's events while there are subscribers.

    Parameters
    ----------
    names : list of str
        Names of the tiers, in the order of the pager's tier numbers. The pool appends a name for each source file.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._listeners: list[Callable[[Event], None]] = []
        self._events: deque[Event] = deque()
        self._queued: dict[int, tuple[str, int]] = {}
        """Operations whose work is queued on the device, by the ordinal of the access: name, and bytes pinned."""
        self._last: deque[Stall] = deque(maxlen=_KEPT_STALLS_MAX)
        self.stalls = 0
        self.stall_seconds = 0.0

    @property
    def listening(self) -> bool:
        """True if there are subscribers to events."""
        return bool(self._listeners)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on; return a function that ends the subscription."""
        self._listeners.append(callback)

        def unsubscribe() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)
            if not self._listeners:
                self._events.clear()  # a later subscriber gets later events only

        return unsubscribe

    def note(self, event: Event) -> None:
        """Queue an event, if there are subscribers."""
        if self._listeners:
            self._events.append(event)

    def deliver(self) -> None:
        """Pass queued events to the subscribers. Called without the pool's lock, so that callbacks may use the pool."""
        while self._events:
            try:
                event = self._events.popleft()
            except IndexError:  # another thread took it
                return
            # A callback may end its own subscription, which changes the list while we go through it.
            for callback in tuple(self._listeners):
                callback(event)

    def transferred(self, ended: Iterable[Ended]) -> None:
        """Queue an event for each of these successful transfers. Called only while there are subscribers."""
        for transfer, start, end, used in ended:
            fetch = transfer.kind == Kind.FETCH
            tier = self._names[transfer.pieces[0].tier]
            self._events.append(
                Event(
                    "fetch" if fetch else "writeback",
                    start,
                    end - start,
                    sum(piece.nbytes for piece in transfer.pieces),
                    transfer.block,
                    *((tier, "fast") if fetch else ("fast", tier)),
                    cause=("demand" if transfer.demand else "prefetch") if fetch else "evict",
                    resident=used,
                )
            )

    def queued(self, ordinal: int, op: str, nbytes: int) -> None:
        """Note that an operation's work is queued on the device, so that `computed` can queue an event for it."""
        self._queued[ordinal] = op, nbytes
        if len(self._queued) > _QUEUED_MAX:
            self._queued.pop(next(iter(self._queued)), None)

    def computed(self, ran: Iterable[tuple[int, float, float]], resident: int) -> None:
        """Queue an event for each operation that the device has done.

        Parameters
        ----------
        ran : iterable
            Result of `Driver.take_ran`: for each operation, the ordinal of its access, and the times of its start and
            end.
        """
        for ordinal, start, end in ran:
            # Not removed: accesses to rows of one table may share an ordinal.
            op, nbytes = self._queued.get(ordinal, ("", 0))
            if nbytes:  # else the operation began before the subscription
                self.note(Event("compute", start, end - start, nbytes, op=op, resident=resident))

    def stalled(self, op: str, start: float, seconds: float, block: int, tier: str, resident: int) -> None:
        """Count a stall, in which an operation waited for its operands, and queue an event for the stall."""
        self.stalls += 1
        self.stall_seconds += seconds
        self._last.append(Stall(op, seconds, block, tier))
        self.note(Event("stall", start, seconds, block=block, source=tier, op=op, resident=resident))

    @property
    def last_stalls(self) -> Sequence[Stall]:
        return tuple(self._last)

    def links(self, totals: Iterable[tuple[int, Kind, int, int, float]]) -> tuple[LinkStats, ...]:
        """Convert a driver's totals to the statistics of each link, sorted by source and target.

        Parameters
        ----------
        totals : iterable
            Result of `Driver.links`: for each tier and direction, the tuple (tier, direction, number of transfers,
            bytes, seconds).
        """
        links = []
        for tier, kind, count, nbytes, seconds in totals:
            ends = (self._names[tier], "fast") if kind == Kind.FETCH else ("fast", self._names[tier])
            links.append(LinkStats(*ends, count, nbytes, seconds))
        return tuple(sorted(links, key=lambda link: (link.source, link.target)))
