"""Striping over tiers of any kind: the contract, where bytes go, failures of one tier, and work at the same time."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from python_tier import DictTier

import farpool
from farpool._native import Memory, PythonPort, StripedPort
from farpool.errors import ChecksumError, ConfigError, TierError, TierFullError
from farpool.memory.tiers import Dram, Extent, Faulty, Nvme, Striped, Throttled, Tier, TierInfo, Verified, WrapperTier
from farpool.testing import TierConformance

MIB = 1 << 20
WAIT = 30


class TestStripedFiles(TierConformance):
    def make_tier(self) -> Tier:
        return Striped([Nvme(self.folder / "a.pool", "8MiB"), Nvme(self.folder / "b.pool", "8MiB")], stripe="64KiB")


class TestStripedMixture(TierConformance):
    def make_tier(self) -> Tier:
        tiers = [Verified(Dram("8MiB")), DictTier(8 * MIB), Throttled(Nvme(self.folder / "a.pool", "8MiB"), "4GB/s")]
        return Striped(tiers, stripe="16KiB", name="mixture")


def put(tier: Tier, nbytes: int, seed: int = 0) -> tuple[Extent, bytes]:
    extent, data = tier.reserve(nbytes), random.Random(f"{seed}/{nbytes}").randbytes(nbytes)
    tier.write_from(extent, memoryview(data))
    return extent, data


def get(tier: Tier, extent: Extent) -> bytes:
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


class Recorded(WrapperTier):
    """Notes the bytes of each write."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self.sizes.append(extent.nbytes)
        super().write_from(extent, data)


class Meeting(WrapperTier):
    """Ends a read only when the other tiers have begun one, too."""

    def __init__(self, inner: Tier, barrier: threading.Barrier) -> None:
        super().__init__(inner)
        self.barrier = barrier

    def read_into(self, extent: Extent, into: memoryview) -> None:
        self.barrier.wait(WAIT)
        super().read_into(extent, into)


def test_each_tier_gets_every_other_stripe() -> None:
    tiers = [Recorded(Dram("1MiB")) for _ in range(2)]
    with Striped(tiers, stripe=4096) as tier:
        assert tier.info.capacity == 2 * MIB
        put(tier, 4 * 4096 + 100)
        assert [inner.sizes for inner in tiers] == [[4096, 4096, 100], [4096, 4096]]
        assert tier.reserved == sum(inner.reserved for inner in tiers)


def test_one_transfer_works_on_all_tiers_at_the_same_time() -> None:
    barrier = threading.Barrier(3)
    with Striped([Meeting(Dram("4MiB"), barrier) for _ in range(3)], stripe=MIB) as tier:
        extent, data = put(tier, 3 * MIB)
        assert get(tier, extent) == data


def test_the_smallest_tier_bounds_all() -> None:
    tier = Striped([Dram("1MiB"), Dram(3 * MIB + 64)], stripe="512KiB")
    assert tier.info.capacity == 2 * MIB
    assert (tier.info.name, tier.info.kind, tier.in_process) == ("dram", "dram", True)
    assert not Striped([Dram("1MiB"), Nvme("/no/file", "1MiB")]).in_process


def test_rates_and_latency_are_those_of_all_tiers_together() -> None:
    links = [Throttled(Dram("1MiB"), "1GB/s", "2GB/s", latency=1e-3), Throttled(Dram("1MiB"), "3GB/s", latency=2e-3)]
    info = Striped(links).info
    assert (info.read_bandwidth, info.write_bandwidth, info.latency) == (2e9, None, 2e-3)


def test_if_one_tier_cannot_be_opened_the_others_are_closed(tmp_path: Path) -> None:
    first, last = Nvme(tmp_path / "a.pool", "1MiB"), Nvme(tmp_path / "c.pool", "1MiB")
    missing = Nvme(tmp_path / "missing" / "b.pool", "1MiB", name="second")
    tier = Striped([first, missing, last])
    with pytest.raises(ConfigError, match="path of second") as caught:
        tier.open()
    assert caught.value.__notes__ == ["nvme: inner tier 2 of 3 cannot be opened"]
    assert list(tmp_path.iterdir()) == []
    for inner in (tier, first, last):
        with pytest.raises(TierError, match="not open"):
            inner.reserve(1)


class Unclosable(WrapperTier):
    """Fails to close."""

    def close(self) -> None:
        super().close()
        raise TierError("it cannot be closed", tier="unclosable")


