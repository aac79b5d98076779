"""Calls that run in the background and end by their deadlines, even if no thread has become free by then.

If no thread has begun a call by its deadline, the thread that watches the deadlines runs the call. Each call checks its
own deadline and, when the deadline has passed, ends at once as a miss. So no caller waits longer than agreed. When a
caller has the result, no thread writes into the caller's memory any more.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, ParamSpec, TypeVar

from farpool.errors import StoreClosedError
from farpool.kv.link import closed_error

__all__ = ["Background", "Call", "Threads", "seconds_to"]

P = ParamSpec("P")
T = TypeVar("T")

_WATCHED_CALLS_MIN = 1024
"""Number of watched calls above which calls that have begun are removed from the list."""


def seconds_to(until: float) -> float:
    """Return how many seconds are left until `until`, a time of `time.monotonic`."""
    return max(0.0, until - time.monotonic())


class Call(Future[T]):
    """A call in the background: wait for it with `result()`, or with ``await`` in a coroutine.

    A call is a future of `concurrent.futures`. Several threads may try to run the same call; only the first thread runs
    it.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._function: Callable[[], T] | None = function
        self._first = iter([True])  # taking the next one is atomic

    def __await__(self) -> Generator[Any, None, T]:
        return asyncio.wrap_future(self).__await__()

    @property
    def has_begun(self) -> bool:
        """True if a thread has begun the call."""
        return self._function is None

    def make(self) -> None:
        """Run the call in this thread, unless another thread has begun it."""
        if not next(self._first, False):
            return
        function, self._function = self._function, None  # so that the call's arguments are freed when the call ends
        assert function is not None
        if self.set_running_or_notify_cancel():
            try:
                self.set_result(function())
            except BaseException as error:
                self.set_exception(error)


class Threads:
    """Threads that run functions. The threads start when the first function is submitted. Thread-safe.

    Parameters
    ----------
    count : int
        Number of threads.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._closed = False
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Reset the lock and the threads in the child of a fork, which has none of its parent's threads."""
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: set[Future[Any]] = set()

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function on a thread, and return the function's future.

        Raises
        ------
        StoreClosedError
            These threads were closed.
        """
        with self._lock:
            if self._closed:
                raise closed_error()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(self._count, thread_name_prefix="farpool-kv")
            job = self._executor.submit(function, *args, **kwargs)
            self._jobs.add(job)
        # Outside the lock: if the job has ended already, the callback runs here.
        job.add_done_callback(self._jobs.discard)
        return job

    def drain(self, timeout: float) -> bool:
        """Wait until all functions have ended; return False if some still run after `timeout` seconds."""
        return not wait(list(self._jobs), timeout).not_done

    def close(self) -> None:
        """Cancel all functions that have not begun, and wait for running functions. Idempotent."""
        with self._lock:
            self._closed = True
            executor, self._executor = self._executor, None
        if executor is not None:
            # Outside the lock, because functions that still run may submit others, which are refused.
            executor.shutdown(cancel_futures=True)


class Background:
    """Runs calls on threads, and ends each call by its deadline. Thread-safe.

    Parameters
    ----------
    submit : callable
        Receives a function and runs it on a thread later; raises `StoreClosedError` if the threads were closed.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._submit = submit
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Forget all watched calls in the child of a fork, which has none of its parent's threads."""
        self._changed = threading.Condition()
        self._watched: list[tuple[float, int, Call[Any]]] = []
        self._watched_max = _WATCHED_CALLS_MIN
        self._numbers = itertools.count()
        self._watching = False

    def begin(self, function: Callable[[], T], until: float) -> Call[T]:
        """Begin a call that ends by `until`, a time of the monotonic clock.

        If the `Threads` were closed before, the caller's thread runs the call at once. If another thread closes them
        while the call waits, that other thread runs the call. No call is cancelled.
        """
        call = Call(function)
        try:
            job = self._submit(call.make)
        except StoreClosedError:
            call.make()
            return call
        job.add_done_callback(lambda done: call.make() if done.cancelled() else None)
        if not call.has_begun:
            self._watch(call, until)
        return call

    def _watch(self, call: Call[T], until: float) -> None:
        with self._changed:
            if len(self._watched) > self._watched_max:
                self._watched = [one for one in self._watched if not one[2].has_begun]
                heapq.heapify(self._watched)
                self._watched_max = max(_WATCHED_CALLS_MIN, 2 * len(self._watched))
            heapq.heappush(self._watched, (until, next(self._numbers), call))
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch_time, name="farpool-kv-deadlines", daemon=True).start()
            elif self._watched[0][2] is call:
                self._changed.notify()

    def _watch_time(self) -> None:
        """Run each watched call at its deadline if no thread has begun it; return when no call is left to watch."""
        while True:
            with self._changed:
                while self._watched and self._watched[0][2].has_begun:
                    heapq.heappop(self._watched)
                if not self._watched:
                    # `_watch` adds a call and reads `_watching` under the same lock. So either this thread sees the
                    # call, or `_watch` starts another thread.
                    self._watching = False
                    return
                left = self._watched[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                call = heapq.heappop(self._watched)[2]
            call.make()
