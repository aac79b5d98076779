"""The contract of a tier, as tests.

Subclass `TierConformance` in a pytest module::

    class TestMyTier(TierConformance):
        def make_tier(self) -> Tier:
            return MyTier("16MiB")

If the tier needs a folder, :meth:`make_tier` uses the attribute `folder`, a new folder for each test.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from farpool._native import Memory
from farpool.abc.tier import Extent, Tier, TierInfo
from farpool.errors import TierError, TierFullError
from farpool.memory.tiers.kinds import GROUP, kind_names
from farpool.memory.tiers.port_tier import port_of
from farpool.testing.tier_machine import tier_machine

__all__ = ["TierConformance"]

_WAIT_TIMEOUT_S = 30.0
_MIB = 2**20
_SIZES = [1, 63, 64, 4095, 4096, 4097, _MIB + 1]


def _pattern(nbytes: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(f"{seed}/{nbytes}").randbytes(nbytes))


class TierConformance:
    """Tests of a tier's contract: a subclass gives :meth:`make_tier`, pytest runs the rest."""

    folder: Path

    def make_tier(self) -> Tier:
        """Make a new, closed tier with a capacity of 8 MiB to 256 MiB; after it is opened, it is empty."""
        raise NotImplementedError("give TierConformance a make_tier()")

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    @pytest.fixture
    def tier(self) -> Iterator[Tier]:
        """Provide an open tier."""
        tier = self.make_tier()
        tier.open()
        yield tier
        tier.close()

    def write(self, tier: Tier, extent: Extent, data: bytes | bytearray) -> None:
        """Write data to an extent."""
        tier.write_from(extent, memoryview(data))

    def read(self, tier: Tier, extent: Extent) -> bytes:
        """Read the bytes of an extent."""
        buffer = bytearray(extent.nbytes)
        tier.read_into(extent, memoryview(buffer))
        return bytes(buffer)

    def test_info_is_valid_before_the_tier_is_opened(self) -> None:
        info = self.make_tier().info
        assert isinstance(info, TierInfo)
        assert info.name
        known = {"hbm", "cxl", *kind_names()}
        assert info.kind in known, f"no package offers the kind {info.kind!r} as an entry point of the group {GROUP}"
        assert info.capacity >= 8 * _MIB
        assert info.alignment >= 1
        assert info.capacity % info.alignment == 0

    def test_info_does_not_change_when_the_tier_is_opened(self) -> None:
        tier = self.make_tier()
        before = tier.info
        with tier:
            assert (tier.info.name, tier.info.kind, tier.info.alignment) == (before.name, before.kind, before.alignment)

    def test_what_is_written_is_read_back(self, tier: Tier) -> None:
        for nbytes in _SIZES:
            extent = tier.reserve(nbytes)
            assert extent.nbytes == nbytes
            data = _pattern(nbytes)
            self.write(tier, extent, data)
            assert self.read(tier, extent) == data, f"{nbytes} bytes"

    def test_unaligned_buffers_work(self, tier: Tier) -> None:
        for nbytes, shift in itertools.product(_SIZES, [1, 8, 64]):
            extent = tier.reserve(nbytes)
            data = _pattern(nbytes, shift)
            tier.write_from(extent, memoryview(bytearray(shift) + data)[shift:])
            buffer = bytearray(shift + nbytes + 16)
            tier.read_into(extent, memoryview(buffer)[shift : shift + nbytes])
            what = f"{nbytes} bytes, {shift} bytes into the buffer"
            assert buffer[shift : shift + nbytes] == data, what
            assert not any(buffer[:shift]), f"{what}: a read wrote in front of its buffer"
            assert not any(buffer[shift + nbytes :]), f"{what}: a read wrote behind its buffer"
            tier.free(extent)

    def test_a_read_only_buffer_can_be_written_to_the_tier(self, tier: Tier) -> None:
        extent = tier.reserve(4097)
        data = bytes(_pattern(4097))
        self.write(tier, extent, data)
        assert self.read(tier, extent) == data

    def test_an_extent_can_be_overwritten(self, tier: Tier) -> None:
        extent = tier.reserve(5000)
        for seed in range(3):
            data = _pattern(5000, seed)
            self.write(tier, extent, data)
            assert self.read(tier, extent) == data

    def test_many_extents_do_not_disturb_each_other(self, tier: Tier) -> None:
        draw = random.Random(1)
        contents: dict[Extent, bytearray] = {}
        for number in range(200):
            extent = tier.reserve(draw.choice([1, 63, 64, 100, 4095, 4096, 4097, 20_000]))
            contents[extent] = _pattern(extent.nbytes, number)
            self.write(tier, extent, contents[extent])
            if number % 3 == 0:
                gone = draw.choice(list(contents))
                tier.free(gone)
                del contents[gone]
        for extent, data in contents.items():
            assert self.read(tier, extent) == data

    def test_reserved_counts_what_is_reserved(self, tier: Tier) -> None:
        assert tier.reserved == 0
        extents = [tier.reserve(nbytes) for nbytes in _SIZES]
        assert sum(_SIZES) <= tier.reserved <= tier.info.capacity
        assert tier.reserved <= sum(_SIZES) + len(_SIZES) * (tier.info.alignment - 1)
        for extent in extents:
            tier.free(extent)
        assert tier.reserved == 0

    def test_the_whole_capacity_can_be_reserved(self, tier: Tier) -> None:
        extent = tier.reserve(tier.info.capacity)
        assert tier.reserved == tier.info.capacity
        tier.free(extent)
        assert tier.reserved == 0

    def test_a_full_tier_says_so_and_stays_as_it_was(self, tier: Tier) -> None:
        extent = tier.reserve(4096)
        data = _pattern(4096)
        self.write(tier, extent, data)
        before = tier.reserved
        with pytest.raises(TierFullError) as caught:
            tier.reserve(tier.info.capacity)
        assert caught.value.tier == tier.info.name
        assert tier.info.name in str(caught.value)
        assert tier.reserved == before
        assert self.read(tier, extent) == data
        tier.reserve(4096)

    def test_a_reservation_of_no_bytes_is_refused(self, tier: Tier) -> None:
        for nbytes in (0, -1):
            with pytest.raises(ValueError, match=r"."):
                tier.reserve(nbytes)
        assert tier.reserved == 0

    def test_freed_room_can_be_reserved_again(self, tier: Tier) -> None:
        piece = tier.info.capacity // 4
        for _ in range(3):
            extents = [tier.reserve(piece - piece % tier.info.alignment) for _ in range(4)]
            for extent in extents:
                tier.free(extent)
        assert tier.reserved == 0

    def test_freeing_twice_is_an_error_and_changes_nothing(self, tier: Tier) -> None:
        kept, gone = tier.reserve(100), tier.reserve(100)
        data = _pattern(100)
        self.write(tier, kept, data)
        tier.free(gone)
        before = tier.reserved
        with pytest.raises(ValueError, match=r"."):
            tier.free(gone)
        assert tier.reserved == before
        assert self.read(tier, kept) == data

    def test_freeing_what_was_never_reserved_is_an_error(self, tier: Tier) -> None:
        extent = tier.reserve(100)
        for wrong in (Extent(extent.offset, 99), Extent(extent.offset + 1, 99), Extent(2**40, 100)):
            with pytest.raises(ValueError, match=r"."):
                tier.free(wrong)
        tier.free(extent)

    def test_a_buffer_of_the_wrong_length_is_refused(self, tier: Tier) -> None:
        extent = tier.reserve(100)
        data = _pattern(100)
        self.write(tier, extent, data)
        for nbytes in (0, 99, 101):
            with pytest.raises(ValueError, match=r"."):
                tier.write_from(extent, memoryview(bytearray(nbytes)))
            with pytest.raises(ValueError, match=r"."):
                tier.read_into(extent, memoryview(bytearray(nbytes)))
        assert self.read(tier, extent) == data

    def test_a_read_into_a_read_only_buffer_is_refused(self, tier: Tier) -> None:
        extent = tier.reserve(100)
        self.write(tier, extent, _pattern(100))
        with pytest.raises(ValueError, match=r"."):
            tier.read_into(extent, memoryview(bytes(100)))

    def test_several_transfers_may_be_under_way_at_once(self, tier: Tier) -> None:
        extents = [tier.reserve(100_000) for _ in range(16)]
        data = [_pattern(100_000, seed) for seed in range(16)]
        buffers = [bytearray(100_000) for _ in extents]
        _in_threads([partial(tier.write_from, e, memoryview(d)) for e, d in zip(extents, data, strict=True)])
        _in_threads([partial(tier.read_into, e, memoryview(b)) for e, b in zip(extents, buffers, strict=True)])
        assert buffers == data

    def test_threads_may_use_the_tier_at_once(self, tier: Tier) -> None:
        def work(seed: int) -> None:
            draw = random.Random(seed)
            for step in range(20):
                extent = tier.reserve(draw.randrange(1, 50_000))
                data = _pattern(extent.nbytes, 1000 * seed + step)
                self.write(tier, extent, data)
                assert self.read(tier, extent) == data
                tier.free(extent)

        _in_threads([partial(work, seed) for seed in range(8)])
        assert tier.reserved == 0

    def test_opening_and_closing_twice_does_nothing(self) -> None:
        tier = self.make_tier()
        tier.close()
        tier.open()
        extent = tier.reserve(100)
        data = _pattern(100)
        self.write(tier, extent, data)
        tier.open()
        assert self.read(tier, extent) == data
        tier.close()
        tier.close()

    def test_a_reopened_tier_is_empty_and_works(self) -> None:
        tier = self.make_tier()
        for seed in range(3):
            with tier:
                assert tier.reserved == 0
                extent = tier.reserve(tier.info.capacity // 2)
                data = _pattern(extent.nbytes, seed)
                self.write(tier, extent, data)
                assert self.read(tier, extent) == data

    def test_closing_while_threads_transfer_does_no_harm(self) -> None:
        """Each transfer either succeeds or raises an error that says that the tier is closed."""
        tier = self.make_tier()
        tier.open()
        extents = [tier.reserve(_MIB) for _ in range(4)]
        begun = threading.Barrier(len(extents) + 1)

        def work(extent: Extent) -> None:
            data = memoryview(_pattern(_MIB))
            begun.wait(_WAIT_TIMEOUT_S)
            with contextlib.suppress(TierError):
                for _ in range(20):
                    tier.write_from(extent, data)

        def close() -> None:
            begun.wait(_WAIT_TIMEOUT_S)
            tier.close()

        _in_threads([close, *(partial(work, extent) for extent in extents)])

    def test_the_native_port_and_python_see_the_same_bytes(self, tier: Tier) -> None:
        # A pool reads and writes through ports only; a tier without one is called from Python, through this one.
        port = port_of(tier)
        extent = tier.reserve(100_001)
        data = _pattern(100_001)
        memory = Memory(100_001)
        self.write(tier, extent, data)
        port.read(extent.offset, memory.address, extent.nbytes)
        assert memoryview(memory) == data
        memoryview(memory)[:] = data[::-1]
        port.write(extent.offset, memory.address, extent.nbytes)
        assert self.read(tier, extent) == data[::-1]

    def test_random_operations_agree_with_a_perfect_tier(self) -> None:
        run_state_machine_as_test(
            tier_machine(self.make_tier),
            settings=settings(max_examples=15, stateful_step_count=30, deadline=None, derandomize=True, database=None),
        )


def _in_threads(calls: list[Callable[[], None]]) -> None:
    """Run each call in a thread of its own; raise the first error of any call."""
    failures: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_WAIT_TIMEOUT_S)
        assert not thread.is_alive(), "a thread did not finish in time"
    if failures:
        raise failures[0]
