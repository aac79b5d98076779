"""Injects faults into a tier for tests: at operations that a seed selects at random, or at chosen operations."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Mapping
from enum import StrEnum

from farpool.abc.tier import Extent, Tier
from farpool.checks import require_seconds
from farpool.errors import ConfigError, TierError, TierFullError
from farpool.memory.tiers.buffers import require_buffer
from farpool.memory.tiers.wrapper import WrapperTier

__all__ = ["Fault", "Faulty"]

_NO_SCRIPT: Mapping[int, str] = {}


class Fault(StrEnum):
    """A kind of failure that is injected into one operation."""

    FAIL = "fail"
    """The operation raises TierError and moves no bytes."""
    CORRUPT = "corrupt"
    """The operation silently flips one bit of the bytes that it moves."""
    STALL = "stall"
    """The operation completes `stall_seconds` late."""


class Faulty(WrapperTier):
    """Wrapper that makes operations of a tier fail, corrupt the bytes they move, or stall.

    Reads and writes are counted together from 0, in the order in which they start. If `script` does not name operation
    n, only `seed`, the probabilities and n decide if this operation has a fault.

    Parameters
    ----------
    inner : Tier
        The inner tier.
    seed : int
        Selects the operations that get a fault.
    fail_reads, fail_writes, corrupt_reads, corrupt_writes, stall : float
        Probabilities from 0 to 1. If several faults are drawn for one operation, the first in this order counts.
    stall_seconds : float
        Seconds by which a stalled operation completes late. :meth:`close` ends stalls at once.
    full : bool
        True if every reservation raises TierFullError. May be changed at any time.
    script : mapping of int to str
        Numbers of operations, each with its fault: ``"fail"``, ``"corrupt"`` or ``"stall"``. The probabilities do not
        apply to these operations.

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
        require_seconds(stall_seconds, "stall_seconds", most=math.inf)
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
        self._no_stalls = threading.Event()

    @property
    def operations(self) -> int:
        """Number of reads and writes that have started so far."""
        return self._operations

    @property
    def injected(self) -> list[tuple[int, Fault]]:
        """For each fault so far, the number of the operation and the kind of fault."""
        with self._lock:
            return list(self._injected)

    def open(self) -> None:
        super().open()
        self._no_stalls.clear()

    def close(self) -> None:
        # Stalled transfers are under way, and `close` waits for them, so they end first.
        self._no_stalls.set()
        super().close()

    def reserve(self, nbytes: int) -> Extent:
        if self.full:
            name = self.info.name
            raise TierFullError(f"{name}: full on purpose, no room for {nbytes} bytes", tier=name)
        return super().reserve(nbytes)

    def read_into(self, extent: Extent, into: memoryview) -> None:
        fault, draw = self._next_fault(self._on_read)
        self._maybe_fail(fault, "read", extent)
        super().read_into(extent, into)
        if fault is Fault.CORRUPT:
            with require_buffer(extent, into, writable=True) as view:
                _flip_bit(view, draw)
        self._maybe_stall(fault)

    def write_from(self, extent: Extent, data: memoryview) -> None:
        fault, draw = self._next_fault(self._on_write)
        self._maybe_fail(fault, "write", extent)
        if fault is Fault.CORRUPT:
            # We corrupt a copy: the caller's buffer is the arena, which must keep the right bytes.
            data = memoryview(bytearray(require_buffer(extent, data, writable=False)))
            _flip_bit(data, draw)
        super().write_from(extent, data)
        self._maybe_stall(fault)

    def _maybe_stall(self, fault: Fault | None) -> None:
        if fault is Fault.STALL:
            self._no_stalls.wait(self._stall_seconds)

    def _maybe_fail(self, fault: Fault | None, word: str, extent: Extent) -> None:
        if fault is Fault.FAIL:
            name = self.info.name
            raise TierError(
                f"{name}: {word} of {extent.nbytes} bytes at offset {extent.offset} failed on purpose", tier=name
            )

    def _next_fault(self, chances: tuple[tuple[Fault, float], ...]) -> tuple[Fault | None, random.Random]:
        with self._lock:
            ordinal = self._operations
            self._operations += 1
            draw = random.Random(f"{self._seed}/{ordinal}")
            fault = self._script.get(ordinal)
            for candidate, chance in chances:
                # Draw each one even if it is not needed, so that changing one probability leaves other draws alone.
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
