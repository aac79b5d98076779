"""Strides: what comes next where no tape knows, by majority vote over the latest steps from access to access.

A program that walks through its blocks at a steady pace, with a few accesses elsewhere in between, has one step that
occurs in more than half of the latest accesses. The vote is over the shortest stretch of the latest steps that has a
majority, so that a new pace is found soon and an old one is not lost through a few strays (the idea is that of Leap: Al
Maruf and Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

__all__ = ["Strides"]

_STRETCHES = (4, 8, 16)


class _Stretch:
    """The latest steps, and the one that more than half of them are."""

    __slots__ = ("_counts", "_length", "_steps", "majority")

    def __init__(self, length: int) -> None:
        self._length = length
        self._steps: deque[int] = deque()
        self._counts: dict[int, int] = {}
        self.majority = 0
        """0 while there is none."""

    def add(self, step: int) -> None:
        counts = self._counts
        self._steps.append(step)
        counts[step] = counts.get(step, 0) + 1
        if len(self._steps) > self._length:
            oldest = self._steps.popleft()
            counts[oldest] -= 1
            if not counts[oldest]:
                del counts[oldest]
        # Only the step just added can have become the majority.
        if 2 * counts.get(step, 0) > self._length:
            self.majority = step
        elif 2 * counts.get(self.majority, 0) <= self._length:
            self.majority = 0


class Strides:
    """The latest steps."""

    def __init__(self) -> None:
        self._stretches = tuple(_Stretch(length) for length in _STRETCHES)
        self._last = 0
        self.stride = 0
        """The step that the majority has taken; 0 without one."""
        self.foretold = False
        """Whether the latest access was the one expected."""

    def record(self, name: int, count: int) -> None:
        """Note an access to `count` blocks from `name` on."""
        step = name - self._last
        self._last = name + count - 1
        self.foretold = bool(step) and step == self.stride
        for stretch in self._stretches:
            stretch.add(step)
        self.stride = next((stretch.majority for stretch in self._stretches if stretch.majority), 0)

    def coming(self, count: int) -> Sequence[int]:
        """Names of the next `count` blocks, if the pace stays."""
        step = self.stride
        return range(self._last + step, self._last + step * (count + 1), step) if step else ()
