"""Listener of a node: accepts connections and does their handshakes, each of which has a deadline.

After the handshake the listener passes the connection to the data loop or to the control service. The listener has its
own thread. Each listening socket has limits for connections that are not authenticated yet: one limit for all, and a
lower one for each origin. If there are too many, the listener ends the oldest. So connections that send nothing cannot
keep clients out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import threading
import traceback
from collections.abc import Mapping, Sequence
from functools import partial

from farpool._native import NodeServer, TlsContext
from farpool.cluster.node.access import NodeAccess
from farpool.cluster.node.arrival import Arrival
from farpool.cluster.node.control import ControlService
from farpool.cluster.node.half_open import HalfOpen
from farpool.cluster.node.logs import log
from farpool.cluster.node.patience import patience
from farpool.cluster.wire.access import Grant
from farpool.cluster.wire.handshake import Accepted, NodeHandshake, refused_frame
from farpool.cluster.wire.shortage import is_shortage
from farpool.cluster.wire.tcp import set_options
from farpool.errors import AccessDeniedError, IncompatibleError, NodeError, NodeFullError, ProtocolError

__all__ = ["Listener"]

_HANDSHAKE_TIMEOUT_S = 5.0
_LINGER_TIMEOUT_S = 1.0
_LINGER_BYTES_MAX = 1 << 20
_HALF_OPEN_MAX = 1024
_HALF_OPEN_PER_HOST_MAX = 256
_RETRY_INTERVAL_S = 0.1
_EVENTS_INTERVAL_S = 1.0
_EXPECTS_TLS = refused_frame(
    ProtocolError("it expects TLS: give its address as tls://HOST:PORT, and a certificate in FARPOOL_TLS")
)


class Listener:
    """Accepts connections and does their handshakes until it is stopped.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening sockets, which this object owns from `start` on.
    access : NodeAccess
        The node's access control.
    server : NodeServer
        The data loop, which serves data connections.
    control : ControlService
        Serves control connections.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        access: NodeAccess,
        server: NodeServer,
        control: ControlService,
    ) -> None:
        self.refused = 0
        """Number of connections that were refused in the handshake."""
        self.incompatible = 0
        """Number of these that were refused because the client or this node has to be upgraded."""
        self._sockets = sockets
        self._access = access
        self._server = server
        self._control = control
        self._half_open = [HalfOpen(_HALF_OPEN_MAX, _HALF_OPEN_PER_HOST_MAX) for _ in sockets]
        self._dropped = 0
        self._serving: dict[asyncio.Task[None], str] = {}
        """Tasks of control connections, and the names of the keys that opened them."""
        # Made here and not in the thread: `stop` and `replace` may need it before the thread runs.
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="farpool-listener", daemon=True)

    @property
    def half_open(self) -> int:
        """Number of connections whose handshake is under way."""
        return sum(len(one) for one in self._half_open)

    def start(self) -> None:
        """Begin to accept connections, in a thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and end handshakes and control connections; the data loop keeps its data connections."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def replace(self, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> None:
        """Use these keys and this certificate from now on; end connections whose key was removed or changed."""
        with contextlib.suppress(RuntimeError):  # the node is stopping
            # In the loop's thread, so that no handshake with an old key ends between the two.
            self._loop.call_soon_threadsafe(self._replace, keys, tls)

    def _replace(self, keys: Mapping[str, Grant] | None, tls: TlsContext | None) -> None:
        gone = self._access.replace(keys, tls)
        # New handshakes already use the new keys, so no connection with an old key comes after these are ended.
        for name in gone:
            self._server.end_key(name)
        # `cancel` takes effect later, so no task leaves this table during the loop.
        for task, name in self._serving.items():
            if name in gone:
                task.cancel()
        log("reloaded", keys=len(keys or {}), tls=tls is not None, ended=" ".join(gone))

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [
                    tasks.create_task(self._accept(listening, half_open, tasks))
                    for listening, half_open in zip(self._sockets, self._half_open, strict=True)
                ]
                serving.append(tasks.create_task(self._keep_logging()))
                await self._stopping.wait()
                # A task group ends its tasks only if its own block raises.
                raise _Stopped
        except* _Stopped:
            pass
        finally:
            for listening in self._sockets:
                listening.close()
            self._log_events()

    async def _keep_logging(self) -> None:
        while True:
            self._log_events()
            await asyncio.sleep(_EVENTS_INTERVAL_S)

    def _log_events(self) -> None:
        for kind, session, text in self._server.events():
            level = logging.INFO if kind == "freed" else logging.WARNING
            log(kind, level=level, session=_short(session), detail=text)
        dropped = sum(one.dropped for one in self._half_open)
        if dropped > self._dropped:
            log("too many half-open connections", level=logging.WARNING, dropped=dropped - self._dropped)
            self._dropped = dropped

    async def _accept(self, listening: socket.socket, half_open: HalfOpen, tasks: asyncio.TaskGroup) -> None:
        listening.setblocking(False)
        while True:
            try:
                arrival = Arrival(await self._accepted(listening))
            except OSError as error:
                # Out of descriptors, most likely: the listening socket stays readable, so wait instead of spinning.
                log("cannot accept", level=logging.ERROR, reason=str(error))
                await asyncio.sleep(_RETRY_INTERVAL_S)
            else:
                meeting = tasks.create_task(self._meet(arrival, half_open))
                # A task that is cancelled before its first step never runs, so its own code cannot do this.
                meeting.add_done_callback(partial(self._ended, arrival, half_open))
                half_open.enter(meeting, arrival.origin)
                await asyncio.sleep(0)  # earlier connections get their turn, however many new ones arrive

    def _ended(self, arrival: Arrival, half_open: HalfOpen, meeting: asyncio.Task[None]) -> None:
        half_open.leave(meeting)
        self._serving.pop(meeting, None)
        arrival.close()

    async def _accepted(self, listening: socket.socket) -> socket.socket:
        """Accept a connection. Unlike the loop's `sock_accept`, this loses no accepted connection when cancelled."""
        while True:
            with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
                return listening.accept()[0]
            readable = asyncio.Event()
            self._loop.add_reader(listening, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(listening)

    async def _meet(self, arrival: Arrival, half_open: HalfOpen) -> None:
        """Serve one connection. Unexpected errors are logged, so that other connections go on."""
        try:
            await self._serve(arrival, half_open)
        except Exception:
            log("failed", level=logging.ERROR, detail=traceback.format_exc())

    async def _serve(self, arrival: Arrival, half_open: HalfOpen) -> None:
        """Do the handshake of one connection. Then serve its calls until it ends, or pass it to the data loop."""
        client = await self._shake_hands(arrival)
        meeting = asyncio.current_task()
        assert meeting is not None
        # The client is authenticated, so from here on no stranger can end its connection.
        half_open.leave(meeting)
        if client is None:
            return
        try:
            if client.purpose == "control":
                self._serving[meeting] = client.key
                await self._control.serve(arrival, client)
            else:
                self._server.adopt(
                    arrival.detach(),
                    client.session,
                    client.tenant,
                    int(client.rights),
                    client.key,
                    latency=client.latency,
                )
        finally:
            self._server.disconnect(client.session)

    async def _shake_hands(self, arrival: Arrival) -> Accepted | None:
        try:
            async with patience(_HANDSHAKE_TIMEOUT_S):
                stranger = self._access.refusal(arrival.socket)  # asked before TLS takes the socket
                handshake = self._access.handshake(await self._secured(arrival))
                client = await self._introduced(arrival, handshake, stranger)
        except _Refused as refused:
            await self._refuse(arrival, str(refused), refused.frame)
            return None
        except OSError as error:
            reason = error.strerror or str(error) or f"no handshake within {_HANDSHAKE_TIMEOUT_S:g} s"
            # Before TLS has begun, a client that expects TLS could not read the frame.
            if is_shortage(error) and (arrival.is_secure or arrival.is_local or self._access.tls is None):
                short = NodeFullError(f"it is short of descriptors or memory ({reason}); try again soon")
                await self._refuse(arrival, str(short), refused_frame(short))
                return None
            # A client that sent a plain hello to a port with TLS can read a plain refusal.
            await self._refuse(arrival, reason, plain=_EXPECTS_TLS if error.errno == errno.EPROTONOSUPPORT else b"")
            return None
        log("accepted", level=logging.DEBUG, key=client.key, purpose=client.purpose, session=_short(client.session))
        return client

    async def _introduced(
        self, arrival: Arrival, handshake: NodeHandshake, stranger: AccessDeniedError | None
    ) -> Accepted:
        """Do the handshake, and count the connection in the client's session.

        `stranger` is an error if the client's user may not use this node; the handshake then ends with this error.
        """
        while True:
            # At most the rest of the frame, because bytes after the handshake belong to the service that takes over.
            data = await arrival.receive(handshake.needed)
            if not data:
                raise ConnectionResetError("the client ended the connection during the handshake")
            try:
                to_send = handshake.feed(data)
                client = handshake.accepted
                if client is not None:
                    if stranger is not None:
                        raise stranger
                    # The keys may have been replaced since the client's hello.
                    if not self._access.still_grants(handshake):
                        raise AccessDeniedError("its access key has just been changed")
                    # Before the welcome: this refuses a session that belongs to another key or tenant.
                    self._server.connect(client.session, client.tenant, client.key)
            except NodeError as error:
                self.incompatible += isinstance(error, IncompatibleError)
                raise _Refused(str(error), refused_frame(error)) from error
            if handshake.accepted is None:
                await arrival.send(to_send)
                continue
            try:
                await arrival.send(to_send)
            except BaseException:
                # The session counts this connection already.
                self._server.disconnect(handshake.accepted.session)
                raise
            return handshake.accepted

    async def _refuse(self, arrival: Arrival, reason: str, frame: bytes = b"", plain: bytes = b"") -> None:
        self.refused += 1
        log("refused", level=logging.WARNING, peer=arrival.peer, reason=reason)
        if not frame and not arrival.is_secure:
            return
        # Let the refusal arrive, with any alert of TLS itself.
        with contextlib.suppress(OSError):
            async with patience(_LINGER_TIMEOUT_S):
                if frame:
                    await arrival.send(frame)
                await arrival.end(_LINGER_BYTES_MAX, plain)

    async def _secured(self, arrival: Arrival) -> str | None:
        """Begin TLS if the connection needs it; return the name in the client's certificate, or None without TLS."""
        if arrival.is_local:
            return None
        set_options(arrival.socket)
        return None if self._access.tls is None else await arrival.secure(self._access.tls)


class _Refused(Exception):  # noqa: N818 - the client's error, not the node's
    """Raised to refuse a client; `frame` tells the client why."""

    def __init__(self, reason: str, frame: bytes) -> None:
        super().__init__(reason)
        self.frame = frame


class _Stopped(Exception):  # noqa: N818 - it is no error
    """Raised to end the task group and all of its tasks."""


def _short(session: int) -> str:
    """Return the low 32 bits of a session's number in hex, for the log.

    These bits distinguish sessions, but a reader of the log cannot use a session with them.
    """
    return f"{session & 0xFFFFFFFF:08x}"
