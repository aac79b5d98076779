"""Frames of the wire protocol (docs/wire.md), as Python packs and reads them.

The data loop is native; what is here carries the handshake and control calls, whose frames have no payload. Sans-IO: a
`FrameReader` says how many bytes it needs next and never needs one that belongs to a later frame, so that a socket can
change hands between two frames.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from farpool._native import crc32c
from farpool.errors import ProtocolError

__all__ = [
    "COMMIT",
    "COPIED",
    "HEAD",
    "HEADER_BYTES",
    "KEPT",
    "LARGEST_KEY",
    "LARGEST_META",
    "LOOKUP",
    "OFFSET",
    "PLACE",
    "PRESENT",
    "ROTATE",
    "ROTATED",
    "STATED",
    "TOUCH",
    "TTL",
    "UNPIN",
    "VERSION",
    "Credential",
    "Frame",
    "FrameReader",
    "Op",
    "Right",
    "Status",
    "pack_frame",
]

VERSION = 2
HEADER_BYTES = 64
LARGEST_META = 65536
LARGEST_KEY = 256
"""Bytes of an object's key."""
_MAGIC = b"FPW1"
_HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")
_CHECKSUM = struct.Struct("<I")


class Op(IntEnum):
    """What a frame asks or says."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    CALL = 6
    GET = 16
    STAT = 17
    PUT = 18
    DROP = 19
    TOUCH = 20
    PIN = 21
    UNPIN = 22
    PREPARE = 23
    COMMIT = 24
    ABORT = 25
    ROTATE = 26
    LOOKUP = 27
    AREA = 28
    READ = 32
    WRITE = 33
    PING = 48


HEAD = struct.Struct("<QBBHIQQ")
"""An object besides its bytes: milliseconds to live (0: no end), copies, class, parts, recompute cost (us), namespace,
and flags: 1 if it is kept. The upper half of the flags is the epoch of the tenant where it lies."""
KEPT = 1
"""Flag of an object's head, where it is told: it is never evicted."""
COPIED = 2
"""Flag of the head of a put: it is a copy of another node's, not wanted where the key has just been dropped."""
TTL = struct.Struct("<Q")
"""Before the key of a ``pin``: milliseconds to live, 0 for as long as the session."""
TOUCH = struct.Struct("<QB7x")
"""Before the key of a ``touch``: milliseconds to live, and 0 (as it is), 1 (keep) or 2 (let go)."""
LOOKUP = struct.Struct("<II")
"""Of a ``lookup``: flags, number of keys; of its reply: number of keys, and how many are there without a gap."""
OFFSET = struct.Struct("<Q")
"""Of an ``abort`` and the reply to ``prepare``; of a ``prepare`` itself the bytes, before the head."""
UNPIN = struct.Struct("<QQ")
"""Of an ``unpin``: offset, and number of the pin."""
COMMIT = struct.Struct("<QII")
"""Of a ``commit``: offset, checksum, zero."""
PLACE = struct.Struct("<QQII")
"""Of the reply to ``pin``: offset, bytes, checksum, number of the pin."""
STATED = struct.Struct("<QII")
"""Of the reply to ``stat``: bytes, checksum, pins, before the head."""
PRESENT = struct.Struct("<QII")
"""Of the reply to a ``put`` or ``prepare`` of a key that is there: bytes, checksum, zero, before the head."""
ROTATE = struct.Struct("<I")
"""Of a ``rotate``: the epoch that is to begin."""
ROTATED = struct.Struct("<IIQQ")
"""Of the reply to ``rotate``: the epoch that is now, zero, and objects and bytes that became unreadable."""


class Status(IntEnum):
    """How a request went."""

    DONE = 0
    MISSING = 1
    PRESENT = 2
    FULL = 4
    DENIED = 5
    BAD_REQUEST = 6
    TOO_LARGE = 7
    CHECKSUM = 8
    UNKNOWN = 9
    BUSY = 10
    TAKEN = 11


class Credential(IntEnum):
    """How the sender of a request proved itself."""

    NONE = 0
    SECRET = 1
    CERTIFICATE = 2


class Right(IntFlag):
    """What an access key allows."""

    READ = 1
    WRITE = 2
    PUBLISH = 4
    ADMIN = 8


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame without a payload.

    Attributes
    ----------
    op : int
        Operation, one of `Op` where the sender is of this version.
    status : int
        One of `Status`; 0 in a request.
    request : int
        Number of the request, repeated in the reply.
    tenant, credential : int
        Tenant and credential type of the sender.
    meta : bytes
        A key or arguments.
    """

    op: int
    status: int
    request: int
    tenant: int
    credential: int
    meta: bytes


def pack_frame(
    op: int, meta: bytes, *, status: int = 0, request: int = 0, tenant: int = 0, credential: int = 0
) -> bytes:
    """A frame without a payload, as it goes over the wire."""
    fields = _HEADER.pack(_MAGIC, VERSION, op, status, request, len(meta), 0, 0, 0, 0, 0, tenant, credential, b"\0\0\0")
    return fields + _CHECKSUM.pack(crc32c(meta, crc32c(fields))) + meta


class FrameReader:
    """Puts frames together from bytes as they come.

    Parameters
    ----------
    node : str
        Address of the node, for errors; empty at the node itself.
    largest_meta : int
        A frame with more meta than this is refused before its meta is read.
    """

    def __init__(self, node: str, largest_meta: int = LARGEST_META) -> None:
        self._node = node
        self._largest_meta = largest_meta
        self._data = bytearray()
        self._needed = HEADER_BYTES

    @property
    def needed(self) -> int:
        """How many bytes to feed next at most; 1 or more."""
        return self._needed - len(self._data)

    def feed(self, data: bytes) -> Frame | None:
        """Take bytes, at most `needed`; a frame once it is complete.

        Raises
        ------
        ProtocolError
            The bytes are no frame, or not one that this farpool reads.
        """
        if len(data) > self.needed:
            raise ValueError(f"{len(data)} bytes were fed, expected at most {self.needed}")
        self._data += data
        if len(self._data) < self._needed:
            return None
        if self._needed == HEADER_BYTES:
            meta_nbytes = self._check_header()
            if meta_nbytes:
                self._needed += meta_nbytes
                return None
        whole = bytes(self._data)
        self._data.clear()
        self._needed = HEADER_BYTES
        fields, meta = whole[: _HEADER.size], whole[HEADER_BYTES:]
        if _CHECKSUM.unpack_from(whole, _HEADER.size)[0] != crc32c(meta, crc32c(fields)):
            raise self._error("sent a frame whose checksum is wrong")
        _, _, op, status, request, _, _, _, _, _, _, tenant, credential, _ = _HEADER.unpack(fields)
        return Frame(op, status, request, tenant, credential, meta)

    def _check_header(self) -> int:
        """Bytes of meta, if the header can be gone on with."""
        magic, version, op, _, _, meta_nbytes, _, payload_nbytes, *_ = _HEADER.unpack_from(self._data)
        if magic != _MAGIC:
            raise self._error(f"does not speak farpool's protocol: it sent {bytes(self._data[:8])!r}")
        if version != VERSION:
            raise self._error(f"sent a frame of version {version}, this farpool speaks version {VERSION}")
        if meta_nbytes > self._largest_meta:
            raise self._error(
                f"sent a frame with {meta_nbytes} bytes of meta, expected at most {self._largest_meta} here"
            )
        if payload_nbytes:
            raise self._error(
                f"sent a frame of operation {op} with {payload_nbytes} bytes of payload, expected none here"
            )
        return int(meta_nbytes)

    def _error(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._node or 'the other side'} {what}", node=self._node)
