"""Start the longest tests first: otherwise one worker is left with a test of minutes, and the others with nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TypeVar

import pytest

LONG_TIMEOUT_S = 1500
"""A test whose own timeout is this large may run for minutes."""

ItemT = TypeVar("ItemT")


def is_long(item: pytest.Item) -> bool:
    """Tell if the test was given a timeout of at least `LONG_TIMEOUT_S`."""
    mark = item.get_closest_marker("timeout")
    return mark is not None and bool(mark.args) and mark.args[0] >= LONG_TIMEOUT_S


def longest_first(items: Sequence[ItemT], long: Callable[[ItemT], bool], workers: int) -> list[ItemT]:
    """Return the items in an order in which each worker of pytest-xdist begins with its part of the long ones.

    ``--dist worksteal`` cuts the list into one consecutive part for each worker, all of the same size. A worker that
    has finished its part takes half of the tests that another worker has left, from the end.
    """
    longest = [item for item in items if long(item)]
    others = (item for item in items if not long(item))
    order: list[ItemT] = []
    for worker in range(workers):
        size = (len(items) - len(order)) // (workers - worker)
        share = longest[worker::workers]
        order += [*share, *islice(others, max(size - len(share), 0))]
    return order
