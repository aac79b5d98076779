"""The memory that a pool holds for its own tables is on its ledger, and bounded."""

from __future__ import annotations

import ctypes
import gc

import pytest

from farpool import Dram
from farpool.ledger import Account
from farpool.memory.pager import Mode, Pager, Run
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pool.config import PoolConfig

HISTORY = 1 << 18
TAPE_BYTES_MAX = 18 << 20
"""The bound in docs/limits.md: 40 bytes for each access and an index of 8 MiB, without the 8 bytes for each block."""
SLACK = 32 << 10


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def heap() -> int:
    """Bytes that the process has allocated with malloc; Python's small objects are not among them."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def on_ledger(pool: BlockPool) -> int:
    pool.stats()
    return sum(pool.ledger.total(tier="host", owner=owner).reserved for owner in ("tape", "block tables"))


def walk(pool: BlockPool, uses: list[Use], passes: int) -> None:
    for _ in range(passes):
        for use in uses:
            pool.release(pool.acquire([use]))


@pytest.mark.slow
def test_what_a_loop_makes_the_heap_grow_by_is_on_the_ledger() -> None:
    if not heap():
        pytest.skip("the C library counts no allocations, for example under a sanitizer")
    with BlockPool(PoolConfig(64 << 10, (Dram("1MiB"),))) as pool:
        storages = [pool.allocate(8 << 10) for _ in range(20)]
        uses = [Use(storage, 0, storage.nbytes, Mode.WRITE) for storage in storages]
        walk(pool, uses, 50)
        heap_before, ledger_before = heap(), on_ledger(pool)
        walk(pool, uses, 1500)
        heap_grown, ledger_grown = heap() - heap_before, on_ledger(pool) - ledger_before
        assert ledger_grown > 1 << 20
        assert abs(heap_grown - ledger_grown) < SLACK
        assert "tape" in pool.explain()


def test_the_tables_of_blocks_are_on_the_ledger() -> None:
    with BlockPool(PoolConfig(64 << 10, (Dram("64MiB"),))) as pool:
        before = on_ledger(pool)
        held = pool.allocate(16 << 20, row_bytes=256)
        after = on_ledger(pool)
        assert after - before >= 56 * held.count
        assert pool.ledger.accounts()["host", "block tables"] == Account(
            *[pool.pager.table_bytes] * 2, 0, pool.pager.table_bytes
        )
        del held


@pytest.mark.parametrize("history", [1 << 10, pytest.param(HISTORY, marks=pytest.mark.slow)])
def test_the_tape_holds_no_more_than_is_documented(history: int) -> None:
    pager = Pager(1 << 20, [], alignment=64, history=history)
    first = pager.create([64] * 8)
    grown = []
    for turn in range(3):
        for step in range(history // (1 if turn else 2)):
            pager.release(pager.request([Run(first + step % 8, 1, Mode.OVERWRITE)]))
            pager.take_commands()
        grown.append(pager.tape_bytes)
    assert grown[0] < grown[1] == grown[2] <= TAPE_BYTES_MAX * history // HISTORY + 8 * 8
