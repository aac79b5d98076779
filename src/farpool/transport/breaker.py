"""Circuit breaker of one node: when it may be asked, and how many writes at once after it has come back.

After a failure the node is left alone for a while that doubles with each failure in a row. Then one call probes it.
When it answers it is not flooded with what has been held back: writes in flight are limited to one, and the limit
doubles with each that succeeds, and is dropped where nothing is written for a while. Sans-IO: the time is passed in,
and by its seed a breaker does the same in each run.
"""

from __future__ import annotations

import random
from enum import Enum

__all__ = ["Breaker", "State"]

_SHORTEST = 0.1
_LONGEST = 5.0
_CALM = 5.0
"""Seconds after which a node that has come back is taken to keep up if nothing is being written."""
_UNLIMITED = 64
"""Writes in flight beyond which a node that has come back is taken to keep up."""


class State(Enum):
    """Whether calls go to the node."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class Breaker:
    """Decides for one node. The caller holds a lock.

    Parameters
    ----------
    seed : int
        Of the jitter that keeps programs from probing in step.

    Attributes
    ----------
    state : State
        ``CLOSED``: calls go through; ``OPEN``: they fail at once; ``HALF_OPEN``: one call is probing.
    untroubled : bool
        Closed, and writes are not limited: there is nothing to ask before a call.
    since : float
        When the node failed after it had last been well; 0.0 while closed.
    retry_at : float
        When the next probe may go; 0.0 while closed.
    """

    __slots__ = ("_back_since", "_backoff", "_limit", "_random", "_writes", "retry_at", "since", "state", "untroubled")

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._backoff = _SHORTEST
        self._limit = 0  # 0: none
        self._back_since = 0.0
        self._writes = 0
        self.state = State.CLOSED
        self.untroubled = True
        self.since = 0.0
        self.retry_at = 0.0

    def admit(self, now: float) -> bool:
        """Whether a call may go to the node. One that may is followed by `succeeded` or `failed`."""
        if self.state is not State.CLOSED:
            if now < self.retry_at:
                return False
            self.state = State.HALF_OPEN
            self.retry_at = now + _LONGEST  # should the probe never end
            return True
        if self._limit:
            self._back_since = self._back_since or now
            if not self._writes and now > self._back_since + _CALM:
                self._lift_limit()
        return True

    def succeeded(self) -> bool:
        """The node has answered a call; True if that means that it has come back."""
        if self.state is not State.HALF_OPEN:  # an answer to what was asked before the failure proves nothing
            return False
        self.state = State.CLOSED
        self.since = self.retry_at = 0.0
        self._backoff = _SHORTEST
        self._limit = 1
        self._back_since = 0.0
        return True

    def failed(self, now: float) -> None:
        """A call has failed in a way that breaks the connection."""
        if self.state is State.OPEN:  # calls that were under way when it failed
            return
        if self.state is State.CLOSED:
            self.since = now
        self.state = State.OPEN
        self.untroubled = False
        self.retry_at = now + self._backoff * self._random.uniform(0.75, 1.0)
        self._backoff = min(2 * self._backoff, _LONGEST)

    def begin_write(self) -> bool:
        """Take a slot for a write; False if none is free now. A slot that was taken is given back by `end_write`."""
        if self._limit and self._writes >= self._limit:
            return False
        self._writes += 1
        return True

    def end_write(self, succeeded: bool) -> None:
        """A write has ended."""
        self._writes -= 1
        if succeeded and self._limit and self.state is State.CLOSED:
            self._limit *= 2
            if self._limit > _UNLIMITED:
                self._lift_limit()

    def _lift_limit(self) -> None:
        self._limit = 0
        self.untroubled = True
