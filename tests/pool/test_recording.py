"""A recording has what the program did, costs the program nothing but time, and survives what happens to it."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from farpool.errors import PoolClosedError, TapeFileError, TapeTruncatedError
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Storage
from farpool.memory.pager.use import Use
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.tape import Access, Content, Create, Free, Record, Run, TapeFile
from tests.block_pools import block_pool
from tests.forking import in_forked_child

READ, WRITE, OVERWRITE = Mode.READ, Mode.WRITE, Mode.OVERWRITE


def touch(pool: BlockPool, storage: Storage, mode: Mode, op: str = "touch", *, rows: bool = False) -> None:
    for start, stop in storage.pieces():
        pool.release(pool.acquire([Use(storage, start, stop, mode)], op, rows=rows))


def accesses(records: list[Record]) -> list[Access]:
    return [record for record in records if isinstance(record, Access)]


def cut_off(path: Path) -> list[Record]:
    """What can be read of a recording that was not closed."""
    found: list[Record] = []
    try:
        for record in TapeFile(path):
            found.append(record)
    except TapeTruncatedError:
        return found
    raise AssertionError("the recording was closed")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "program.tape"


@pytest.fixture
def pool() -> BlockPool:
    with block_pool("256KiB", dram="4MiB", timeout=20) as pool:
        yield pool


def test_blocks_accesses_and_frees_are_recorded_in_order(pool: BlockPool, path: Path) -> None:
    with pool.record(path):
        storage = pool.allocate(40_000, cls="weights", name="w")
        touch(pool, storage, OVERWRITE, "fill")
        pool.release(pool.acquire([Use(storage, 0, 40_000, READ)], "sum"))
        pool.release(pool.acquire([Use(storage, 0, 100, READ)], "rows", rows=True))
        first, count = storage.first, storage.count
        del storage
        assert pool.live == 0
    made, *others, freed = TapeFile(path)
    assert made == Create(first, 3, 16384, 40_000 - 2 * 16384, "weights", "w", Content.NONE, 0)
    assert [(record.op, record.runs) for record in accesses(others)] == [
        *(("fill", (Run(first + block, 1, OVERWRITE),)) for block in range(3)),
        ("sum", (Run(first, 3, READ),)),
        ("rows", (Run(first, 1, READ, first),)),
    ]
    assert freed == Free(first, count)


def test_the_header_says_what_the_pool_is(pool: BlockPool, path: Path) -> None:
    with pool.record(path):
        pass
    metadata = TapeFile(path).metadata
    assert (metadata.budget, metadata.device) == (256 << 10, "cpu")
    assert [(tier.name, tier.capacity) for tier in metadata.tiers] == [("dram", 4 << 20)]
    assert metadata.cut == pool.allocation.sizes


def test_what_lives_already_comes_first_with_its_name_and_content(pool: BlockPool, path: Path) -> None:
    full = pool.allocate(40_000, name="full")
    part = pool.allocate(40_000, name="part")
    touch(pool, full, OVERWRITE)
    pool.release(pool.acquire([Use(part, 16384, 32768, OVERWRITE)], "write"))
    with pool.record(path):
        pass
    creates = [(record.name, record.count, record.content) for record in TapeFile(path) if isinstance(record, Create)]
    assert creates == [
        ("full", 3, Content.POOL),
        ("part", 1, Content.NONE),
        ("part", 1, Content.POOL),
        ("part", 1, Content.NONE),
    ]


def test_storages_that_share_a_block_make_one_record(pool: BlockPool, path: Path) -> None:
    with pool.record(path):
        small = [pool.allocate(100, name=f"small{number}") for number in range(3)]
        del small
        assert pool.live == 0
    made, freed = TapeFile(path)
    assert isinstance(made, Create)
    assert (made.name, made.count) == ("small0", 1)
    assert freed == Free(made.first, 1)


def test_times_are_split_into_think_stall_and_compute(pool: BlockPool, path: Path) -> None:
    storages = [pool.allocate(16_384) for _ in range(40)]
    for storage in storages:
        touch(pool, storage, OVERWRITE)
    began = time.perf_counter()
    with pool.record(path):
        time.sleep(0.02)
        access = pool.acquire([Use(storages[-1], 0, 16_384, READ)], "slow")
        time.sleep(0.03)
        pool.release(access)
        touch(pool, storages[0], READ, "absent")
    whole = time.perf_counter() - began
    slow, absent = accesses(list(TapeFile(path)))
    assert slow.think >= 0.0199
    assert slow.stall == 0
    assert slow.compute >= 0.0299
    assert absent.stall > 0
    assert sum((access.think + access.stall + access.compute for access in (slow, absent)), 0.0) <= whole


def test_several_recordings_at_once_have_the_same_accesses(pool: BlockPool, tmp_path: Path) -> None:
    storage = pool.allocate(16_384)
    with pool.record(tmp_path / "outer.tape"):
        touch(pool, storage, OVERWRITE, "first")
        with pool.record(tmp_path / "inner.tape"):
            touch(pool, storage, READ, "second")
        touch(pool, storage, READ, "third")
    outer, inner = (accesses(list(TapeFile(tmp_path / name))) for name in ("outer.tape", "inner.tape"))
    assert [access.op for access in outer] == ["first", "second", "third"]
    assert [access.op for access in inner] == ["second"]
    assert inner[0].compute == pytest.approx(outer[1].compute, abs=2e-7)


def test_threads_have_numbers_and_times_of_their_own(pool: BlockPool, path: Path) -> None:
    storages = [pool.allocate(16_384) for _ in range(4)]
    start = threading.Barrier(4)

    def work(storage: Storage) -> None:
        start.wait(20)
        for _ in range(700):
            touch(pool, storage, WRITE, str(storage.first))

    with pool.record(path):
        threads = [threading.Thread(target=work, args=(storage,)) for storage in storages]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    found = accesses(list(TapeFile(path)))
    assert len(found) == 4 * 700
    assert len({(access.thread, access.op) for access in found}) == 4
    assert {access.thread for access in found} == {0, 1, 2, 3}


def test_an_access_that_is_under_way_at_the_end_is_left_out(pool: BlockPool, path: Path) -> None:
    storages = [pool.allocate(16_384) for _ in range(2)]
    recording = pool.record(path)
    held = pool.acquire([Use(storages[0], 0, 1, WRITE)], "held")
    touch(pool, storages[1], OVERWRITE, "ended")
    recording.close()
    pool.release(held)
    assert [access.op for access in accesses(list(TapeFile(path)))] == ["ended"]


def test_a_refused_access_is_not_recorded(pool: BlockPool, path: Path) -> None:
    storage = pool.allocate(1 << 20)
    with pool.record(path), pytest.raises(MemoryError):
        pool.acquire([Use(storage, 0, 1 << 20, READ)], "too large")
    assert accesses(list(TapeFile(path))) == []


def test_the_pool_completes_its_recordings_when_it_closes(path: Path) -> None:
    with block_pool("256KiB", dram="4MiB") as pool:
        recording = pool.record(path)
        touch(pool, pool.allocate(16_384), OVERWRITE)
    assert len(accesses(list(TapeFile(path)))) == 1
    recording.close()
    with pytest.raises(PoolClosedError):
        pool.record(path)


def test_a_long_recording_is_on_disk_before_it_ends(pool: BlockPool, path: Path) -> None:
    storage = pool.allocate(16_384)
    recording = pool.record(path)
    for _ in range(2500):
        touch(pool, storage, WRITE)
    assert 1000 < len(cut_off(path)) < 2500
    recording.close()
    assert len(accesses(list(TapeFile(path)))) == 2500


def test_an_ordinary_loop_takes_well_below_twenty_bytes_an_access(pool: BlockPool, path: Path) -> None:
    storages = [pool.allocate(16_384) for _ in range(60)]
    with pool.record(path):
        for _ in range(30):
            for number, storage in enumerate(storages):
                touch(pool, storage, WRITE, f"op{number % 7}")
    assert path.stat().st_size < 12 * 60 * 30


def test_a_full_disk_ends_the_recording_and_not_the_program(pool: BlockPool, path: Path) -> None:
    storage = pool.allocate(16_384)
    recording = pool.record(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        for _ in range(12_000):
            touch(pool, storage, WRITE)
        assert not pool.recorder.recordings
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    with pytest.raises(TapeFileError, match=r"ended early, .*program.tape could not be written: .*File too large"):
        recording.close()
    recording.close()
    assert 0 < len(cut_off(path)) < 12_000


def test_an_error_of_the_program_is_not_hidden_by_one_of_the_recording(
    pool: BlockPool, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    def program() -> None:
        with pool.record(path):
            touch(pool, pool.allocate(16_384), OVERWRITE)
            monkeypatch.setattr(os, "pwrite", full)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()


def test_a_forked_child_leaves_the_file_to_its_parent(pool: BlockPool, path: Path) -> None:
    storage = pool.allocate(16_384)
    with pool.record(path) as recording:
        touch(pool, storage, OVERWRITE, "before")
        if (child := os.fork()) == 0:
            try:
                recording.close()
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        touch(pool, storage, READ, "after")
    assert [access.op for access in accesses(list(TapeFile(path)))] == ["before", "after"]


def test_a_forked_child_closes_a_recording_even_if_a_thread_of_the_parent_held_its_locks(
    pool: BlockPool, path: Path
) -> None:
    with pool.record(path) as recording:
        with pool.recorder._changing, recording._writing:  # as a thread that is just ending another recording
            in_forked_child(recording.close)
        touch(pool, pool.allocate(16_384), OVERWRITE)
    assert len(accesses(list(TapeFile(path)))) == 1


def test_a_forked_child_that_ends_an_access_of_its_parent_writes_nothing(pool: BlockPool, path: Path) -> None:
    storage = pool.allocate(16_384)
    with pool.record(path) as recording:
        held = pool.acquire([Use(storage, 0, 16_384, WRITE)], "held")
        size = path.stat().st_size
        recording._written = 0  # long ago, so that a write is due

        def child() -> None:
            pool.release(held)
            assert path.stat().st_size == size

        in_forked_child(child)
        pool.release(held)
    assert [access.op for access in accesses(list(TapeFile(path)))] == ["held"]


KILLED = """
import sys
from farpool import PoolConfig
from farpool.memory.pool.block_pool import BlockPool
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
with BlockPool(PoolConfig.make("256KiB", dram="4MiB")) as pool:
    storages = [pool.allocate(16_384) for _ in range(30)]
    with pool.record(sys.argv[1]):
        while True:
            for number, storage in enumerate(storages):
                pool.release(pool.acquire([Use(storage, 0, 16_384, Mode.WRITE)], f"op{number}"))
"""


def test_what_was_recorded_before_a_kill_is_read(path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)]) as program:
        deadline = time.monotonic() + 60
        while not (path.exists() and path.stat().st_size > 20_000):
            assert program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        program.send_signal(signal.SIGKILL)
        program.wait(20)
    ops = [access.op for access in accesses(cut_off(path))]
    assert len(ops) > 1000
    assert ops == [f"op{number % 30}" for number in range(len(ops))]
