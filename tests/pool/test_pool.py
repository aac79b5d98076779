"""The pool on real tiers: bytes come back, budgets hold, faults are typed errors, accounts add up."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import farpool
from farpool import Dram, Event, Faulty, Nvme, Remote, Throttled, TierError, Verified
from farpool.cluster.node.process import running_node
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tiers import SafetensorsFile
from farpool.memory.tiers.device import HostArena
from tests.block_pools import block_pool

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE


def write(pool: BlockPool, storage: Storage, content: bytes) -> None:
    """Fill a storage, block by block."""
    for start, stop in storage.pieces():
        access = pool.acquire([Use(storage, start, stop, OVERWRITE)], "write")
        (offset,) = access.offsets
        pool.arena.view()[offset : offset + stop - start] = content[start:stop]
        pool.release(access)


def read(pool: BlockPool, storage: Storage) -> bytes:
    """A storage's bytes, block by block."""
    parts = []
    for start, stop in storage.pieces():
        access = pool.acquire([Use(storage, start, stop, READ)], "read")
        (offset,) = access.offsets
        parts.append(bytes(pool.arena.view()[offset : offset + stop - start]))
        pool.release(access)
    return b"".join(parts)


def content(seed: int, nbytes: int) -> bytes:
    return random.Random(seed).randbytes(nbytes)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with running_node(ephemeral=True) as a, running_node(ephemeral=True) as b:
        yield [a.address, b.address]


@pytest.fixture(params=["dram", "nvme", "both", "tcp", "mapped"])
def pool(request: pytest.FixtureRequest, tmp_path: Path, nodes: list[str]) -> Iterator[BlockPool]:
    tiers = {
        "dram": lambda: [Dram("4MiB")],
        "nvme": lambda: [Nvme(tmp_path / "far.pool", "4MiB")],
        "both": lambda: [Dram("512KiB"), Nvme(tmp_path / "far.pool", "4MiB")],
        "tcp": lambda: [Remote(*nodes, size="4MiB", transport="tcp")],
        "mapped": lambda: [Remote(*nodes, size="4MiB", transport="mapped")],
    }[request.param]()
    with block_pool("256KiB", tiers, timeout=20) as pool:
        yield pool


def test_bytes_larger_than_the_budget_come_back(pool: BlockPool) -> None:
    sizes = [1, 63, 100, 4096, 70_000, 300_000, 0, 1_000_000]
    storages = [pool.allocate(nbytes) for nbytes in sizes]
    for seed, storage in enumerate(storages):
        write(pool, storage, content(seed, storage.nbytes))
    for _ in range(2):
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed, storage.nbytes)
    assert pool.stats().fast.peak <= 256 << 10


def test_a_range_that_spans_blocks_is_contiguous(pool: BlockPool) -> None:
    storage = pool.allocate(200_000)
    assert storage.count > 4
    data = content(7, storage.nbytes)
    write(pool, storage, data)
    filler = pool.allocate(230_000)
    write(pool, filler, content(8, filler.nbytes))
    for start, stop in [(0, 200_000), (5, 60_000), (100_000, 199_999), (1, 200_000)]:
        access = pool.acquire([Use(storage, start, stop, READ)], "read")
        assert bytes(pool.arena.view()[access.offsets[0] : access.offsets[0] + stop - start]) == data[start:stop]
        pool.release(access)


def test_overlapping_uses_see_the_same_memory(pool: BlockPool) -> None:
    storage = pool.allocate(100_000)
    write(pool, storage, content(1, storage.nbytes))
    access = pool.acquire([Use(storage, 0, 60_000, READ), Use(storage, 40_000, 100_000, WRITE)], "both")
    first, second = access.offsets
    assert second - first == 40_000
    pool.release(access)


def test_a_dropped_storage_is_freed(pool: BlockPool) -> None:
    for _ in range(50):
        storage = pool.allocate(900_000)
        write(pool, storage, bytes(storage.nbytes))
    assert pool.live == 1
    del storage
    assert pool.live == 0
    assert all(c.live == 0 for c in pool.stats().classes)


