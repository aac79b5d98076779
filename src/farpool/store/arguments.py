"""What callers pass, checked, and as it goes over the wire."""

from __future__ import annotations

import math
import struct
import time
from typing import TYPE_CHECKING

from farpool.errors import ConfigError
from farpool.transport.frames import LARGEST_KEY

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["EXPIRY", "as_key", "as_payload", "as_target", "expiry_of"]

EXPIRY = struct.Struct("<Q")
"""Milliseconds since 1970, 0 for never."""


def as_key(key: str | bytes) -> bytes:
    """A key as bytes; text as UTF-8.

    Raises
    ------
    ConfigError
        It has no bytes, or more than 256.
    TypeError
        It is neither text nor bytes.
    """
    if isinstance(key, str):
        data = key.encode()
    elif isinstance(key, bytes):
        data = key
    else:
        raise TypeError(f"a key is a str or bytes, this one is a {type(key).__name__}: {key!r}")
    if not 1 <= len(data) <= LARGEST_KEY:
        raise ConfigError(f"the key {key!r} has {len(data)} bytes, expected 1 to {LARGEST_KEY}", setting="key")
    return data


def as_payload(value: Buffer) -> memoryview:
    """A value as memory that can be sent without a copy.

    Raises
    ------
    TypeError
        It has no buffer.
    ValueError
        Its bytes are not contiguous.
    """
    view = memoryview(value)
    if not view.c_contiguous:
        raise ValueError(f"the value ({type(value).__name__} of shape {view.shape}) is not contiguous; copy it first")
    return view


def as_target(buffer: Buffer) -> memoryview:
    """A buffer that an object can be read into.

    Raises
    ------
    TypeError
        It is no buffer.
    ValueError
        Its bytes are read-only or not contiguous.
    """
    view = memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        wrong = "read-only" if view.readonly else "not contiguous"
        raise ValueError(f"the buffer ({type(buffer).__name__} of {view.nbytes} bytes) is {wrong}")
    return view


def expiry_of(ttl: float | None) -> int:
    """When an object with this time to live expires, as on the wire.

    Raises
    ------
    ConfigError
        The time is not a number of seconds above 0.
    """
    if ttl is None:
        return 0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not (math.isfinite(ttl) and ttl > 0):
        raise ConfigError(f"ttl is {ttl!r}, expected seconds above 0, or None for no limit", setting="ttl")
    return math.ceil((time.time() + ttl) * 1000)
