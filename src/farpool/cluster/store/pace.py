"""Members that answer slowly: how a store finds them, and when they have recovered (docs/store.md).

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
from statistics import median
from typing import TYPE_CHECKING

from farpool._native import LATE_ANSWER_S, LATE_ANSWERS
from farpool.cluster.store.messages import Ask
from farpool.cluster.wire.frames import Op
from farpool.errors import FarpoolError

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Pace", "Paces"]

_TIMES_MEDIAN = 4.0
"""Times the median of the other members that a member may take. Nodes in other racks or zones take two or three times
as long as the nearest one, which is no reason to leave them out."""
_SHARE_TO_RECOVER = 0.5
"""Share of its limit within which a slow member has to answer. Between this share and the limit its state stays."""
_PROBE_PAUSE_S = 0.25
"""Seconds between two probes of a slow member, so it recovers about four seconds after its answers are prompt again."""
_PING_PAUSE_S = 0.02
"""Seconds between two requests that measure the other members before one of them is judged."""
_OTHERS_MAX = 8
"""Largest number of other members that are measured for a comparison; more would change the median little."""
_UNDONE = 4
"""Number of prompt probes that a late one undoes. So a member recovers if fewer than a fifth of its probes are late,
which also happens to prompt nodes when this host is busy."""
_PROBES_MAX = 16 * LATE_ANSWERS
"""Largest number of prompt probes that a member needs, about a minute. It needs twice as many at each relapse."""
_RELAPSE_S = 60.0
"""Seconds after its recovery in which a member that is slow again has had a relapse: its probes are prompt, but its
other answers are not."""


class Pace:
    """Decides if one member counts as slow, from the times of its answers and of the other members. Reads no clock.

    Attributes
    ----------
    is_slow : bool
        True while the member counts as slow.
    times_slow : int
        How often the member has become slow.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self.times_slow = 0
        self._needed = LATE_ANSWERS
        self._prompt = 0
        self._recovered: float | None = None

    def late(self, seconds: float, others: Sequence[float], now: float) -> bool:
        """Record that the member was late for many answers in a row; return True if it counts as slow from now on.

        Parameters
        ----------
        seconds : float
            Its smallest smoothed time during these answers.
        others : sequence of float
            Smoothed times of the other members. Without them nothing says that the member itself is slow.
        now : float
            Time by the monotonic clock.
        """
        if self.is_slow or not others or seconds <= _limit(others):
            return False
        relapsed = self._recovered is not None and now - self._recovered < _RELAPSE_S
        self._needed = min(2 * self._needed, _PROBES_MAX) if relapsed else LATE_ANSWERS
        self._prompt = 0
        self.is_slow = True
        self.times_slow += 1
        return True

    def probed(self, seconds: float, others: Sequence[float], now: float) -> bool:
        """Record the time of a probe, infinite if it failed; return True if the member has recovered with it."""
        if not self.is_slow:
            return False
        is_prompt = not others or seconds < _SHARE_TO_RECOVER * _limit(others)
        self._prompt = self._prompt + 1 if is_prompt else max(0, self._prompt - _UNDONE)
        if self._prompt < self._needed:
            return False
        self.is_slow = False
        self._recovered = now
        return True


class Paces:
    """Compares the members of a store, and probes slow ones in a thread. Thread-safe.

    Parameters
    ----------
    cluster : Cluster
        The members.
    closing : threading.Event
        Ends the thread when it is set.
    """

    def __init__(self, cluster: Cluster, closing: threading.Event) -> None:
        # Weak, because the program may drop a store without closing it while the thread runs.
        self._cluster = weakref.ref(cluster)
        self._closing = closing
        # Protects the thread and the suspects. No other lock is taken while it is held.
        self._lock = threading.Lock()
        self._suspects: dict[Member, float] = {}
        self._thread: threading.Thread | None = None

    def watch(self, member: Member) -> None:
        """Compare a member with the others after it has been late for many answers."""
        own, watched = weakref.ref(self), weakref.ref(member)

        def late(seconds: float) -> None:
            paces, member = own(), watched()
            if paces is not None and member is not None:
                paces._late(member, seconds)

        member.pool.on_late(late)

    def join(self) -> None:
        """Wait until the thread has ended."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _late(self, member: Member, seconds: float) -> None:
        cluster = self._cluster()
        if cluster is None or member.pace.is_slow or not _serves_reads(member):
            return
        others = _times(_others(cluster, member))
        if others and seconds > _limit(others):
            with self._lock:
                if self._thread is not None or self._start():
                    self._suspects[member] = seconds

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
        while self._go_on():
            # The pauses are random, so that programs which found the member slow do not all probe it at the same time.
            if self._closing.wait(_PROBE_PAUSE_S * random.uniform(0.75, 1.25)):
                return

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


def _limit(others: Sequence[float]) -> float:
    """Return the seconds above which an answer is late, from the times of the other members."""
    return max(_TIMES_MEDIAN * median(others), LATE_ANSWER_S)
