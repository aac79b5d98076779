"""Strides: what comes next where no tape knows, by majority vote over the latest steps from access to access.

A program that walks through its blocks at a steady pace, with a few accesses elsewhere in between, has one step that
occurs in more than half of the latest accesses. The vote is that of Boyer and Moore, over the shortest stretch of
the latest steps that has a majority, so that a new pace is found soon and an old one is not lost through a few
strays (the idea is that of Leap: Al Maruf and Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX
ATC 2020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

__all__ = ["Strides"]

_STRETCHES = (4, 8, 16)


class Strides:
    """The latest steps."""

    def __init__(self) -> None:
        self._steps: deque[int] = deque(maxlen=_STRETCHES[-1])
        self._last = 0
        self.foretold = False
        """Whether the latest access was the one expected."""

    def record(self, name: int, count: int) -> None:
        """Note an access to `count` blocks from `name` on."""
        step = name - self._last
        self.foretold = bool(step) and step == self.stride()
        self._steps.appendleft(step)
        self._last = name + count - 1

    def stride(self) -> int:
        """The step that the majority has taken; 0 without one."""
        for length in _STRETCHES:
            if len(self._steps) >= length and (step := _majority(tuple(islice(self._steps, length)))):
                return step
        return 0

    def coming(self, count: int) -> Sequence[int]:
        """Names of the next `count` blocks, if the pace stays."""
        step = self.stride()
        return range(self._last + step, self._last + step * (count + 1), step) if step else ()


def _majority(steps: Sequence[int]) -> int:
    candidate = votes = 0
    for step in steps:
        if not votes:
            candidate = step
        votes += 1 if step == candidate else -1
    return candidate if 2 * steps.count(candidate) > len(steps) else 0
