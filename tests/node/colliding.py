"""Keys with the same hash, as whoever has an index mapped can make them: its seed stands in the file."""

from __future__ import annotations

import struct
from pathlib import Path

__all__ = ["colliding_keys"]

_SEED = struct.Struct("<72xQ")
_MASK = 2**64 - 1


def colliding_keys(index: Path, count: int) -> list[bytes]:
    """Keys of 16 bytes that an index (docs/segment-file.md) cannot tell apart by their hash."""
    with open(index, "rb") as file:
        (seed,) = _SEED.unpack(file.read(_SEED.size))
    begun = _mix(seed ^ 16)
    # The second word undoes the difference that the first has made.
    return [struct.pack("<QQ", first, _mix(begun ^ first)) for first in range(count)]


def _mix(word: int) -> int:
    word = (word + 0x9E3779B97F4A7C15) & _MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31
