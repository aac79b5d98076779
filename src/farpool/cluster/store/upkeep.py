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
from typing import TYPE_CHECKING, TypeGuard

from farpool.cluster.store.driver import probe
from farpool.cluster.store.messages import Ask, decoded
from farpool.cluster.store.plan import share_of
from farpool.cluster.wire.frames import COPIED, HEAD, KEPT, MARK_OF_NONE, TOUCH, Op, Status
from farpool.errors import FarpoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from farpool._native import Reply
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Mended", "Upkeep", "mend"]

_PAUSE_S = 0.005
"""Seconds for which hits are collected. The time is short, because other objects soon fill a small cache."""
_HITS_MAX = 65536
"""Maximum number of keys whose hits are collected in one pause. A hit of a further key is ignored; the copies of that
key are checked after a later hit."""
_UNKEPT_MS = 60_000
"""Milliseconds from the call's deadline until a new copy expires, unless its node was told to keep the copy."""


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
    """Copy an object to other nodes. The bytes come from the first holder that returns the object (the source).

    The copies get the remaining time to live. If the source keeps its copy (never evicts it), the other nodes keep
    their copies, too. A node where the key was dropped a short time ago refuses the copy, because the drop may have
    come after the object was read from the source. A node in a later epoch than the source also refuses the copy; the
    head of the object contains its epoch.
    """
    reasons: list[str] = []
    for holder in holders:
        get = Ask(holder, Op.GET, key)
        (source,) = cluster.ask([get], deadline)
        if not isinstance(source, Exception) and source.status == Status.DONE:
            break
        if isinstance(source, Exception) or source.status != Status.MISSING:
            reasons.append(_reason(get, source))
    else:
        return Mended(0, tuple(reasons), gone=not reasons)
    ttl, *head, flags = HEAD.unpack(source.meta)
    is_kept = bool(flags & KEPT)
    meta = HEAD.pack(_unkept_ms(deadline) if is_kept else ttl, *head, flags & ~KEPT | COPIED) + key
    # Each part is the value itself, because a store has no other redundancies.
    value = cluster.redundancy.decode({0: memoryview(source.payload or b"")})
    puts = [Ask(member, Op.PUT, meta, 0, value) for member in members]
    answers = cluster.ask(puts, deadline)
    refused = any(not isinstance(answer, Exception) and answer.status == Status.MISSING for answer in answers)
    let_go = False
    if is_kept:
        taken = [place for place, answer in enumerate(answers) if _has_taken(answer)]
        kept, let_go = _keep(cluster, key, holder, [members[place] for place in taken], deadline)
        for place, answer in zip(taken, kept, strict=True):
            answers[place] = answer
    copies = 0
    for put, answer in zip(puts, answers, strict=True):
        if _has_taken(answer):
            copies += 1
        else:
            reasons.append(_reason(put, answer))
    # A refusal may have another reason than a drop. The object is gone only if its holder has lost it, too.
    return Mended(copies, tuple(reasons), gone=let_go or (refused and _is_missing(cluster, holder, key, deadline)))


def _keep(
    cluster: Cluster, key: bytes, holder: Member, members: Sequence[Member], deadline: float
) -> tuple[list[Reply | Exception], bool]:
    """Tell nodes to keep new copies of an object if the holder keeps its copy.

    Return the nodes' answers, and True if the holder does not keep its copy.

    A sweep may release the object at the same time, and must leave no copy kept. So we note the marks of the new copies
    first, and then have the holder keep its own copy again, which gives it another mark. A sweep that has not released
    that copy by then is refused, looks at all copies again, and finds the new ones. If the sweep releases the new
    copies before we keep them, they have other marks than we noted, and their nodes do not keep them.
    """
    touch = TOUCH.pack(_unkept_ms(deadline), 0) + key
    marked = cluster.ask([Ask(member, Op.TOUCH, touch) for member in members], deadline)
    (again,) = cluster.ask([Ask(holder, Op.TOUCH, TOUCH.pack(0, 1) + key, MARK_OF_NONE)], deadline)
    if isinstance(again, Exception) or again.status != Status.DONE:
        gone = not isinstance(again, Exception) and again.status in (Status.MISSING, Status.UNKNOWN)
        return [again] * len(members), gone
    answers = list(marked)
    known = [(place, answer.serial) for place, answer in enumerate(marked) if _has_taken(answer)]
    asks = [Ask(members[place], Op.TOUCH, TOUCH.pack(0, 1) + key, mark) for place, mark in known]
    for (place, _), answer in zip(known, cluster.ask(asks, deadline), strict=True):
        answers[place] = answer
    return answers, False


def _unkept_ms(deadline: float) -> int:
    """Return the milliseconds until a new copy expires, unless its node is told to keep the copy.

    That time begins with the first byte that the node receives. It includes the time until the deadline, so that a copy
    which takes minutes to send has not expired when it is complete.
    """
    return _UNKEPT_MS + max(0, round((deadline - time.monotonic()) * 1000))


def _has_taken(answer: Reply | Exception) -> TypeGuard[Reply]:
    """Return True if a node has stored or touched a copy, or already had it."""
    return not isinstance(answer, Exception) and answer.status in (Status.DONE, Status.PRESENT)


def _is_missing(cluster: Cluster, holder: Member, key: bytes, deadline: float) -> bool:
    (answer,) = cluster.ask([Ask(holder, Op.STAT, key)], deadline)
    return not isinstance(answer, Exception) and answer.status == Status.MISSING


def _reason(ask: Ask, answer: Reply | Exception) -> str:
    """Return the reason why a node has not returned, stored or kept an object."""
    if not isinstance(answer, Exception) and answer.status == Status.UNKNOWN:
        return f"{ask.member.name}: it does not keep its copy, because another program has released the object"
    if not isinstance(answer, Exception) and answer.status == Status.MISSING:
        return (
            f"{ask.member.name}: it takes no copy, because the key was dropped there lately or the node is in a later "
            "epoch"
        )
    return str(decoded(ask, answer, ()))
