"""The contract between a pool and what runs its transfers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.pager import Move, Transfer

__all__ = ["Done", "Executor"]


@dataclass(frozen=True, slots=True)
class Done:
    """The end of a transfer.

    Attributes
    ----------
    id : int
        The transfer's.
    error : BaseException or None
        Why it failed.
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
    """Carries out moves and transfers in the order in which it is given them, as far as their dependencies demand it.

    Methods other than `wait` are called with the pool's lock held and must not block.
    """

    @property
    def trouble(self) -> Exception | None:
        """The error that hides whether transfers under way have ended; None where that can be told."""
        return None

    @abstractmethod
    def start(self, commands: Sequence[Transfer | Move]) -> None:
        """Carry out the moves, start the transfers."""

    @abstractmethod
    def expedite(self, transfers: Sequence[int]) -> None:
        """Somebody waits for these by now."""

    def note_use(self) -> None:  # noqa: B027 - only devices whose work outlives the access need it
        """The calling thread is about to be granted an access; what it does may go on after the access was released.

        Raises
        ------
        UnsupportedError
            It cannot have one now; nothing was changed.
        """

    @abstractmethod
    def poll(self) -> list[Done]:
        """The transfers that have ended since the last call."""

    @abstractmethod
    def wait(self, timeout: float) -> bool:
        """Block until `poll` has something, at most `timeout` seconds."""

    @abstractmethod
    def close(self, timeout: float) -> bool:
        """Let what is running end, drop the rest. False if something still runs after `timeout` seconds."""
