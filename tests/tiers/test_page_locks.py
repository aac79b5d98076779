"""Page locks of a pool's tiers as its user sees them: on the ledger, in a warning, and within a limit."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from farpool import FarpoolWarning, _native
from farpool.ledger import Account, Ledger
from farpool.memory.tiers import Dram, Mapped, Nvme, Throttled, Tier, Verified, page_locks
from farpool.memory.tiers.page_locks import TierLocks, most_locked
from tests.block_pools import block_pool

MIB = 1 << 20


@dataclass
class Space:
    name: str
    nbytes: int
    locked: int = 0
    refused: str = ""


class Native:
    """Stands in for the native locks, which need a device: notes what is added, and locks what the test says."""

    others = 0

    def __init__(self, device: object, chunk: int, most: int) -> None:
        self.device, self.chunk, self.most = device, chunk, most
        self.added: list[tuple[_native.Port, int]] = []
        self.spaces: dict[str, Space] = {}

    def add(self, port: _native.Port, address: int, nbytes: int, name: str) -> None:
        self.added.append((port, address))
        self.spaces[name] = Space(name, nbytes)

    def totals(self) -> list[Space]:
        return [replace(space) for space in self.spaces.values()]

    @classmethod
    def locked_in_process(cls) -> int:
        return cls.others


@pytest.fixture(autouse=True)
def native(monkeypatch: pytest.MonkeyPatch) -> type[Native]:
    monkeypatch.setattr(_native, "PageLocks", Native)
    monkeypatch.setattr(page_locks, "available_memory", lambda: 100 * MIB)
    monkeypatch.setattr(Native, "others", 0)
    return Native


def locks_of(ledger: Ledger, *tiers: Tier) -> tuple[TierLocks, Native]:
    for tier in tiers:
        tier.open()
    locks = TierLocks(object(), tiers, ledger)  # type: ignore[arg-type]
    return locks, cast(Native, locks.native)


def test_memory_is_mapped_and_what_stands_before_it_is_not() -> None:
    with Dram("64KiB") as tier:
        assert isinstance(tier, Mapped)
        data = random.Random(1).randbytes(1000)
        tier.reserve(4096)
        extent = tier.reserve(1000)
        tier.write_from(extent, memoryview(data))
        place = _native.Memory(1000)
        _native.memmove(place.address, tier.address(extent.offset), 1000)
        assert bytes(memoryview(place)) == data
    assert not isinstance(Verified(Dram("64KiB")), Mapped)
    assert not isinstance(Throttled(Dram("64KiB"), 1e9, 1e9), Mapped)


def test_only_mapped_tiers_are_added_with_their_own_memory(tmp_path: Path) -> None:
    near, far = Dram("1MiB"), Dram("2MiB", "far")
    wrapped = Throttled(Verified(Dram("64KiB", "wrapped")), 1e9, 1e9)
    tiers: list[Tier] = [near, wrapped, far, Nvme(tmp_path / "far.pool", "1MiB")]
    _, native = locks_of(Ledger(), *tiers)
    assert native.added == [(near.port, near.address(0)), (far.port, far.address(0))]
    assert {name: space.nbytes for name, space in native.spaces.items()} == {"dram": MIB, "far": 2 * MIB}
    assert native.chunk == 64 * MIB
    assert native.most == 50 * MIB
    for tier in tiers:
        tier.close()


def test_the_limit_is_half_of_the_available_memory_with_what_the_process_has_locked_before(
    native: type[Native],
) -> None:
    assert most_locked() == 50 * MIB
    native.others = 20 * MIB  # which is not available any more
    assert most_locked() == 60 * MIB


def test_the_ledger_shows_what_is_locked_whenever_it_is_read() -> None:
    ledger = Ledger()
    _, native = locks_of(ledger, Dram("1MiB"), Dram("2MiB", "far"))
    assert ledger.accounts() == {}
    native.spaces["far"].locked = 65536
    assert ledger.accounts() == {("far", "page locks"): Account(page_locked=65536)}
    native.spaces["dram"].locked = 4096
    assert ledger.total(owner="page locks") == Account(page_locked=69632)
    native.spaces["far"].locked = native.spaces["dram"].locked = 0
    assert ledger.accounts() == {}


def test_one_warning_is_given_for_each_tier_of_which_something_is_refused() -> None:
    ledger = Ledger()
    locks, native = locks_of(ledger, Dram("1MiB"), Dram("2MiB", "far"))
    locks.warn()  # nothing is refused: pytest would raise a warning
    native.spaces["dram"] = Space("dram", MIB, 128 << 10, "no more")
    with pytest.warns(FarpoolWarning) as caught:
        assert ledger.total(tier="dram").page_locked == 128 << 10
    (warning,) = caught
    assert str(warning.message) == (
        "dram: only 128 KiB of its 1 MiB can be page-locked (no more); the rest is copied through staging memory, "
        "which is slower"
    )
    ledger.accounts()
    locks.warn()
    native.spaces["far"].refused = "the limit"
    with pytest.warns(FarpoolWarning, match=r"^far: only 0 B of its 2 MiB can be page-locked \(the limit\)") as caught:
        locks.warn()
    assert len(caught) == 1
    ledger.accounts()


def test_where_warnings_are_errors_one_look_raises_it_and_the_next_shows_the_bytes() -> None:
    ledger = Ledger()
    _, native = locks_of(ledger, Dram("1MiB"))
    native.spaces["dram"] = Space("dram", MIB, 4096, "no more")
    with pytest.raises(FarpoolWarning, match="no more"):
        ledger.total()
    assert ledger.total() == Account(page_locked=4096)


def test_a_pool_s_statistics_have_what_its_ledger_follows() -> None:
    with block_pool(1 << 16, [Dram("1MiB")]) as pool:
        locks = TierLocks(object(), pool._lower.tiers, pool.ledger)  # type: ignore[arg-type]
        native = cast(Native, locks.native)
        assert pool.stats().tiers[0].page_locked == 0
        assert "page locks" not in pool.explain()
        native.spaces["dram"].locked = 1 << 16
        stats = pool.stats()
        assert stats.tiers[0].page_locked == 1 << 16
        assert stats.tiers[0].touched >= 1 << 16  # locked memory is backed
        assert "page locks" in pool.explain()
