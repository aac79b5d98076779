"""Tests a connector with a probe: one block of known bytes that the connector moves before all other blocks.

Checksums protect a block between a save and a load. They cannot detect a connector that reads the wrong bytes from the
engine's memory, or writes the right bytes to the wrong place, for example after the engine has changed its layout. So a
connector first writes a block of known bytes with the engine's own functions, saves and loads the block, and reads it
with the engine's own functions. If other bytes come back, the cache moves no block: every lookup is a miss, and no
block is saved.

A connector for a serving engine has the engine's memory when it starts: it makes its probe with `Probe(name, caches)`
and calls `Probe.check`. `farpool.kv.PrefixCache` and the caches for transformers see memory only when they first save
from it or load into it. They make their probe with ``at_first_use=True`` and call `Probe.admit` before each save and
load.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farpool.cluster.store.arguments import as_payload, parts_of
from farpool.errors import BudgetError, PoolFullError, ProbeError, StoreClosedError, TierError
from farpool.kv.background import seconds_to
from farpool.kv.compression import flat
from farpool.kv.keys import block_key, namespace_key
from farpool.kv.namespace import Group, Namespace
from farpool.kv.reasons import Reason

if TYPE_CHECKING:
    from farpool.kv.blocks import BlockCache, Target

__all__ = ["EngineBlock", "Probe"]

_LOG = logging.getLogger("farpool.kv")

_PROBE_TTL_S = 60.0
"""Seconds after which a probe's block expires, in case the program ends before the probe deletes the block."""
_NOT_ALLOWED = frozenset({Reason.REFUSED, Reason.FULL})
"""Reasons why nodes can never store a probe's block: the access key allows only reading, or the block does not fit into
a node's memory.
"""
_DAMAGED = frozenset({Reason.CORRUPT, Reason.FOREIGN, Reason.WRONG_SIZE, Reason.WRONG_VERSION})
_NO_PROOF = "no known block has come back through memory like this"


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """One block of an engine's memory. The engine does not use this block during a probe.

    Attributes
    ----------
    nbytes : int
        Size of the block in bytes.
    write, read : callable
        Write and read the block with the engine's own functions.
    values : callable
        Returns the payloads of the block as the connector saves them, one for each key.
    targets : callable
        Returns the memory into which the connector loads the block.
    land : callable
        Moves the loaded bytes from `targets` to their place in the engine's memory. Does nothing if `targets` are that
        place.
    known : bytes or None
        Bytes that the block has now, if the probe may only read the engine's memory. The probe then moves these bytes.
        If None, the probe writes random bytes and moves them.
    """

    nbytes: int
    write: Callable[[bytes], None]
    read: Callable[[], bytes]
    values: Callable[[], Sequence[Target]]
    targets: Callable[[], Sequence[Target]]
    land: Callable[[Sequence[Any]], None] = lambda targets: None
    known: bytes | None = None

    @classmethod
    def private(cls, nbytes: int) -> EngineBlock:
        """Make a block in new memory, for a probe that runs while the engine uses all of its own memory."""
        memory = bytearray(nbytes)
        view = memoryview(memory)

        def write(data: bytes) -> None:
            view[:] = data

        return cls(nbytes, write, lambda: bytes(memory), lambda: [view], lambda: [view])