def test_operands_beyond_the_budget_are_refused_with_the_budget_that_works() -> None:
    with block_pool("64KiB", dram="4MiB") as pool:
        storages = [pool.allocate(nbytes, name=f"w{nbytes}") for nbytes in (50_000, 30_000, 100)]
        for storage in storages:
            write(pool, storage, bytes(storage.nbytes))
        with pytest.raises(farpool.BudgetError, match=r"aten.addmm.*w50000") as caught:
            pool.acquire([Use(s, 0, s.nbytes, READ) for s in storages], "aten.addmm")
        assert isinstance(caught.value, MemoryError)
        assert read(pool, storages[0]) == bytes(50_000)
    with block_pool(caught.value.needed, dram="4MiB") as pool:
        storages = [pool.allocate(nbytes) for nbytes in (50_000, 30_000, 100)]
        access = pool.acquire([Use(s, 0, s.nbytes, READ) for s in storages], "aten.addmm")
        pool.release(access)


def test_more_than_all_tiers_hold_is_refused() -> None:
    with block_pool("64KiB", dram="64KiB") as pool:
        kept = pool.allocate(100_000)
        with pytest.raises(farpool.PoolFullError, match="do not fit"):
            pool.allocate(50_000)
        write(pool, kept, content(3, kept.nbytes))
        assert read(pool, kept) == content(3, kept.nbytes)


def test_a_pool_without_lower_tiers_works_until_it_is_full() -> None:
    with block_pool("64KiB") as pool:
        storages = [pool.allocate(10_000) for _ in range(6)]
        for seed, storage in enumerate(storages):
            write(pool, storage, content(seed, 10_000))
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed, 10_000)
        with pytest.raises(farpool.PoolFullError):
            pool.allocate(10_000)


def test_resizing_keeps_bytes_and_gives_memory_back(pool: BlockPool) -> None:
    storages = [pool.allocate(60_000) for _ in range(10)]
    for seed, storage in enumerate(storages):
        write(pool, storage, content(seed, storage.nbytes))
    for fast in ("128KiB", "1MiB", "96KiB"):
        pool.resize(fast=fast)
        assert pool.stats().fast.reserved <= pool.fast
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed, storage.nbytes)
    for wrong in (0, -1, "much", "1000TiB"):
        with pytest.raises(farpool.ConfigError):
            pool.resize(fast=wrong)
    assert pool.fast == 96 << 10


def test_closing_with_live_storages_is_refused() -> None:
    pool = block_pool("64KiB", dram="1MiB")
    storage = pool.allocate(100)
    with pytest.raises(farpool.PoolClosedError, match="1 live"):
        pool.close()
    del storage
    pool.close()
    pool.close()
    with pytest.raises(farpool.PoolClosedError):
        pool.allocate(1)
    with pytest.raises(farpool.PoolClosedError):
        pool.stats()


def test_events_tell_what_moved() -> None:
    events: list[Event] = []
    with block_pool("64KiB", dram="1MiB") as pool:
        end = pool.subscribe(events.append)
        storages = [pool.allocate(10_000) for _ in range(12)]
        for storage in storages:
            write(pool, storage, bytes(10_000))
        for storage in storages:
            read(pool, storage)
        stats = pool.stats()
        end()
        count = len(events)
        read(pool, storages[0])
        assert len(events) == count
        kinds = {event.kind for event in events}
        assert {"create", "fetch", "writeback", "compute", "stall"} <= kinds
        for link in stats.links:
            moved = [e for e in events if (e.source, e.target) == (link.source, link.target)]
            assert len(moved) == link.transfers
            assert sum(event.nbytes for event in moved) == link.nbytes
        assert all(event.resident <= pool.fast for event in events)
        text = pool.explain()
        assert "dram" in text
        assert "stalls" in text


def test_the_last_events_arrive_before_a_subscription_ends() -> None:
    events: list[Event] = []
    with block_pool("64KiB", dram="1MiB") as pool:
        storages = [pool.allocate(10_000) for _ in range(5)]
        for storage in storages:
            write(pool, storage, bytes(10_000))
        end = pool.subscribe(events.append)
        for storage in storages:
            pool.demote(storage)  # begins write-backs, and no operation follows
        limit = time.monotonic() + 60
        while sum(link.nbytes for link in pool.stats().links) < 50_000:
            assert time.monotonic() < limit
        end()
        moved = [event.nbytes for event in events if event.kind == "writeback"]
        assert sum(moved) == sum(link.nbytes for link in pool.stats().links)
        count = len(events)
        later: list[Event] = []
        pool.subscribe(later.append)()
        assert (len(events), later) == (count, [])


