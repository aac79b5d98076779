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
        No node has the block: it was never saved, has expired, or was evicted.
    LATE
        The block did not arrive by the deadline.
    NODE_AWAY
        The nodes that may have the block cannot be reached.
    CORRUPT
        The bytes that arrived differ from the bytes that were saved.
    FOREIGN
        The bytes are whole, but belong to another key or namespace.
    WRONG_SIZE
        The payload's size differs from the size that the reader expects.
    WRONG_VERSION
        The payload was written in another version of the format.
    FULL
        The nodes have no room for the block.
    REFUSED
        The access key does not allow this operation.
    PINNED
        The block stays in memory, because a program pins or reads it.
    NO_LOWER_TIER
        The block stays in memory, because there is no lower tier.
    OTHER_WEIGHTS
        The KV was computed with weights that differ from the weights in use.
    OTHER_DTYPE
        KV of this model is stored, but in another data type.
    OTHER_LAYOUT
        KV of this model and data type is stored, but in another layout, block size, or set of layers or ranks.
    BYPASSED
        Computing the KV was expected to take less time than loading it.
    OTHER_RANK
        Another rank of this engine lacks the block, computes it, or did not answer in time.
    UNPROVED
        The connector's probe has failed, or has not run yet, so the connector moves no block.
    CLOSED
        The cache or its store is closed.
    FAILED
        Another error was raised. The log (``farpool.kv``) contains each such error once.
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
    """Return the reason why a store's call for a block failed; None if it succeeded.

    Parameters
    ----------
    answer : object
        The store's answer: None if there is no such block, or an error, or a reason. Anything else means success.
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
    (ConfigError, Reason.FAILED),  # before its base class ValueError; raised if an address was given twice, for example
    (ValueError, Reason.WRONG_SIZE),  # the target is smaller than the value
    (OSError, Reason.NODE_AWAY),  # NodeError, ReplicationError, and errors of sockets
)
"""Reasons for classes of errors. The first class of which an error is an instance decides."""
