import gc
import json
import threading
import time
import weakref
from pathlib import Path

import pytest

from farpool.errors import ConfigError, TierError, TierFullError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.tiers import Dram, Faulty, Nvme, Traced, TraceRecord
from tests.block_pools import block_pool

WAIT = 30


def shape(record: TraceRecord) -> tuple[object, ...]:
    """What does not depend on time."""
    return (record.op, record.offset, record.nbytes, record.error)


def test_each_operation_is_noted_with_its_extent_and_its_error() -> None:
    begin = time.monotonic()
    with Traced(Faulty(Dram("1MiB"), script={1: "fail"})) as tier:
        extent = tier.reserve(100)
        other = tier.reserve(64)
        tier.write_from(other, memoryview(bytes(64)))
        with pytest.raises(TierError):
            tier.write_from(other, memoryview(bytes(64)))
        tier.read_into(other, memoryview(bytearray(64)))
        tier.free(other)
        with pytest.raises(ValueError, match="not reserved"):
            tier.free(other)
        with pytest.raises(TierFullError):
            tier.reserve(1 << 20)
        with pytest.raises(ValueError, match="buffer"):
            tier.read_into(extent, memoryview(bytearray(99)))
        records = tier.records()
    assert [shape(record)[:3] for record in records] == [
        ("reserve", 0, 100),
        ("reserve", 128, 64),
        ("write", 128, 64),
        ("write", 128, 64),
        ("read", 128, 64),
        ("free", 128, 64),
        ("free", 128, 64),
        ("reserve", None, 1 << 20),
        ("read", 0, 100),
    ]
    errors = [(record.error or "").partition(":")[0] for record in records]
    assert errors == ["", "", "", "TierError", "", "", "ValueError", "TierFullError", "ValueError"]
    assert "failed on purpose" in (records[3].error or "")
    assert {record.tier for record in records} == {"dram"}
    assert all(record.time >= begin and record.duration >= 0 for record in records)
    assert [record.time for record in records] == sorted(record.time for record in records)


def test_a_transfer_is_noted_when_it_has_ended() -> None:
    with Traced(Faulty(Dram("1MiB"), script={0: "stall"}, stall_seconds=0.1)) as tier:
        tier.write_from(tier.reserve(10), memoryview(bytes(10)))
        reserved, written = tier.records()
        assert (reserved.op, written.op) == ("reserve", "write")
        assert written.error is None
        assert written.duration >= 0.1


def test_only_the_last_records_are_kept() -> None:
    with Traced(Dram("1MiB"), keep=3) as tier:
        for nbytes in range(1, 6):
            tier.reserve(nbytes)
        assert [record.nbytes for record in tier.records()] == [3, 4, 5]


def test_a_callback_gets_every_record() -> None:
    seen: list[TraceRecord] = []
    with Traced(Dram("1MiB"), seen.append, keep=0) as tier:
        extent = tier.reserve(10)
        tier.write_from(extent, memoryview(bytes(10)))
        assert tier.records() == ()
    assert [shape(record) for record in seen] == [("reserve", 0, 10, None), ("write", 0, 10, None)]


def test_a_callback_that_raises_does_no_harm_and_is_not_silent(caplog: pytest.LogCaptureFixture) -> None:
    def callback(record: TraceRecord) -> None:
        raise RuntimeError("mine")

    with Traced(Dram("1MiB"), callback) as tier:
        extent = tier.reserve(10)
        tier.free(extent)
        assert tier.reserved == 0
    assert [str(record.exc_info[1]) for record in caplog.records if record.exc_info] == ["mine", "mine"]


def test_the_file_has_each_record_as_a_line_and_is_begun_anew_at_open(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    tier = Traced(Dram("1MiB"), path=path)
    for nbytes in (10, 20):
        with tier:
            tier.free(tier.reserve(nbytes))
            with pytest.raises(ValueError, match="at least 1 byte"):
                tier.reserve(0)
            # Read while the tier is open: a process that is killed leaves its trace.
            lines = [json.loads(line) for line in path.read_text().splitlines()]
        records = tier.records()[-3:]
        assert [TraceRecord(**line) for line in lines] == list(records)
        assert [line["nbytes"] for line in lines] == [nbytes, nbytes, 0]


def test_a_file_that_cannot_be_written_leaves_the_tier_closed(tmp_path: Path) -> None:
    pool_file = tmp_path / "pool"
    tier = Traced(Nvme(pool_file, "1MiB"), path=tmp_path / "no" / "trace.jsonl")
    with pytest.raises(ConfigError, match=r"no/trace.jsonl cannot be written: No such file"):
        tier.open()
    assert not pool_file.exists()


@pytest.mark.parametrize("keep", [-1, 1.5, "many", True])
def test_a_wrong_number_of_records_is_refused(keep: object) -> None:
    with pytest.raises(ConfigError, match="keep is"):
        Traced(Dram("1MiB"), keep=keep)  # type: ignore[arg-type]


def test_a_pool_on_a_traced_tier_moves_what_the_trace_says() -> None:
    tier = Traced(Dram("1MiB"))
    with block_pool("64KiB", [tier], timeout=WAIT) as pool:
        storages = [pool.allocate(16384) for _ in range(10)]
        for storage in storages:
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            pool.release(access)
        access = pool.acquire([Use(storages[0], 0, 16384, Mode.READ)])
        pool.release(access)
        assert pool.stats().tiers[0].touched > 0
    ops = [record.op for record in tier.records()]
    assert ops.count("write") >= 6
    assert ops.count("read") >= 1


def test_threads_may_trace_at_once() -> None:
    with Traced(Dram("1MiB")) as tier:

        def work() -> None:
            for _ in range(50):
                extent = tier.reserve(64)
                tier.write_from(extent, memoryview(bytes(64)))
                tier.free(extent)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert len(tier.records()) == 4 * 50 * 3


def test_a_dropped_tier_is_collected() -> None:
    tier = Traced(Dram("1MiB"))
    with tier:
        tier.write_from(tier.reserve(10), memoryview(bytes(10)))
    gone = weakref.ref(tier)
    del tier
    gc.collect()
    assert gone() is None
