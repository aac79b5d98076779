"""Packs and reads the wire protocol's frames in Python (docs/wire.md).

A frame is a fixed header, then *meta* (a key or arguments), then a payload. Frames with payloads are handled in native
code (the node's data loop and the client's data connections). This module serves the handshake and control calls, whose
frames have no payload.

Sans-IO: a `FrameReader` reports how many bytes it needs next. It never asks for bytes of a later frame. So other code
can take over the socket between two frames.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum, IntFlag

from farpool._native import crc32c
from farpool.errors import IncompatibleError, ProtocolError

__all__ = [
    "COMMIT",
    "COPIED",
    "ENDED",
    "HEAD",
    "HEADER_BYTES",
    "KEPT",
    "KEY_BYTES_MAX",
    "LOOKUP",
    "MARK_OF_NONE",
    "META_BYTES_MAX",
    "OFFSET",
    "PLACE",
    "PRESENT",
    "PRIORITY_ENDS",
    "PRIORITY_SHIFT",
    "RETAIN",
    "RETAIN_RAISES",
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
META_BYTES_MAX = 65536
KEY_BYTES_MAX = 256
"""Maximum length of an object's key in bytes."""
_MAGIC = b"FPW1"
_HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")
_CHECKSUM = struct.Struct("<I")


class Op(IntEnum):
    """Operation codes of frames."""

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
    DEMOTE = 29
    RETAIN = 30
    END_SESSION = 31
    READ = 32
    WRITE = 33
    PING = 48


HEAD = struct.Struct("<QBBHIQQ")
"""Head of an object (its properties on the wire): milliseconds to live (0: no end), copies, class, parts, recompute
cost (us), namespace, and flags (`KEPT`, `COPIED`, `PRIORITY_ENDS`, and the priority). The upper half of the flags is
the tenant's epoch on the storing node."""
KEPT = 1
"""Flag of a head in a reply: the object is never evicted."""
COPIED = 2
"""Flag of a head in a ``put``: the object is a copy from another node. If its key was just dropped, it is refused."""
PRIORITY_ENDS = 8
"""Flag of a head in a reply: the priority ends with a session, or at a time."""
PRIORITY_SHIFT = 8
"""Place of the priority (3 bits) in the flags of a head. Nodes without the feature `RETENTION` ignore these bits."""
TTL = struct.Struct("<Q")
"""Start of a ``pin`` request, before the key: milliseconds for which the pin lasts; 0 for as long as the session."""
TOUCH = struct.Struct("<QB7x")
"""Start of a ``touch`` request, before the key: milliseconds to live, and a code.

The code is 0 (do not change whether the object is kept), 1 (keep the object) or 2 (stop keeping it).
"""
RETAIN = struct.Struct("<QQQ")
"""Start of a ``retain`` request, before the key: number of the session (0: none), the priority (0 to 7), and the
milliseconds for which it holds (0: no end)."""
RETAIN_RAISES = 256
"""Added to the priority in a ``retain`` request: an object whose priority is higher stays as it is."""
ENDED = struct.Struct("<Q")
"""Meta of an ``end_session`` request: number of the session. Meta of the reply: number of its objects."""
MARK_OF_NONE = (1 << 64) - 1
"""A mark that no object has. A ``touch`` with code 1 and this mark touches only an object that is already kept."""
LOOKUP = struct.Struct("<II")
"""Start of a ``lookup`` request: flags, number of keys.

Also the start of the reply to it: number of keys, and number of keys before the first one that is missing.
"""
OFFSET = struct.Struct("<Q")
"""Offset in an ``abort`` request and in the reply to ``prepare``.

Also the object's size in bytes in a ``prepare`` request, before the head.
"""
UNPIN = struct.Struct("<QQ")
"""Meta of an ``unpin`` request: offset of the payload, number of the pin."""
COMMIT = struct.Struct("<QII")
"""Meta of a ``commit`` request: offset, checksum, zero."""
PLACE = struct.Struct("<QQII")
"""Meta of the reply to ``pin``: offset, bytes, checksum, number of the pin."""
STATED = struct.Struct("<QII")
"""Start of the reply to ``stat``, before the head: bytes, checksum, pins."""
PRESENT = struct.Struct("<QII")
"""Start of the reply to a ``put`` or ``prepare`` of an existing key, before the head: bytes, checksum, zero."""
ROTATE = struct.Struct("<I")
"""Meta of a ``rotate`` request: the epoch to begin."""
ROTATED = struct.Struct("<IIQQ")
"""Meta of the reply to ``rotate``: the current epoch, zero, number and bytes of objects that became unreadable."""


