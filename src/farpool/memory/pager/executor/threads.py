"""Executor of transfers between host memory and tiers, on native threads."""

from __future__ import annotations

from collections.abc import Sequence

from farpool._native import Port, Queue, memmove
from farpool.memory.pager import Kind, Move, Transfer
from farpool.memory.pager.executor.base import Done, Executor

__all__ = ["ThreadExecutor"]

_WRITE_BACK, _PREFETCH, _DEMAND = 0, 1, 2


class ThreadExecutor(Executor):
    """Executor with a queue and native threads for each tier and direction. The threads need no interpreter lock.

    Parameters
    ----------
    address : int
        Address of the arena in memory.
    ports : list of Port
        The tiers' native ports, in the order of the pager's tier numbers. The pool appends a port for each source file.
    """

    def __init__(self, address: int, ports: list[Port]) -> None:
        self.address = address
        self.ports = ports
        self.queue = Queue()

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        for command in commands:
            if isinstance(command, Move):
                # The move is made here and now, under the pool's lock, so it precedes every transfer that is submitted
                # after it.
                memmove(self.address + command.target, self.address + command.source, command.nbytes)
                continue
            if command.kind == Kind.WRITE_BACK:
                direction, priority = Queue.WRITE, _WRITE_BACK
            else:
                direction, priority = Queue.READ, _DEMAND if command.demand else _PREFETCH
            self.queue.submit(
                command.id,
                self.ports[command.pieces[0].tier] if command.pieces else None,
                direction,
                [(piece.offset, self.address + piece.place, piece.nbytes) for piece in command.pieces],
                command.after,
                priority,
            )

    def expedite(self, transfers: Sequence[int]) -> None:
        for number in transfers:
            self.queue.reprioritize(number, _DEMAND)

    def poll(self) -> list[Done]:
        return [Done(c.id, c.error, c.cancelled, c.start, c.end) for c in self.queue.poll()]

    def wait(self, timeout: float) -> bool:
        return self.queue.wait(timeout)

    def close(self, timeout: float) -> bool:
        return self.queue.close(timeout)
