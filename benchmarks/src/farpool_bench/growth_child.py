"""Child process that measures the pager once, or a pool that is resized; prints its row as JSON.

``blocks history accesses``: the blocks are in one lower tier behind a simulated link, a quarter of them fit into the
arena, and transfers take virtual time. No bytes are moved: the pager is measured, and this simulation round it.

``fast``: a program goes over storages of twice the budget `fast`, block by block, and the budget is halved while it
runs; bytes that do not fit are in a file, which is no memory.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from farpool._native import SimulatedProgram
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig
from farpool.memory.tiers import Nvme
from farpool_bench.harness import Row
from farpool_bench.measure import resident_bytes

if TYPE_CHECKING:
    from farpool.memory.pager.storage import Storage

_CHUNK = 1000
"""Number of accesses in one sample."""
_STEPS = 4
"""Number of steps before the change of the budget, and after it."""
_STORAGES = 64
"""Number of storages over which twice the budget is spread."""


def _samples(run: Callable[[int], None], accesses: int) -> tuple[float, ...]:
    samples = []
    for done in range(0, accesses, _CHUNK):
        count = min(_CHUNK, accesses - done)
        start = time.thread_time()
        run(count)
        samples.append((time.thread_time() - start) / count)
    return tuple(samples)


def _grow(blocks: int, history: int, accesses: int) -> Row:
    # Memory that a first run of the code takes (the allocator's first pages) must not count as the blocks'.
    small = SimulatedProgram(_CHUNK, history)
    small.fill()
    before = resident_bytes()
    small.loop(2 * history)
    history_bytes = resident_bytes() - before
    del small

    before = resident_bytes()
    program = SimulatedProgram(blocks, history)
    program.fill()
    if blocks <= history:  # else the loop is longer than the tape, which then foretells nothing
        program.loop(2 * blocks)
    loop = _samples(program.loop, accesses)
    shuffled = _samples(program.shuffled, accesses)
    nbytes = resident_bytes() - before
    return Row(blocks=blocks, nbytes=nbytes, history_bytes=history_bytes, loop=loop, shuffled=shuffled)


def _resize(fast: int) -> Row:
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
    # How much smaller the resident set is after the first step with the smaller budget, over how much smaller that is.
    given_back = (resident[_STEPS - 1] - resident[_STEPS]) / (fast - smaller)
    return Row(fast=fast, smaller=smaller, resident=resident, given_back=given_back)


def _step(pool: BlockPool, storages: list[Storage], mode: Mode) -> None:
    for storage in storages:
        for start, stop in storage.pieces():
            pool.release(pool.acquire([Use(storage, start, stop, mode)]))


if __name__ == "__main__":
    _numbers = [int(argument) for argument in sys.argv[1:]]
    _row = _grow(*_numbers) if len(_numbers) == 3 else _resize(*_numbers)
    sys.stdout.write(msgspec.json.encode(_row).decode() + "\n")
