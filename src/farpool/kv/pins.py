"""Records the pins of this process. With a pin, an owner, such as a sequence, keeps a block in the nodes' memory."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from farpool.abc.objects import Hold

__all__ = ["Pins"]

_PINNED_BLOCKS_MIN = 1024
"""Pins whose time is over are removed only while more blocks than this are pinned."""


class Pins:
    """Pins by block and owner, each with the time at which it ends. Thread-safe."""

    def __init__(self) -> None:
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Forget all pins in the child of a fork, because they belong to the parent."""
        self._lock = threading.Lock()
        self._owners: dict[bytes, dict[bytes, tuple[Hold, float]]] = {}
        self._blocks_max = _PINNED_BLOCKS_MIN

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, pins: Sequence[tuple[bytes, Hold]], owner: bytes, now: float, ttl: float) -> list[Hold]:
        """Record the pins of an owner.

        Parameters
        ----------
        pins : sequence of tuple of bytes and Hold
            Key of each block, and its pin.
        owner : bytes
            The owner. If the owner already has a pin of a block, the new pin replaces the old one.
        now, ttl : float
            The present time, and the seconds after which the nodes end these pins.

        Returns
        -------
        list of Hold
            Replaced pins that no owner uses any more. The caller has to release them on the nodes.
        """
        replaced: list[Hold] = []
        with self._lock:
            self._forget_ended(now)
            for key, pin in pins:
                owners = self._owners.setdefault(key, {})
                before, _ = owners.get(owner, (pin, 0.0))
                owners[owner] = pin, now + ttl
                if not _uses(owners, before):
                    replaced.append(before)
        return replaced

    def remove(self, keys: Sequence[bytes], owner: bytes) -> list[Hold]:
        """Forget the pins of an owner on these blocks; return the pins that no other owner uses.

        The caller has to release the returned pins on the nodes.
        """
        unused: list[Hold] = []
        with self._lock:
            for key in keys:
                owners = self._owners.get(key, {})
                pin, _ = owners.pop(owner, (None, 0.0))
                # A pool has one pin of a block for all owners; a node makes a pin for each owner.
                if pin is not None and not _uses(owners, pin):
                    unused.append(pin)
                if not owners:
                    self._owners.pop(key, None)
        return unused

    def clear(self) -> None:
        """Forget all pins."""
        with self._lock:
            self._owners.clear()

    def _forget_ended(self, now: float) -> None:
        """Forget pins whose time is over, if many blocks are pinned. The caller holds the lock."""
        if len(self._owners) > self._blocks_max:
            left = {
                key: {owner: one for owner, one in owners.items() if one[1] > now}
                for key, owners in self._owners.items()
            }
            self._owners = {key: owners for key, owners in left.items() if owners}
            self._blocks_max = max(_PINNED_BLOCKS_MIN, 2 * len(self._owners))


def _uses(owners: dict[bytes, tuple[Hold, float]], pin: Hold) -> bool:
    """Return True if one of the owners of a block uses this pin."""
    return any(other == pin for other, _ in owners.values())