def test_each_storage_that_is_freed_was_created(tmp_path: Path) -> None:
    events: list[Event] = []
    path = tmp_path / "weights.safetensors"
    save_file({"large": torch.zeros(10_000), "small": torch.zeros(10)}, path)
    with block_pool("64KiB", dram="1MiB") as pool, SafetensorsFile(path) as source:
        pool.subscribe(events.append)
        storages = [pool.allocate(nbytes, cls="weights") for nbytes in (200, 300, 10_000)]
        for storage in storages:
            write(pool, storage, bytes(storage.nbytes))
            pool.pack_at_first_use(storage)
        storages += [pool.adopt(source, entry.extent) for entry in source.tensors.values()]
        for storage in storages:
            read(pool, storage)
        del storages, storage
        assert pool.live == 0
    made, freed = (
        Counter((event.nbytes, event.cause) for event in events if event.kind == kind) for kind in ("create", "free")
    )
    assert made == freed
    assert made[40_000, "weights"] == 1


def test_a_subscription_ends_under_the_lock_of_the_pool(pool: BlockPool) -> None:
    end = pool.subscribe(lambda event: None)
    thread = threading.Thread(target=end)
    with pool.driver:
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        assert pool.account.listening
    thread.join(20)
    assert not thread.is_alive()
    assert not pool.account.listening
    end()  # once more changes nothing


def test_the_account_tells_how_many_rows_of_tables_were_in_place() -> None:
    with block_pool("64KiB", dram="1MiB") as pool:
        table = pool.allocate(40_960, cls="embedding")
        assert pool.stats().row_hit_rate == 1
        assert "rows of tables" not in pool.explain()
        write(pool, table, bytes(40_960))
        for _ in range(3):
            pool.release(pool.acquire([Use(table, 0, 100, READ), Use(table, 8_192, 8_200, READ)], "rows", rows=True))
        stats = pool.stats()
        assert stats.row_accesses == 6
        assert stats.row_hits == 6
        assert "rows of tables: 6 blocks looked up, 100.0% in place; kept by recency" in pool.explain()


def test_the_account_tells_rows_of_several_tables_apart() -> None:
    with block_pool("64KiB", dram="1MiB") as pool:
        users, moments, items = (
            pool.allocate(81_920, cls="embedding", name=name) for name in ("users", "users", "items")
        )
        for table in (users, moments, items):
            for start in range(0, 81_920, 8_192):
                pool.release(pool.acquire([Use(table, start, start + 8_192, OVERWRITE)]))

        def look_up(table: Storage, *rows: int) -> None:
            for row in rows:
                use = Use(table, row * 4_096, row * 4_096 + 8, READ)
                pool.release(pool.acquire([use], "rows", rows=True))

        look_up(users, 0, 0, 0)  # the first is fetched
        look_up(items, 19)  # written last, so it is there
        look_up(moments, 1)
        look_up(users, 0)
        tables = [(table.name, table.row_accesses, table.row_hits) for table in pool.stats().tables]
        assert tables == [("items", 1, 1), ("users", 5, 3)]
        text = pool.explain()
        assert "rows of tables: 6 blocks looked up, 66.7% in place" in text
        assert "\n  items: 1, 100.0% in place\n  users: 5, 60.0% in place\n" in text
        del items, table
        assert [table.name for table in pool.stats().tables] == ["users"]
        assert "\n  users:" not in pool.explain()  # the line above says it all
        again = pool.allocate(81_920, cls="embedding", name="again")  # in the place of what was dropped
        assert [table.name for table in pool.stats().tables] == ["users"]
        assert pool.stats().row_accesses == 6
        del again


WRONG: dict[str, dict[str, object]] = {
    "a budget of 0": {"fast": 0},
    "a negative budget": {"fast": -5},
    "no size": {"fast": "lots"},
    "larger than memory": {"fast": "4000TiB"},
    "a truth value": {"fast": True},
    "an unknown tier": {"fast": "1MiB", "tiers": ["dram"]},
    "two tiers of one name": {"fast": "1MiB", "tiers": [Dram("1MiB"), Dram("2MiB")]},
    "a tier of 0": {"fast": "1MiB", "dram": "0"},
    "tiers twice": {"fast": "1MiB", "dram": "1MiB", "tiers": [Dram("1MiB")]},
    "an unknown device": {"fast": "1MiB", "device": "tpu"},
    "no timeout": {"fast": "1MiB", "timeout": 0},
}


