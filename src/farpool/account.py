"""Keeps a pool's running account: what moved over which link, what was waited for, and the events for subscribers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from farpool.events import Event
from farpool.executor.base import Done
from farpool.pager import Kind, Transfer
from farpool.stats import LinkStats, Stall

__all__ = ["Account"]

_LAST_STALLS = 8


class Account:
    """Counts transfers and stalls; queues events while somebody listens.

    Parameters
    ----------
    names : list of str
        Names of the tiers as the pager numbers them. The pool appends to it when it gets another source.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._links: dict[tuple[str, str], tuple[int, int, float]] = {}
        self._listeners: list[Callable[[Event], None]] = []
        self._events: deque[Event] = deque()
        self._last: deque[Stall] = deque(maxlen=_LAST_STALLS)
        self.stalls = 0
        self.stall_seconds = 0.0

    @property
    def listening(self) -> bool:
        """Whether anybody wants events."""
        return bool(self._listeners)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call `callback` with each event from now on; returns the function that ends it."""
        self._listeners.append(callback)

        def unsubscribe() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return unsubscribe

    def note(self, event: Event) -> None:
        """Queue an event."""
        if self._listeners:
            self._events.append(event)

    def deliver(self) -> None:
        """Hand queued events to the subscribers. Not under the pool's lock: a callback may use the pool."""
        while self._events:
            try:
                event = self._events.popleft()
            except IndexError:  # another thread took it
                return
            for callback in tuple(self._listeners):
                callback(event)

    def transferred(self, transfer: Transfer, done: Done, resident: int) -> None:
        """A transfer with bytes has ended well."""
        nbytes = sum(piece.nbytes for piece in transfer.pieces)
        if not nbytes:
            return
        tier = self._names[transfer.pieces[0].tier]
        fetch = transfer.kind == Kind.FETCH
        link = (tier, "fast") if fetch else ("fast", tier)
        count, total, seconds = self._links.get(link, (0, 0, 0.0))
        self._links[link] = (count + 1, total + nbytes, seconds + done.end - done.start)
        if self._listeners:
            self._events.append(
                Event(
                    "fetch" if fetch else "writeback",
                    done.start,
                    done.end - done.start,
                    nbytes,
                    transfer.block,
                    *link,
                    cause=("demand" if transfer.demand else "prefetch") if fetch else "evict",
                    resident=resident,
                )
            )

    def stalled(self, op: str, start: float, seconds: float, block: int, tier: str, resident: int) -> None:
        """An op waited for its operands."""
        self.stalls += 1
        self.stall_seconds += seconds
        self._last.append(Stall(op, seconds, block, tier))
        self.note(Event("stall", start, seconds, block=block, source=tier, op=op, resident=resident))

    @property
    def last_stalls(self) -> Sequence[Stall]:
        return tuple(self._last)

    def links(self) -> tuple[LinkStats, ...]:
        """What moved so far, by link."""
        return tuple(
            LinkStats(source, target, count, nbytes, seconds)
            for (source, target), (count, nbytes, seconds) in sorted(self._links.items())
        )
