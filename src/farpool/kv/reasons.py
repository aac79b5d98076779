"""Reasons for which KV was not loaded, saved or moved."""

from __future__ import annotations

import logging
from enum import StrEnum
from functools import lru_cache

from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    NodeFullError,
    NodeTimeoutError,
    ObjectTooLargeError,
    PoolClosedError,
    PoolFullError,
    StoreClosedError,
)

__all__ = ["Reason", "reason_of"]


class Reason(StrEnum):
    """Reason for which a block was not loaded, saved or moved.

    Attributes
    ----------
    ABSENT
        No node has it: it was never saved, has expired, or was evicted.
    LATE
        It did not come within the deadline.
    NODE_AWAY
        The nodes that may have it cannot be reached.
    CORRUPT
        The bytes are not those that were saved.
    FOREIGN
        The bytes are whole, but belong to another key or namespace.
    WRONG_SIZE
        The payload has another size than the reader expects.
    WRONG_VERSION
        The payload was written in another version of the format.
    FULL
        The nodes have no room for it.
    REFUSED
        The access key may not do this.
    PINNED
        It stays in memory, as somebody holds or reads it.
    NO_LOWER_TIER
        It stays in memory, as nothing lies below.
    OTHER_WEIGHTS
        It is of other weights than those in use.
    OTHER_DTYPE
        There is KV of this model, of another data type.
    OTHER_LAYOUT
        There is KV of this model and data type, of another layout, block size, or set of layers or ranks.
    BYPASSED
        Computing it was expected to take less time.
    OTHER_RANK
        Another rank of this engine lacks the block, computes it, or did not answer in time.
    UNPROVED
        The connector's probe has failed, or was not made yet, so the connector moves no block.
    CLOSED
        The cache or its store is closed.
    FAILED
        Something else went wrong; the log (``farpool.kv``) has the error, once.
    """

    ABSENT = "absent"
    LATE = "late"
    NODE_AWAY = "node_away"
    CORRUPT = "corrupt"
    FOREIGN = "foreign"
    WRONG_SIZE = "wrong_size"
    WRONG_VERSION = "wrong_version"
    FULL = "full"
    REFUSED = "refused"
    PINNED = "pinned"
    NO_LOWER_TIER = "no_lower_tier"
    OTHER_WEIGHTS = "other_weights"
    OTHER_DTYPE = "other_dtype"
    OTHER_LAYOUT = "other_layout"
    BYPASSED = "bypassed"
    OTHER_RANK = "other_rank"
    UNPROVED = "unproved"
    CLOSED = "closed"
    FAILED = "failed"


def reason_of(error: Exception) -> Reason:
    """Return the reason that stands for an error of the store."""
    reason = next((reason for kind, reason in _REASONS if isinstance(error, kind)), Reason.FAILED)
    if reason is Reason.FAILED:
        _log_once(f"{type(error).__name__}: {error}")
    return reason


@lru_cache(maxsize=256)
def _log_once(error: str) -> None:
    _LOG.warning("KV was not loaded or saved: %s", error)


_LOG = logging.getLogger("farpool.kv")

_REASONS: tuple[tuple[type[Exception], Reason], ...] = (
    (NodeTimeoutError, Reason.LATE),
    (AccessDeniedError, Reason.REFUSED),
    (NodeFullError, Reason.FULL),
    (ObjectTooLargeError, Reason.FULL),
    (PoolFullError, Reason.FULL),
    (PoolClosedError, Reason.CLOSED),
    (ChecksumError, Reason.CORRUPT),
    (StoreClosedError, Reason.CLOSED),
    (ConfigError, Reason.FAILED),  # also a ValueError: an address twice, for example
    (ValueError, Reason.WRONG_SIZE),  # a target that is smaller than the value
    (OSError, Reason.NODE_AWAY),  # NodeError, ReplicationError, and whatever a socket says
)
"""The first that fits counts."""
