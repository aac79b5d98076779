"""Functions that check and convert the arguments of store calls: keys, values, buffers and times to live."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, overload

from farpool._native import Slices, target_sizes
from farpool._native import as_keys as native_keys
from farpool.abc.objects import Payload
from farpool.checks import require_seconds
from farpool.cluster.wire.frames import KEY_BYTES_MAX
from farpool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

__all__ = ["as_key", "as_keys", "as_payload", "as_prefix", "as_target", "as_targets", "nbytes_of", "parts_of", "ttl_of"]

_TTL_MAX_S = 1e16
"""Longest time to live in seconds. It is about the longest that the wire format can express."""


def as_key(key: str | bytes) -> bytes:
    """Convert a key to bytes; text is encoded as UTF-8.

    Raises
    ------
    ConfigError
        The key is empty, has more than 256 bytes, or has characters that UTF-8 cannot encode.
    TypeError
        The key is neither text nor bytes.
    """
    return _bytes_of(key, "key", 1)


def as_keys(keys: Iterable[str | bytes]) -> list[bytes]:
    """Convert keys to bytes; raises the errors of `as_key`."""
    given = list(keys)
    # The native check is one call for all keys. It returns None if a key is wrong, and the loop finds the error.
    checked = native_keys(given)
    return [as_key(key) for key in given] if checked is None else checked


def as_prefix(prefix: str | bytes) -> bytes:
    """Convert a key prefix to bytes. The prefix may be empty; all other errors of `as_key` are raised."""
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
    if not fewest <= len(data) <= KEY_BYTES_MAX:
        raise ConfigError(
            f"the {what} {text!r} has {len(data)} bytes, expected {fewest} to {KEY_BYTES_MAX}", setting=what
        )
    return data


def nbytes_of(payload: Payload) -> int:
    """Return the size of a payload in bytes."""
    return payload.nbytes if isinstance(payload, memoryview) else sum([part.nbytes for part in payload])


def parts_of(payload: Payload) -> list[memoryview]:
    """Return the buffers of a payload in their order."""
    if isinstance(payload, memoryview):
        return [payload]
    parts: list[memoryview] = []
    for part in payload:
        parts += part.views() if isinstance(part, Slices) else (part,)
    return parts


def as_payload(value: Buffer | tuple[Buffer | Slices, ...]) -> Payload:
    """Return a value, or its pieces, as memory that can be sent without a copy.

    Raises
    ------
    TypeError
        The value or a piece does not have the buffer protocol.
    ValueError
        The bytes of the value or of a piece are not contiguous.
    """
    if isinstance(value, tuple):
        return tuple([part if isinstance(part, Slices) else _sendable(part) for part in value])
    return _sendable(value)


def _sendable(value: Buffer) -> memoryview:
    view = memoryview(value)
    if not view.c_contiguous:
        raise ValueError(f"the value ({type(value).__name__} of shape {view.shape}) is not contiguous; copy it first")
    return view


@overload
def as_target(buffer: Buffer) -> memoryview: ...
@overload
def as_target(buffer: Buffer | tuple[Buffer | Slices, ...]) -> Payload: ...
def as_target(buffer: Buffer | tuple[Buffer | Slices, ...]) -> Payload:
    """Return a buffer, or several buffers, as memory for the bytes of one object.

    Raises
    ------
    TypeError
        An argument does not have the buffer protocol.
    ValueError
        A buffer is read-only or not contiguous.
    """
    if isinstance(buffer, tuple):
        return tuple(
            [_writable_slices(part) if isinstance(part, Slices) else _writable_buffer(part) for part in buffer]
        )
    return _writable_buffer(buffer)


def as_targets(buffers: Iterable[Buffer | tuple[Buffer | Slices, ...]]) -> tuple[list[Payload], list[int]]:
    """Return buffers as memory for objects, and the size of each in bytes. Raises the errors of `as_target`."""
    given = list(buffers)
    sizes = target_sizes(given)
    if sizes is not None:
        return cast("list[Payload]", given), sizes
    targets = [as_target(buffer) for buffer in given]
    return targets, [nbytes_of(target) for target in targets]


def _writable_buffer(buffer: Buffer) -> memoryview:
    view = buffer if type(buffer) is memoryview else memoryview(buffer)
    if view.readonly or not view.c_contiguous:
        wrong = "read-only" if view.readonly else "not contiguous"
        raise ValueError(f"the buffer ({type(buffer).__name__} of {view.nbytes} bytes) is {wrong}")
    return view


def _writable_slices(slices: Slices) -> Slices:
    if slices.readonly:
        raise ValueError(f"the buffer (rows of {slices.nbytes} bytes) is read-only")
    return slices


def ttl_of(ttl: float | None) -> int:
    """Convert a time to live from seconds to milliseconds, the unit of the wire format. None becomes 0.

    Raises
    ------
    ConfigError
        The time is not a number of seconds above 0 and at most 1e16.
    """
    if ttl is None:
        return 0
    return math.ceil(require_seconds(ttl, "ttl", None, _TTL_MAX_S, hint=", or None for no limit") * 1000)
