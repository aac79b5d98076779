"""A connection that a client opened, plain or with TLS, as the node's event loop uses it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
from collections.abc import Sequence

from farpool._native import Stream, TlsContext
from farpool.cluster.node.half_open import origin_of
from farpool.cluster.node.users import process_of

__all__ = ["Arrival"]


class Arrival:
    """A client's connection, plain or with TLS. Use it only in the event loop's thread.

    Parameters
    ----------
    connection : socket.socket
        The accepted connection, which this object owns from now on.

    Attributes
    ----------
    is_local : bool
        True if the client connected to the node's UNIX socket, over which files can be passed.
    peer : str
        The client's address, for the log.
    origin : str
        Address, IPv6 network or process of the client. The number of handshakes under way is limited for each origin.
    socket : socket.socket
        The socket, until TLS begins.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.is_local = connection.family == socket.AF_UNIX
        self.peer = self.origin = "unix"
        if self.is_local:
            # All clients of a UNIX socket have the same address, so the limit on handshakes counts by process.
            self.origin = f"process {process_of(connection)}"
        if not self.is_local:
            self.peer = self.origin = "gone"
            # `getpeername` fails if the client has gone already.
            with contextlib.suppress(OSError):
                self.peer = str(connection.getpeername()[0])
                self.origin = origin_of(self.peer)
        self.socket = connection
        self._secure: Stream | None = None

    @property
    def is_secure(self) -> bool:
        """True if TLS has begun."""
        return self._secure is not None

    async def secure(self, context: TlsContext) -> str:
        """Begin TLS; return the name in the client's certificate.

        Raises
        ------
        OSError
            The client does not speak TLS 1.3, or one side does not accept the other's certificate.
        """
        self._secure = context.accept(self.socket.detach())
        while events := self._secure.handshake():
            await self._ready(self._secure, events)
        return self._secure.peer_name

    async def receive(self, nbytes: int) -> bytes:
        """Receive 1 to `nbytes` bytes; return no bytes if the client has ended the connection."""
        secure = self._secure
        if secure is None:
            return await asyncio.get_running_loop().sock_recv(self.socket, nbytes)
        while (data := secure.receive(nbytes)) is None:
            await self._ready(secure, select.POLLOUT if secure.receiving_sends else select.POLLIN)
        return data

    async def send(self, data: bytes) -> None:
        """Send all of the bytes."""
        secure = self._secure
        if secure is None:
            await asyncio.get_running_loop().sock_sendall(self.socket, data)
            return
        done = 0
        while done < len(data):
            sent = secure.send(data, done)
            done += sent
            if not sent:
                await self._ready(secure, select.POLLOUT)

    def send_files(self, data: bytes, files: Sequence[int]) -> int:
        """Send `files` (descriptors) and the first bytes of `data` over the UNIX socket.

        Return the number of bytes of `data` that were sent.
        """
        return socket.send_fds(self.socket, [data], list(files))

    async def end(self, most: int, plain: bytes = b"") -> None:
        """Send `plain` without TLS and shut down sending; then receive and drop at most `most` bytes from the client.

        If we closed the socket while bytes from the client are unread, the system would throw away the bytes that are
        on their way to the client.
        """
        loop = asyncio.get_running_loop()
        descriptor = self.socket.fileno() if self._secure is None else self._secure.fileno()
        # A copy of the descriptor: asyncio needs a socket object, and the stream still owns the original.
        with socket.socket(fileno=os.dup(descriptor)) as raw:
            raw.setblocking(False)
            if plain:
                await loop.sock_sendall(raw, plain)
            raw.shutdown(socket.SHUT_WR)
            while most > 0 and (data := await loop.sock_recv(raw, 1 << 16)):
                most -= len(data)

    def detach(self) -> int | Stream:
        """Return the connection for the native server. This object cannot be used after that."""
        return self.socket.detach() if self._secure is None else self._secure

    def close(self) -> None:
        """Close the connection, unless it was detached. Idempotent."""
        self.socket.close()
        if self._secure is not None:
            self._secure.close()

    @staticmethod
    async def _ready(stream: Stream, events: int) -> None:
        loop = asyncio.get_running_loop()
        descriptor = stream.fileno()
        ready = asyncio.Event()
        if events == select.POLLOUT:
            loop.add_writer(descriptor, ready.set)
        else:
            loop.add_reader(descriptor, ready.set)
        try:
            await ready.wait()
        finally:
            if events == select.POLLOUT:
                loop.remove_writer(descriptor)
            else:
                loop.remove_reader(descriptor)
