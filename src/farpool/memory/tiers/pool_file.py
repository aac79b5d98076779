"""Format of pool files, whose header distinguishes a tier's file from any other file.

A pool file holds bytes that one process has moved out of memory. They are useless after that process has ended.
Integers are little-endian.

====== ===== ==============================================================
offset bytes field
====== ===== ==============================================================
0      8     magic, ``FARPOOL`` and a zero byte
8      4     version, 1
12     4     header size in bytes, 4096; the extents begin there
16     8     feature bits; none are defined, a reader refuses unknown ones
24     8     capacity: bytes for extents after the header
32     8     process id of the owner
40     16    pool id, random for each opening
56     4     CRC32C of bytes 0 to 55
60     4036  zero
====== ===== ==============================================================

The owner holds an exclusive ``flock`` on the open file, and removes the file when it closes the tier. A pool file
without a lock was left by a process that was killed. No other process can use the bytes in it, and the next owner
resets the file. A tier never changes a file that does not begin with the magic or has a damaged header.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass

from farpool._native import crc32c
from farpool.errors import PoolFileError

__all__ = ["HEADER_BYTES", "MAGIC", "VERSION", "PoolFileHeader"]

MAGIC = b"FARPOOL\0"
VERSION = 1
HEADER_BYTES = 4096
_FIELDS = struct.Struct("<8sIIQQQ16s")
_CHECKSUM = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class PoolFileHeader:
    """The header of a pool file.

    Attributes
    ----------
    capacity : int
        Bytes for extents after the header.
    pid : int
        Process id of the owner.
    pool_id : bytes
        16 random bytes, new at each opening.
    """

    capacity: int
    pid: int
    pool_id: bytes

    @classmethod
    def for_this_process(cls, capacity: int) -> PoolFileHeader:
        """Make a header with a new pool id, and with this process as the owner."""
        return cls(capacity, os.getpid(), os.urandom(16))

    def pack(self) -> bytes:
        """Encode the header as 4096 bytes."""
        fields = _FIELDS.pack(MAGIC, VERSION, HEADER_BYTES, 0, self.capacity, self.pid, self.pool_id)
        return (fields + _CHECKSUM.pack(crc32c(fields))).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes, path: str, tier: str) -> PoolFileHeader:
        """Decode and check a header.

        Parameters
        ----------
        data : bytes
            The first bytes of the file, up to 4096.
        path, tier : str
            Path of the file and name of the tier, for errors.

        Raises
        ------
        PoolFileError
            The file is not a pool file, its header is damaged, or it has a newer version or unknown features.
        """
        if data[: len(MAGIC)] != MAGIC:
            raise PoolFileError(
                f"{tier}: {path} is not empty and not a pool file; it was not touched, choose another path", tier=tier
            )
        # Check the version first: a newer one may have another layout and another checksum.
        version = int.from_bytes(data[8:12], "little") if len(data) >= 12 else VERSION
        if version > VERSION:
            raise PoolFileError(
                f"{tier}: {path} is a pool file of version {version}, this farpool reads up to version {VERSION}; it "
                "was not touched, upgrade farpool or choose another path",
                tier=tier,
            )
        end = _FIELDS.size + _CHECKSUM.size
        if len(data) < end or crc32c(data[: _FIELDS.size]) != _CHECKSUM.unpack(data[_FIELDS.size : end])[0]:
            raise PoolFileError(
                f"{tier}: the header of the pool file {path} is damaged; it was not touched, delete it or choose "
                "another path",
                tier=tier,
            )
        _, _, header_bytes, features, capacity, pid, pool_id = _FIELDS.unpack(data[: _FIELDS.size])
        if version < VERSION or header_bytes != HEADER_BYTES or features != 0:
            raise PoolFileError(
                f"{tier}: {path} is a pool file of version {version} with header size {header_bytes} and feature bits "
                f"{features:#x}, this farpool knows version {VERSION}, {HEADER_BYTES} and no features; it was not "
                "touched",
                tier=tier,
            )
        return cls(capacity, pid, pool_id)
