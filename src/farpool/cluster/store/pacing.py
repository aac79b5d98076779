"""Members that answer slowly: how a store finds them, and how it notices that they have recovered (docs/store.md).

The connections to a node measure how long it takes to answer (native/wire/answer_times.hpp), which costs a request a
few dozen nanoseconds. When a node has been late for many answers in a row, and took much longer than the other members,
the member becomes a suspect. A thread then measures the others again and again. If the suspect is late for many answers
while they answer promptly, it counts as slow: programs read last from it. If this host or the network is overloaded,
the others are late as well.

A slow member gets few reads, so they cannot show when it has recovered. The same thread therefore probes it until its
answers are prompt again, and ends when no member is slow or a suspect.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from farpool.cluster.store.messages import Ask
from farpool.cluster.store.pace import limit_of
from farpool.cluster.wire.frames import Op

if TYPE_CHECKING:
    from farpool.cluster.store.cluster import Cluster
    from farpool.cluster.store.member import Member

__all__ = ["Pacing"]

_PROBE_PAUSE_S = 0.25
"""Seconds between two probes of a slow member that answers promptly, so it recovers in about four seconds."""
_LONGEST_PAUSE_S = 2.0
"""Longest pause between two probes. Pauses grow by a tenth while all slow members are late: they may be overloaded."""
_SUSPECTED_S = 10.0
"""Seconds for which a member stays a suspect after it was late for many answers in a row."""
_ANSWERED = 8
"""Pings in a row that another member must have answered before a suspect is compared with it. After so many, little is
left in its smoothed time of the times before."""
_CLOSE_S = 1.0
"""Seconds for which a store that is being closed waits for the thread."""
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
        # Protects the thread and the reports. No other lock is taken while it is held.
        self._lock = threading.RLock()  # the handler of a signal may read from the store
        self._reports: dict[Member, float] = {}  # members that were late, and for how long at least
        self._thread: threading.Thread | None = None
        # Only the thread uses these.
        self._pause = _PROBE_PAUSE_S
        self._suspects: dict[Member, float] = {}  # until when each of them is one
        self._answered: dict[Member, int] = {}  # how many pings in a row the other members have answered

    def late(self, member: Member, seconds: float) -> None:
        """Have a member compared with others, because it was late for many answers: for at least `seconds` each."""
        cluster = self._cluster()
        if cluster is None or not _serves_reads(member):
            return
        others = _times(_others(cluster, member))
        # Slow ones as well: an error may have ended the thread that probes them.
        if member.pace.is_slow or (others and seconds > limit_of(others)):
            with self._lock:
                if self._thread is not None or self._start():
                    self._reports[member] = seconds

    def close(self) -> None:
        """End the thread. Pings under way end when the connections are closed, so close those first. Idempotent.

        A ping that opens a connection does not end then. The thread is left to itself if it takes long.
        """
        with self._lock:
            self._closing.set()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)

    def _start(self) -> bool:
        """Start the thread; the caller holds the lock. Return False if it cannot be started."""
        if self._closing.is_set():
            return False
        thread = threading.Thread(target=self._work, name="farpool-store-pace", daemon=True)
        self._answered = {}  # those pings are old
        self._thread = thread  # before it starts, because a signal's handler may come here meanwhile
        try:
            with suppress(RuntimeError):  # no more threads may be started: later answers try again
                thread.start()
        finally:
            if thread.ident is None:
                self._thread = None
        return self._thread is not None

    def _work(self) -> None:
        try:
            while self._go_on():
                # The pauses are random, so that programs which found a member slow do not probe it at the same time.
                if self._closing.wait(self._pause * random.uniform(0.75, 1.25)):
                    return
        except BaseException:
            with self._lock:
                self._thread = None  # a later suspect starts another thread
            raise

    def _go_on(self) -> bool:
        """Judge suspects and measure members; return False if the thread can end.

        The thread waits outside this function, because variables of it would keep a dropped store alive.
        """
        cluster = self._cluster()
        if cluster is None:
            return False
        self._judge()
        slow = [member for member in cluster.members if member.pace.is_slow]
        if self._suspects or any(not member.is_failing for member in slow):
            self._measure(cluster, slow)
        is_urgent = self._suspects or any(member.pace.is_recovering for member in slow)
        self._pause = _PROBE_PAUSE_S if is_urgent else min(1.1 * self._pause, _LONGEST_PAUSE_S)
        cluster.reorder()
        with self._lock:
            if slow or self._suspects or self._reports:
                return True
            self._thread = None
            return False

    def _judge(self) -> None:
        """Compare the members that were late with others that have been measured all the time."""
        with self._lock:
            reports, self._reports = self._reports, {}
        now = time.monotonic()
        others = [one for one, count in self._answered.items() if count >= _ANSWERED and one not in reports]
        for member, seconds in reports.items():
            # The last answers as well, because smoothed times do not show at once that this host is overloaded.
            member.pace.late(seconds, [max(one.pool.times.seconds, one.pool.times.last) for one in others], now)
            self._suspects[member] = now + _SUSPECTED_S
        self._suspects = {
            member: until for member, until in self._suspects.items() if now < until and not member.pace.is_slow
        }

    def _measure(self, cluster: Cluster, slow: Sequence[Member]) -> None:
        """Probe slow members, and measure others, whose times would be old if they are not read from at present."""
        # Not the suspects: a node with a slow disk answers pings promptly.
        left = [one for one in cluster.snapshot.met if one not in slow and one not in self._suspects]
        others = [one for one in left if one in self._answered]  # the same ones as before
        left = [one for one in left if one not in self._answered and not one.is_failing]
        others += random.sample(left, min(len(left), _OTHERS_MAX - len(others)))
        answers = self._ping(cluster, [*slow, *others])
        for member, answer in zip(slow, answers, strict=False):
            # The connection has measured it. A time measured in Python would contain waits for the interpreter lock.
            seconds = math.inf if isinstance(answer, Exception) else member.pool.times.last
            member.pace.probed(seconds, _times(_others(cluster, member)), time.monotonic())
        self._answered = {
            one: self._answered.get(one, 0) + 1
            for one, answer in zip(others, answers[len(slow) :], strict=True)
            if self._suspects and not isinstance(answer, Exception)
        }

    def _ping(self, cluster: Cluster, members: Sequence[Member]) -> Sequence[object]:
        try:
            # A reply may take as long as a call, because a slow node has not failed.
            return cluster.ask([Ask(member, Op.PING, b"") for member in members], cluster.deadline())
        except Exception as error:  # for example, another node has the address of one of them now, or memory is short
            return [error] * len(members)


def _serves_reads(member: Member) -> bool:
    """Return True if the node itself answers reads, and programs do not read its memory without asking it."""
    return member.channel.reader is None and member.channel.one_sided is None


def _others(cluster: Cluster, member: Member) -> list[Member]:
    """Return the other members that answer and do not count as slow."""
    met = cluster.snapshot.met
    return [one for one in met if one is not member and not one.is_failing and not one.pace.is_slow]


def _times(members: Sequence[Member]) -> list[float]:
    """Return the smoothed times of the members that have been measured."""
    return [seconds for member in members if (seconds := member.pool.times.seconds) > 0]
