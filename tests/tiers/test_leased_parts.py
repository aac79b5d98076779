"""The parts of a leased tier over ports of this process, of which any one can be made to fail."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pytest

from farpool._native import PythonPort
from farpool.abc.tier import Extent
from farpool.cluster.leases.client import LeasedExtent
from farpool.errors import TierError
from farpool.memory.tiers.leased_parts import LeasedParts, Slot, _Claimed

NBYTES = 4096


class Bytes:
    """Memory of a node."""

    def __init__(self) -> None:
        self.content = bytearray(NBYTES)
        self.fails = False

    def read_into(self, extent: Extent, into: memoryview) -> None:
        self._check()
        into[:] = self.content[extent.offset : extent.offset + extent.nbytes]

    def write_from(self, extent: Extent, data: memoryview) -> None:
        self._check()
        self.content[extent.offset : extent.offset + extent.nbytes] = data

    def _check(self) -> None:
        if self.fails:
            raise TierError("the node is away", tier="remote")


class Parts:
    """One part with a copy on each of several nodes."""

    def __init__(self, count: int) -> None:
        self.nodes = [Bytes() for _ in range(count)]
        self.extents = [LeasedExtent(f"{index:032x}", 1, NBYTES, replica=index) for index in range(count)]
        self.slot = Slot("remote")
        self.parts = LeasedParts("remote", (self.slot,), cast(Any, None), 1.0)
        for extent, node in zip(self.extents, self.nodes, strict=True):
            self.parts._claimed[extent.key] = _Claimed(cast(Any, None), cast(Any, None), PythonPort(node))
        self.parts.use(self.slot, tuple(self.extents))
        self._buffer = ctypes.create_string_buffer(NBYTES)

    def write(self, value: int) -> None:
        ctypes.memset(self._buffer, value, NBYTES)
        self.slot.port.write(0, ctypes.addressof(self._buffer), NBYTES)

    def read(self) -> int:
        self.slot.port.read(0, ctypes.addressof(self._buffer), NBYTES)
        assert len(set(self._buffer.raw)) == 1
        return self._buffer.raw[0]

    def make_again(self, index: int) -> None:
        assert self.parts.move(self.extents[index], self.extents[index], lambda: True)

    @property
    def faults(self) -> dict[int, str]:
        return {
            self.extents.index(one): self.parts.faults()[one.key]
            for one in self.extents
            if one.key in self.parts.faults()
        }


def test_a_copy_that_is_out_of_use_stays_out_while_another_one_is_made_again() -> None:
    parts = Parts(3)
    parts.write(1)
    parts.nodes[0].fails = parts.nodes[1].fails = True
    parts.write(2)
    assert parts.faults == {0: "the node is away", 1: "the node is away"}
    parts.nodes[0].fails = parts.nodes[1].fails = False
    parts.make_again(0)
    assert parts.faults == {1: "the node is away"}
    parts.nodes[2].fails = True
    assert parts.read() == 2
    parts.nodes[0].fails = True
    with pytest.raises(TierError):
        parts.read()
    assert parts.nodes[1].content[0] == 1
    parts.nodes[0].fails = False
    parts.make_again(1)
    assert parts.nodes[1].content == bytes([2]) * NBYTES
    assert parts.read() == 2


def test_a_copy_that_cannot_be_made_again_stays_out() -> None:
    parts = Parts(2)
    parts.write(1)
    parts.nodes[1].fails = True
    parts.write(2)
    with pytest.raises(TierError, match="the node is away"):
        parts.make_again(1)
    parts.write(3)
    parts.nodes[1].fails = False
    assert parts.faults == {1: "the node is away"}
    assert parts.read() == 3
    parts.make_again(1)
    assert parts.faults == {}
    assert parts.nodes[0].content == parts.nodes[1].content == bytes([3]) * NBYTES
