"""Reasons why KV was not loaded, saved or moved."""

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
    """Reason why a block was not loaded, saved or moved.

    Attributes
    ----------
    ABSENT
        No node has it: it was never saved, has expired, or was evicted.
    LATE
        It did not arrive by the deadline.
    NODE_AWAY
        The nodes that may have it cannot be reached.
    CORRUPT
        Other bytes arrived than were saved.
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
        It stays in memory, because a program holds or reads it.
    NO_LOWER_TIER
        It stays in memory, because there is no lower tier.
    OTHER_WEIGHTS
        Other weights than the ones in use have computed it.
    OTHER_DTYPE
        There is KV of this model, in another data type.
    OTHER_LAYOUT
        There is KV of this model and data type, in another layout, block size, or set of layers or ranks.
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


def reason_of(answer: object) -> Reason | None:
    """Return why a store's answer for a block is a failure; None if it is a success.

    Parameters
    ----------
    answer : object
        None if there is no such block, an error, or a reason. Anything else is the result of a success.
    """
    if answer is None:
        return Reason.ABSENT
    if isinstance(answer, Reason):
        return answer
    if not isinstance(answer, Exception):
        return None
    reason = next((reason for kind, reason in _REASONS if isinstance(answer, kind)), Reason.FAILED)
    if reason is Reason.FAILED:
        _log_once(f"{type(answer).__name__}: {answer}")
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
    (ConfigError, Reason.FAILED),  # before ValueError, which it also is; for example, an address was given twice
    (ValueError, Reason.WRONG_SIZE),  # the target is smaller than the value
    (OSError, Reason.NODE_AWAY),  # NodeError, ReplicationError, and errors of sockets
)
"""The first class that fits counts."""