class Probe:
    """Decides if a connector may move blocks. Thread-safe.

    Parameters
    ----------
    where : str
        Name of the engine, for messages.
    *caches : BlockCache
        The caches that move no block until the probe has passed; see `guard`.
    at_first_use : bool
        If True, `admit` probes the engine's memory at its first use, and blocks may be looked up before that.

    Attributes
    ----------
    reason : Reason or None
        Why no block may be moved: `UNPROVED` if the probe has failed or has not run, otherwise the reason why the nodes
        could not be asked yet. None after the probe has passed. With `at_first_use`, None unless the probe has failed.
    error : ProbeError or None
        Error of a probe that has failed.
    """

    def __init__(self, where: str, *caches: BlockCache, at_first_use: bool = False) -> None:
        self._where = where
        self.reason: Reason | None = None if at_first_use else Reason.UNPROVED
        self.error: ProbeError | None = None
        self._nbytes = 0
        self._caches: tuple[BlockCache, ...] = ()
        self._passed: set[Hashable] = set()
        self._without_nodes: set[Hashable] = set()  # kinds of memory that were checked without a node
        self.begin_in_child()
        if caches:
            self.guard(*caches)

    @classmethod
    def of(cls, cache: BlockCache, where: str) -> Probe:
        """Return the probe that guards a cache. If the cache has none, make a probe that runs at the first use."""
        return cache.probe if isinstance(cache.probe, Probe) else cls(where, cache, at_first_use=True)

    def guard(self, *caches: BlockCache) -> None:
        """Keep caches from moving blocks until this probe has passed.

        The probe saves its block through the first cache, and loads it through the second cache if there are two.
        """
        self._caches = caches
        for cache in caches:
            cache.require(self)

    def begin_in_child(self) -> None:
        """Forget a probe that a thread of the parent was running. The child of a fork calls this."""
        self._lock = threading.Lock()
        self._asking: Future[None] | None = None
        self._thread: int | None = None  # the thread that makes the probe now

    def is_of_this_thread(self) -> bool:
        """Return True if the calling thread is running the probe. Caches let this thread move the probe's block."""
        # No lock: only this thread can have written its own identity.
        return self._thread == threading.get_ident()

    def check(self, block: EngineBlock) -> None:
        """Probe a part of the engine's memory when the connector starts.

        If no node can be reached, the block is copied within this host's memory instead, and `attempt` tries the nodes
        later.

        Parameters
        ----------
        block : EngineBlock
            The part of the memory.
        """
        with self._lock:
            if self.error is None:
                self.reason = self._proved(block)

    def attempt(self) -> None:
        """Probe again through the nodes, if the nodes could not be reached before.

        The probe uses new memory, because the engine may be using its own memory now.
        """
        with self._lock:
            if self.error is None and self.reason is not None and self._nbytes:
                self.reason = self._proved(EngineBlock.private(self._nbytes))

    def admit(
        self,
        step: str,
        requests: str | Sequence[str],
        blocks: int,
        kinds: Iterable[Hashable],
        block: Callable[[Sequence[Hashable]], EngineBlock],
        timeout: float | None = None,
        *,
        through_nodes: bool = True,
    ) -> Reason | None:
        """Probe each kind of memory that no call has used before; return a reason if the call must not move its blocks.

        If no node can be reached, the probe copies its block within this host's memory, and the next call tries the
        nodes.

        Parameters
        ----------
        step : str
            ``load`` or ``save``.
        requests : str or sequence of str
            The engine's name of the request, for ``farpool why``; or a sequence with a name for each block.
        blocks : int
            Number of blocks that the call moves.
        kinds : iterable
            Names of the kinds of memory that the call uses.
        block : callable
            Makes the block to probe; its argument is the list of kinds that have to be probed.
        timeout : float or None
            Maximum time in seconds; None for the cache's own timeout for each request.
        through_nodes : bool
            False if the call needs no node. The probe then asks no node.

        Returns
        -------
        Reason or None
            Why the call must not move its blocks; None if it may move them. If there is a reason, the blocks are
            counted as missed, and the journal has an entry for them.

        Raises
        ------
        BudgetError, PoolFullError, TierError
            The engine's memory is in a pool that has no room for the block.
        """
        reason = self._first_use(list(kinds), block, timeout, through_nodes=through_nodes)
        if reason is not None:
            for request, number in Counter([requests] * blocks if isinstance(requests, str) else requests).items():
                self._caches[0].missed(step, request, number, reason, _NO_PROOF)
        return reason

    def _first_use(
        self,
        kinds: Sequence[Hashable],
        block: Callable[[Sequence[Hashable]], EngineBlock],
        timeout: float | None,
        *,
        through_nodes: bool,
    ) -> Reason | None:
        """Probe the kinds of memory that no call has used before; return a reason if the call must not use them."""
        # Without the lock, because each load and save comes here. The sets only grow. A call that misses a new entry
        # here checks again below, with the lock.
        if self._passed.issuperset(kinds) or (not through_nodes and self._without_nodes.issuperset(kinds)):
            return self.reason
        until = None if timeout is None else time.monotonic() + timeout
        if not self._lock.acquire(timeout=-1 if timeout is None else min(timeout, threading.TIMEOUT_MAX)):
            return Reason.LATE  # another call is still making the probe
        try:
            done = self._passed if through_nodes else self._passed | self._without_nodes
            missing = [kind for kind in kinds if kind not in done]
            if self.error is not None or not missing:
                return self.reason
            reason = self._proved(block(missing), through_nodes=through_nodes, until=until)
            if self.error is None:
                (self._passed if through_nodes and reason is None else self._without_nodes).update(missing)
            if reason is Reason.LATE and timeout is not None:
                self._ask_later()
            return reason
        finally:
            self._lock.release()

    def _ask_later(self) -> None:
        """Probe through the nodes in the background, with the cache's own timeout.

        Otherwise an engine whose calls all have too little time for a probe would never move a block.
        """
        if self._caches and (self._asking is None or self._asking.done()):
            with contextlib.suppress(StoreClosedError):
                self._asking = self._caches[0].submit(self._ask_nodes)

    def _ask_nodes(self) -> None:
        """Probe through the nodes, with new memory.

        If the probe passes, so have all kinds of memory that were checked without a node.
        """
        with self._lock:
            kinds = self._without_nodes - self._passed
            if self.error is None and kinds and self._proved(EngineBlock.private(self._nbytes)) is None:
                self._passed |= kinds

    def _proved(self, block: EngineBlock, *, through_nodes: bool = True, until: float | None = None) -> Reason | None:
        """Probe a block; return why blocks may not be moved yet, or None if they may be moved.

        If the nodes cannot be reached, the block is copied within this host's memory. Such a copy still detects a
        connector that reads or writes the wrong bytes.
        """
        self._nbytes = block.nbytes
        reason = self._moved(block, through_nodes=through_nodes, until=until)
        if reason is not None and self.error is None:
            self._moved(block, through_nodes=False)
        if self.error is not None:
            return Reason.UNPROVED
        if reason in _NOT_ALLOWED:
            _LOG.warning(
                "%s: the nodes did not store the probe's block (%s); only the engine's memory was checked",
                self._where,
                reason,
            )
            return None
        return reason

    def _moved(self, block: EngineBlock, *, through_nodes: bool, until: float | None = None) -> Reason | None:
        """Move a block of known bytes and compare the result; return the reason if the nodes did not move the block."""
        known, reason = block.known or _known(block.nbytes), None
        self._thread = threading.get_ident()
        try:
            kept = block.read()
            try:
                block.write(known)
                if through_nodes and self._caches:
                    reason = _carried(block, known, self._caches[0], self._caches[1:2] or self._caches, until)
                else:
                    _copied(block, known)
                found = block.read()
            finally:
                block.write(kept)
            if reason in _DAMAGED:
                self._fail(f"the loaded block is {reason}")
            elif reason is None and found != known:
                self._fail(_difference(known, found))
        except (BudgetError, PoolFullError, TierError):  # the engine's memory is in a pool that has no room
            raise
        except Exception as error:  # another release may have changed the engine's functions
            self._fail(f"{type(error).__name__} was raised: {error}")
        finally:
            self._thread = None
        return reason

    def _fail(self, what: str) -> None:
        self.reason = Reason.UNPROVED
        self.error = ProbeError(
            f"{self._where}: a known block of {self._nbytes} bytes was saved and loaded, and {what}; expected the same "
            "bytes. This cache loads and saves no blocks. Check that this release of the engine is supported and that "
            "its memory always has the same order of bytes"
        )
        _LOG.error("ProbeError: %s", self.error)


