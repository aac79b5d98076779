"""Codecs that were measured and not chosen: the byte shuffle of KV with LZ4, and with Zstandard's level 1."""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

__all__ = ["ShuffledLz4", "ShuffledZstd"]


class _Shuffled(ABC):
    """Byte shuffle, each plane coded by a library at its own defaults."""

    name = ""

    def __init__(self, element: int) -> None:
        self._element = element
        self._lengths = struct.Struct(f"<{element}Q")

    @abstractmethod
    def _code(self, plane: memoryview) -> bytes:
        """Compress one plane."""

    @abstractmethod
    def _uncode(self, coded: memoryview, count: int) -> bytes:
        """Decompress one plane of `count` bytes."""

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


class ShuffledZstd(_Shuffled):
    """Zstandard, level 1."""

    name = "zstd level 1"

    def __init__(self, element: int) -> None:
        import zstandard

        super().__init__(element)
        self._compressor = zstandard.ZstdCompressor(level=1)
        self._decompressor = zstandard.ZstdDecompressor()

    def _code(self, plane: memoryview) -> bytes:
        return self._compressor.compress(plane)

    def _uncode(self, coded: memoryview, count: int) -> bytes:
        return self._decompressor.decompress(coded)


class ShuffledLz4(_Shuffled):
    """LZ4 in its block format."""

    name = "lz4"

    def _code(self, plane: memoryview) -> bytes:
        import lz4.block

        return bytes(lz4.block.compress(plane, store_size=False))

    def _uncode(self, coded: memoryview, count: int) -> bytes:
        import lz4.block

        return bytes(lz4.block.decompress(coded, uncompressed_size=count))
