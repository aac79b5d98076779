"""Adapter through which the pager reserves room in a tier; reservations are booked on the ledger."""

from __future__ import annotations

from farpool.errors import TierFullError
from farpool.ledger import Ledger
from farpool.memory.tiers import Extent, Tier

__all__ = ["TierSpace"]


class TierSpace:
    """The pager's reservations in one tier. They are booked on the ledger, and their peak is kept.

    Attributes
    ----------
    name : str
    capacity : int
        Capacity of the tier in bytes.
    reserved : int
        Bytes reserved at the moment.
    peak : int
        The most bytes that were ever reserved.
    """

    def __init__(self, tier: Tier, ledger: Ledger) -> None:
        self.tier = tier
        self.name = tier.info.name
        self.capacity = tier.info.capacity
        self.reserved = 0
        self.peak = 0
        self._ledger = ledger

    def reserve(self, nbytes: int, cls: str) -> int | None:
        before = self.tier.reserved
        try:
            extent = self.tier.reserve(nbytes)
        except TierFullError:
            return None
        after = self.reserved = self.tier.reserved
        self.peak = max(self.peak, after)
        self._ledger.add(self.name, cls, requested=nbytes, reserved=after - before)
        return extent.offset

    def free(self, offset: int, nbytes: int, cls: str) -> None:
        before = self.tier.reserved
        self.tier.free(Extent(offset, nbytes))
        after = self.reserved = self.tier.reserved
        self._ledger.subtract(self.name, cls, requested=nbytes, reserved=before - after)