def _known(nbytes: int) -> bytes:
    """Return random bytes, because two places in a block, or two probes, should not have the same bytes."""
    return hashlib.shake_128(os.urandom(16)).digest(nbytes)


def _inverted(known: bytes) -> bytes:
    return known.translate(_INVERSE)


def _copied(block: EngineBlock, known: bytes) -> None:
    """Copy the block out of the engine's memory and back, as a save and a load would, but without nodes."""
    copies = [b"".join(flat(part).tobytes() for part in parts_of(as_payload(value))) for value in block.values()]
    # The place holds other bytes before the load, so a load that writes nothing is noticed.
    block.write(_inverted(known))
    targets = block.targets()
    for copy, target in zip(copies, targets, strict=True):
        start = 0
        for part in map(flat, parts_of(as_payload(target))):
            part[:] = np.frombuffer(copy, np.uint8, part.nbytes, start)
            start += part.nbytes
    block.land(targets)


def _carried(
    block: EngineBlock, known: bytes, saving: BlockCache, loaders: Sequence[BlockCache], until: float | None
) -> Reason | None:
    """Save the block and load it again through the nodes; return the reason if the save or the load failed."""
    values = block.values()
    namespace = Namespace(
        engine="farpool",
        model="probe",
        weights=os.urandom(16).hex(),  # no other probe has this key, and no block of an engine
        dtype="bytes",
        layout="bytes",
        tokens_per_block=1,
        groups=(Group(("probe",), block.nbytes),),
    )
    keys = [block_key(namespace.digest, b"probe", 0, number) for number in range(len(values))]
    saved = saving.save(keys, values, ttl=_PROBE_TTL_S, namespace=namespace, timeout=_left(until))
    if any(saved):  # the saved copies expire; do not ask unreachable nodes again
        return next(reason for reason in saved if reason is not None)
    try:
        block.write(_inverted(known))
        targets = block.targets()
        loaded = loaders[0].load(keys, targets, timeout=_left(until))
        block.land(targets)
        return next((reason for reason in loaded if reason is not None), None)
    finally:
        saving.drop([*keys, namespace_key(namespace.digest)], timeout=_left(until))


def _left(until: float | None) -> float | None:
    return None if until is None else seconds_to(until)


def _difference(known: bytes, found: bytes) -> str:
    if len(known) != len(found):
        return f"{len(found)} bytes were loaded"
    first = next(place for place, (one, other) in enumerate(zip(known, found, strict=True)) if one != other)
    return f"other bytes came back from byte {first} on"


_INVERSE = bytes(255 - value for value in range(256))
