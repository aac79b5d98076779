"""A pool as a debugger shows it."""

from __future__ import annotations

import threading

import farpool
from farpool import Dram, Pool
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.pool import blocks_of


def test_it_tells_budget_tiers_and_what_is_in_use_in_one_line() -> None:
    with Pool("64KiB", [Dram("1MiB")]) as pool:
        assert repr(pool) == "<Pool on cpu: fast 0 B of 64 KiB, dram 0 B of 1 MiB in use by 0 storages>"
        blocks = blocks_of(pool)
        kept = [blocks.allocate(32768) for _ in range(4)]
        for storage in kept:
            for start, stop in storage.pieces():
                blocks.release(blocks.acquire([Use(storage, start, stop, Mode.OVERWRITE)]))
        assert "fast 64 KiB of 64 KiB" in repr(pool)
        assert "in use by 4 storages" in repr(pool)
        assert "dram 0 B of" not in repr(pool)
        assert "\n" not in repr(pool)
        del kept, storage


def test_a_closed_pool_says_so() -> None:
    pool = Pool("64KiB", dram="1MiB")
    pool.close()
    assert repr(pool) == "<Pool (closed): fast 64 KiB, dram 1 MiB>"


def test_a_pool_that_could_not_be_opened_has_one_too() -> None:
    assert repr(Pool.__new__(Pool)) == "<Pool that is not open>"


def test_it_waits_for_nobody() -> None:
    """A debugger asks in the middle of anything: every lock of the pool and its tiers is held meanwhile."""
    seen: list[str] = []
    dram = Dram("1MiB")
    with Pool("64KiB", [dram]) as pool:
        blocks = blocks_of(pool)
        with blocks.driver, blocks.ledger._lock, dram._space._lock, dram._lifecycle:
            thread = threading.Thread(target=lambda: seen.append(repr(pool)), daemon=True)
            thread.start()
            thread.join(20)
            assert seen
    assert farpool.Pool is Pool
