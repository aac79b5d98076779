"""Failures on purpose, for tests: reproducible by seed, or exactly at the n-th operation."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from enum import StrEnum

from farpool.errors import ConfigError, TierError, TierFullError, TierTimeoutError
from farpool.tiers.base import Extent, Tier, Transfer
from farpool.tiers.buffers import require_buffer
from farpool.tiers.transfers import FinishedTransfer
from farpool.tiers.wrapper import WrapperTier

__all__ = ["Fault", "Faulty"]

_NO_SCRIPT: Mapping[int, str] = {}


class Fault(StrEnum):
    """What can go wrong with one operation."""

    FAIL = "fail"
    """It raises TierError; nothing is moved."""
    CORRUPT = "corrupt"
    """One bit of what is moved is flipped, silently."""
    STALL = "stall"
    """It completes `stall_seconds` late."""


class _FaultyTransfer(Transfer):
    """A transfer that completes late, or does something when the one inside has completed."""

    def __init__(
        self, inner: Transfer, name: str, *, until: float, closing: threading.Event, finish: Callable[[], None]
    ) -> None:
        self._inner = inner
        self._name = name
        self._until = until
        self._closing = closing
        self._finish = finish
        self._lock = threading.Lock()
        self._finished = False

    def done(self) -> bool:
        if not self._inner.done() or (time.monotonic() < self._until and not self._closing.is_set()):
            return False
        self._finish_once()
        return True

    def wait(self, timeout: float | None = None) -> None:
        begin = time.monotonic()
        deadline = None if timeout is None else begin + timeout
        stall = self._until - begin
        if stall > 0:
            self._closing.wait(stall if timeout is None else min(stall, timeout))
            if deadline is not None and deadline < self._until and not self._closing.is_set():
                raise TierTimeoutError(f"{self._name}: stalled on purpose for more than {timeout} s", tier=self._name)
        self._inner.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        self._finish_once()

    def _finish_once(self) -> None:
        with self._lock:
            if not self._finished:
                self._finish()
                self._finished = True


class Faulty(WrapperTier):
    """Makes operations of a tier fail, corrupt what they move, or stall.

    Reads and writes are counted together from 0, in the order in which they start. Whether the n-th has a fault depends
    on `seed` and n alone.

    Parameters
    ----------
    inner : Tier
        The tier inside.
    seed : int
        Selects which operations are hit.
    fail_reads, fail_writes, corrupt_reads, corrupt_writes, stall : float
        Probabilities from 0 to 1. Of several faults that are drawn for one operation, the first in this order counts.
    stall_seconds : float
        How late a stalled operation completes. :meth:`close` ends stalls at once.
    full : bool
        Every reservation raises TierFullError. May be changed at any time.
    script : mapping of int to str
        Fault of the n-th operation: ``"fail"``, ``"corrupt"`` or ``"stall"``; goes before the probabilities.

    Raises
    ------
    ConfigError
        A probability is not from 0 to 1, a time is negative, or the script names an unknown fault.
    """

    def __init__(
        self,
        inner: Tier,
        *,
        seed: int = 0,
        fail_reads: float = 0.0,
        fail_writes: float = 0.0,
        corrupt_reads: float = 0.0,
        corrupt_writes: float = 0.0,
        stall: float = 0.0,
        stall_seconds: float = 0.0,
        full: bool = False,
        script: Mapping[int, str] = _NO_SCRIPT,
    ) -> None:
        super().__init__(inner)
        probabilities = {
            "fail_reads": fail_reads,
            "fail_writes": fail_writes,
            "corrupt_reads": corrupt_reads,
            "corrupt_writes": corrupt_writes,
            "stall": stall,
        }
        for name, value in probabilities.items():
            if not 0.0 <= value <= 1.0:
                raise ConfigError(f"{name} is {value!r}, expected a probability from 0 to 1")
        if not stall_seconds >= 0.0:
            raise ConfigError(f"stall_seconds is {stall_seconds!r}, expected 0 or more seconds")
        known = [fault.value for fault in Fault]
        for ordinal, fault in script.items():
            if fault not in known:
                raise ConfigError(f"script has {fault!r} for operation {ordinal}, expected one of {known}")
        self.full = full
        self._seed = seed
        self._on_read = ((Fault.FAIL, fail_reads), (Fault.CORRUPT, corrupt_reads), (Fault.STALL, stall))
        self._on_write = ((Fault.FAIL, fail_writes), (Fault.CORRUPT, corrupt_writes), (Fault.STALL, stall))
        self._stall_seconds = stall_seconds
        self._script = {ordinal: Fault(fault) for ordinal, fault in script.items()}
        self._operations = 0
        self._injected: list[tuple[int, Fault]] = []
        self._lock = threading.Lock()
        self._closing = threading.Event()

    @property
    def operations(self) -> int:
        """Reads and writes started so far."""
        return self._operations

    @property
    def injected(self) -> list[tuple[int, Fault]]:
        """The faults so far: ordinal of the operation, and what was done to it."""
        with self._lock:
            return list(self._injected)

    def open(self) -> None:
        super().open()
        self._closing = threading.Event()

    def close(self) -> None:
        self._closing.set()
        super().close()

    def reserve(self, nbytes: int) -> Extent:
        if self.full:
            name = self.info.name
            raise TierFullError(f"{name}: full on purpose, no room for {nbytes} bytes", tier=name)
        return super().reserve(nbytes)

    def start_read(self, extent: Extent, into: memoryview) -> Transfer:
        fault, draw = self._next_fault(self._on_read)
        if fault is Fault.FAIL:
            return self._failed("read", extent)
        if fault is None:
            return super().start_read(extent, into)
        view = require_buffer(extent, into, writable=True)

        def finish() -> None:
            if fault is Fault.CORRUPT:
                _flip_bit(view, draw)
            view.release()

        return self._hold(super().start_read(extent, into), fault, finish)

    def start_write(self, extent: Extent, data: memoryview) -> Transfer:
        fault, draw = self._next_fault(self._on_write)
        if fault is Fault.FAIL:
            return self._failed("write", extent)
        if fault is None:
            return super().start_write(extent, data)
        if fault is Fault.CORRUPT:
            data = memoryview(bytearray(require_buffer(extent, data, writable=False)))
            _flip_bit(data, draw)
        return self._hold(super().start_write(extent, data), fault, lambda: None)

    def _hold(self, inner: Transfer, fault: Fault, finish: Callable[[], None]) -> Transfer:
        until = time.monotonic() + self._stall_seconds if fault is Fault.STALL else 0.0
        return _FaultyTransfer(inner, self.info.name, until=until, closing=self._closing, finish=finish)

    def _failed(self, word: str, extent: Extent) -> Transfer:
        name = self.info.name
        return FinishedTransfer(
            TierError(f"{name}: {word} of {extent.nbytes} bytes at offset {extent.offset} failed on purpose", tier=name)
        )

    def _next_fault(self, chances: tuple[tuple[Fault, float], ...]) -> tuple[Fault | None, random.Random]:
        with self._lock:
            ordinal = self._operations
            self._operations += 1
            draw = random.Random(f"{self._seed}/{ordinal}")
            fault = self._script.get(ordinal)
            for candidate, chance in chances:
                # Each is drawn whether needed or not, so that changing one probability leaves the others' draws alone.
                hit = draw.random() < chance
                if hit and fault is None:
                    fault = candidate
            if fault is not None:
                self._injected.append((ordinal, fault))
        return fault, draw


def _flip_bit(view: memoryview, draw: random.Random) -> None:
    data = view.cast("B")
    bit = draw.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    data.release()