def test_if_one_tier_cannot_be_closed_the_others_are_closed(tmp_path: Path) -> None:
    tier = Striped([Nvme(tmp_path / "a.pool", "1MiB"), Unclosable(Dram("1MiB")), Nvme(tmp_path / "c.pool", "1MiB")])
    tier.open()
    with pytest.raises(TierError, match="it cannot be closed"):
        tier.close()
    assert list(tmp_path.iterdir()) == []
    missing = Nvme(tmp_path / "missing" / "d.pool", "1MiB")
    tier = Striped([Nvme(tmp_path / "a.pool", "1MiB"), Unclosable(Dram("1MiB")), missing])
    with pytest.raises(TierError, match="it cannot be closed"):
        tier.open()
    assert list(tmp_path.iterdir()) == []


class Growing(WrapperTier):
    """Has a capacity that is known only when it is open, as a tier in the free memory of nodes."""

    capacity = 2 * MIB

    @property
    def info(self) -> TierInfo:
        return replace(super().info, capacity=self.capacity)


def test_a_capacity_that_has_changed_since_the_first_look_counts() -> None:
    inner = Growing(Dram("4MiB"))
    tier = Striped([inner, Dram("4MiB")])
    assert tier.info.capacity == 4 * MIB
    for share in (1, 4):
        inner.capacity = share * MIB
        with tier:
            assert tier.info.capacity == 2 * share * MIB
            extent, data = put(tier, tier.info.capacity)
            assert get(tier, extent) == data


@pytest.mark.parametrize("nbytes", [8192, 4 * MIB])
def test_the_failure_of_one_tier_names_it(nbytes: int) -> None:
    with Striped([Dram("4MiB"), Verified(Faulty(Dram("4MiB"), corrupt_reads=1.0))], stripe=4096, name="wide") as tier:
        extent, _ = put(tier, nbytes)
        with pytest.raises(ChecksumError, match=r"^wide: inner tier 2 of 2: dram: the 4096 bytes") as caught:
            get(tier, extent)
        assert caught.value.tier == "wide"
    failing = Faulty(Dram("4MiB"), fail_writes=1.0)
    with (
        Striped([failing, Dram("4MiB", name="other")], stripe=4096) as tier,
        pytest.raises(TierError, match="dram: write of 4096 bytes"),
    ):
        put(tier, nbytes)


def test_a_full_inner_tier_changes_nothing() -> None:
    full = Faulty(Dram("1MiB"))
    tiers = [Dram("1MiB"), full]
    with Striped(tiers, stripe=4096, name="wide") as tier:
        full.full = True
        with pytest.raises(TierFullError, match=r"wide: inner tier 2 of 2 has no room") as caught:
            tier.reserve(3 * 4096)
        assert caught.value.tier == "wide"
        assert [tier.reserved, *(inner.reserved for inner in tiers)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Striped([]), "are missing"),
        (lambda: Striped([Dram("1MiB")] * 2), "one tier twice"),
        (lambda: Striped([Dram("1MiB"), Nvme("/no/file", "1MiB")], stripe=64).info, "a multiple of 4096"),
        (lambda: Striped([Dram("1MiB"), Dram("64KiB")]).info, "the smallest inner tier has 65536"),
        (lambda: Striped([Dram("1MiB")], stripe="wide"), "stripe is 'wide'"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        make()  # type: ignore[operator]


def test_a_port_moves_whole_extents_only() -> None:
    with Striped([Dram("1MiB"), Dram("1MiB")], stripe=4096) as tier:
        extent, _ = put(tier, 3 * 4096)
        memory = Memory(4096)
        with pytest.raises(ValueError, match="transfer a whole extent"):
            tier.port.read(extent.offset, memory.address, 4096)


def test_ports_that_hold_one_range_each_are_striped_by_arithmetic() -> None:
    tiers = [DictTier(), DictTier()]
    ranges = [tier.reserve(2 * 4096) for tier in tiers]
    port = StripedPort("both", [PythonPort(tier) for tier in tiers], stripe=2 * 4096, share=2 * 4096)
    memory = Memory(4 * 4096)
    memoryview(memory)[:] = data = random.Random(1).randbytes(memory.nbytes)
    port.write(0, memory.address, memory.nbytes)
    assert [get(tier, extent) for tier, extent in zip(tiers, ranges, strict=True)] == [data[:8192], data[8192:]]


def test_a_pool_pages_over_striped_files(tmp_path: Path) -> None:
    tier = Striped([Nvme(tmp_path / "a.pool", "8MiB"), Nvme(tmp_path / "b.pool", "8MiB")], stripe="64KiB", name="wide")
    with farpool.Pool(fast="256KiB", tiers=[tier]) as pool:
        table = pool.full((1024, 1024), 3.0)
        assert pool.materialize(table).eq(3.0).all()
        (stats,) = pool.stats().tiers
        assert (stats.name, stats.kind) == ("wide", "nvme")
        assert stats.reserved > MIB
        assert "wide" in pool.explain()
        del table
    assert list(tmp_path.iterdir()) == []
