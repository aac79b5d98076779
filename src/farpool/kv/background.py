"""Calls that go on in the background, and end by their deadlines also where no thread is free before.

A call whose time is over before a thread has come to it is made by a thread that does nothing but watch the time. It
knows its deadline itself, and ends at once, as a miss. So nobody waits longer than was agreed, and whoever has its
result knows that nothing is written into its memory any more.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from farpool.errors import StoreClosedError

__all__ = ["Background"]

T = TypeVar("T")

_FEWEST_WATCHED = 1024
"""Number of calls below which those that have begun are not looked for."""


class _Call(Generic[T]):
    """A call, and its future; whoever comes first makes it."""

    def __init__(self, function: Callable[[], T]) -> None:
        self.future: Future[T] = Future()
        self._function: Callable[[], T] | None = function
        self._first = iter([True])  # taking the next one is atomic

    @property
    def has_begun(self) -> bool:
        return self._function is None

    def make(self) -> None:
        """Make the call, unless somebody has."""
        if not next(self._first, False):
            return
        function, self._function = self._function, None  # what it refers to is let go with its end
        assert function is not None
        if self.future.set_running_or_notify_cancel():
            try:
                self.future.set_result(function())
            except BaseException as error:
                self.future.set_exception(error)


class Background:
    """Threads for calls with deadlines. Thread-safe.

    Parameters
    ----------
    submit : callable
        Runs a function on a thread, later; raises `StoreClosedError` where there are none any more.
    """

    def __init__(self, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._submit = submit
        self.leave_to_parent()

    def leave_to_parent(self) -> None:
        """Begin anew in the child of a fork, which has none of the threads."""
        self._changed = threading.Condition()
        self._watched: list[tuple[float, int, _Call[Any]]] = []
        self._many = _FEWEST_WATCHED
        self._numbers = itertools.count()
        self._watching = False

    def begin(self, function: Callable[[], T], until: float) -> Future[T]:
        """Begin a call that takes no longer than until a time of `time.monotonic`, and return its future.

        Once there are no threads it is made at once, as are those that were waiting for one: nothing is cancelled.
        """
        call = _Call(function)
        try:
            job = self._submit(call.make)
        except StoreClosedError:
            call.make()
            return call.future
        job.add_done_callback(lambda done: call.make() if done.cancelled() else None)
        if not call.has_begun:
            self._watch(call, until)
        return call.future

    def _watch(self, call: _Call[T], until: float) -> None:
        with self._changed:
            if len(self._watched) > self._many:
                self._watched = [one for one in self._watched if not one[2].has_begun]
                heapq.heapify(self._watched)
                self._many = max(_FEWEST_WATCHED, 2 * len(self._watched))
            heapq.heappush(self._watched, (until, next(self._numbers), call))
            if not self._watching:
                self._watching = True
                threading.Thread(target=self._watch_time, name="farpool-kv-deadlines", daemon=True).start()
            elif self._watched[0][2] is call:
                self._changed.notify()

    def _watch_time(self) -> None:
        """Make the calls whose time is over, until none is left."""
        while True:
            with self._changed:
                while self._watched and self._watched[0][2].has_begun:
                    heapq.heappop(self._watched)
                if not self._watched:
                    self._watching = False
                    return
                left = self._watched[0][0] - time.monotonic()
                if left > 0:
                    self._changed.wait(min(left, threading.TIMEOUT_MAX))
                    continue
                call = heapq.heappop(self._watched)[2]
            call.make()
