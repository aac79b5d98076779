"""Where clients arrive: listening sockets, the handshake under a deadline, and who serves what comes of it.

Runs in a thread of its own. Connections that have not proved themselves are bounded in number and in time; further ones
wait in the system's backlog, each kind of socket for itself, so that strangers on the network do not keep local
programs out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from farpool._native import NodeServer
from farpool.errors import NodeError
from farpool.node.control import ControlService
from farpool.node.logs import log
from farpool.transport.handshake import Accepted, NodeHandshake
from farpool.transport.tcp import set_options

__all__ = ["Listener"]

_HANDSHAKE_SECONDS = 5.0
_LINGER_SECONDS = 1.0
_LINGER_BYTES = 1 << 20
_MOST_UNPROVED = 256
_RETRY_SECONDS = 0.1
_EVENTS_SECONDS = 1.0


class Listener:
    """Accepts connections until stopped.

    Parameters
    ----------
    sockets : sequence of socket.socket
        Listening sockets, which this object owns from `start` on.
    make_handshake : callable
        Makes the node's half of a handshake.
    server : NodeServer
        Takes over data connections.
    control : ControlService
        Serves control connections.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        make_handshake: Callable[[], NodeHandshake],
        server: NodeServer,
        control: ControlService,
    ) -> None:
        self.refused = 0
        """Connections that were refused in the handshake."""
        self._sockets = sockets
        self._make_handshake = make_handshake
        self._server = server
        self._control = control
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="farpool-listener", daemon=True)

    def start(self) -> None:
        """Begin to accept."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and end handshakes and control connections. Data connections are the server's."""
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve_all())

    async def _serve_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                serving = [tasks.create_task(self._accept(listening, tasks)) for listening in self._sockets]
                serving.append(tasks.create_task(self._keep_logging()))
                await self._stopping.wait()
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
            await asyncio.sleep(_EVENTS_SECONDS)

    def _log_events(self) -> None:
        for kind, session, text in self._server.events():
            level = logging.INFO if kind == "freed" else logging.WARNING
            log(kind, level=level, session=_short(session), detail=text)

    async def _accept(self, listening: socket.socket, tasks: asyncio.TaskGroup) -> None:
        listening.setblocking(False)
        places = asyncio.Semaphore(_MOST_UNPROVED)
        while True:
            await places.acquire()
            try:
                connection = await self._accepted(listening)
            except OSError as error:
                # Out of descriptors, most likely: the listening socket stays readable, so wait instead of spinning.
                places.release()
                log("cannot accept", level=logging.ERROR, reason=str(error))
                await asyncio.sleep(_RETRY_SECONDS)
            else:
                meeting = tasks.create_task(self._meet(connection, places))
                # Also where it is cancelled before its first step, which then never comes.
                meeting.add_done_callback(partial(_close, connection))

    async def _accepted(self, listening: socket.socket) -> socket.socket:
        """As `sock_accept` of the loop, which drops what it has accepted when it is cancelled just then."""
        while True:
            with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
                return listening.accept()[0]
            readable = asyncio.Event()
            self._loop.add_reader(listening, readable.set)
            try:
                await readable.wait()
            finally:
                self._loop.remove_reader(listening)

    async def _meet(self, connection: socket.socket, places: asyncio.Semaphore) -> None:
        """Serve one connection; whatever goes wrong with it stays with it."""
        try:
            await self._serve(connection, places)
        except Exception:
            log("failed", level=logging.ERROR, detail=traceback.format_exc())

    async def _serve(self, connection: socket.socket, places: asyncio.Semaphore) -> None:
        """One connection, from its first byte to its end or to the data loop."""
        with connection:
            try:
                connection.setblocking(False)
                client = await self._shake_hands(connection)
            finally:
                places.release()
            if client is None:
                return
            if client.purpose == "control":
                await self._control.serve(connection, client)
            else:
                self._server.adopt(connection.detach(), client.session, client.tenant, int(client.rights))

    async def _shake_hands(self, connection: socket.socket) -> Accepted | None:
        handshake = self._make_handshake()
        try:
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                if connection.family != socket.AF_UNIX:
                    set_options(connection)
                while handshake.accepted is None:
                    data = await self._loop.sock_recv(connection, handshake.needed)
                    if not data:
                        raise ConnectionResetError("the client ended the connection during the handshake")
                    to_send = handshake.feed(data)
                    if to_send:
                        await self._loop.sock_sendall(connection, to_send)
        except NodeError as error:
            self.refused += 1
            log("refused", level=logging.WARNING, peer=_peer(connection), reason=str(error))
            await self._tell(connection, handshake.refused(error))
            return None
        except OSError as error:
            self.refused += 1
            reason = str(error) or f"no handshake within {_HANDSHAKE_SECONDS:g} s"
            log("refused", level=logging.WARNING, peer=_peer(connection), reason=reason)
            return None
        client = handshake.accepted
        log("accepted", level=logging.DEBUG, key=client.key, purpose=client.purpose, session=_short(client.session))
        return client

    async def _tell(self, connection: socket.socket, refusal: bytes) -> None:
        """Send why, and let it arrive: closing a socket with unread bytes would throw away what is on its way."""
        with contextlib.suppress(OSError):
            async with asyncio.timeout(_LINGER_SECONDS):
                await self._loop.sock_sendall(connection, refusal)
                connection.shutdown(socket.SHUT_WR)
                unread = _LINGER_BYTES
                while unread > 0 and (data := await self._loop.sock_recv(connection, 1 << 16)):
                    unread -= len(data)


class _Stopped(Exception):  # noqa: N818 - it is no error
    """Ends the task group with everything in it."""


def _close(connection: socket.socket, _: asyncio.Task[None]) -> None:
    connection.close()


def _peer(connection: socket.socket) -> str:
    if connection.family == socket.AF_UNIX:
        return "unix"
    with contextlib.suppress(OSError):
        return str(connection.getpeername()[0])
    return "gone"


def _short(session: int) -> str:
    """Enough of a session's number to tell it from others, and too little to use it."""
    return f"{session & 0xFFFFFFFF:08x}"
