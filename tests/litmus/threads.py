"""Runs the sides of a litmus test at the same time, and makes nodes need their memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from farpool import Store

PATIENCE_S = 60.0
"""Seconds until a side that waits for another one gives up. Only ends waits; nothing is measured by it."""

_T = TypeVar("_T")


def together(*sides: Callable[[], Any]) -> list[Any]:
    """Run functions in threads that begin at the same moment; return their results, or raise the first error."""
    begin = threading.Barrier(len(sides))
    results: list[Any] = [None] * len(sides)
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            begin.wait(PATIENCE_S)
            results[place] = sides[place]()
        except BaseException as error:
            errors.append(error)

    # If one side fails, another one may wait for it; that one ends when the test closes its store.
    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(sides))]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 2 * PATIENCE_S
    for thread in threads:
        while thread.is_alive() and not errors:
            assert time.monotonic() < deadline, "a side does not end"
            thread.join(0.05)
    if errors:
        raise errors[0]
    return results


def awaited(look: Callable[[], _T | None]) -> _T:
    """Call a function until it returns something; return that."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := look()) is None:
        assert time.monotonic() < deadline, "it was not seen in time"
    return found


def need_all_memory(store: Store) -> None:
    """Put more than the node has, so that it evicts each object that it may evict, and take it away again."""
    for number in range(80):
        store.put(f"filler/{number}", bytes([number]) * (512 << 10), ttl=60)
    for number in range(80):
        store.drop(f"filler/{number}")
