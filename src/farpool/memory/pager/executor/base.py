"""The interface of executors, which run a pool's transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.memory.pager import Move, Transfer

__all__ = ["Done", "Executor"]


@dataclass(frozen=True, slots=True)
class Done:
    """Report that a transfer has ended, with its outcome and times.

    Attributes
    ----------
    id : int
        Number of the transfer.
    error : BaseException or None
        The error with which it failed; None if it succeeded or was cancelled.
    cancelled : bool
        It never started, because one that it waited for had failed.
    start, end : float
        Seconds on the monotonic clock.
    """

    id: int
    error: BaseException | None
    cancelled: bool
    start: float
    end: float


class Executor(ABC):
    """Runs moves and transfers, in the given order as far as their dependencies demand it.

    Methods other than `wait` are called with the pool's lock held and must not block.
    """

    @property
    def trouble(self) -> Exception | None:
        """The error that keeps this from finding out whether transfers have ended; None if there is no such error."""
        return None

    @abstractmethod
    def start(self, commands: Sequence[Transfer | Move]) -> None:
        """Carry out the moves and start the transfers."""

    @abstractmethod
    def expedite(self, transfers: Sequence[int]) -> None:
        """Raise the priority of transfers for which a thread now waits."""

    def note_use(self) -> None:  # noqa: B027 - only devices whose work outlives the access need it
        """Prepare for an access by the calling thread, whose work on a device may outlast the access.

        Raises
        ------
        UnsupportedError
            The thread cannot have an access now; nothing was changed.
        """

    @abstractmethod
    def poll(self) -> list[Done]:
        """Return the transfers that have ended since the last call."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block until `poll` has something to return, for at most `timeout` seconds; False if it has nothing."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """Let running transfers end and drop the rest; return False if one still runs after `timeout` seconds."""
