"""Codecs that were measured and not chosen: the byte shuffle of KV with LZ4, and with Zstandard's level 1."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer


class Shuffled:
    """Byte shuffle, each plane compressed by a library; `uncode` gets a plane and the number of its bytes."""

    def __init__(
        self, name: str, element: int, code: Callable[[memoryview], bytes], uncode: Callable[[memoryview, int], bytes]
    ) -> None:
        self.name = name
        self._element, self._code, self._uncode = element, code, uncode
        self._lengths = struct.Struct(f"<{element}Q")

    def pack(self, payload: NDArray[np.uint8]) -> list[Buffer] | None:
        elements = payload.view(f"<u{self._element}")
        planes = []
        for index in range(self._element):
            plane = np.empty(len(elements), np.uint8)
            np.right_shift(elements, 8 * index, out=plane, casting="unsafe")
            planes.append(self._code(plane.data))
        return [self._lengths.pack(*map(len, planes)), *planes]

    def unpack(self, stored: NDArray[np.uint8], payload: NDArray[np.uint8]) -> None:
        elements: NDArray[Any] = payload.view(f"<u{self._element}")
        place = self._lengths.size
        planes = []
        for length in self._lengths.unpack_from(stored.data):
            planes.append(np.frombuffer(self._uncode(stored[place : place + length].data, len(elements)), np.uint8))
            place += length
        for start in range(0, len(elements), 1 << 16):
            some = elements[start : start + (1 << 16)]
            some[:] = planes[-1][start : start + (1 << 16)]
            for plane in reversed(planes[:-1]):
                some <<= 8
                some |= plane[start : start + (1 << 16)]


def zstd(element: int) -> Shuffled:
    """Zstandard, level 1."""
    import zstandard

    compressor, decompressor = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    return Shuffled("zstd level 1", element, compressor.compress, lambda coded, count: decompressor.decompress(coded))


def lz4(element: int) -> Shuffled:
    """LZ4 in its block format."""
    from lz4 import block

    def uncode(coded: memoryview, count: int) -> bytes:
        return bytes(block.decompress(coded, uncompressed_size=count))

    return Shuffled("lz4", element, lambda plane: bytes(block.compress(plane, store_size=False)), uncode)
