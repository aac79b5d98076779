"""One member of a store: the connections to its node, and the record of whether the node answers.

Calls do not ask a node that has failed: they go to other nodes, or fail at once if there is none. A thread probes the
node until it answers, and then calls ask it again. So no call has to wait to find out whether the node has recovered.

A call with a short timeout may end before a healthy node can answer. This alone is no failure of the node: the thread
sends the node one probe with more time to answer, and calls still ask the node. The node counts as failed only if it
does not answer this probe either.

A member that has left the list is closed when no call and no pin refers to it any more. Python counts these references
anyway; a counter of our own would make each lookup slower.
"""

from __future__ import annotations

import math
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from farpool.abc.membership import MemberInfo
from farpool.cluster.store.pace import Pace
from farpool.cluster.wire.frames import Op
from farpool.errors import (
    AccessDeniedError,
    ConfigError,
    IncompatibleError,
    NodeError,
    NodeTimeoutError,
    ProtocolError,
)

if TYPE_CHECKING:
    from farpool._native import Connection, ObjectReader
    from farpool.cluster.wire.channel import Channel
    from farpool.cluster.wire.features import Feature

__all__ = ["Member", "may_be_stale"]

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
"""Longest pause between two probes of a failed node. Each pause is twice as long as the previous one, up to this."""
_PROBE_TIMEOUT_S = 1.0
"""Seconds within which a node must answer a probe."""
_SILENCE_S = 0.05
"""Seconds without an answer before a node may count as failed. A shorter wait says little about the node."""


def may_be_stale(error: Exception) -> bool:
    """Return True if an error may be due to a restart of the node. A new connection may then work."""
    return isinstance(error, NodeError) and not isinstance(error, NodeTimeoutError | ProtocolError | AccessDeniedError)


