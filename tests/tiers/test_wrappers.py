"""Behaviours that wrap a tier keep its contract; the whole conformance kit runs on the tiers themselves."""

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from python_tier import DictTier

from farpool._native import Memory, PythonPort
from farpool.errors import TierFullError
from farpool.memory.tiers import Dram, Extent, Faulty, HasPort, Nvme, Throttled, Tier, Traced, Verified
from farpool.testing import tier_machine

WAIT = 30
MIB = 1 << 20

WRAPPED: dict[str, Callable[[Path], Tier]] = {
    "faulty": lambda _: Faulty(Dram("16MiB")),
    "stalling": lambda _: Faulty(Dram("16MiB"), seed=3, stall=0.05, stall_seconds=0.01),
    "throttled": lambda _: Throttled(Dram("16MiB"), "2GB/s", "1GB/s", latency=1e-4),
    "traced": lambda folder: Traced(Dram("16MiB"), path=folder / "trace.jsonl"),
    "verified": lambda _: Verified(Dram("16MiB")),
    "verified python tier": lambda _: Verified(DictTier()),
    "several round nvme": lambda folder: Verified(Throttled(Traced(Nvme(folder / "pool", "16MiB")), "4GB/s")),
}


@pytest.fixture(params=WRAPPED)
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Tier]:
    return lambda: WRAPPED[request.param](tmp_path)


@pytest.fixture
def tier(make: Callable[[], Tier]) -> Iterator[Tier]:
    with make() as tier:
        yield tier


def put(tier: Tier, nbytes: int, seed: int = 0) -> tuple[Extent, bytes]:
    extent, data = tier.reserve(nbytes), random.Random(f"{seed}/{nbytes}").randbytes(nbytes)
    tier.write_from(extent, memoryview(data))
    return extent, data


def get(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


def test_random_operations_agree_with_a_perfect_tier(make: Callable[[], Tier]) -> None:
    run_state_machine_as_test(
        tier_machine(make),
        settings=settings(max_examples=8, stateful_step_count=30, deadline=None, derandomize=True, database=None),
    )


def test_what_is_refused_changes_nothing(tier: Tier) -> None:
    kept, data = put(tier, 4096)
    gone, _ = put(tier, 100)
    tier.free(gone)
    before = tier.reserved
    with pytest.raises(TierFullError) as caught:
        tier.reserve(tier.info.capacity)
    assert caught.value.tier == tier.info.name
    for wrong in (
        lambda: tier.reserve(0),
        lambda: tier.free(gone),
        lambda: tier.free(Extent(kept.offset, 99)),
        lambda: tier.write_from(kept, memoryview(bytes(4095))),
        lambda: tier.read_into(kept, memoryview(bytearray(4097))),
        lambda: tier.read_into(kept, memoryview(bytes(4096))),
    ):
        with pytest.raises(ValueError, match=r"."):
            wrong()
    assert tier.reserved == before
    assert get(tier, kept) == data


def test_threads_may_have_transfers_under_way_at_once(tier: Tier) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for step in range(10):
                pairs = [put(tier, nbytes, 100 * seed + step) for nbytes in (1, 4097, 40_000)]
                buffers = [bytearray(extent.nbytes) for extent, _ in pairs]
                for (extent, _), buffer in zip(pairs, buffers, strict=True):
                    tier.read_into(extent, memoryview(buffer))
                assert buffers == [data for _, data in pairs]
                for extent, _ in pairs:
                    tier.free(extent)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert failures == []
    assert tier.reserved == 0


def test_a_reopened_tier_is_empty_and_works(make: Callable[[], Tier]) -> None:
    tier = make()
    before = tier.info
    for seed in range(2):
        tier.open()
        tier.open()
        assert tier.reserved == 0
        assert (tier.info.name, tier.info.kind, tier.info.alignment) == (before.name, before.kind, before.alignment)
        extent, data = put(tier, 5000, seed)
        assert get(tier, extent) == data
        tier.close()
        tier.close()


def test_the_native_port_and_python_see_the_same_bytes(tier: Tier) -> None:
    port = tier.port if isinstance(tier, HasPort) else PythonPort(tier)
    extent, data = put(tier, 100_001)
    memory = Memory(extent.nbytes)
    port.read(extent.offset, memory.address, extent.nbytes)
    assert memoryview(memory) == data
    memoryview(memory)[:] = data[::-1]
    port.write(extent.offset, memory.address, extent.nbytes)
    assert get(tier, extent) == data[::-1]
