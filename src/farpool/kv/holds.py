"""Pins of this process: which owner keeps which block in the nodes' memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.abc.objects import Hold

__all__ = ["Holds"]

_HELD_BLOCKS_MIN = 1024
"""Up to this many held blocks, we do not look for holds whose time is over."""


class Holds:
    """Holds by block and owner, each with the time at which it ends. Thread-safe."""

    def __init__(self) -> None:
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Forget all holds in the child of a fork: they belong to the parent."""
        self._lock = threading.Lock()
        self._owners: dict[bytes, dict[bytes, tuple[Hold, float]]] = {}
        self._blocks_max = _HELD_BLOCKS_MIN

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, holds: Sequence[tuple[bytes, Hold]], owner: bytes, now: float, ttl: float) -> list[Hold]:
        """Record the holds of an owner.

        Parameters
        ----------
        holds : sequence of tuple of bytes and Hold
            Key of each block, and its hold.
        owner : bytes
            The owner. A second hold of the same block replaces the first.
        now, ttl : float
            The time, and the seconds after which the nodes end these holds.

        Returns
        -------
        list of Hold
            Holds that were replaced and that no other owner uses, which the caller ends.
        """
        replaced: list[Hold] = []
        with self._lock:
            self._forget_ended(now)
            for key, hold in holds:
                owners = self._owners.setdefault(key, {})
                before, _ = owners.get(owner, (hold, 0.0))
                owners[owner] = hold, now + ttl
                if before not in [other for other, _ in owners.values()]:
                    replaced.append(before)
        return replaced

    def remove(self, keys: Sequence[bytes], owner: bytes) -> list[Hold]:
        """Forget the holds of an owner; return those that no other owner uses, which the caller ends."""
        ended: list[Hold] = []
        with self._lock:
            for key in keys:
                owners = self._owners.get(key, {})
                mine = owners.pop(owner, None)
                # In a pool all owners share one hold; a node makes one for each.
                if mine is not None and mine[0] not in [hold for hold, _ in owners.values()]:
                    ended.append(mine[0])
                if not owners:
                    self._owners.pop(key, None)
        return ended

    def clear(self) -> None:
        """Forget all holds."""
        with self._lock:
            self._owners.clear()

    def _forget_ended(self, now: float) -> None:
        """Forget holds whose time is over, if there are many; called with the lock."""
        if len(self._owners) > self._blocks_max:
            left = {
                key: {owner: one for owner, one in owners.items() if one[1] > now}
                for key, owners in self._owners.items()
            }
            self._owners = {key: owners for key, owners in left.items() if owners}
            self._blocks_max = max(_HELD_BLOCKS_MIN, 2 * len(self._owners))
