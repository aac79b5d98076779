import threading
import time
from collections.abc import Callable

import pytest
from python_tier import DictTier

from farpool._native import Memory, Port
from farpool.errors import ConfigError, TierError
from farpool.memory.pager import Mode
from farpool.memory.pager.use import Use
from farpool.memory.tiers import Dram, Faulty, Throttled, TierInfo, Verified
from tests.block_pools import block_pool

WAIT = 30
KIB = 1 << 10


def seconds_of(calls: list[Callable[[], None]]) -> float:
    """Make the calls at once, each in a thread of its own; seconds until the last one ended."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    return time.monotonic() - begin


def reads(port: Port, times: int, nbytes: int) -> Callable[[], None]:
    memory = Memory(nbytes)

    def call() -> None:
        for _ in range(times):
            port.read(0, memory.address, nbytes)

    return call


def writes(port: Port, times: int, nbytes: int) -> Callable[[], None]:
    memory = Memory(nbytes)

    def call() -> None:
        for _ in range(times):
            port.write(0, memory.address, nbytes)

    return call


@pytest.mark.parametrize(("times", "nbytes"), [(1, 100_000), (10, 10_000), (200, 500)])
def test_transfers_one_after_another_take_at_least_their_bytes_over_the_rate(times: int, nbytes: int) -> None:
    with Throttled(Dram("1MiB"), read_bandwidth="2MB/s", write_bandwidth="1MB/s") as tier:
        assert seconds_of([reads(tier.port, times, nbytes)]) >= times * nbytes / 2e6
        assert seconds_of([writes(tier.port, times, nbytes)]) >= times * nbytes / 1e6


def test_transfers_of_several_threads_share_the_rate() -> None:
    with Throttled(Dram("1MiB"), "2MB/s") as tier:
        assert seconds_of([reads(tier.port, 5, 10_000) for _ in range(4)]) >= 200_000 / 2e6


def test_a_shared_link_carries_both_directions_one_after_another() -> None:
    with Throttled(Dram("1MiB"), "2MB/s", "1MB/s", shared=True) as tier:
        both = [reads(tier.port, 4, 25_000), writes(tier.port, 4, 25_000)]
        assert seconds_of(both) >= 100_000 / 2e6 + 100_000 / 1e6


def test_each_transfer_ends_at_least_the_latency_later() -> None:
    with Throttled(Dram("1MiB"), latency=0.01) as tier:
        assert seconds_of([reads(tier.port, 10, 1)]) >= 10 * 0.01
        assert seconds_of([writes(tier.port, 10, 1)]) >= 10 * 0.01


def test_transfers_for_callers_in_python_are_held_back_too() -> None:
    with Throttled(Dram("1MiB"), "1MB/s", "1MB/s") as tier:
        extent = tier.reserve(50_000)
        begin = time.monotonic()
        tier.write_from(extent, memoryview(b"a" * 50_000))
        buffer = bytearray(50_000)
        tier.read_into(extent, memoryview(buffer))
        assert time.monotonic() - begin >= 100_000 / 1e6
        assert buffer == b"a" * 50_000


def test_closing_does_not_wait_for_the_link() -> None:
    tier = Throttled(Dram("1MiB"), write_bandwidth=1)
    tier.open()
    writers = [
        threading.Thread(target=tier.write_from, args=(tier.reserve(100_000), memoryview(bytes(100_000))), daemon=True)
        for _ in range(3)
    ]
    for writer in writers:
        writer.start()
    while tier._under_way < len(writers):
        time.sleep(0.001)
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(WAIT)
    assert not closing.is_alive()
    for writer in writers:
        writer.join(WAIT)
        assert not writer.is_alive()


def test_a_reopened_tier_is_throttled_again() -> None:
    tier = Throttled(Dram("1MiB"), "1MB/s")
    for _ in range(2):
        with tier:
            assert seconds_of([reads(tier.port, 2, 20_000)]) >= 40_000 / 1e6


def test_a_failure_inside_comes_through_without_being_held_back() -> None:
    with Throttled(Faulty(Dram("1MiB"), script={0: "fail"}), write_bandwidth=1) as tier:
        extent = tier.reserve(1000)
        with pytest.raises(TierError, match="failed on purpose"):
            tier.write_from(extent, memoryview(bytes(1000)))


def test_an_extent_that_was_freed_is_refused() -> None:
    with Throttled(Dram("1MiB"), "1GB/s") as tier:
        extent = tier.reserve(100)
        tier.free(extent)
        with pytest.raises(ValueError, match="not reserved"):
            tier.read_into(extent, memoryview(bytearray(100)))


class Measured(DictTier):
    @property
    def info(self) -> TierInfo:
        return TierInfo("measured", "remote", 1 << 20, 1, 1e-3, 5e6, 6e6)


def test_info_tells_the_slower_of_the_link_and_the_tier_inside() -> None:
    info = Throttled(Dram("1MiB"), "2MB/s", 500, latency=0.5).info
    assert (info.latency, info.read_bandwidth, info.write_bandwidth) == (0.5, 2e6, 500)
    info = Throttled(Dram("1MiB")).info
    assert info == Dram("1MiB").info
    info = Throttled(Measured(), "1GB/s", "1MB/s", latency=1e-4).info
    assert (info.latency, info.read_bandwidth, info.write_bandwidth) == (1e-3, 5e6, 1e6)


def test_a_pool_on_slow_tiers_gives_the_same_bytes_and_counts_their_memory() -> None:
    tiers = [Throttled(Dram(128 * KIB), "200MB/s", "200MB/s", latency=1e-4), Throttled(Dram("1MiB", "far"), "50MB/s")]
    with block_pool("64KiB", tiers, timeout=WAIT) as pool:
        storages = [pool.allocate(16 * KIB) for _ in range(20)]
        for number, storage in enumerate(storages):
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.OVERWRITE)])
            pool.arena.view()[access.offsets[0] : access.offsets[0] + storage.nbytes] = bytes([number]) * storage.nbytes
            pool.release(access)
        for number, storage in enumerate(storages):
            access = pool.acquire([Use(storage, 0, storage.nbytes, Mode.READ)])
            found = bytes(pool.arena.view()[access.offsets[0] : access.offsets[0] + storage.nbytes])
            assert found == bytes([number]) * storage.nbytes
            pool.release(access)
        assert [tier.touched > 0 for tier in pool.stats().tiers] == [True, True]


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"read_bandwidth": "fast"}, "read_bandwidth is 'fast'"),
        ({"write_bandwidth": 0}, "write_bandwidth is 0"),
        ({"write_bandwidth": float("nan")}, "write_bandwidth is nan"),
        ({"latency": -1.0}, "latency is -1.0"),
        ({"latency": float("inf")}, "latency is inf"),
        ({"latency": "1ms"}, "latency is '1ms'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(wrong: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Throttled(Dram("1MiB"), **wrong)  # type: ignore[arg-type]


def test_closing_waits_for_transfers_under_way() -> None:
    tier = Verified(Throttled(Dram("1MiB"), write_bandwidth=1e6))
    tier.open()
    writing = threading.Thread(target=tier.write_from, args=(tier.reserve(200_000), memoryview(bytes(200_000))))
    begin = time.monotonic()
    writing.start()
    while not tier._under_way:
        time.sleep(0.001)
    tier.close()
    assert not tier._under_way
    assert time.monotonic() - begin >= 200_000 / 1e6
    writing.join(WAIT)
    assert not writing.is_alive()
