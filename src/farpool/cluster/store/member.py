"""One node of a store: the connections to it, and the record of whether it answers.

A node that has failed is left alone: calls pass it over, or fail at once where there is no other. Meanwhile a thread
asks it again and again, so that no call has to find out, and calls go to it as soon as it answers.

An answer that is late for a call which could hardly wait is no failure. A thread asks the node once more, with more
time; meanwhile calls go to it as before, and only if it stays silent it has failed.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from farpool.cluster.wire.frames import Op
from farpool.errors import AccessDeniedError, ConfigError, NodeError, NodeTimeoutError, ProtocolError

if TYPE_CHECKING:
    from farpool._native import Connection, ObjectReader
    from farpool.cluster.wire.channel import Channel

__all__ = ["Member", "may_be_stale"]

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 1.0
"""Seconds between two attempts to reach a node that has failed; they double."""
_PATIENCE = 1.0
"""Seconds in which a node that is probed has to answer."""
_SILENCE = 0.05
"""Seconds of silence that are a failure; a call that has waited for less says little about the node."""


def may_be_stale(error: Exception) -> bool:
    """Return True if a new connection may work where an open one has failed, as the node may have been restarted."""
    return isinstance(error, NodeError) and not isinstance(error, NodeTimeoutError | ProtocolError | AccessDeniedError)


class Member:
    """A node of a store. Thread-safe.

    Parameters
    ----------
    channel : Channel
        Connections to the node.
    met : callable
        Called with this object at each new contact; may refuse the node with `ConfigError`.

    Attributes
    ----------
    name : str
        Its address.
    identity : bytes
        The node's identity, which it keeps over restarts; empty before the first contact.
    pool : ConnectionPool
        Connections to it.
    is_failing : bool
        True while the node has failed and is left alone.
    """

    def __init__(self, channel: Channel, met: Callable[[Member], None]) -> None:
        self.channel = channel
        self.name = channel.name
        self.identity = b""
        self.pool = channel.pool
        self.is_failing = False
        self._met = met
        # Kind and text of the error, which itself would keep alive whatever its caller was reading into.
        self._error: tuple[type[NodeError], str] = (NodeError, "")
        self._since = 0.0
        self._closing = threading.Event()
        self._prober: threading.Thread | None = None
        self._probing = False
        self._met_at: object = None
        self._lock = threading.Lock()

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        """Borrow a connection, to be given back to `pool`; a new one if `fresh`.

        Raises
        ------
        NodeError
            The node cannot be reached, or is left alone because it has failed.
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
        connection = self.channel.take(deadline, fresh=fresh)
        if self.channel.welcome is not self._met_at:  # the contact is new, and the node may be another one
            try:
                self._meet(connection, deadline)
            except BaseException:
                self.pool.give(connection)
                raise
        return connection

    def _meet(self, connection: Connection, deadline: float) -> None:
        """Learn the node's identity and the tenant's epoch, and map its objects where that is possible."""
        self.channel.attach(deadline)
        # The reply tells the epoch, also to a program that will only read mapped memory.
        connection.exchange(Op.PING, b"", deadline)
        welcome = self.channel.welcome
        assert welcome is not None
        before, self.identity = self.identity, welcome.identity
        try:
            self._met(self)
        except ConfigError:
            self.identity = before
            raise
        self._met_at = welcome

    def attach(self, deadline: float) -> ObjectReader | None:
        """Map the node's objects; None where they cannot be mapped."""
        self.pool.give(self.take(deadline))
        return self.channel.reader

    def call(self, name: str, deadline: float, **arguments: object) -> dict[str, object]:
        """Call a named operation of the node over its control connection."""
        self.attach(deadline)  # a refusal from here on is not one of the connection
        try:
            return self.channel.call(name, deadline, **arguments)
        except NodeError as error:
            if not error.refused:
                self.failed(error)
            raise

    def failed(self, error: Exception, silence: float = math.inf) -> None:
        """Mark the node as failed: leave it alone until it answers a probe.

        Parameters
        ----------
        error : Exception
            What has gone wrong.
        silence : float
            Seconds for which it has said nothing. If its answer was only late, and they are few, it is probed first.
        """
        if isinstance(error, AccessDeniedError):  # that it refuses this program says nothing about its health
            return
        late = isinstance(error, NodeTimeoutError) and silence < _SILENCE
        with self._lock:
            if self._closing.is_set():
                return
            kinds = (NodeTimeoutError, ProtocolError)
            known = next((kind for kind in kinds if isinstance(error, kind)), NodeError), str(error)
            if not self._probing:
                prober = threading.Thread(target=self._probe, args=(known,), name="farpool-store-probe", daemon=True)
                try:
                    prober.start()
                except RuntimeError:  # no more threads may be started: the next call asks the node again
                    return
                self._prober, self._probing = prober, True
            if not late:
                self._mark(known)

    def _mark(self, error: tuple[type[NodeError], str]) -> None:
        if not self.is_failing:
            self._since, self._error = time.monotonic(), error
            self.is_failing = True

    def status(self) -> tuple[float, str]:
        """Return for how many seconds the node has been failing (0.0 if it is well), and the error."""
        with self._lock:
            return time.monotonic() - self._since if self.is_failing else 0.0, self._error[1]

    def close(self) -> None:
        """Close all connections, and end the requests that are under way on them."""
        with self._lock:
            self._closing.set()
        self.channel.close()
        if self._prober is not None and self._prober is not threading.current_thread():
            self._prober.join()

    def _refuse(self) -> None:
        with self._lock:
            if not self.is_failing:
                return
            failing, (kind, error) = time.monotonic() - self._since, self._error
        raise kind(
            f"{self.name} is not asked: it has been failing for {failing:.1f} s and is being probed: {error}",
            node=self.name,
        )

    def _probe(self, error: tuple[type[NodeError], str]) -> None:
        with self._lock:  # whoever has started this has marked the node by then
            late = not self.is_failing
        if late:
            answers = self._answers()
            with self._lock:
                if answers and not self.is_failing:
                    self._probing = False
                    return
                self._mark(error)
        pause = _FIRST_PAUSE
        # Not in step with other programs that have lost it at the same time.
        while not self._closing.wait(pause * random.uniform(0.75, 1.0)):
            pause = min(2 * pause, _LONGEST_PAUSE)
            if self._answers():
                with self._lock:
                    self.is_failing, self._error = False, (NodeError, "")
                    self._probing = False
                return

    def _answers(self) -> bool:
        """Ask the node whether it is there, over a new connection, which calls may use afterwards."""
        deadline = time.monotonic() + _PATIENCE
        try:
            connection = self._connect(deadline, fresh=True)
            try:
                connection.exchange(Op.PING, b"", deadline)
            finally:
                self.pool.give(connection)
        except (AccessDeniedError, ConfigError):  # it answers; the next call is told so as well
            return True
        except NodeError:
            return False
        return True
