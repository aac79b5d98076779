"""The executor of a pool in debug mode, which checks the order of commands and reports the commands to the watch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from farpool.memory.debug.checked import CheckedExecutor
from farpool.memory.pager import Move, Transfer
from farpool.memory.pager.executor.base import Done, Executor

__all__ = ["WatchedExecutor"]


class _Follower(Protocol):
    def follow(self, commands: Sequence[Transfer | Move]) -> None: ...

    def moved(self, move: Move) -> None: ...

    def ended(self, transfer: Transfer, *, failed: bool) -> None: ...


class WatchedExecutor(CheckedExecutor):
    """Executor that checks commands and also notifies a follower of them.

    It notifies the follower before commands are started, after each move, and when a transfer has ended. It does not
    report moves within the ranges of one access, because they do not change the pager's map.

    Parameters
    ----------
    inner : Executor
        Carries the commands out.
    follower : Watch
        Object that is notified.
    """

    def __init__(self, inner: Executor, follower: _Follower) -> None:
        super().__init__(inner)
        self._follower = follower

    def start(self, commands: Sequence[Transfer | Move]) -> None:
        # Packing moves bytes inside its own access, and the pager's map does not change with that.
        if not all(isinstance(command, Move) and self.is_own(command) for command in commands):
            self._follower.follow(commands)
        super().start(commands)

    def _carry_out(self, commands: Sequence[Transfer | Move]) -> None:
        for moves, group in groupby(commands, key=lambda command: isinstance(command, Move)):
            if not moves:
                self._inner.start(list(group))
                continue
            for move in group:
                self._inner.start([move])
                if isinstance(move, Move) and not self.is_own(move):
                    self._follower.moved(move)

    def poll(self) -> list[Done]:
        finished = self._inner.poll()
        for done in finished:
            transfer = self._open.get(done.id)
            failed = done.error is not None or done.cancelled
            self._end(done.id, failed=failed)
            if transfer is not None:
                self._follower.ended(transfer, failed=failed)
        return finished
