"""Background upkeep: after a read, a thread marks the other copies of the object as used, and restores missing copies.

A hit counts as a use on one node only. Without upkeep the other copies would look unused, their nodes would evict them,
and the object would be lost if the node that serves the hits failed.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from farpool.cluster.repair.copying import Copied, copying
from farpool.cluster.repair.messages import Outcome
from farpool.cluster.store.driver import probe
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.plan import share_of
from farpool.errors import FarpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Mended", "Upkeep", "copy", "mend"]

_PAUSE_S = 0.005
"""Seconds for which hits are collected. The time is short, because other objects soon fill a small cache."""
_HITS_MAX = 65536
"""Maximum number of keys whose hits are collected in one pause. A hit of a further key is ignored; the copies of that
key are checked after a later hit."""


class Upkeep:
    """Thread that marks the other copies of read objects as used, and restores missing copies; idle without reads.

    Parameters
    ----------
    cluster : Cluster
        The nodes.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # Protects the hits and the thread. Each read of an object takes it, so it is held for a moment only.
        self._lock = threading.Lock()
        self._hits: dict[bytes, Member] = {}
        self._lacking: set[bytes] = set()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._until = math.inf

    def note(self, key: bytes, member: Member) -> None:
        """Record that a key was read from a node."""
        with self._lock:
            if self._closing.is_set():
                return
            if len(self._hits) < _HITS_MAX:
                self._hits[key] = member
            if self._thread is None:
                worker = threading.Thread(target=self._work, name="farpool-store-upkeep", daemon=True)
                with suppress(RuntimeError):  # no more threads may be started: a later hit tries again
                    worker.start()
                    self._thread = worker

    def finish(self, deadline: float) -> None:
        """Finish the work for all hits so far, or stop at the deadline (monotonic clock). Idempotent.

        Without this call, a program that ends at once after its reads would not restore missing copies.
        """
        with self._lock:
            self._until = deadline
            self._closing.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _work(self) -> None:
        while time.monotonic() < self._until:
            self._closing.wait(_PAUSE_S)
            with self._lock:
                hits, self._hits = self._hits, {}
                if not hits:
                    # With the lock, so a later hit starts another thread and is not lost.
                    self._thread = None
                    return
            try:
                self._visit(hits)
            except FarpoolError:  # a later hit tries again
                continue
            except BaseException:
                with self._lock:
                    self._thread = None  # a later hit starts another thread
                raise

    def _visit(self, hits: dict[bytes, Member]) -> None:
        cluster = self._cluster
        deadline = self._deadline()
        view = cluster.view(deadline)
        wanted: dict[Member, list[bytes]] = defaultdict(list)
        for key, holder in hits.items():
            for member in cluster.redundancy.place(key, view.places(key)):
                if member.identity != holder.identity:
                    wanted[member].append(key)
        until = share_of(deadline, last=len(wanted) == 1)
        lacking: dict[bytes, list[Member]] = defaultdict(list)
        for member, answer in probe(cluster, wanted, until, use=True).items():
            if not isinstance(answer, Exception):
                for place in answer.missing:
                    lacking[wanted[member][place]].append(member)
        # While an object is being put or dropped, only some nodes have it. So a copy counts as missing only if the next
        # check does not find it either. There is no next check when the store is being closed.
        again = set() if self._closing.is_set() else lacking.keys() - self._lacking
        self._lacking = again
        with self._lock:
            for key in again:
                self._hits.setdefault(key, hits[key])
        for key in lacking.keys() - again:
            if time.monotonic() > self._until:
                return
            mend(cluster, key, [hits[key]], lacking[key], self._deadline())

    def _deadline(self) -> float:
        return min(self._cluster.deadline(), self._until)


@dataclass(frozen=True, slots=True)
class Mended:
    """Outcome of copying one object.

    Attributes
    ----------
    copies : int
        Number of target nodes that have the object now.
    reasons : tuple of str
        Why the other target nodes do not have the object, or why no holder returned it.
    gone : bool
        True if the object was dropped, released, evicted or expired: no holder has it any more, or the node that
        returned the object does not keep its copy any more.
    """

    copies: int
    reasons: tuple[str, ...] = ()
    gone: bool = False


def mend(cluster: Cluster, key: bytes, holders: Sequence[Member], members: Sequence[Member], deadline: float) -> Mended:
    """Copy an object to other nodes, each time from the first holder that returns it."""
    left, copies = list(holders), 0
    reasons: list[str] = []
    for member in members:
        while left:
            copied = copy(cluster, key, left[0], member, deadline)
            copies += copied.outcome is Outcome.DONE
            if copied.outcome is Outcome.GONE:
                return Mended(copies, tuple(reasons), gone=True)
            if copied.outcome is not Outcome.LOST:
                reasons += filter(None, [copied.reason(left[0].name, member.name)])
            if copied.failed is None or copied.failed.to == "target":
                break
            del left[0]
    return Mended(copies, tuple(reasons), gone=not left and not reasons and not copies)


def copy(cluster: Cluster, key: bytes, source: Member, target: Member, deadline: float) -> Copied:
    """Copy an object from one node to another through this program, as `copying` describes it."""
    steps = copying(key, lambda: max(0, round((deadline - time.monotonic()) * 1000)))
    request = next(steps)
    while True:
        member = source if request.to == "source" else target
        (answer,) = cluster.ask([Ask(member, request.op, request.meta, request.serial, request.payload)], deadline)
        try:
            request = steps.send(answer)
        except StopIteration as end:
            copied: Copied = end.value
            return copied
