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
        The error with which the transfer failed; None if it succeeded or was cancelled.
    cancelled : bool
        True if the transfer never started, because a transfer that it waited for had failed.
    start, end : float
        Seconds on the monotonic clock.
    """

    id: int
    error: BaseException | None
    cancelled: bool
    start: float
    end: float


class Executor(ABC):
    """Runs moves and transfers. Their order may change, except that dependencies between transfers are kept.

    Methods other than `wait` are called with the pool's lock held and must not block.
    """

    @property
    def trouble(self) -> Exception | None:
        """The error that keeps the executor from finding out if transfers have ended; None if there is none."""
        return None

    @abstractmethod
    def start(self, commands: Sequence[Transfer | Move]) -> None:
        """Carry out the moves and start the transfers."""

    @abstractmethod
    def expedite(self, transfers: Sequence[int]) -> None:
        """Raise the priority of transfers, because a thread now waits for them."""

    def note_use(self) -> None:  # noqa: B027 - only devices whose work outlives the access need it
        """Prepare for an access by the calling thread. The thread's work on a device may end after the access.

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
        """Wait until `poll` has transfers to return; return False if it has none after `timeout` seconds."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """Let running transfers end, and drop the others. Return False if one still runs after `timeout` seconds."""
