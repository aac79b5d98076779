"""The probe of a connector: it moves one known block before it serves any other.

Checksums protect a block between a save and a load. They cannot see a connector that takes the wrong bytes from the
engine's memory, or puts the right bytes into the wrong place, for example after the engine has changed its layout. So a
connector first moves a block of known bytes, which it writes and reads with the engine's own functions. If other bytes
come back, it refuses to serve: every block is missing, and none is saved.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from farpool.errors import ProbeError
from farpool.kv.compression import flat
from farpool.kv.keys import block_key, namespace_key
from farpool.kv.namespace import Group, Namespace
from farpool.kv.reasons import Reason
from farpool.store.arguments import as_payload, parts_of

if TYPE_CHECKING:
    from farpool.kv.blocks import BlockCache, Target

__all__ = ["EngineBlock", "Probe"]

_LOG = logging.getLogger("farpool.kv")

_TTL_S = 60.0
"""Seconds after which a probe's block expires if its program dies before removing it."""
_NOT_ALLOWED = frozenset({Reason.REFUSED, Reason.FULL})
"""Reasons for which nodes never take a block: the access key may only read, or the block is larger than a node."""
_DAMAGED = frozenset({Reason.CORRUPT, Reason.FOREIGN, Reason.WRONG_SIZE, Reason.WRONG_VERSION})


@dataclass(frozen=True, slots=True)
class EngineBlock:
    """One block of an engine's memory, which the engine does not use during a probe.

    Attributes
    ----------
    nbytes : int
        Bytes of the block.
    write, read : callable
        Write and read the block with the engine's own functions.
    values : callable
        Return the payloads of the block as the connector saves them, one for each key.
    targets : callable
        Return the memory into which the connector loads the block.
    land : callable
        Copy the loaded bytes from `targets` to the block, if the targets are other memory.
    """

    nbytes: int
    write: Callable[[bytes], None]
    read: Callable[[], bytes]
    values: Callable[[], Sequence[Target]]
    targets: Callable[[], Sequence[Target]]
    land: Callable[[Sequence[Any]], None] = lambda targets: None

    @classmethod
    def private(cls, nbytes: int) -> EngineBlock:
        """Make a block in memory of its own, for a probe while the engine uses all of its memory."""
        memory = bytearray(nbytes)
        view = memoryview(memory)

        def write(data: bytes) -> None:
            view[:] = data

        return cls(nbytes, write, lambda: bytes(memory), lambda: [view], lambda: [view])


