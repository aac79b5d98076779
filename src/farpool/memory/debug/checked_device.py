"""Checks that copies to and from a device wait for the work that must end first, and never share host memory.

Three rules are checked. First, each copy has a fence that was made after the last use of its range of the arena.
Second, a copy does not end before the work that precedes its fence. This finds a device that ignores a fence, but only
if the copy really ends too early. Third, no transfer uses host memory (staging memory or a tier's own) while a copy, or
another transfer between a tier and host memory, still uses this memory.

Errors are kept, not raised, because the thread that drives the copies has to go on.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from farpool.errors import OrderError
from farpool.memory.pager.executor.copies import Copy, Device

__all__ = ["CheckedDevice"]


@dataclass(frozen=True, slots=True)
class _Fence:
    point: object
    uses: int
    """Number of accesses that were already released when the fence was made."""


class _CheckedCopy:
    def __init__(self, device: CheckedDevice, copy: Copy, fence: object, host: int, nbytes: int, what: str) -> None:
        self.host = host
        self.nbytes = nbytes
        self.what = what
        self._device = device
        self._copy = copy
        self._fence = fence

    def done(self) -> bool:
        ended = self._copy.done()
        if ended:
            # We ask for the copy first. In the other order, work that ends between the two questions would look like a
            # missing wait.
            if not self._device.passed(self._fence):
                self._device.found(f"{self.what} ended before the program's work that it was to wait for")
            self._device.ended(self)
        return ended


class CheckedDevice:
    """Device that checks copies before another device makes them.

    Parameters
    ----------
    inner : Device
        Makes the copies.

    Attributes
    ----------
    findings : list of OrderError
        Violations of the order that were found so far.
    """

    def __init__(self, inner: Device) -> None:
        self.findings: list[OrderError] = []
        self._inner = inner
        self._lock = threading.Lock()
        self._uses = 0
        self._last_use: dict[tuple[int, int], int] = {}
        """For each range that accesses have used, the ordinal of the last access that used it."""
        self._copies: list[_CheckedCopy] = []
        self._at_tier: dict[int, tuple[int, int]] = {}

    def found(self, message: str) -> None:
        """Record a violation of the order."""
        self.findings.append(OrderError(message))

    # ---- the program's work -----------------------------------------------------------------------------------------

    def used(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Record the ranges ``(place, bytes)`` that an access has used. Called just before the access is released."""
        with self._lock:
            self._uses += 1
            for place, nbytes in ranges:
                for start, size in [*self._last_use]:
                    if place <= start and start + size <= place + nbytes:
                        del self._last_use[start, size]
                self._last_use[place, nbytes] = self._uses

    def begin_thread(self) -> None:
        self._inner.begin_thread()

    def note_use(self) -> None:
        self._inner.note_use()

    def fence(self) -> _Fence:
        with self._lock:
            uses = self._uses
        return _Fence(self._inner.fence(), uses)

    def passed(self, fence: object) -> bool:
        return not isinstance(fence, _Fence) or self._inner.passed(fence.point)

    def move(self, source: int, target: int, nbytes: int) -> None:
        self._inner.move(source, target, nbytes)

    # ---- copies ---------------------------------------------------------------------------------------------------

    def to_device(self, host: int, place: int, nbytes: int, fence: object) -> Copy:
        what = f"the copy to arena range [{place}, {place + nbytes})"
        point = self._check(what, host, place, nbytes, fence)
        return self._note(self._inner.to_device(host, place, nbytes, point), fence, host, nbytes, what)

    def to_host(self, place: int, host: int, nbytes: int, fence: object) -> Copy:
        what = f"the copy from arena range [{place}, {place + nbytes})"
        point = self._check(what, host, place, nbytes, fence)
        return self._note(self._inner.to_host(place, host, nbytes, point), fence, host, nbytes, what)

    def _check(self, what: str, host: int, place: int, nbytes: int, fence: object) -> object:
        self._check_host(what, host, nbytes)
        with self._lock:
            if not isinstance(fence, _Fence):
                self.found(f"{what} waits for {fence!r}, which is no fence of this device")
                return fence
            for (start, size), number in self._last_use.items():
                if start < place + nbytes and place < start + size and number > fence.uses:
                    self.found(
                        f"{what} does not wait for the access to [{start}, {start + size}) that was released after the "
                        "fence which the copy was given"
                    )
        return fence.point

    def _check_host(self, what: str, host: int, nbytes: int) -> None:
        with self._lock:
            for copy in self._copies:
                if copy.host < host + nbytes and host < copy.host + copy.nbytes:
                    self.found(f"{what} uses host memory at {host:#x} before {copy.what} has ended there")
            for number, (start, size) in self._at_tier.items():
                if start < host + nbytes and host < start + size:
                    self.found(f"{what} uses host memory in which transfer {number} is still at its tier")

    def _note(self, copy: Copy, fence: object, host: int, nbytes: int, what: str) -> Copy:
        checked = _CheckedCopy(self, copy, fence, host, nbytes, what)
        with self._lock:
            self._copies.append(checked)
        return checked

    def ended(self, copy: _CheckedCopy) -> None:
        """Record that a copy has ended: its host memory may be used again."""
        with self._lock:
            if copy in self._copies:
                self._copies.remove(copy)

    # ---- the tier's end of staging memory ---------------------------------------------------------------------------

    def tier_leg(self, transfer: int, host: int, nbytes: int) -> None:
        """Record that the part of a transfer between its tier and host memory begins; `host` is the address."""
        self._check_host(f"transfer {transfer}", host, nbytes)
        with self._lock:
            self._at_tier[transfer] = (host, nbytes)

    def tier_leg_ended(self, transfer: int) -> None:
        """Record that the part of a transfer between its tier and host memory has ended."""
        with self._lock:
            self._at_tier.pop(transfer, None)