class Status(IntEnum):
    """Status codes of replies: the outcome of a request."""

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
    LAPSED = 12


class Credential(IntEnum):
    """Kind of credential that authenticated the sender of a request."""

    NONE = 0
    SECRET = 1
    CERTIFICATE = 2


class Right(IntFlag):
    """Rights that an access key may have."""

    READ = 1
    WRITE = 2
    PUBLISH = 4
    ADMIN = 8
    REPAIR = 16


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame without a payload.

    Attributes
    ----------
    op : int
        Operation; one of `Op`, unless the sender has another version of farpool.
    status : int
        One of `Status`; 0 in a request.
    request : int
        Number of the request; the reply has the same number.
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
    """Encode a frame without a payload into the bytes to send."""
    fields = _HEADER.pack(_MAGIC, VERSION, op, status, request, len(meta), 0, 0, 0, 0, 0, tenant, credential, b"\0\0\0")
    return fields + _CHECKSUM.pack(crc32c(meta, crc32c(fields))) + meta


class FrameReader:
    """Assembles frames from bytes as they arrive.

    Parameters
    ----------
    node : str
        Address of the node, for errors; empty at the node itself.
    meta_bytes_max : int
        Maximum bytes of meta; a frame with more is refused before its meta is read.
    """

    def __init__(self, node: str, meta_bytes_max: int = META_BYTES_MAX) -> None:
        self._node = node
        self._meta_bytes_max = meta_bytes_max
        self._data = bytearray()
        self._needed = HEADER_BYTES

    @property
    def needed(self) -> int:
        """Maximum number of bytes that the next call of `feed` accepts; at least 1."""
        return self._needed - len(self._data)

    def feed(self, data: bytes) -> Frame | None:
        """Add received bytes, at most `needed`; return the frame if it is complete now, else None.

        Raises
        ------
        ProtocolError
            The bytes are no frame, or a frame that this farpool cannot read.
        """
        if len(data) > self.needed:
            raise ValueError(f"{len(data)} bytes were fed, expected at most {self.needed}")
        self._data += data
        if len(self._data) < self._needed:
            return None
        if self._needed == HEADER_BYTES:
            # The header is checked before any meta is received, because a stranger chooses the meta's length.
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
        """Check the header; return the number of bytes of meta that follow it, or raise ProtocolError."""
        magic, version, op, _, _, meta_nbytes, _, payload_nbytes, *_ = _HEADER.unpack_from(self._data)
        # The magic comes first, so that bytes of another protocol are not reported as a wrong version.
        if magic != _MAGIC:
            raise self._error(f"does not speak farpool's protocol: it sent {bytes(self._data[:8])!r}")
        if version != VERSION:
            what = f"sent a frame of version {version}, this farpool speaks version {VERSION}"
            raise IncompatibleError(f"{self._sender} {what}", node=self._node)
        if meta_nbytes > self._meta_bytes_max:
            raise self._error(
                f"sent a frame with {meta_nbytes} bytes of meta, expected at most {self._meta_bytes_max} here"
            )
        if payload_nbytes:
            raise self._error(
                f"sent a frame of operation {op} with {payload_nbytes} bytes of payload, expected none here"
            )
        return int(meta_nbytes)

    @property
    def _sender(self) -> str:
        return self._node or "the other side"

    def _error(self, what: str) -> ProtocolError:
        return ProtocolError(f"{self._sender} {what}", node=self._node)
