"""Program that uses a part of a processor, in short pieces, and asks the node for nothing; the part `victim` runs it.

With the argument ``PART`` it prints ``ready`` and goes on until its standard input ends.
"""

from __future__ import annotations

import select
import time

from farpool_bench.cluster_parts.flood import give_way

_PIECE_S = 0.0005
"""Seconds of work at a time, about as long as a flood works on one reply."""


def main(part: str) -> None:
    """Use a part of a processor."""
    give_way()  # as floods
    print("ready", flush=True)
    start, began = time.perf_counter(), time.process_time()
    while True:
        used, wall = time.process_time() - began, time.perf_counter() - start
        ahead = used - float(part) * wall
        # The wait also notices the end of the standard input.
        if select.select([0], [], [], _PIECE_S if ahead > 0 else 0)[0]:
            return
        until = time.perf_counter() + (_PIECE_S if ahead <= 0 else 0)
        while time.perf_counter() < until:
            sum(range(100))
