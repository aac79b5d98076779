"""Sequential transfers through a tier's native port, with a given number under way."""

from __future__ import annotations

import time
from dataclasses import dataclass

from farpool._native import Memory, Port, Queue

__all__ = ["Sequential", "pass_over", "rate"]

_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class Sequential:
    """Description of sequential transfers over the first `nbytes` bytes of a tier, with `depth` blocks under way."""

    write: bool
    block: int
    depth: int
    nbytes: int

    @property
    def count(self) -> int:
        """Number of blocks in one pass."""
        return self.nbytes // self.block


def pass_over(port: Port, kind: Sequential, memory: Memory) -> None:
    """Write each block once, in order."""
    for number in range(kind.count):
        port.write(number * kind.block, memory.address, kind.block)


def rate(port: Port, kind: Sequential, memory: Memory, seconds: float) -> float:
    """Measure bytes per second of pass after pass, for at least `seconds`.

    Parameters
    ----------
    memory : Memory
        Memory of `depth` blocks.
    """
    start = time.perf_counter()
    moved = (_one_by_one if kind.depth == 1 else _queued)(port, kind, memory, start + seconds)
    return moved * kind.block / (time.perf_counter() - start)


def _one_by_one(port: Port, kind: Sequential, memory: Memory, end: float) -> int:
    move = port.write if kind.write else port.read
    moved = 0
    while time.perf_counter() < end:
        move(moved % kind.count * kind.block, memory.address, kind.block)
        moved += 1
    return moved


def _queued(port: Port, kind: Sequential, memory: Memory, end: float) -> int:
    queue = Queue()
    direction = Queue.WRITE if kind.write else Queue.READ
    free = [memory.address + slot * kind.block for slot in range(kind.depth)]
    used: dict[int, int] = {}
    submitted = 0
    try:
        while used or time.perf_counter() < end:
            while free and time.perf_counter() < end:
                used[submitted] = address = free.pop()
                queue.submit(submitted, port, direction, [(submitted % kind.count * kind.block, address, kind.block)])
                submitted += 1
            queue.wait(_PATIENCE)
            for completion in queue.poll():
                if completion.error is not None:
                    raise completion.error
                free.append(used.pop(completion.id))
    finally:
        queue.close(_PATIENCE)
    return submitted
