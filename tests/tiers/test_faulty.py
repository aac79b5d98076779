import threading
import time

import pytest

from farpool._native import Memory
from farpool.errors import ConfigError, TierError, TierFullError
from farpool.memory.tiers import Dram, Extent, Faulty

WAIT = 30


def outcomes(seed: int, **faults: float) -> list[str]:
    with Faulty(Dram("1MiB"), seed=seed, **faults) as tier:
        extent = tier.reserve(100)
        results = []
        for _ in range(50):
            for start, buffer in ((tier.write_from, bytes(100)), (tier.read_into, bytearray(100))):
                try:
                    start(extent, memoryview(buffer))  # type: ignore[operator]
                    results.append("corrupt" if any(buffer) else "ok")
                except TierError:
                    results.append("failed")
        return results


def test_faults_are_the_same_for_the_same_seed() -> None:
    faults = {"fail_reads": 0.1, "fail_writes": 0.1, "corrupt_reads": 0.1, "corrupt_writes": 0.1}
    first = outcomes(1, **faults)
    assert first == outcomes(1, **faults)
    assert first != outcomes(2, **faults)
    assert {"ok", "failed", "corrupt"} == set(first)


def test_another_probability_leaves_the_failures_where_they_were() -> None:
    alone = outcomes(5, fail_reads=0.2)
    both = outcomes(5, fail_reads=0.2, corrupt_reads=0.2)
    assert [result == "failed" for result in alone] == [result == "failed" for result in both]


def test_the_scripted_operation_fails_and_no_other() -> None:
    with Faulty(Dram("1MiB"), script={3: "fail"}) as tier:
        extent = tier.reserve(10)
        for ordinal in range(6):
            if ordinal == 3:
                with pytest.raises(TierError, match="write of 10 bytes at offset 0 failed on purpose") as caught:
                    tier.write_from(extent, memoryview(bytes(10)))
                assert caught.value.tier == "dram"
            else:
                tier.write_from(extent, memoryview(bytes(10)))
        assert tier.operations == 6
        assert tier.injected == [(3, "fail")]


def test_a_corrupt_transfer_has_one_bit_flipped() -> None:
    with Faulty(Dram("1MiB"), script={1: "corrupt"}) as tier:
        extent = tier.reserve(1000)
        tier.write_from(extent, memoryview(bytes(1000)))
        buffer = bytearray(1000)
        tier.read_into(extent, memoryview(buffer))
        assert sum(byte.bit_count() for byte in buffer) == 1


def test_corrupting_a_write_leaves_the_callers_bytes_alone() -> None:
    with Faulty(Dram("1MiB"), script={0: "corrupt"}) as tier:
        data = bytearray(100)
        tier.write_from(tier.reserve(100), memoryview(data))
        assert not any(data)


def test_a_stalled_transfer_completes_later() -> None:
    with Faulty(Dram("1MiB"), script={0: "stall"}, stall_seconds=0.2) as tier:
        extent = tier.reserve(10)
        begin = time.monotonic()
        tier.write_from(extent, memoryview(b"0123456789"))
        assert time.monotonic() - begin >= 0.2
        buffer = bytearray(10)
        tier.read_into(extent, memoryview(buffer))
        assert buffer == b"0123456789"


def test_closing_ends_a_stall_at_once() -> None:
    tier = Faulty(Dram("1MiB"), script={0: "stall"}, stall_seconds=3600)
    tier.open()
    waiter = threading.Thread(target=tier.write_from, args=(tier.reserve(10), memoryview(bytes(10))), daemon=True)
    waiter.start()
    while not tier.injected:
        time.sleep(0.001)
    begin = time.monotonic()
    tier.close()
    waiter.join(WAIT)
    assert not waiter.is_alive()
    assert time.monotonic() - begin < WAIT


def test_full_refuses_every_reservation_until_it_is_switched_off() -> None:
    with Faulty(Dram("1MiB"), full=True) as tier:
        with pytest.raises(TierFullError, match="full on purpose"):
            tier.reserve(1)
        tier.full = False
        assert tier.reserve(1) == Extent(0, 1)


def test_transfers_through_its_port_get_the_faults() -> None:
    with Faulty(Dram("1MiB"), script={1: "fail", 2: "fail"}) as tier:
        extent, memory = tier.reserve(64), Memory(64)
        tier.port.write(extent.offset, memory.address, 64)
        with pytest.raises(TierError, match=r"write of 64 bytes .* on purpose"):
            tier.port.write(extent.offset, memory.address, 64)
        with pytest.raises(TierError, match=r"read of 64 bytes .* on purpose"):
            tier.port.read(extent.offset, memory.address, 64)
        assert tier.operations == 3


@pytest.mark.parametrize(
    "wrong",
    [{"fail_reads": 1.5}, {"stall": -0.1}, {"corrupt_writes": float("nan")}, {"stall_seconds": -1.0}],
)
def test_a_wrong_probability_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Faulty(Dram("1MiB"), **wrong)


def test_an_unknown_fault_in_the_script_is_refused() -> None:
    with pytest.raises(ConfigError, match="'explode' for operation 4"):
        Faulty(Dram("1MiB"), script={4: "explode"})
