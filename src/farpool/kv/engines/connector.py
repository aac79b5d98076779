"""The block caches of a serving engine, with a judge and a probe.

The judge decides whether the engine loads blocks or computes them. The probe first moves a known block through the
engine's memory. The caches move no other block until the known block has come back unchanged.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from farpool.errors import StoreClosedError
from farpool.kv.blocks import BlockCache
from farpool.kv.engine_judge import EngineJudge
from farpool.kv.namespace import Namespace
from farpool.kv.probe import Probe
from farpool.kv.settings import CacheSettings

__all__ = ["Connector"]

_LOG = logging.getLogger("farpool.kv")

T = TypeVar("T")


class Connector:
    """Opens the block caches of one engine, and runs work on their threads. Thread-safe after `open` has returned.

    Parameters
    ----------
    engine : str
        Name of the engine, for messages.
    settings : CacheSettings
        Settings from the engine's configuration.
    tokens_per_block : int
        Tokens of a block.
    decides : bool
        True if the judge of this process decides. False if this process loads every block that it finds, because
        another rank decides, or because the connector cannot see which blocks a request needs.

    Attributes
    ----------
    judge : EngineJudge
        Decides between loading and computing; all caches share it.
    probe : Probe
        Keeps the caches from moving blocks until ``probe.check`` has passed.
    """

    def __init__(self, engine: str, settings: CacheSettings, tokens_per_block: int, *, decides: bool = True) -> None:
        self._settings = settings
        self.judge = EngineJudge(settings.judge(), tokens_per_block, is_on=settings.hold_out and decides)
        self.probe = Probe(engine)
        self._caches: list[BlockCache] = []

    def open(self, namespace: Namespace, *threads: int) -> list[BlockCache]:
        """Open caches, and close the caches that were open before.

        The probe saves its block through the first cache. It loads the block through the second cache, if there are two
        or more, otherwise through the first.

        Parameters
        ----------
        namespace : Namespace
            Everything that readers and writers of blocks have to agree on.
        *threads : int
            For each cache to open, its number of threads. Without this argument, one cache is opened, with the number
            of threads in the settings.
        """
        self.close()
        numbers = threads or (self._settings.threads,)
        self._caches = [
            msgspec.structs.replace(self._settings, threads=number).cache(namespace, self.judge.judge)
            for number in numbers
        ]
        self.probe.guard(*self._caches)
        return self._caches

    def submit(
        self, cache: BlockCache, work: Callable[[], T], done: Callable[[T], None], *, failed: T, closed: T
    ) -> bool:
        """Run work on a thread of a cache, and pass the result to `done`.

        `done` is called exactly once in every case, because the engine waits for each result.

        Parameters
        ----------
        cache : BlockCache
            The cache whose thread does the work.
        work : callable
            Returns the result.
        done : callable
            Receives the result, on the thread that did the work.
        failed : object
            Result if `work` raises an error, which is logged.
        closed : object
            Result if the work does not run because the cache is closed. If the cache was closed before, `done` receives
            this result at once, on the caller's thread. If the cache is closed while the work waits for a thread,
            `done` receives this result on the thread that closes the cache.

        Returns
        -------
        bool
            False if the cache is closed.
        """

        def run() -> None:
            result = failed
            try:
                result = work()
            except Exception:
                _LOG.exception("a task of the connector has failed; its blocks count as missing")
            finally:
                done(result)

        try:
            job = cache.submit(run)
        except StoreClosedError:
            done(closed)
            return False
        job.add_done_callback(lambda ended: done(closed) if ended.cancelled() else None)
        return True

    def stats(self) -> Counter[str]:
        """Return the counters summed over all caches, and the number of found blocks that the engine had to compute."""
        counts = Counter(self.judge.stats())
        for cache in self._caches:
            counts.update(cache.stats())
        return counts

    def close(self) -> None:
        """Close the caches. Afterwards none of their threads accesses the engine's memory. Idempotent."""
        for cache in self._caches:
            cache.close()
