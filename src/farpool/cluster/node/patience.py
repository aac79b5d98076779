"""Deadlines for clients. The time in which the node's own process stood still does not count."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

__all__ = ["patience"]

_SLICE_S = 0.5


@contextlib.asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Raise TimeoutError in the ``with`` block when the event loop has run for `seconds` seconds.

    With `asyncio.timeout`, a process that was stopped for longer than a handshake may take would end every handshake
    when it continues, before it looks at the bytes that it has received. So we count the time in slices. A slice counts
    no more than its length, however late the loop sees its end.

    Parameters
    ----------
    seconds : float
        Time that the block may take.

    Raises
    ------
    TimeoutError
        The block took longer.
    """
    async with asyncio.timeout(None) as timeout:
        slices = _Slices(timeout, seconds)
        try:
            yield
        finally:
            slices.cancel()


class _Slices:
    """Counts a timeout's seconds in short slices, and lets the timeout expire when the slices add up to these seconds.

    If the process stands still during a slice, the slice still counts only its length. If the loop sees the end of the
    last slice late, the timeout may get one more slice.
    """

    def __init__(self, timeout: asyncio.Timeout, seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout = timeout
        self._left = seconds
        self._was_late = False
        self._begin(min(seconds, _SLICE_S))

    def cancel(self) -> None:
        """Stop counting; the timeout no longer expires."""
        self._timer.cancel()

    def _begin(self, seconds: float) -> None:
        self._left -= seconds
        self._due = self._loop.time() + seconds
        self._timer = self._loop.call_at(self._due, self._end_slice)

    def _end_slice(self) -> None:
        late = self._loop.time() - self._due > _SLICE_S
        if self._left > 0:
            self._begin(min(self._left, _SLICE_S))
        elif late and not self._was_late:
            # The client's bytes may be there. Wait for them once only, because a slow loop would never end otherwise.
            self._begin(_SLICE_S)
        else:
            self._timeout.reschedule(self._loop.time())
        self._was_late = late