class Member:
    """A member of a store. Thread-safe.

    Parameters
    ----------
    channel : Channel
        Connections to the node.
    met : callable
        Called with this object and the node's identity at each new contact with the node. It sets `identity`, or raises
        `ConfigError` to refuse the node.
    info : MemberInfo, optional
        Entry for this member in the list of members; by default an entry with only the channel's address.

    Attributes
    ----------
    name : str
        Address of the node.
    identity : bytes
        Identity of the node, which it keeps when it restarts or moves; empty before the first contact.
    info : MemberInfo
        Entry for this member in the list of members.
    pool : ConnectionPool
        Connections to the node.
    is_failing : bool
        True while calls do not ask the node because it has failed.
    is_probed : bool
        True while a thread tries to reach the node.
    pace : Pace
        Record of whether the node answers slowly.
    unmet : NodeError or None
        Error of the last attempt to meet the node.
    """

    def __init__(self, channel: Channel, met: Callable[[Member, bytes], None], info: MemberInfo | None = None) -> None:
        self.channel = channel
        self.name = channel.name
        self.identity = b""
        self.info = info or MemberInfo((channel.name,))
        self.pool = channel.pool
        self.is_failing = False
        self.is_probed = False
        self.pace = Pace()
        self.unmet: NodeError | None = None
        self._met = met
        # Type and text of the error. The error itself would keep the buffers of the call alive that it ended.
        self._error: tuple[type[NodeError], str] = (NodeError, "")
        self._since = 0.0
        self._ending = threading.Event()
        self._prober: threading.Thread | None = None
        self._met_at: object = None
        # Protects the record of failures, the probe's state and `info`. Calls read `is_failing` without it.
        self._lock = threading.Lock()
        # Closes the connections when the last call or pin lets the member go. At exit, `Store` closes them itself.
        weakref.finalize(self, channel.close).atexit = False

    def __repr__(self) -> str:
        return f"<Member {self.name} {self.identity.hex() or 'not met'}>"

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        """Borrow a connection, or open a new one if `fresh`. The caller gives the connection back to `pool`.

        Raises
        ------
        NodeError
            The node cannot be reached, or is not asked because it has failed.
        """
        if self.is_failing:
            self._refuse()
        began = time.monotonic()
        try:
            return self._connect(deadline, fresh=fresh)
        except NodeError as error:
            self.failed(error, min(time.monotonic(), deadline) - began)
            raise

    def _connect(self, deadline: float, *, fresh: bool) -> Connection:
        try:
            connection = self.channel.take(deadline, fresh=fresh)
            if self.channel.welcome is not self._met_at:  # the contact is new, and the node may be another one
                try:
                    self._meet(connection, deadline)
                except BaseException:
                    connection.close()  # perhaps it leads to another node, so no later call may use it
                    self.pool.give(connection)
                    raise
        except NodeError as error:
            addresses = self.info.addresses
            if len(addresses) > 1 and not error.refused and self.name in addresses:
                self._move(addresses[(addresses.index(self.name) + 1) % len(addresses)])
            raise
        return connection

    def _meet(self, connection: Connection, deadline: float) -> None:
        """Learn the node's identity and the tenant's epoch, and map the node's objects if that is possible."""
        self.channel.attach(deadline)
        # The reply contains the epoch. A program needs it even if it will only read mapped memory.
        connection.exchange(Op.PING, b"", deadline)
        welcome = self.channel.welcome
        assert welcome is not None
        if self.info.identity not in (b"", welcome.identity):
            raise NodeError(
                f"{self.name}: the node there has the identity {welcome.identity.hex()}, expected "
                f"{self.info.identity.hex()}; the list of members has another node at this address",
                node=self.name,
            )
        self._met(self, welcome.identity)
        # Set last: if `_met` refuses the node, the next connection is refused as well.
        self._met_at = welcome

    def update(self, info: MemberInfo) -> None:
        """Replace the member's entry by a newer entry. If the node has moved, later calls use its new address."""
        with self._lock:
            self.info = info
            is_back, is_moved = self._ending.is_set(), self.name not in info.addresses
            if is_back:
                # A probe from before keeps the old event, and ends.
                self._ending = threading.Event()
                self.pace = Pace()
            if is_moved:
                self._move(info.addresses[0])
            if is_back or is_moved:
                self.is_failing = False

    def _move(self, address: str) -> None:
        self.name = address
        self.channel.move(address)

    def attach(self, deadline: float) -> ObjectReader | None:
        """Map the node's objects and return a reader for them; return None if they cannot be mapped."""
        self.pool.give(self.take(deadline))
        return self.channel.reader

    def call(self, name: str, deadline: float, **arguments: object) -> dict[str, object]:
        """Call a named operation of the node over its control connection."""
        self.attach(deadline)  # if the node refuses from here on, it refuses the call and not the connection
        try:
            return self.channel.call(name, deadline, **arguments)
        except NodeError as error:
            if not error.refused:
                self.failed(error)
            raise

    def introduce(self) -> None:
        """Try to reach the node in the background, so that no call has to wait for it."""
        with self._lock:
            self._start_probe(None)

    def failed(self, error: Exception, silence: float = math.inf) -> None:
        """Record that the node has failed: no call asks it until it answers a probe.

        Parameters
        ----------
        error : Exception
            The error of the call.
        silence : float
            Seconds since the node last answered. If this time is short and the error is a timeout, the node is probed
            before it counts as failed.
        """
        if isinstance(error, AccessDeniedError):  # the node answers, and only refuses this program
            return
        late = isinstance(error, NodeTimeoutError) and silence < _SILENCE_S
        with self._lock:
            known = _described(error)
            # Marked only if a probe runs, because only a probe takes the mark away.
            if self._start_probe(known) and not late:
                self._mark(known)

    def _start_probe(self, error: tuple[type[NodeError], str] | None) -> bool:
        """Start the thread that probes the node, if none runs; the caller holds the lock.

        Return False if the member has left or no thread can be started.
        """
        if self._ending.is_set():
            return False
        if not self.is_probed:
            arguments = (error, self._ending)
            prober = threading.Thread(target=self._probe, args=arguments, name="farpool-store-probe", daemon=True)
            try:
                prober.start()
            except RuntimeError:  # no more threads may be started: the next call asks the node again
                return False
            self._prober, self.is_probed = prober, True
        return True

    def _mark(self, error: tuple[type[NodeError], str]) -> None:
        if not self.is_failing:
            self._since, self._error = time.monotonic(), error
            self.is_failing = True

    def status(self) -> tuple[float, str]:
        """Return the seconds since the node began to fail (0.0 if it works), and the text of the error."""
        with self._lock:
            return time.monotonic() - self._since if self.is_failing else 0.0, self._error[1]

    def absence(self) -> NodeError:
        """Return an error that explains why a call cannot ask this node. Use it only if the node has not been met."""
        return self.unmet or NodeError(
            self.status()[1] or f"{self.name} was reached too late for this call", node=self.name
        )

    def lacks(self, feature: Feature) -> bool:
        """Return True if the node did not have a feature at the last contact with it; False before any contact."""
        welcome = self.channel.welcome
        return welcome is not None and not welcome.features >> feature.bit & 1

    def leave(self) -> None:
        """Stop probing the node, because it is no member any more. Its connections stay open for calls and pins."""
        with self._lock:
            self._ending.set()
            self.is_probed = False

    def close(self) -> None:
        """Close all connections, and end the requests that are under way on them."""
        self.leave()
        # Before the join: closing the channel ends the probe's waits.
        self.channel.close()
        if self._prober is not None and self._prober is not threading.current_thread():
            self._prober.join()

    def _refuse(self) -> None:
        with self._lock:
            # A probe may have succeeded since the caller looked.
            if not self.is_failing:
                return
            failing, (kind, error) = time.monotonic() - self._since, self._error
        raise kind(
            f"{self.name} is not asked: it has been failing for {failing:.1f} s and is being probed: {error}",
            node=self.name,
        )

    def _probe(self, error: tuple[type[NodeError], str] | None, ending: threading.Event) -> None:
        with self._lock:  # the thread that started this one has marked the node by then
            late = not self.is_failing
        if late:
            failure = self._failure()
            with self._lock:
                if ending.is_set():
                    return
                if failure is None and not self.is_failing:
                    self.is_probed = False
                    return
                if failure is not None:
                    self._mark(error or failure)
        pause = _FIRST_PAUSE_S
        # The pauses are random, so that programs which lost the node at the same time do not probe it at the same time.
        while not ending.wait(pause * random.uniform(0.75, 1.0)):
            pause = min(2 * pause, _LONGEST_PAUSE_S)
            if self._failure() is None:
                with self._lock:
                    # The member may have left in the meantime, and may even be back with another probe.
                    if not ending.is_set():
                        self.is_failing, self._error = False, (NodeError, "")
                        self.is_probed = False
                return

    def _failure(self) -> tuple[type[NodeError], str] | None:
        """Probe the node over a new connection; return the error's type and text, or None if the node answers."""
        deadline = time.monotonic() + _PROBE_TIMEOUT_S
        try:
            # A new one, because an idle one may be from before the node restarted.
            connection = self._connect(deadline, fresh=True)
            try:
                connection.exchange(Op.PING, b"", deadline)
            finally:
                self.pool.give(connection)
        except AccessDeniedError:  # the node answers; the next call gets the same refusal
            return None
        except (NodeError, ConfigError) as error:
            return _described(error)
        return None


def _described(error: Exception) -> tuple[type[NodeError], str]:
    kinds = (NodeTimeoutError, IncompatibleError, ProtocolError)
    return next((kind for kind in kinds if isinstance(error, kind)), NodeError), str(error)
