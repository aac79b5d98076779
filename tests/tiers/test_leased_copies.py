"""Tiers whose leased bytes are on several nodes: nodes fail, and the bytes stay."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from farpool import Pool
from farpool.abc.tier import Tier
from farpool.cluster.node.process import RunningNode
from farpool.errors import ConfigError, FarpoolWarning, TierError
from farpool.memory.tiers import Leased, RemoteSpec, leased
from farpool.testing import TierConformance
from tests.nodes import eventually
from tests.tiers.test_leased import MIB, Fleet, ask_back, get, put

pytestmark = pytest.mark.slow


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with ExitStack() as stack, warnings.catch_warnings():
        warnings.simplefilter("ignore", FarpoolWarning)
        yield Fleet(tmp_path, stack)


class TestCopies(TierConformance):
    fleet: Fleet

    @pytest.fixture(autouse=True)
    def _fleet(self, shared: Fleet) -> None:
        self.fleet = shared

    def make_tier(self) -> Tier:
        return self.fleet.tier("?copies=2", size="16MiB", transport="tcp")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes that take every lease of a test that follows another one's end."""
    with ExitStack() as stack:
        fleet = Fleet(tmp_path_factory.mktemp("shared"), stack)
        fleet.start("512MiB")
        fleet.start("512MiB")
        yield fleet


def open_tier(fleet: Fleet, query: str = "?copies=2", timeout: float = 2.0, size: str | None = "4MiB") -> Leased:
    return fleet.tier(query, size=size, timeout=timeout, transport="tcp")


def is_whole(tier: Leased, *nodes: RunningNode) -> bool:
    """True if these nodes have the bytes, and each copy is in use."""
    return sorted(tier.nodes) == sorted(node.address for node in nodes) and tier.notes == ()


def test_a_lease_with_copies_is_counted_once_and_lent_twice(fleet: Fleet) -> None:
    one, two = fleet.start(), fleet.start()
    with open_tier(fleet) as tier:
        assert tier.info.capacity == tier.leased == 4 * MIB
        assert is_whole(tier, one, two)
        assert tier.mapped == (False, False)
        assert (fleet.lent(one), fleet.lent(two)) == (4 * MIB, 4 * MIB)
        extent, data = put(tier, 3 * MIB + 5)
        assert get(tier, extent) == data
    eventually(lambda: fleet.lent(one) == fleet.lent(two) == 0)
    with pytest.raises(ConfigError, match="the nearest offer"):
        open_tier(fleet, "?copies=3").open()
    with pytest.raises(ConfigError, match="rack"):
        open_tier(fleet, "?copies=2&spread=rack").open()


def test_copies_grow_with_the_lease(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leased, "_FIRST_BYTES", 2 * MIB)
    one, two = fleet.start("16MiB"), fleet.start("16MiB")
    with open_tier(fleet, size=None) as tier:
        extents = [put(tier, 2 * MIB, seed) for seed in range(5)]
        assert fleet.lent(one) == fleet.lent(two) == tier.leased
        one.kill()
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]


@pytest.mark.parametrize("dies", ["at a read", "at a write"])
def test_nodes_die_one_after_the_other_and_the_bytes_stay(fleet: Fleet, dies: str) -> None:
    one, two, three = fleet.start(), fleet.start(), fleet.start()
    with open_tier(fleet) as tier:
        extents = [put(tier, MIB, seed) for seed in range(4)]
        for lost in (one, two):
            rest = [node for node in (one, two, three) if node is not lost and node.address in tier.nodes]
            if lost.address not in tier.nodes:
                continue
            lost.kill()
            if dies == "at a write":
                extent, _ = extents[0]
                extents[0] = (extent, random.Random(lost.address).randbytes(MIB))
                tier.write_from(extent, memoryview(extents[0][1]))
            assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
            eventually(lambda lost=lost: lost.address not in tier.nodes and tier.notes == ())
            assert rest[0].address in tier.nodes
            assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
            lost.start()


@pytest.mark.parametrize("keeps", [True, False])
def test_without_another_member_a_copy_is_made_again_where_it_was(fleet: Fleet, keeps: bool) -> None:
    one, two = fleet.start(), fleet.start()
    with open_tier(fleet) as tier:
        extents = [put(tier, MIB, seed) for seed in range(3)]
        one.kill()
        if not keeps:
            files = list(one.folder.glob("extent-*"))
            assert files
            for file in files:
                file.unlink()
        extents.append(put(tier, MIB, 9))
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]
        eventually(lambda: "is out of use" in str(tier.notes))
        one.start()
        eventually(lambda: is_whole(tier, one, two))
        two.kill()
        assert [get(tier, extent) for extent, _ in extents] == [data for _, data in extents]


def test_the_last_copy_is_an_error_and_not_other_bytes(fleet: Fleet) -> None:
    one, two = fleet.start(), fleet.start()
    with open_tier(fleet, timeout=0.5) as tier:
        extent, _ = put(tier, MIB, 1)
        one.kill()
        newer = random.Random(2).randbytes(MIB)
        tier.write_from(extent, memoryview(newer))
        two.kill()
        one.start()  # it has the bytes before the last write
        with pytest.raises(TierError):
            get(tier, extent)
        two.start()
        eventually(lambda: is_whole(tier, one, two))
        assert get(tier, extent) == newer


def test_memory_that_a_lender_wants_back_moves_with_its_copy_in_place(fleet: Fleet) -> None:
    one, two = fleet.start("8MiB"), fleet.start("8MiB")
    with open_tier(fleet) as tier:
        extent, data = put(tier, 4 * MIB)
        three = fleet.start("8MiB")
        ask_back(fleet, one, tier, 4 * MIB)
        eventually(lambda: is_whole(tier, two, three))
        eventually(lambda: fleet.lent(one) == 0)
        two.kill()
        assert get(tier, extent) == data


def test_a_program_computes_on_while_a_node_dies(fleet: Fleet) -> None:
    nodes = [fleet.start("64MiB") for _ in range(3)]
    location = f"{fleet.manager.location}?copies=2&size=32MiB&tenant=0"
    with Pool("2MiB", [RemoteSpec(nodes=location, transport="tcp", timeout=2.0)]) as pool:
        tensors = [pool.full((1 << 16,), float(number)) for number in range(64)]  # 256 KiB each
        stop, failures, rounds = threading.Event(), [], [0]

        def work() -> None:
            try:
                while not stop.is_set():
                    rounds[0] += 1
                    for number, tensor in enumerate(tensors):
                        tensor += 1.0
                        assert tensor.sum() == (number + rounds[0]) << 16
            except BaseException as error:
                failures.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            eventually(lambda: rounds[0] >= 2 or bool(failures))
            for node in nodes[:2]:
                before = rounds[0]
                node.kill()
                eventually(lambda before=before: rounds[0] > before + 2 or bool(failures))
                node.start()
                eventually(lambda: "out of use" not in pool.explain() or bool(failures))
        finally:
            stop.set()
            worker.join()
        assert failures == []
