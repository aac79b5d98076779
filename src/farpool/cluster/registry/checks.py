"""Checks of arguments, and errors, that all kinds of registries share."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from farpool.abc.registry import KEY_BYTES_MAX, OPERATIONS_MAX, VALUE_BYTES_MAX, Condition, Operation, Put
from farpool.checks import require_seconds
from farpool.errors import ConfigError, RegistryDamagedError, RegistryLeaseError

__all__ = ["checked_key", "checked_transaction", "checked_ttl", "checksum", "damaged", "deadline_of", "no_lease"]

_TTL_MAX_S = 1e9


def deadline_of(timeout: float | None, default: float) -> float:
    """Return the deadline of a call, by `time.monotonic`. Its timeout is `default` if `timeout` is None."""
    return time.monotonic() + require_seconds(default if timeout is None else timeout, "timeout", 0.0, 1e6)


def checked_ttl(ttl: float) -> float:
    """Check a lease's time to live and return it, in seconds."""
    return require_seconds(ttl, "ttl", None, _TTL_MAX_S)


def checked_key(key: str, what: str = "key", *, fewest: int = 1) -> bytes:
    """Check a key (or prefix) and return it as UTF-8."""
    if not isinstance(key, str):
        raise TypeError(f"the registry's {what} {key!r} is a {type(key).__name__}, expected a str")
    try:
        data = key.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"the {what} {key!r} has a character that UTF-8 cannot encode", setting=what) from error
    if not fewest <= len(data) <= KEY_BYTES_MAX or b"\0" in data:
        raise ConfigError(
            f"the {what} {key!r} has {len(data)} bytes, expected {fewest} to {KEY_BYTES_MAX}, none of them zero",
            setting=what,
        )
    return data


def checked_transaction(conditions: Sequence[Condition], operations: Sequence[Operation]) -> None:
    """Raise an error unless every kind of registry accepts this transaction.

    The error is TypeError for a key that is not a str, and ConfigError for any other reason.
    """
    for many, what in ((conditions, "conditions"), (operations, "operations")):
        if len(many) > OPERATIONS_MAX:
            raise ConfigError(
                f"the transaction has {len(many)} {what}, expected at most {OPERATIONS_MAX}", setting=what
            )
    for condition in conditions:
        checked_key(condition.key)
        if condition.revision < 0:
            raise ConfigError(f"the revision of {condition.key!r} is {condition.revision}, expected at least 0")
    keys = [operation.key for operation in operations]
    for operation in operations:
        checked_key(operation.key)
        if keys.count(operation.key) > 1:
            raise ConfigError(f"the transaction changes {operation.key!r} twice, expected once", setting="operations")
        if isinstance(operation, Put) and len(operation.value) > VALUE_BYTES_MAX:
            raise ConfigError(
                f"the value of {operation.key!r} has {len(operation.value)} bytes, expected at most {VALUE_BYTES_MAX}",
                setting="value",
            )


def damaged(address: str, why: str, key: str = "") -> RegistryDamagedError:
    """Return the error for a damaged entry, or for other damage in a registry if `key` is empty."""
    what = f"its entry {key!r} " if key else ""
    return RegistryDamagedError(
        f"the registry {address} is damaged: {what}{why}; see `farpool registry check`, and restore a backup",
        registry=address,
        key=key,
    )


def checksum(key: bytes, value: bytes) -> int:
    """Return the CRC32 of an entry, computed over the length of the key, the key and the value."""
    # With the length, an entry that is cut differently into key and value has another checksum.
    return zlib.crc32(value, zlib.crc32(len(key).to_bytes(4, "little") + key))


def no_lease(address: str, lease: int) -> RegistryLeaseError:
    """Return the error for a lease that does not exist."""
    return RegistryLeaseError(
        f"the registry {address} has no lease {lease}: it has ended; grant a new one", registry=address, lease=lease
    )
