"""Eviction for a cache of KV blocks: which blocks leave, by cost, size and how soon they come back.

Blocks form prefixes, and one whose predecessor is gone is worthless, so prefixes are given up from their ends. The
policy is chosen while the cache runs: shadow caches of all candidates (LRU, ARC, S3-FIFO, W-TinyLFU, GDSF, and
expected reuse, which learns times of reuse from the blocks themselves) keep metadata of a sample of the blocks, and
a policy takes over, with the blocks as they are, when its shadow saves surely more recomputing than that of the
policy in use. Until then it is LRU. The class moves no bytes; its caller does what it says.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from farpool._native import PrefixEviction, TenantCounts, online_policy_names
from farpool.errors import ConfigError

__all__ = ["POLICIES", "Eviction", "EvictionStats", "ShadowStats", "TenantStats"]

POLICIES: tuple[str, ...] = online_policy_names()
"""Names of the policies among which is chosen; the first is the one in the beginning."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class TenantStats:
    """Use of the cache by one tenant.

    Attributes
    ----------
    blocks, nbytes : int
        Blocks that are in, and their bytes.
    hits, hit_bytes : int
        Touches of blocks that were in, and the bytes of these blocks.
    saved_seconds : float
        Sum of the costs of these blocks.
    inserted, refused, evicted : int
        Blocks that came in, that were not admitted, and that had to leave.
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
    """Hits of a shadow cache, and the seconds of recomputing that they would have saved, in the sample."""

    policy: str
    hits: int
    saved_seconds: float


@dataclass(frozen=True, slots=True)
class EvictionStats:
    """State of an `Eviction`.

    Attributes
    ----------
    policy : str
        The one in use.
    switches : int
        How often another one took over.
    capacity, nbytes, blocks : int
        Bytes that the cache may hold, bytes that are in, and the number of blocks.
    sampled : int
        One block in so many is in the sample of the shadows.
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
    """Blocks of a cache with a byte capacity, and the choice of those that leave. Not thread-safe.

    Parameters
    ----------
    capacity : int
        Bytes that all blocks together may have.
    policy : str
        One of `POLICIES` to use it always, without shadows; empty to choose.

    Raises
    ------
    ConfigError
        The capacity is not positive, or the policy is not known.
    """

    def __init__(self, capacity: int, policy: str = "") -> None:
        if isinstance(capacity, bool) or not isinstance(capacity, int) or not 0 < capacity < 1 << 63:
            raise ConfigError(f"capacity is {capacity!r}, expected a number of bytes, at least 1", setting="capacity")
        if policy and policy not in POLICIES:
            raise ConfigError(
                f"policy {policy!r} is not known; expected one of {', '.join(POLICIES)}", setting="policy"
            )
        self._core = PrefixEviction(capacity, policy)
        self._ids: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._tenants: dict[str, int] = {}

    def insert(self, key: Key, size: int, cost: float, parent: Key | None = None, tenant: str = "") -> list[Key]:
        """Bring a block in, and say what has to leave for it.

        A block that is in already stays as it is. One is refused if its predecessor is not in, if it does not fit
        beside pinned blocks, or if what would have to leave is worth more.

        Parameters
        ----------
        key : hashable
            Name of the block: bytes, a string or a whole number.
        size : int
            Bytes, at least 1.
        cost : float
            Seconds of computing the block again.
        parent : hashable, optional
            The block before it in its prefix; None for the first one.
        tenant : str
            Whose counts it goes into.

        Returns
        -------
        list
            Keys of the blocks that left; `key` itself at the end if it was refused.

        Raises
        ------
        ConfigError
            The size or the cost is negative, the size is 0, or a block is its own parent.
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
            if number in self._keys:  # another key with the same 64 bits: rare, and then this one stays outside
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
        """Count a hit; False if the block is not in."""
        number = self._ids.get(key)
        return number is not None and self._core.touch(number)

    def remove(self, key: Key) -> bool:
        """Take a block out, pinned or not; False if it is not in. Blocks behind it leave before all others."""
        number = self._ids.pop(key, None)
        if number is None:
            return False
        del self._keys[number]
        return self._core.remove(number)

    def pin(self, key: Key) -> bool:
        """Hold a block, and with it those before it, until as many unpins; False if it is not in."""
        number = self._ids.get(key)
        return number is not None and self._core.pin(number)

    def unpin(self, key: Key) -> bool:
        """Take one pin away; False if the block is not in."""
        number = self._ids.get(key)
        return number is not None and self._core.unpin(number)

    def use_policy(self, policy: str) -> None:
        """Go on with another policy and the blocks as they are.

        Raises
        ------
        ConfigError
            The policy is not known.
        """
        if policy not in POLICIES:
            raise ConfigError(
                f"policy {policy!r} is not known; expected one of {', '.join(POLICIES)}", setting="policy"
            )
        self._core.use_policy(policy)

    def __contains__(self, key: Key) -> bool:
        return key in self._ids

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that are in."""
        return self._core.used

    def stats(self) -> EvictionStats:
        """Counts so far, by tenant and by shadow."""
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
    """Number of a key for the native part: the same in each process, and never 0."""
    data = key if isinstance(key, bytes) else repr(key).encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) or 1
