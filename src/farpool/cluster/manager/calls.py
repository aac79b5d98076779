"""Blocking calls, such as requests to the registry, in a few threads and off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from farpool.closing import Closing

__all__ = ["BusyError", "Calls"]

_Result = TypeVar("_Result")


class BusyError(Exception):
    """Too many calls are under way or wait."""


class Calls(Closing):
    """Threads for blocking calls, and a bounded number of calls that wait for a thread. For one event loop.

    Parameters
    ----------
    threads : int
        Number of threads.
    waiting_max : int
        Maximum number of calls that wait; further calls are refused.
    name : str
        Beginning of the threads' names.
    """

    def __init__(self, threads: int, waiting_max: int, name: str) -> None:
        self._most = threads + waiting_max
        self._under_way = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    @property
    def under_way(self) -> int:
        """Number of calls that run or wait."""
        return self._under_way

    async def run(self, act: Callable[[], _Result]) -> _Result:
        """Call `act` in a thread and return its result.

        If the caller is cancelled, a call that runs already runs to its end, and counts until then.

        Raises
        ------
        BusyError
            Too many calls wait.
        """
        if self._under_way >= self._most:
            raise BusyError
        loop = asyncio.get_running_loop()
        self._under_way += 1

        def ended(_: Future[_Result]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(self._ended)

        try:
            future = self._pool.submit(act)
        except RuntimeError as error:  # no thread can be started
            self._ended()
            raise BusyError from error
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def _ended(self) -> None:
        self._under_way -= 1

    def close(self) -> None:
        """Begin no further calls. Calls that run end by their own deadlines."""
        self._pool.shutdown(wait=False, cancel_futures=True)
