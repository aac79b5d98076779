"""Objects that use a part of a pool's fast tier and of its lower tiers by themselves, without storages and blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from farpool.errors import PoolClosedError
from farpool.ledger import Ledger
from farpool.memory.pool.space import TierSpace
from farpool.memory.tiers import Tier

__all__ = ["Guest", "Guests", "Room"]


class Guest(Protocol):
    """An object that uses a pool's memory until it is closed, or until the pool ends it."""

    @property
    def name(self) -> str:
        """Name of the guest, for messages."""
        ...

    def end(self) -> bool:
        """Stop using the pool, because it is closed. Return False if the program still uses the guest's memory."""
        ...


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes in a lower tier: number of the tier in the pool, offset in the tier, and size."""

    tier: int
    offset: int
    nbytes: int


class Guests:
    """The guests of a pool, the bytes that they have in its tiers, and the accounts of these bytes. Thread-safe.

    Bytes of the fast tier move from the arena to a guest: the arena becomes smaller, so blocks and guests together
    never use more than the budget.
    """

    def __init__(
        self,
        lock: AbstractContextManager[Any],
        spaces: Sequence[TierSpace],
        ledger: Ledger,
        add_budget: Callable[[int, str], None],
        tiers: Sequence[Tier],
        check_open: Callable[[], None],
    ) -> None:
        self._lock = lock
        self._spaces = spaces
        self._ledger = ledger
        self._add_budget = add_budget
        self.tiers = tiers
        """The lower tiers of the pool, from fast to slow."""
        self._check_open = check_open
        self._fast: dict[Guest, int] = {}
        """Bytes of the fast tier, by guest."""
        self._ended = False
        """True once all guests were ended: no guest may enter any more."""

    def names(self) -> list[str]:
        """Return the names of all guests."""
        return [guest.name for guest in list(self._fast)]

    def enter(self, guest: Guest, fast: int) -> None:
        """Take `fast` bytes from the arena for a new guest.

        Raises
        ------
        BudgetError
            The arena cannot be made smaller by so many bytes; nothing was changed.
        PoolFullError, TierTimeoutError
            Blocks cannot be evicted to make the arena smaller; nothing was changed.
        PoolClosedError
            The pool is closed, or is being closed.
        """
        self._add_budget(-fast, guest.name)
        with self._lock:
            self._check_open()
            if self._ended:
                raise PoolClosedError(f"{guest.name}: the pool is being closed")
            self._ledger.add("fast", "regions", requested=fast, reserved=fast, touched=fast)
            self._fast[guest] = fast

    def leave(self, guest: Guest) -> None:
        """Give a guest's part of the fast tier back to the arena."""
        with self._lock:
            fast = self._fast.pop(guest, 0)
            if fast:
                self._ledger.subtract("fast", "regions", requested=fast, reserved=fast, touched=fast)
        if fast:
            with suppress(PoolClosedError):  # a closed pool has no arena
                self._add_budget(fast, guest.name)

    def reserve(self, tier: int, nbytes: int) -> Room | None:
        """Reserve bytes in a lower tier; return None if the tier lacks room."""
        with self._lock:
            self._check_open()
            offset = self._spaces[tier].reserve(nbytes, "regions")
            return None if offset is None else Room(tier, offset, nbytes)

    def free(self, room: Room) -> None:
        """Free bytes in a lower tier."""
        with self._lock:
            self._spaces[room.tier].free(room.offset, room.nbytes, "regions")

    def end_all(self) -> list[str]:
        """End all guests, because the pool is closed; return the names of those whose memory is still in use."""
        with self._lock:
            self._ended = True
            guests = list(self._fast)
        return [guest.name for guest in guests if not guest.end()]