@pytest.mark.parametrize("setting", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_setting_is_a_clear_error(setting: dict[str, object]) -> None:
    with pytest.raises(farpool.ConfigError):
        block_pool(**setting)  # type: ignore[arg-type]


def test_a_tier_that_cannot_be_opened_leaves_nothing_open(tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    first = tmp_path / "first.pool"
    with pytest.raises(farpool.ConfigError):
        block_pool("1MiB", [Nvme(first, "1MiB", name="a"), Nvme(tmp_path / "no" / "second.pool", "1MiB", name="b")])
    assert not first.exists()
    assert set(os.listdir("/proc/self/fd")) <= before  # what earlier tests left may be gone by now


def test_a_corrupted_block_is_a_typed_error_with_tier_and_block() -> None:
    with block_pool("64KiB", [Verified(Faulty(Dram("4MiB"), corrupt_reads=1.0))], timeout=20) as pool:
        storages = [pool.allocate(10_000) for _ in range(20)]
        for seed, storage in enumerate(storages):
            write(pool, storage, content(seed, 10_000))
        caught: list[tuple[str, int | None]] = []
        for seed, storage in enumerate(storages):
            try:
                assert read(pool, storage) == content(seed, 10_000)
            except farpool.ChecksumError as error:
                caught.append((error.tier, error.block))
        assert len(caught) > 10
        assert all(tier == "dram" and block is not None for tier, block in caught)
        assert pool.stats().fast.reserved <= pool.fast


@pytest.mark.parametrize("seed", range(3))
def test_transfers_that_fail_now_and_then_lose_nothing(seed: int) -> None:
    with block_pool(
        "64KiB", [Verified(Faulty(Dram("4MiB"), seed=seed, fail_reads=0.1, fail_writes=0.1))], timeout=20
    ) as pool:
        storages = [pool.allocate(9_000) for _ in range(20)]
        held: dict[int, bytes] = {}
        errors = 0
        rng = random.Random(seed)
        for step in range(400):
            index = rng.randrange(20)
            try:
                if index not in held or rng.random() < 0.4:
                    fresh = content(step, 9_000)
                    write(pool, storages[index], fresh)
                    held[index] = fresh
                else:
                    assert read(pool, storages[index]) == held[index]
            except farpool.TierError:
                errors += 1
                if index in held and storages[index].count > 1:
                    del held[index]  # written in part
        assert errors
        stats = pool.stats()
        assert stats.fast.reserved <= pool.fast
        assert sum(c.live for c in stats.classes) == 20 * 9_000


def test_a_tier_that_stalls_is_an_error_within_the_timeout() -> None:
    tier = Faulty(Dram("4MiB"), stall=1.0, stall_seconds=30.0)
    with block_pool("64KiB", [tier], timeout=0.5) as pool:
        storages = [pool.allocate(10_000) for _ in range(10)]
        with pytest.raises(farpool.TierTimeoutError, match="dram") as caught:
            [write(pool, storage, bytes(10_000)) for storage in storages]
        assert isinstance(caught.value, TimeoutError)
        assert pool.stats().fast.reserved <= pool.fast
        tier.close()


def test_threads_share_a_pool(pool: BlockPool) -> None:
    storages = [pool.allocate(30_000) for _ in range(24)]
    for seed, storage in enumerate(storages):
        write(pool, storage, content(seed, 30_000))
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(150):
                picked = rng.sample(range(24), 3)
                access = pool.acquire([Use(storages[i], 0, 30_000, READ) for i in picked], "work")
                for i, offset in zip(picked, access.offsets, strict=True):
                    assert bytes(pool.arena.view()[offset : offset + 30_000]) == content(i, 30_000)
                pool.release(access)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures


def test_a_forked_child_finds_the_pool_closed(pool: BlockPool) -> None:
    storage = pool.allocate(1000)
    write(pool, storage, content(1, 1000))
    child = os.fork()
    if child == 0:
        try:
            read(pool, storage)
        except farpool.PoolClosedError:
            os._exit(7)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert read(pool, storage) == content(1, 1000)


def test_small_storages_are_packed_in_the_order_of_their_first_use(pool: BlockPool) -> None:
    storages = [pool.allocate(200, cls="weights") for _ in range(60)]
    for seed, storage in enumerate(storages):
        write(pool, storage, content(seed, 200))
        pool.pack_at_first_use(storage)
    order = list(range(60))
    random.Random(0).shuffle(order)
    for _ in range(2):
        for seed in order:
            assert read(pool, storages[seed]) == content(seed, 200)
    places = [(storages[seed].first, storages[seed].offset) for seed in order]
    assert places == sorted(places)
    assert len({first for first, _ in places}) == 1
    del storages[10:], storage
    assert pool.live == 10
    for seed, storage in enumerate(storages):
        assert read(pool, storage) == content(seed, 200)


def test_a_storage_whose_packing_fails_keeps_its_place_and_nothing_stays_pinned(
    pool: BlockPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = pool.allocate(200, cls="weights")
    write(pool, storage, content(1, 200))
    pool.pack_at_first_use(storage)

    class Lost:
        """The pool's driver, on a device that cannot copy any more."""

        def __getattr__(self, name: str) -> object:
            return getattr(pool.driver, name)

        def __enter__(self) -> None:
            pool.driver.__enter__()

        def __exit__(self, *error: object) -> None:
            pool.driver.__exit__(*error)

        def move(self, source: int, target: int, nbytes: int) -> None:
            raise RuntimeError("the device is lost")

    with monkeypatch.context() as patched:
        patched.setattr(pool._packing, "_driver", Lost())
        with pytest.raises(RuntimeError, match="the device is lost"):
            read(pool, storage)
    assert pool.driver.granted == 0
    assert pool.live == 1
    assert read(pool, storage) == content(1, 200)


def test_a_device_that_is_not_there_is_a_clear_error() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(farpool.ConfigError, match="no CUDA device"):
        block_pool("1MiB", device="cuda")


def test_a_device_with_a_number_is_refused_with_what_to_do_instead() -> None:
    with pytest.raises(farpool.ConfigError, match=r"device: 'cuda:1' is not known; .*set_device"):
        block_pool("1MiB", device="cuda:1")


def test_small_storages_are_aligned_as_the_device_aligns_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostArena, "alignment", 512)
    with block_pool("64KiB", dram="1MiB") as pool:
        storages = [pool.allocate(nbytes) for nbytes in (40, 100, 64, 4000, 24, 513, 12)]
        for storage in storages:
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            assert access.offsets[0] % 512 == 0
            pool.release(access)
        del storages, storage


def test_an_access_that_failed_keeps_nothing_alive() -> None:
    """Its error has a traceback, the traceback frames, and these what they worked on."""

    def attempt(pool: BlockPool, storage: Storage) -> weakref.ref[Storage]:
        with pytest.raises(TierError):
            read(pool, storage)
        return weakref.ref(storage)

    with block_pool("64KiB", [Faulty(Dram("4MiB"), fail_reads=1.0)]) as pool:
        storages = [pool.allocate(20_000) for _ in range(10)]
        for storage in storages:
            write(pool, storage, content(0, 20_000))
        kept = attempt(pool, storages.pop(0))
        gc.collect()
        assert kept() is None


def test_closing_waits_for_operands_in_use() -> None:
    pool = block_pool("64KiB", dram="1MiB", timeout=20)
    storage = pool.allocate(1000)
    access = pool.acquire([Use(storage, 0, 1000, OVERWRITE)], "held")
    closing = threading.Thread(target=pool.__exit__, args=(None, None, None))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    pool.arena.view()[access.offsets[0]] = 1
    pool.release(access)
    closing.join(20)
    assert not closing.is_alive()


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupted_wait_leaves_nothing_pinned() -> None:
    with block_pool("64KiB", [Throttled(Dram(4 << 20), 2e5, 1e9)]) as pool:
        storages = [pool.allocate(20_000) for _ in range(10)]
        for seed, storage in enumerate(storages):
            write(pool, storage, content(seed, 20_000))
        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(KeyboardInterrupt):
                all(read(pool, storage) for storage in storages)  # takes a second
        finally:
            signal.signal(signal.SIGALRM, before)
        for seed, storage in enumerate(storages):
            assert read(pool, storage) == content(seed, 20_000)
        access = pool.acquire([Use(s, 0, 20_000, READ) for s in storages[:3]], "all of it")
        pool.release(access)


def test_threads_that_first_use_a_storage_together_see_its_bytes(pool: BlockPool) -> None:
    storages = [pool.allocate(200, cls="weights") for _ in range(64)]
    for seed, storage in enumerate(storages):
        write(pool, storage, content(seed, 200))
        pool.pack_at_first_use(storage)
    filler = [pool.allocate(100_000) for _ in range(4)]
    for seed, storage in enumerate(filler):
        write(pool, storage, content(seed, 100_000))
    wrong: list[int] = []
    start = threading.Barrier(4)

    def work(number: int) -> None:
        start.wait(10)
        for seed, storage in enumerate(storages):
            if read(pool, storage) != content(seed, 200):
                wrong.append(seed)
            if seed % 8 == number:
                read(pool, filler[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    assert not any(storage.loose for storage in storages)
