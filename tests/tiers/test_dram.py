import os
from pathlib import Path

import pytest

from farpool.errors import ConfigError, TierError, TierFullError
from farpool.memory.tiers import Dram, HasPort, Tier
from farpool.testing import TierConformance


class TestDram(TierConformance):
    def make_tier(self) -> Tier:
        return Dram("16MiB")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def test_more_than_the_machine_has_is_refused_with_both_numbers() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    tier = Dram(2 * machine)
    with pytest.raises(ConfigError, match=str(machine)) as caught:
        tier.open()
    assert str(tier.info.capacity) in str(caught.value)


@pytest.mark.parametrize("capacity", [0, -1, 63, True, "", "many", "0MiB"])
def test_a_bad_capacity_is_refused(capacity: int | str) -> None:
    with pytest.raises(ConfigError, match="capacity of dram"):
        Dram(capacity)


def test_a_closed_tier_has_no_port_and_reserves_nothing() -> None:
    tier = Dram("1MiB", "mine")
    for use in (lambda: tier.port, lambda: tier.reserve(1)):
        with pytest.raises(TierError, match="mine: the tier is not open") as caught:
            use()
        assert caught.value.tier == "mine"


def test_an_open_tier_has_a_port() -> None:
    with Dram("1MiB") as tier:
        assert isinstance(tier, HasPort)


def test_capacity_is_never_rounded_up() -> None:
    with Dram(1_000_063) as tier:
        assert tier.info.capacity == 1_000_000
        tier.reserve(1_000_000)
        with pytest.raises(TierFullError, match="0 of 1000000 bytes are free"):
            tier.reserve(1)


def test_memory_is_used_when_written_used_again_when_freed_and_given_back_at_the_end() -> None:
    nbytes = 64 << 20
    with Dram("256MiB") as tier:
        data = bytearray(nbytes)
        before = resident_bytes()
        extent = tier.reserve(nbytes)
        assert resident_bytes() - before < nbytes // 4
        tier.write_from(extent, memoryview(data))
        assert resident_bytes() - before > nbytes // 2
        tier.free(extent)
        again = tier.reserve(nbytes)
        assert again == extent
        assert tier.touched == nbytes
    assert resident_bytes() - before < nbytes // 4


def test_extents_are_aligned_to_cache_lines() -> None:
    with Dram("1MiB") as tier:
        for nbytes in (1, 65, 100):
            assert tier.reserve(nbytes).offset % 64 == 0
