"""What callers pass, checked, and as it goes over the wire."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from farpool.errors import ConfigError
from farpool.transport.frames import LARGEST_KEY

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["as_key", "as_payload", "as_prefix", "as_target", "expiry_of"]

_LONGEST_TTL = 1e16
"""Seconds; about what the wire can say."""
"""Seconds; the system takes its milliseconds as 32 bits."""


def as_key(key: str | bytes) -> bytes:
    """A key as bytes; text as UTF-8.

    Raises
    ------
    ConfigError
        It has no bytes, more than 256, or characters that UTF-8 does not have.
    TypeError
        It is neither text nor bytes.
    """
    return _bytes_of(key, "key", 1)


def as_prefix(prefix: str | bytes) -> bytes:
    """What keys begin with, as bytes; errors as of `as_key`, but it may be empty."""
    return _bytes_of(prefix, "prefix", 0)


def _bytes_of(text: str | bytes, what: str, fewest: int) -> bytes:
    if isinstance(text, str):
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the {what} {text!r} has a character that UTF-8 does not have, {text[error.start]!r}; expected text "
                "or bytes",
                setting=what,
            ) from None
    elif isinstance(text, bytes):
        data = text
    else:
        raise TypeError(f"a {what} is a str or bytes, this one is a {type(text).__name__}: {text!r}")
    if not fewest <= len(data) <= LARGEST_KEY:
        raise ConfigError(
            f"the {what} {text!r} has {len(data)} bytes, expected {fewest} to {LARGEST_KEY}", setting=what
        )
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
        The time is not a number of seconds above 0 and at most 1e16.
    """
    if ttl is None:
        return 0
    if isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= _LONGEST_TTL:
        raise ConfigError(
            f"ttl is {_brief(ttl)}, expected seconds above 0 and at most {_LONGEST_TTL:g}, or None for no limit",
            setting="ttl",
        )
    return math.ceil((time.time() + ttl) * 1000)


def _brief(value: object) -> str:
    """A value for an error; whole numbers may have more digits than Python prints."""
    return "too large a number" if isinstance(value, int) and abs(value) > 1 << 64 else repr(value)
