"""Members that answer slowly: how a store finds them, and how it notices that they have recovered (docs/store.md).

The connections to a node measure how long it takes to answer (native/wire/answer_times.hpp), which costs a request a
few dozen nanoseconds. When a node has been late for many answers in a row, its time is compared with the times of the
other members. If it takes much longer, the member counts as slow: programs read last from it.

A slow member gets few reads, so they cannot show when it has recovered. A thread therefore probes it until its answers
are prompt again. The same thread compares suspects with the others, and ends when no member is slow.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from farpool._native import LATE_ANSWERS
from farpool.cluster.store.messages import Ask
from farpool.cluster.store.pace import limit_of
from farpool.cluster.wire.frames import Op
from farpool.errors import FarpoolError

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Pacing"]

_PROBE_PAUSE_S = 0.25
"""Seconds between two probes of a slow member, so it recovers about four seconds after its answers are prompt again."""
_PING_PAUSE_S = 0.02
"""Seconds between two requests that measure the other members before one of them is judged."""
_OTHERS_MAX = 8
"""Largest number of other members that are measured for a comparison; more would change the median little."""


class Pacing:
    """Compares the members of a store, and probes slow ones in a thread. Thread-safe; idle if no member is slow.

    Parameters
    ----------
    cluster : Cluster
        The members.
    """

    def __init__(self, cluster: Cluster) -> None:
        # Weak, because the program may drop a store without closing it while the thread runs.
        self._cluster = weakref.ref(cluster)
        self._closing = threading.Event()
        # Protects the thread and the suspects. No other lock is taken while it is held.
        self._lock = threading.Lock()
        self._suspects: dict[Member, float] = {}
        self._thread: threading.Thread | None = None

    def late(self, member: Member, seconds: float) -> None:
        """Compare a member with the others, because it has been late for many answers: for at least `seconds` each."""
        cluster = self._cluster()
        if cluster is None or member.pace.is_slow or not _serves_reads(member):
            return
        others = _times(_others(cluster, member))
        if others and seconds > limit_of(others):
            with self._lock:
                if self._thread is not None or self._start():
                    self._suspects[member] = seconds

    def close(self) -> None:
        """End the thread. Probes under way end when the connections are closed, so close those first. Idempotent."""
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _start(self) -> bool:
        """Start the thread; the caller holds the lock. Return False if it cannot be started."""
        if self._closing.is_set():
            return False
        thread = threading.Thread(target=self._work, name="farpool-store-pace", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no more threads may be started: later answers try again
            return False
        self._thread = thread
        return True

    def _work(self) -> None:
        try:
            while self._go_on():
                # The pauses are random, so that programs which found a member slow do not probe it at the same time.
                if self._closing.wait(_PROBE_PAUSE_S * random.uniform(0.75, 1.25)):
                    return
        except BaseException:
            with self._lock:
                self._thread = None  # a later suspect starts another thread
            raise

    def _go_on(self) -> bool:
        """Judge suspects and probe slow members; return False if the thread can end.

        The thread waits outside this function, because variables of it would keep a dropped store alive.
        """
        cluster = self._cluster()
        if cluster is None:
            return False
        with self._lock:
            suspects, self._suspects = self._suspects, {}
        for member, seconds in suspects.items():
            self._judge(cluster, member, seconds)
        slow = [member for member in cluster.members if member.pace.is_slow]
        if any(not member.is_failing for member in slow):
            self._probe(cluster, slow)
        cluster.reorder()
        with self._lock:
            if slow or self._suspects:
                return True
            self._thread = None
            return False

    def _judge(self, cluster: Cluster, member: Member, seconds: float) -> None:
        """Compare a member with some of the others, whose times may be old and are therefore measured now.

        If this host or the network is overloaded, the others take as long, and the member does not count as slow.
        """
        others = _some(_others(cluster, member))
        for _ in range(LATE_ANSWERS):
            self._ping(cluster, others)
            if self._closing.wait(_PING_PAUSE_S):
                return
        member.pace.late(seconds, _times(others), time.monotonic())

    def _probe(self, cluster: Cluster, slow: Sequence[Member]) -> None:
        # Others as well, because the times of members that are not read from at present would be old.
        others = _some([member for member in cluster.snapshot.met if member not in slow])
        answers = self._ping(cluster, [*slow, *others])
        for member, answer in zip(slow, answers, strict=False):
            # The connection has measured it. A time measured in Python would contain waits for the interpreter lock.
            seconds = math.inf if isinstance(answer, Exception) else member.pool.times.last
            member.pace.probed(seconds, _times(_others(cluster, member)), time.monotonic())

    def _ping(self, cluster: Cluster, members: Sequence[Member]) -> Sequence[object]:
        try:
            # A reply may take as long as a call, because a slow node has not failed.
            return cluster.ask([Ask(member, Op.PING, b"") for member in members], cluster.deadline())
        except FarpoolError as error:  # for example, another node has the address of one of them now
            return [error] * len(members)


def _serves_reads(member: Member) -> bool:
    """Return True if the node itself answers reads, and programs do not read its memory without asking it."""
    return member.channel.reader is None and member.channel.one_sided is None


def _others(cluster: Cluster, member: Member) -> list[Member]:
    """Return the other members that answer."""
    return [one for one in cluster.snapshot.met if one is not member and not one.is_failing]


def _some(members: list[Member]) -> list[Member]:
    return members if len(members) <= _OTHERS_MAX else random.sample(members, _OTHERS_MAX)


def _times(members: Sequence[Member]) -> list[float]:
    """Return the smoothed times of the members that have been measured."""
    return [seconds for member in members if (seconds := member.pool.times.seconds) > 0]
