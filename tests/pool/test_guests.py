"""Guests of a pool take parts of its fast tier, also while other threads change its budget."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from farpool import BudgetError, PoolClosedError
from tests.pool.test_resident import BLOCK, READ, SECONDS, access, content, filled_pool, read


@dataclass(frozen=True)
class Visitor:
    name: str

    def end(self) -> bool:
        return True


def test_parts_taken_at_the_same_time_add_up() -> None:
    """A change of the budget waits for operands without the pool's lock, and another one may not begin in that time."""
    pool, storages = filled_pool(16)
    first, second = Visitor("first"), Visitor("second")
    with pool:
        held = [access(pool, storage, READ) for storage in storages]
        begun, ended = threading.Barrier(3), threading.Semaphore(0)

        def run(change: Callable[[], None]) -> None:
            begun.wait(SECONDS)
            change()
            ended.release()

        threads = [
            threading.Thread(target=run, args=(change,))
            for change in (lambda: pool.guests.enter(first, 4 * BLOCK), lambda: pool.guests.enter(second, 4 * BLOCK))
        ]
        for thread in threads:
            thread.start()
        begun.wait(SECONDS)
        assert not ended.acquire(timeout=0.5)
        for grant in held:
            pool.release(grant)
        for thread in threads:
            thread.join(SECONDS)
        assert pool.fast == 8 * BLOCK
        assert pool.ledger.total(tier="fast", owner="regions").reserved == 8 * BLOCK
        assert [read(pool, storage) for storage in storages] == [content(seed) for seed in range(16)]
        pool.guests.leave(first)
        pool.guests.leave(second)
        assert pool.fast == 16 * BLOCK


def test_a_part_as_large_as_the_tier_is_refused() -> None:
    pool, _ = filled_pool(1)
    with pool:
        with pytest.raises(BudgetError, match="visitor needs"):
            pool.guests.enter(Visitor("visitor"), pool.fast)
        assert pool.guests.names() == []


def test_no_guest_enters_a_pool_that_is_being_closed() -> None:
    pool, _ = filled_pool(1)
    with pool:
        assert pool.guests.end_all() == []
        with pytest.raises(PoolClosedError, match="visitor: the pool is being closed"):
            pool.guests.enter(Visitor("visitor"), BLOCK)
        assert pool.guests.names() == []