class Probe:
    """Decides if a connector may serve blocks. Thread-safe.

    Parameters
    ----------
    where : str
        Name of the engine, for messages.

    Attributes
    ----------
    reason : Reason or None
        Why the connector serves no block; None once the probe has passed. `UNPROVED` if the probe has failed, else the
        reason why it has not reached the nodes yet.
    error : ProbeError or None
        Error of a probe that has failed.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self.reason: Reason | None = Reason.UNPROVED
        self.error: ProbeError | None = None
        self._nbytes = 0
        self._caches: tuple[BlockCache, BlockCache] | None = None
        self.begin_in_child()

    def guard(self, saving: BlockCache, loading: BlockCache, *others: BlockCache) -> None:
        """Keep caches from moving blocks until this probe has passed; the probe uses the first two."""
        self._caches = saving, loading
        for cache in (saving, loading, *others):
            cache.require(self)

    def begin_in_child(self) -> None:
        """Forget a probe that another thread was making when this process was forked."""
        self._lock = threading.Lock()
        self._thread: int | None = None  # that makes the probe now

    def is_of_this_thread(self) -> bool:
        """Return True while this thread makes the probe, because caches may then move the probe's block."""
        return self._thread == threading.get_ident()

    def check(self, block: EngineBlock) -> None:
        """Move a known block through a part of the engine's memory, at the start.

        If no node answers, the probe uses a copy in memory instead, and `attempt` tries the nodes later.

        Parameters
        ----------
        block : EngineBlock
            The part of the memory.
        """
        with self._lock:
            if self.error is not None:
                return
            self._nbytes = block.nbytes
            reason = self._moved(block, through_nodes=True)
            if reason is not None and self.error is None:
                self._moved(block, through_nodes=False)
            if self.error is None:
                self._settle(reason)

    def attempt(self) -> None:
        """Probe the nodes if none has answered yet, with other memory, because the engine may be using its own now."""
        with self._lock:
            if self.error is None and self.reason is not None and self._nbytes:
                reason = self._moved(EngineBlock.private(self._nbytes), through_nodes=True)
                if self.error is None:
                    self._settle(reason)

    def _settle(self, reason: Reason | None) -> None:
        if reason in _NOT_ALLOWED:
            _LOG.warning(
                "%s: nodes took no block for the probe (%s); only the engine's memory was checked", self._where, reason
            )
            reason = None
        self.reason = reason

    def _moved(self, block: EngineBlock, *, through_nodes: bool) -> Reason | None:
        """Move a known block and compare it; return the reason if the nodes did not move it."""
        known, reason = _known(block.nbytes), None
        self._thread = threading.get_ident()
        try:
            kept = block.read()
            try:
                block.write(known)
                if through_nodes and self._caches is not None:
                    reason = _carried(block, known, *self._caches)
                else:
                    _copied(block, known)
                found = block.read()
            finally:
                block.write(kept)
            if reason in _DAMAGED:
                self._fail(f"it came back {reason}")
            elif reason is None and found != known:
                self._fail(_difference(known, found))
        except Exception as error:  # the engine's functions may have changed
            self._fail(f"{type(error).__name__} was raised: {error}")
        finally:
            self._thread = None
        return reason

    def _fail(self, what: str) -> None:
        self.reason = Reason.UNPROVED
        self.error = ProbeError(
            f"{self._where}: a known block of {self._nbytes} bytes was saved and loaded, and {what}; expected the same "
            "bytes. This connector loads and saves no blocks. Check that this release of the engine is supported"
        )
        _LOG.error("ProbeError: %s", self.error)


def _known(nbytes: int) -> bytes:
    """Return bytes that are different in each place and each probe."""
    return hashlib.shake_128(os.urandom(16)).digest(nbytes)


def _inverted(known: bytes) -> bytes:
    return known.translate(_INVERSE)


def _copied(block: EngineBlock, known: bytes) -> None:
    """Copy the block out of the engine's memory and back, as a save and a load would."""
    copies = [b"".join(flat(part).tobytes() for part in parts_of(as_payload(value))) for value in block.values()]
    block.write(_inverted(known))
    targets = block.targets()
    for copy, target in zip(copies, targets, strict=True):
        start = 0
        for part in map(flat, parts_of(as_payload(target))):
            part[:] = np.frombuffer(copy, np.uint8, part.nbytes, start)
            start += part.nbytes
    block.land(targets)


def _carried(block: EngineBlock, known: bytes, saving: BlockCache, loading: BlockCache) -> Reason | None:
    """Save the block and load it again; return the reason if one of them failed."""
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
    saved = saving.save(keys, values, ttl=_TTL_S, namespace=namespace)
    if any(saved):  # do not drop the parts that were saved: they expire, and a drop would wait for missing nodes again
        return next(reason for reason in saved if reason is not None)
    try:
        block.write(_inverted(known))
        targets = block.targets()
        loaded = loading.load(keys, targets)
        block.land(targets)
        return next((reason for reason in loaded if reason is not None), None)
    finally:
        saving.drop([*keys, namespace_key(namespace.digest)])


def _difference(known: bytes, found: bytes) -> str:
    if len(known) != len(found):
        return f"{len(found)} bytes came back"
    first = next(place for place, (one, other) in enumerate(zip(known, found, strict=True)) if one != other)
    return f"other bytes came back from byte {first} on"


_INVERSE = bytes(255 - value for value in range(256))
