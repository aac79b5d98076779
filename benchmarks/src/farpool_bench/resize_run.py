"""Child process that halves a pool's budget while a program runs, and measures its own resident set.

Run as ``python -m farpool_bench.resize_run fast``; prints a `ResizeRun` as JSON. The program goes over storages of
twice the budget, block by block; what does not fit is in a file, which is no memory.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Nvme
from farpool_bench.measure import resident_bytes

__all__ = ["ResizeRun"]

_STEPS = 4
"""Number of steps before the change, and after it."""
_STORAGES = 64
"""Number of storages over which twice the budget is spread."""


@dataclass(frozen=True, slots=True)
class ResizeRun:
    """Measurements of one run.

    Attributes
    ----------
    fast, smaller : int
        Bytes of the budget before and after.
    resident : tuple of int
        The process's resident set after each step; the budget changed before the one in the middle.
    given_back : float
        After the first step with the smaller budget: how much smaller the resident set is, over how much smaller the
        budget is.
    """

    fast: int
    smaller: int
    resident: tuple[int, ...]
    given_back: float


def _step(pool: BlockPool, storages: list[Storage], mode: Mode) -> None:
    for storage in storages:
        for start, stop in storage.pieces():
            pool.release(pool.acquire([Use(storage, start, stop, mode)]))


def _measure(fast: int) -> ResizeRun:
    smaller = fast // 2
    with (
        tempfile.TemporaryDirectory(prefix="farpool-", dir="/var/tmp") as folder,
        BlockPool(PoolConfig.make(fast, [Nvme(Path(folder, "pool"), 3 * fast)])) as pool,
    ):
        storages = [pool.allocate(2 * fast // _STORAGES) for _ in range(_STORAGES)]
        _step(pool, storages, Mode.OVERWRITE)
        resident = []
        for step in range(2 * _STEPS):
            if step == _STEPS:
                pool.resize(smaller)
            _step(pool, storages, Mode.READ)
            resident.append(resident_bytes())
        del storages
    given_back = (resident[_STEPS - 1] - resident[_STEPS]) / (fast - smaller)
    return ResizeRun(fast, smaller, tuple(resident), given_back)


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(_measure(int(sys.argv[1]))).decode() + "\n")
