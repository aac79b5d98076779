"""Debug mode: each planted misuse of the arena is found and named, and nothing is found where there is none."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from farpool import ConfigError, Dram, Faulty, LifetimeError, OrderError, Pool, PoolConfig, Verified
from farpool.memory.debug.memory import POISON, DeviceMemory
from farpool.memory.pager import Kind, Mode, Move, Transfer
from farpool.memory.pager.messages import Piece
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use, runs_of
from farpool.memory.pool import blocks_of
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tiers.device import HostArena
from tests.block_pools import block_pool

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE
_BLOCK = 4096


class Planted(BlockPool):
    """Storages by name, and a way past all accesses to their bytes."""

    def __init__(self) -> None:
        super().__init__(PoolConfig.make("64KiB", dram="4MiB", timeout=20, debug=True))
        self.names = 0

    def put(self, nbytes: int = _BLOCK, fill: int = 1) -> Storage:
        self.names += 1
        storage = self.allocate(nbytes, name=f"s{self.names}")
        self.touch(storage, WRITE, fill)
        return storage

    def touch(self, storage: Storage, mode: Mode = READ, fill: int = 1) -> int:
        """Access a storage; where it lay."""
        access = self.acquire([Use(storage, 0, storage.nbytes, mode)], "test.touch")
        (place,) = access.offsets
        if mode != READ:
            self.poke(place, bytes([fill]) * storage.nbytes)
        self.release(access)
        return place

    def poke(self, place: int, data: bytes) -> None:
        self.arena.view()[place : place + len(data)] = data

    def peek(self, place: int, nbytes: int) -> bytes:
        return bytes(self.arena.view()[place : place + nbytes])


@pytest.fixture
def pool() -> Iterator[Planted]:
    pool = Planted()
    yield pool
    pool._watch = None  # what the test planted is still there
    pool.force_close()


def poison(nbytes: int) -> bytes:
    return (POISON * nbytes)[:nbytes]


def test_what_a_dropped_storage_leaves_behind_is_poison(pool: Planted) -> None:
    storage = pool.put()
    place = pool.touch(storage)
    del storage
    assert pool.live == 0
    assert pool.peek(place, _BLOCK) == poison(_BLOCK)


def test_what_a_clean_block_leaves_behind_is_poison_until_another_takes_it(pool: Planted) -> None:
    pool.put()
    assert pool.peek(0, 1 << 16).count(POISON) >= ((1 << 16) - _BLOCK) // 2


def test_an_evicted_block_leaves_nothing_that_could_be_read(pool: Planted) -> None:
    kept = [pool.put(fill=7) for _ in range(15)]
    places = {pool.touch(storage) for storage in kept}
    large = pool.allocate(12 * _BLOCK, name="large")
    access = pool.acquire([Use(large, 0, large.nbytes, OVERWRITE)], "test.fill")
    try:
        gone = pool.peek(access.offsets[0], large.nbytes)
        assert gone == poison(large.nbytes)
    finally:
        pool.poke(access.offsets[0], bytes(large.nbytes))
        pool.release(access)
    assert len(places) == 15


def test_a_write_to_a_block_outside_an_access_is_found_when_it_is_used_next(pool: Planted) -> None:
    storage = pool.put()
    place = pool.touch(storage)
    pool.poke(place + 100, b"x")
    with pytest.raises(LifetimeError, match=rf"s1\) at arena offset {place}: changed .* last access .* was test.touch"):
        pool.touch(storage)


def test_a_write_to_a_block_outside_an_access_is_found_when_it_leaves(pool: Planted) -> None:
    storage = pool.put()
    pool.poke(pool.touch(storage) + 5, b"x")
    with pytest.raises(LifetimeError, match="changed while no access could write it"):
        _ = [pool.put() for _ in range(40)]
    del storage


def test_a_write_to_memory_that_was_given_up_is_found(pool: Planted) -> None:
    storage = pool.put()
    place = pool.touch(storage)
    del storage
    other = pool.put(fill=3)
    assert pool.touch(other) == place
    del other
    assert pool.live == 0
    pool.poke(place + 64, b"stale")
    with pytest.raises(LifetimeError, match=f"arena offset {place + 64}, which belongs to no block, was written to"):
        pool.put(100)


def test_a_write_through_an_access_that_was_to_read_names_op_and_operand(pool: Planted) -> None:
    storages = [pool.put(), pool.put()]
    access = pool.acquire([Use(s, 0, s.nbytes, READ) for s in storages], "aten.sneaky")
    pool.poke(access.offsets[1] + 9, b"x")
    with pytest.raises(LifetimeError, match=r"\(s2\) at arena offset \d+: aten.sneaky changed it, although"):
        pool.release(access)


def test_a_write_beside_an_operand_that_shares_a_block_is_found(pool: Planted) -> None:
    small = [pool.put(100) for _ in range(3)]
    assert len({storage.first for storage in small}) == 1
    access = pool.acquire([Use(small[1], 0, 100, WRITE)], "aten.wide")
    pool.poke(access.offsets[0], b"w" * 100)
    pool.release(access)
    access = pool.acquire([Use(small[1], 0, 100, WRITE)], "aten.wide")
    pool.poke(access.offsets[0], b"w" * 140)
    with pytest.raises(
        LifetimeError, match=r"aten.wide wrote to arena range .* \(s2\), outside the bytes that it was to write"
    ):
        pool.release(access)


def test_a_write_beyond_the_end_of_a_block_is_found(pool: Planted) -> None:
    storage = pool.allocate(1000, name="odd")
    access = pool.acquire([Use(storage, 0, 1000, OVERWRITE)], "aten.long")
    pool.poke(access.offsets[0], b"w" * 1003)
    with pytest.raises(LifetimeError, match=f"arena offset {access.offsets[0] + 1000}, which belongs to no block"):
        pool.release(access)


def test_a_block_that_is_moved_while_an_access_holds_it_is_found(pool: Planted) -> None:
    storage = pool.put()
    access = pool.acquire([Use(storage, 0, storage.nbytes, READ)], "aten.held")
    assert pool.pager.evict_for_test(storage.first)  # the planted fault: the pager does not care that somebody holds it
    with pytest.raises((LifetimeError, OrderError), match=r"aten.held as generation|which an access holds"):
        pool.release(access)


def test_bytes_that_come_back_changed_from_below_are_found(pool: Planted) -> None:
    storage = pool.put()
    others = [pool.put() for _ in range(30)]
    (tier,) = pool._lower.tiers
    block = pool.pager.block(storage.first)
    assert block.tier == 0
    assert block.place < 0
    memory = tier._memory  # type: ignore[attr-defined]
    memoryview(memory)[block.copy + 1] ^= 1
    with pytest.raises(LifetimeError, match="came back from below with other bytes than it left with"):
        pool.touch(storage)
    assert len(others) == 30


def test_a_transfer_that_lost_its_waits_is_found(pool: Planted) -> None:
    assert pool._watch is not None
    starting = pool._watch.starting

    def hasty(commands: Sequence[Transfer | Move]) -> None:
        starting([replace(c, after=()) if isinstance(c, Transfer) else c for c in commands])

    pool._watch.starting = hasty  # type: ignore[method-assign]
    storages = [pool.allocate(_BLOCK) for _ in range(40)]
    rng = random.Random(0)
    with pytest.raises(OrderError, match=r"does not wait for write-back|while write-back \d+"):
        all(pool.touch(rng.choice(storages), WRITE) >= 0 for _ in range(400))
    pool._watch.starting = starting  # type: ignore[method-assign]
    with pytest.raises(OrderError, match=r"does not wait for write-back|while write-back \d+"):
        pool.touch(storages[0])


def test_an_access_in_the_range_of_a_transfer_is_found_and_later_accesses_raise_it_too(pool: Planted) -> None:
    assert pool._watch is not None
    storage, other = pool.put(), pool.put()
    place = pool.pager.block(storage.first).place
    pool._watch._order._open[77] = Transfer(77, Kind.FETCH, 5, (Piece(0, 0, place, _BLOCK),), (), True)
    with pytest.raises(OrderError, match=r"test.touch was granted arena range .* while fetch 77 of block 5"):
        pool.touch(storage)
    assert pool.driver.granted == 0
    del pool._watch._order._open[77]
    for used in (other, storage):
        with pytest.raises(OrderError, match="while fetch 77 of block 5"):
            pool.touch(used)


def test_what_was_found_is_raised_by_each_later_access(pool: Planted) -> None:
    storage = pool.put()
    other = pool.put()
    pool.poke(pool.touch(storage), b"x")
    for _ in range(2):
        with pytest.raises(LifetimeError, match="s1"):
            pool.touch(storage)
    with pytest.raises(LifetimeError, match="s1"):
        pool.touch(other)


def test_what_was_written_after_the_last_access_is_found_when_the_pool_is_closed() -> None:
    pool = Planted()
    kept = pool.put()
    pool.poke(pool.touch(kept) + 1, b"x")
    with pytest.raises(LifetimeError, match="changed while no access could write it"), pool:
        pass
    assert pool.closed


def test_threads_that_write_and_read_one_shared_block_are_left_alone(pool: Planted) -> None:
    small = [pool.put(100) for _ in range(3)]
    reading = pool.acquire([Use(small[0], 0, 100, READ)], "read")
    writing = pool.acquire([Use(small[1], 0, 100, WRITE)], "write")
    pool.poke(writing.offsets[0], b"y" * 100)
    pool.release(reading)
    pool.release(writing)
    assert pool.touch(small[1]) == writing.offsets[0]


def test_a_range_promised_while_the_end_of_its_write_back_was_not_noted_is_not_reported(pool: Planted) -> None:
    kept = [pool.put() for _ in range(16)]
    new = pool.allocate(_BLOCK, name="new")
    place = pool.touch(kept[3])
    runs, _ = runs_of([Use(new, 0, _BLOCK, OVERWRITE)])
    with pool.driver:
        assert pool.pager.evict_for_test(kept[3].first)
        pool.driver.start()
        assert pool._queue.wait(20)
        grant = pool.pager.request(runs)
        assert pool.pager.place_of(runs[0]) < 0
        assert pool.pager.block(new.first).place == place
        pool.driver.note_ends()  # as `release` does, with what the pager has decided not yet started
        assert pool._watch is not None
        pool._watch.raise_findings()
        assert pool.peek(place, _BLOCK) == poison(_BLOCK)
        pool.pager.abandon(grant)
        pool.driver.start()
    assert pool.touch(new, WRITE) == place


@pytest.mark.parametrize("seed", range(4))
def test_a_random_program_with_failing_tiers_finds_nothing(seed: int) -> None:
    rng = random.Random(seed)
    tier = Verified(Faulty(Dram("4MiB"), seed=seed, fail_reads=0.05, fail_writes=0.05))
    with block_pool("64KiB", [tier], timeout=20, debug=True) as pool:
        storages: list[tuple[Storage, bytearray]] = []
        for _ in range(400):
            first = len(storages) < 30
            try:
                if first:
                    nbytes = rng.choice([1, 100, 500, 1000, _BLOCK, 3 * _BLOCK + 5])
                    storages.append((pool.allocate(nbytes), bytearray(nbytes)))
                    fresh, expected = storages[-1]
                    access = pool.acquire([Use(fresh, 0, nbytes, OVERWRITE)], "first")
                elif rng.random() < 0.1:
                    del storages[rng.randrange(len(storages))]
                    continue
                else:
                    fresh, expected = rng.choice(storages)
                    access = pool.acquire([Use(fresh, 0, fresh.nbytes, rng.choice([READ, WRITE]))], "again")
            except OSError:
                if len(storages) and not any(storages[-1][1]):
                    storages.pop()
                continue
            view = pool.arena.view()[access.offsets[0] : access.offsets[0] + fresh.nbytes]
            if first:
                expected[:] = bytes([rng.randint(1, 255)]) * fresh.nbytes
                view[:] = expected
            assert view == expected
            pool.release(access)
            del fresh
        assert pool.pager.counters.write_backs
        storages.clear()


def test_memory_that_cannot_be_read_is_poisoned_and_the_order_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    arenas: list[HostArena] = []

    class Queue:
        def fill(self, address: int, nbytes: int, value: int) -> None:
            place = address - arenas[0].address
            assert place % 2 == nbytes % 2 == 0
            arenas[0].view()[place : place + nbytes] = value.to_bytes(2, sys.byteorder) * (nbytes // 2)

    def memory(arena: HostArena) -> DeviceMemory:
        arenas.append(arena)
        return DeviceMemory(arena.address, Queue())  # type: ignore[arg-type]

    monkeypatch.setattr("farpool.memory.debug.HostMemory", memory)
    pool = Planted()
    with pool:
        storages = [pool.put(fill=index + 1) for index in range(40)]
        for index in random.Random(0).choices(range(40), k=200):
            place = pool.touch(storages[index])
            assert pool.peek(place, _BLOCK) == bytes([index + 1]) * _BLOCK
        del storages
        assert pool.live == 0
        assert pool.peek(place, _BLOCK) == poison(_BLOCK)
        storage = pool.put()
        access = pool.acquire([Use(storage, 0, storage.nbytes, READ)], "aten.held")
        assert pool.pager.evict_for_test(storage.first)
        with pytest.raises((LifetimeError, OrderError), match=r"aten.held as generation|which an access holds"):
            pool.release(access)
        pool._watch = None  # what the test planted is still there


def test_a_pool_is_debugged_where_the_environment_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARPOOL_DEBUG", "1")
    with Pool("64KiB") as pool, Pool("64KiB", debug=False) as plain:
        assert blocks_of(pool)._watch is not None
        assert blocks_of(plain)._watch is None
    monkeypatch.setenv("FARPOOL_DEBUG", "perhaps")
    with pytest.raises(ConfigError, match=r"FARPOOL_DEBUG.*perhaps"):
        Pool("64KiB")


def test_without_debug_mode_nothing_of_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FARPOOL_DEBUG", raising=False)
    with block_pool("64KiB", dram="1MiB") as pool:
        assert pool._watch is None
        assert not pool.driver.attention, "an access is one native call"
