"""Descriptions of namespaces, stored next to their blocks, so that a program can see which models' KV a node stores."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from farpool.abc.objects import About
from farpool.cluster.store.arguments import as_payload
from farpool.errors import ConfigError
from farpool.kv.keys import KEY_MAGIC, NAMESPACE_MAGIC, namespace_key
from farpool.kv.namespace import Namespace

if TYPE_CHECKING:
    from farpool.abc.objects import ObjectCalls, Objects

__all__ = ["OBJECT_KIND", "Descriptions", "namespaces", "purge"]

OBJECT_KIND = 2
"""Class of KV in the header of a stored object (docs/wire.md)."""
_DESCRIBE_INTERVAL_S = 60.0
"""Seconds after which a cache stores a namespace's description again, because a purge or a lost node may have removed
it.
"""
_DESCRIBED_NAMESPACES_MAX = 4096
"""Maximum number of namespaces for which a cache remembers when it stored the description."""
_DELETED_KEYS_MAX = 4096
"""Maximum number of keys that one request deletes."""
_PURGE_TIMEOUT_S = 30.0


class Descriptions:
    """Stores the descriptions of namespaces, and remembers when it stored each description. Thread-safe."""

    def __init__(self) -> None:
        self._described_at: dict[bytes, float] = {}

    def is_due(self, namespace: Namespace) -> bool:
        """Return True if the description of a namespace has to be stored before the next block of the namespace."""
        described_at = self._described_at.get(namespace.digest, -math.inf)
        return time.monotonic() >= described_at + _DESCRIBE_INTERVAL_S

    def store(self, calls: ObjectCalls, namespace: Namespace, ttl_ms: int, timeout: float, *, keep: bool) -> None:
        """Store the description of a namespace.

        Parameters
        ----------
        calls : ObjectCalls
            Calls of the store.
        namespace : Namespace
            The namespace.
        ttl_ms : int
            Milliseconds after which the blocks of the namespace expire; 0 for never.
        timeout : float
            Seconds that the call may take.
        keep : bool
            If True, nodes never evict the description.
        """
        now, digest = time.monotonic(), namespace.digest
        # The description has to outlive all blocks that are saved before it is stored again. Without a description no
        # program finds these blocks by their weights or tenant.
        lifetime_ms = ttl_ms + 2000 * int(_DESCRIBE_INTERVAL_S) if ttl_ms else 0
        about = About(ttl_ms=lifetime_ms, kind=OBJECT_KIND, tenant=namespace.tenant, keep=keep)
        (outcome,) = calls.put_many([(namespace_key(digest), as_payload(namespace.encoded))], timeout, about)
        if not isinstance(outcome, Exception):
            if len(self._described_at) >= _DESCRIBED_NAMESPACES_MAX:
                self._described_at.clear()
            self._described_at[digest] = now

    def forget(self, digest: bytes) -> None:
        """Forget that the description of a namespace is stored, because it was removed."""
        self._described_at.pop(digest, None)


def namespaces(objects: Objects) -> Mapping[bytes, Namespace]:
    """Return, by digest, the namespaces that have blocks in a store or pool.

    Raises
    ------
    NodeError, ReplicationError
        Some nodes cannot be reached, and they may have namespaces that no other node has.
    """
    found: dict[bytes, Namespace] = {}
    for key, encoded in zip(keys := list(objects.keys(NAMESPACE_MAGIC)), objects.get_many(keys), strict=True):
        if encoded is not None:
            # Every client that may put can put something else under such a key.
            with contextlib.suppress(ConfigError):
                namespace = Namespace.decode(encoded)
                if namespace_key(namespace.digest) == key:
                    found[namespace.digest] = namespace
    return found


def purge(objects: Objects, digest: bytes) -> int:
    """Remove all blocks of one namespace from a store or pool; return how many were removed.

    Raises
    ------
    NodeError, ReplicationError
        Some nodes cannot be reached, and they may have blocks that no other node has.
    """
    calls, removed = objects.best_effort(), 0
    keys = [*objects.keys(KEY_MAGIC + digest)]
    for start in range(0, len(keys), _DELETED_KEYS_MAX):
        for copies in calls.drop_many(keys[start : start + _DELETED_KEYS_MAX], _PURGE_TIMEOUT_S):
            if isinstance(copies, Exception):
                raise copies
            removed += copies > 0
    objects.drop(namespace_key(digest))
    return removed
