"""Chooses which blocks a KV cache evicts, by their cost, their size, and how soon they are used again.

Blocks form prefixes, and a block is useless without the block before it (its parent), so prefixes are evicted from
their ends. The eviction policy is chosen while the cache runs. Each candidate policy (LRU, ARC, S3-FIFO, W-TinyLFU,
GDSF, and expected reuse, which learns reuse times from the blocks themselves) has a shadow cache, which keeps only
metadata, for a sample of the blocks. The first policy is LRU. If the shadow cache of another policy saves significantly
more recomputing than the shadow cache of the policy in use, the cache continues with the other policy and its present
blocks. This module moves no bytes: it returns the blocks to evict, and its caller evicts them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from farpool._native import PrefixEviction, TenantCounts, online_policy_names
from farpool.checks import require_choice, require_whole
from farpool.errors import ConfigError

__all__ = ["POLICIES", "Eviction", "EvictionStats", "ShadowStats", "TenantStats"]

POLICIES: tuple[str, ...] = online_policy_names()
"""Names of the candidate policies. A cache starts with the first of them."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Use of the cache by one tenant.

    Attributes
    ----------
    blocks, nbytes : int
        Blocks in the cache, and their bytes.
    hits, hit_bytes : int
        Number of hits, and the sum of the sizes of the hit blocks; each hit of a block adds its size again.
    saved_seconds : float
        Sum of the costs of the hit blocks, in seconds of computing.
    inserted, refused, evicted : int
        Numbers of blocks that were inserted, refused, and evicted.
    """

    blocks: int
    nbytes: int
    hits: int
    hit_bytes: int
    saved_seconds: float
    inserted: int
    refused: int
    evicted: int


@dataclass(frozen=True, slots=True)
class ShadowStats:
    """Hits of a shadow cache in its sample of blocks, and the seconds of recomputing that these hits would save."""

    policy: str
    hits: int
    saved_seconds: float


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """State of an `Eviction`.

    Attributes
    ----------
    policy : str
        The policy in use.
    switches : int
        How often the policy has changed.
    capacity, nbytes, blocks : int
        Maximum bytes, bytes in the cache, and number of blocks.
    sampled : int
        One in this many blocks belongs to the sample that the shadow caches track.
    """

    policy: str
    switches: int
    capacity: int
    nbytes: int
    blocks: int
    sampled: int
    tenants: dict[str, TenantStats]
    shadows: tuple[ShadowStats, ...]


class Eviction(Generic[Key]):
    """Keeps track of the blocks of a cache with a byte capacity, and chooses the blocks to evict. Not thread-safe.

    Parameters
    ----------
    capacity : int
        Maximum bytes of all blocks together.
    policy : str
        One of `POLICIES`, which is then always used; or empty, to select the policy at run time by means of shadow
        caches.

    Raises
    ------
    ConfigError
        The capacity is not positive, or the policy is not known.
    """

    def __init__(self, capacity: int, policy: str = "") -> None:
        require_whole(capacity, "capacity", 1, (1 << 63) - 1, " bytes")
        if policy:
            require_choice(policy, "policy", POLICIES)
        self._core = PrefixEviction(capacity, policy)
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._tenants: dict[str, int] = {}

    def insert(self, key: Key, size: int, cost: float, parent: Key | None = None, tenant: str = "") -> list[Key]:
        """Insert a block, and return the blocks to evict for it.

        A block that is already in the cache is not changed, but is linked again to a parent that has come back. A block
        is refused if its parent is not in the cache, if it does not fit next to the pinned blocks, or if the blocks
        that would have to be evicted are worth more.

        Parameters
        ----------
        key : hashable
            Name of the block: bytes, a string or a whole number.
        size : int
            Size in bytes, at least 1.
        cost : float
            Seconds that computing the block again would take.
        parent : hashable, optional
            The block before it in its prefix; None for the first block.
        tenant : str
            Tenant whose counts include the block.

        Returns
        -------
        list
            Keys of the blocks to evict. If the block was refused, its own key is the last in the list.

        Raises
        ------
        ConfigError
            The size is below 1, the cost is negative or not finite, or a block is its own parent.
        """
        if size < 1 or not 0.0 <= cost < float("inf") or key == parent:
            raise ConfigError(
                f"block of {size} bytes with a cost of {cost} s after {parent!r}; expected at least 1 byte, a finite "
                "cost that is not negative, and another block as parent"
            )
        number = self._ids.get(key)
        before = 0 if parent is None else self._ids.get(parent) or _id(parent)
        if number is None:
            number = _id(key)
            if number in self._keys:  # another key with the same 64 bits, which is rare: refuse this one
                return [key]
        account = self._tenants.setdefault(tenant, len(self._tenants))
        admitted, evicted = self._core.insert(number, before, size, cost, account)
        left = [self._keys.pop(one) for one in evicted]
        for one in left:
            del self._ids[one]
        if admitted:
            self._ids[key] = number
            self._keys[number] = key
        else:
            left.append(key)
        return left

    def touch(self, key: Key) -> bool:
        """Count a hit of a block; return False if the block is not in the cache."""
        number = self._ids.get(key)
        return number is not None and self._core.touch(number)

    def remove(self, key: Key) -> bool:
        """Remove a block, even if it is pinned; return False if it is not in the cache.

        The later blocks of its prefix are useless without it, so they are evicted before all other blocks.
        """
        number = self._ids.pop(key, None)
        if number is None:
            return False
        del self._keys[number]
        return self._core.remove(number)

    def pin(self, key: Key) -> bool:
        """Pin a block and all blocks before it in its prefix; return False if the block is not in the cache.

        The block stays pinned until `unpin` was called as often as `pin`.
        """
        number = self._ids.get(key)
        return number is not None and self._core.pin(number)

    def unpin(self, key: Key) -> bool:
        """Remove one pin of a block; return False if the block is not in the cache."""
        number = self._ids.get(key)
        return number is not None and self._core.unpin(number)

    def use_policy(self, policy: str) -> None:
        """Continue with another policy, and keep the blocks that are in the cache.

        Raises
        ------
        ConfigError
            The policy is not known.
        """
        require_choice(policy, "policy", POLICIES)
        self._core.use_policy(policy)

    def __contains__(self, key: Key) -> bool:
        return key in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks in the cache."""
        return self._core.used

    def stats(self) -> EvictionStats:
        """Return the state of the cache, with the counts of each tenant and of each shadow cache."""
        core = self._core
        counts = core.tenants()
        tenants = {name: _of(counts[number]) for name, number in self._tenants.items() if number < len(counts)}
        return EvictionStats(
            core.policy,
            core.switches,
            core.capacity,
            core.used,
            len(core),
            core.sampled,
            tenants,
            tuple(ShadowStats(*shadow) for shadow in core.shadows()),
        )


def _of(counts: TenantCounts) -> TenantStats:
    return TenantStats(
        counts.blocks,
        counts.nbytes,
        counts.hits,
        counts.hit_nbytes,
        counts.saved,
        counts.inserted,
        counts.refused,
        counts.evicted,
    )


def _id(key: Hashable) -> int:
    """Return the number that identifies a key in the native core. It is the same in each process, and never 0."""
    data = key if isinstance(key, bytes) else repr(key).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) or 1
