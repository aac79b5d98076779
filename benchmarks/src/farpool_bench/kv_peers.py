"""The peers of the benchmarks of KV: Mooncake, LMCache and Redis, with the same calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, Self, TypeVar

from farpool.cluster.wire.channel import Transport
from farpool_bench.lmcache_peer import LMCachePeer, Tier, find_lmcache
from farpool_bench.mooncake_peer import MooncakePeer, find_mooncake
from farpool_bench.race import opened
from farpool_bench.redis_peer import RedisPeer, RedisUser, find_redis
from farpool_bench.ring import Ring
from farpool_bench.users import User

__all__ = ["Contender", "KVPeers", "closed"]

_UserT = TypeVar("_UserT", bound=User)


def closed(stack: ExitStack, user: _UserT) -> _UserT:
    """Close a user at the end."""
    stack.callback(user.close)
    return user


class Contender(NamedTuple):
    """One that runs beside farpool's cache of blocks, or the reason why it cannot."""

    name: str
    each: Callable[[bool], float] | None
    """Seconds for one object when all of a ring are put (True) or got in one call."""
    find: Callable[[], float] | None
    """Seconds for a call that looks up all keys of the ring."""
    fetch: Callable[[], float] | None
    """Seconds until all objects are looked up and got, without any call before; see `User.fetch_seconds`."""
    reason: str

    @classmethod
    def of(cls, name: str, user: User, seconds: float) -> Contender:
        """Make one of a user that moves its whole ring in one call, for so many seconds a sample."""
        each = partial(user.seconds_each, batch=len(user.ring), seconds=seconds)
        return cls(name, each, partial(user.lookup_seconds, seconds), user.fetch_seconds, "")


class KVPeers:
    """The peers that run here; a context manager that stops them.

    Parameters
    ----------
    lmcache : str
        A Python that has farpool and LMCache; empty for this process's own.
    seconds : float
        Seconds of a sample.
    lent : int
        Bytes of Mooncake's segment and of LMCache's L1, at least.
    tiers : tuple of {"fs", "L1"}
        Tiers of LMCache, each of which is a peer.

    Attributes
    ----------
    names : tuple of str
        Their names and versions.
    """

    def __init__(self, lmcache: str, seconds: float, lent: int, tiers: tuple[Tier, ...] = ("fs",)) -> None:
        lent = max(64 << 20, lent)
        self._seconds = seconds
        self._stack = ExitStack()
        try:
            redis, why_no_redis = find_redis()
            mooncake, why_no_mooncake = find_mooncake()
            other, why_no_lmcache = find_lmcache(lmcache)
            self.names = tuple(name for name in (mooncake, other and f"{other}, {' and '.join(tiers)}", redis) if name)
            start = partial(opened, self._stack)
            self._redis, self._why_no_redis = start(RedisPeer if redis else None, why_no_redis)
            make = partial(MooncakePeer, lent) if mooncake else None
            self._mooncake, self._why_no_mooncake = start(make, why_no_mooncake)
            self._lmcache = []
            for tier in tiers:
                begin = partial(LMCachePeer, lmcache, tier, lent) if other else None
                self._lmcache.append((f"LMCache, {tier}", *start(begin, why_no_lmcache)))
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def contenders(self, stack: ExitStack, way: Transport, ring: Ring) -> Iterator[Contender]:
        """Make each peer ready to move a ring's objects, until the stack is closed.

        Redis goes over TCP beside farpool over TCP, and else over its UNIX socket.
        """
        nbytes, count, seconds = ring.nbytes, len(ring), self._seconds
        for name, peer, reason in (
            ("Mooncake, TCP", self._mooncake, self._why_no_mooncake),
            *self._lmcache,
        ):
            if peer is None:
                yield Contender(name, None, None, None, reason)
            else:
                each = partial(peer.seconds_each, nbytes=nbytes, count=count, batch=count, seconds=seconds)
                find = partial(peer.lookup_seconds, nbytes, count, seconds)
                yield Contender(name, each, find, partial(peer.fetch_seconds, nbytes, count), "")
        name = "Redis, TCP" if way == "tcp" else "Redis, UNIX socket"
        if self._redis is None:
            yield Contender(name, None, None, None, self._why_no_redis)
        else:
            client = self._redis.tcp if way == "tcp" else self._redis.unix
            yield Contender.of(name, closed(stack, RedisUser(client, ring)), seconds)
