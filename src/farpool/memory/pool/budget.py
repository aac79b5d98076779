"""Changing the budget of the fast tier while the tier is in use."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from farpool._native import Driver
from farpool.errors import BudgetError, TierTimeoutError
from farpool.ledger import Ledger
from farpool.memory.pager import NoRoomError, Pager
from farpool.memory.pager.storage import cut
from farpool.memory.pool.allocation import Allocation
from farpool.memory.pool.faults import no_room
from farpool.memory.tiers import Tier
from farpool.memory.tiers.device import HostArena
from farpool.sizes import format_size

if TYPE_CHECKING:
    from farpool.memory.debug import Watch
    from farpool.memory.tiers.cuda_arena import CudaArena

__all__ = ["Budget"]


class Budget:
    """Resizer of the fast tier; its methods are called with the pool's lock held.

    Parameters
    ----------
    ledger : Ledger
        Ledger on which the arena's bytes are booked.
    tiers : sequence of Tier
        The lower tiers, to which blocks are evicted when the budget shrinks.
    timeout : float
        Maximum seconds to wait until these blocks are evicted.
    """

    def __init__(
        self,
        pager: Pager,
        arena: HostArena | CudaArena,
        allocation: Allocation,
        driver: Driver,
        check_open: Callable[[], None],
        ledger: Ledger,
        tiers: Sequence[Tier],
        timeout: float,
    ) -> None:
        self._pager = pager
        self._arena = arena
        self._allocation = allocation
        self._driver = driver
        self._check_open = check_open
        self._ledger = ledger
        self._tiers = tiers
        self._timeout = timeout

    def change(self, budget: int, watch: Watch | None) -> None:
        """Change the budget to `budget` bytes.

        Parameters
        ----------
        watch : Watch, optional
            Debug mode's checker. It inspects the memory that the arena is about to give back.

        Raises
        ------
        BudgetError
            A block that exists already is larger than the new budget.
        PoolFullError, TierTimeoutError
            Blocks cannot be evicted to make the fast tier smaller; the budget is unchanged.
        """
        before = self._pager.capacity
        if budget < before:
            # We empty the upper part of the arena before the arena gives memory back. When we grow, we resize the arena
            # before the pager, because the pager may place blocks in the new part at once.
            self._check_blocks_fit(budget)
            self._shrink(budget)
            if watch is not None:
                watch.follow(())  # while the memory above the new budget is still there
        self._arena.resize(budget)
        if budget > before:
            self._pager.resize(budget)
        change = {"requested": abs(budget - before)}
        change["reserved"] = change["touched"] = change["requested"]
        book = self._ledger.add if budget > before else self._ledger.subtract
        book("fast", "arena", **change)
        self._allocation.sizes = cut(budget, self._allocation.sizes.alignment, self._arena.alignment)

    def _shrink(self, budget: int) -> None:
        """Evict or move all blocks in the part of the arena that will be given back, and wait until it is empty."""
        before = self._pager.capacity
        deadline = time.monotonic() + self._timeout
        try:
            while not self._pager.resize(budget):
                self._driver.start()
                if time.monotonic() >= deadline:
                    raise TierTimeoutError(f"resize: memory beyond {format_size(budget)} did not come free in time")
                # The wait gives up the lock, so another thread may close the pool during it.
                self._driver.wait(deadline - time.monotonic())
                self._check_open()
        except BaseException as error:
            # With the old budget, blocks that could not be evicted may stay where they are.
            self._pager.resize(before)
            self._driver.start()
            if isinstance(error, NoRoomError):
                raise no_room(error, "resize", self._tiers) from None
            raise

    def _check_blocks_fit(self, budget: int) -> None:
        """Raise `BudgetError` if a block is larger than the new budget, because existing blocks keep their size."""
        largest = max((self._pager.block(block).size for block in self._pager.blocks()), default=0)
        if largest > budget:
            raise BudgetError(
                f"resize: there is a block of {format_size(largest)}, cut for the budget that the pool was made with; "
                f"{format_size(budget)} are too small for it",
                op="resize",
                needed=largest,
                budget=self._pager.capacity,
            )
