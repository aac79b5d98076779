import gc
import weakref
from pathlib import Path

import pytest
from python_tier import DictTier

from farpool._native import Memory
from farpool.errors import ChecksumError, TierError
from farpool.memory.tiers import Dram, Faulty, Nvme, Verified

WAIT = 30


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("where", ["corrupt_reads", "corrupt_writes"])
def test_every_corruption_is_found(seed: int, where: str) -> None:
    faulty = Faulty(Dram("1MiB"), seed=seed, **{where: 0.5})
    with Verified(faulty) as tier:
        found: dict[int, ChecksumError] = {}
        messages: list[str] = []
        for number in range(20):
            extent = tier.reserve(1 + 97 * number)
            tier.write_from(extent, memoryview(bytes([number]) * extent.nbytes))
            try:
                tier.read_into(extent, memoryview(bytearray(extent.nbytes)))
            except ChecksumError as error:
                found[number] = error
                messages.append(f"at offset {extent.offset}")
        assert list(found) == [ordinal // 2 for ordinal, _ in faulty.injected]
        assert found
        assert {error.tier for error in found.values()} == {"dram"}
        assert all(message in str(error) for message, error in zip(messages, found.values(), strict=True))


def test_a_corrupt_read_is_right_when_read_again() -> None:
    with Verified(Faulty(Dram("1MiB"), script={1: "corrupt"})) as tier:
        extent = tier.reserve(1000)
        tier.write_from(extent, memoryview(b"a" * 1000))
        buffer = bytearray(1000)
        with pytest.raises(ChecksumError, match="expected 0x"):
            tier.read_into(extent, memoryview(buffer))
        tier.read_into(extent, memoryview(buffer))
        assert buffer == b"a" * 1000


def test_an_extent_that_was_never_written_cannot_be_read() -> None:
    with Verified(Dram("1MiB")) as tier:
        extent = tier.reserve(100)
        with pytest.raises(ChecksumError, match="never written"):
            tier.read_into(extent, memoryview(bytearray(100)))


def test_a_failed_write_leaves_nothing_to_read() -> None:
    with Verified(Faulty(Dram("1MiB"), script={1: "fail"})) as tier:
        extent = tier.reserve(100)
        tier.write_from(extent, memoryview(bytes(100)))
        with pytest.raises(TierError, match="failed on purpose"):
            tier.write_from(extent, memoryview(bytes(100)))
        with pytest.raises(ChecksumError):
            tier.read_into(extent, memoryview(bytearray(100)))


def test_freeing_forgets_the_checksum() -> None:
    with Verified(Dram("1MiB")) as tier:
        extent = tier.reserve(100)
        tier.write_from(extent, memoryview(bytes(100)))
        assert tier.tracked == 1
        tier.free(extent)
        assert tier.tracked == 0
        again = tier.reserve(100)
        with pytest.raises(ChecksumError):
            tier.read_into(again, memoryview(bytearray(100)))


def test_a_refused_free_keeps_the_checksum() -> None:
    with Verified(Dram("1MiB")) as tier:
        extent = tier.reserve(100)
        tier.write_from(extent, memoryview(bytes(100)))
        wrong = type(extent)(extent.offset, 99)
        with pytest.raises(ValueError, match="not reserved"):
            tier.free(wrong)
        tier.read_into(extent, memoryview(bytearray(100)))


def test_a_read_of_other_length_than_written_is_refused_by_the_port() -> None:
    memory = Memory(4096)
    with Verified(Dram("1MiB")) as tier:
        extent = tier.reserve(100)
        tier.port.write(extent.offset, memory.address, 100)
        with pytest.raises(ChecksumError, match="written with 100 bytes"):
            tier.port.read(extent.offset, memory.address, 50)


def test_bytes_changed_on_the_disk_are_found(tmp_path: Path) -> None:
    with Verified(Nvme(tmp_path / "pool", "1MiB", direct=False)) as tier:
        extent = tier.reserve(1000)
        tier.write_from(extent, memoryview(b"a" * 1000))
        with open(tmp_path / "pool", "r+b") as file:
            file.seek(4096 + extent.offset + 500)
            file.write(b"b")
        with pytest.raises(ChecksumError):
            tier.read_into(extent, memoryview(bytearray(1000)))


def test_an_exception_of_a_python_tier_comes_through_unchanged() -> None:
    class Broken(DictTier):
        def read_into(self, extent: object, into: object) -> object:  # type: ignore[override]
            raise ZeroDivisionError("mine")

    with Verified(Broken()) as tier:
        extent = tier.reserve(10)
        tier.write_from(extent, memoryview(bytes(10)))
        with pytest.raises(ZeroDivisionError, match="mine"):
            tier.read_into(extent, memoryview(bytearray(10)))


def test_a_tier_that_keeps_its_buffer_finds_it_released() -> None:
    class Hoarder(DictTier):
        def write_from(self, extent, data):  # type: ignore[no-untyped-def]
            self.kept = data
            return super().write_from(extent, data)

    hoarder = Hoarder()
    with Verified(hoarder) as tier:
        tier.write_from(tier.reserve(10), memoryview(bytes(10)))
        with pytest.raises(ValueError, match="released"):
            bytes(hoarder.kept)


def test_a_dropped_tier_is_collected() -> None:
    tier = Verified(DictTier())
    tier.open()
    tier.close()
    gone = weakref.ref(tier)
    del tier
    gc.collect()
    assert gone() is None
