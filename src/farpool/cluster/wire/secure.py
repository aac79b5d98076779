"""The client's socket with TLS, for the handshake and for control connections.

It has only the methods of `socket.socket` that the handshake and control connections use: sending all bytes, receiving
and timeouts. `detach` returns the TLS stream for the native code that moves data.
"""

from __future__ import annotations

import errno
import select
import socket
import time
from typing import Any

from farpool._native import Stream, TlsContext
from farpool.errors import AccessDeniedError, ProtocolError

__all__ = ["SecureSocket"]


class SecureSocket:
    """A connected socket with TLS over it. Its methods do the same as the methods of `socket.socket` with these names.

    Parameters
    ----------
    connected : socket.socket
        The connection, which this object owns from now on.
    context : TlsContext
        This side's certificate, and the authority that must have issued the node's certificate.
    host : str
        Name or IP address for which the node's certificate must be issued.
    node : str
        The node's address, for errors.
    """

    def __init__(self, connected: socket.socket, context: TlsContext, host: str, node: str) -> None:
        self._node = node
        self._timeout: float | None = connected.gettimeout()
        # A blocking receive inside OpenSSL would not end at a deadline, so this class waits with `poll`.
        connected.setblocking(False)
        self._stream = context.connect(connected.detach(), host)

    def do_handshake(self) -> None:
        """Do the TLS handshake, in which both sides prove their certificates.

        Raises
        ------
        AccessDeniedError
            One side does not accept the other's certificate.
        ProtocolError
            The node does not speak TLS 1.3.
        """
        until = self._until()
        try:
            while events := self._stream.handshake():
                self._wait(events, until)
        except OSError as error:
            raise self._explained(error) from error

    def settimeout(self, timeout: float | None) -> None:
        """Set the seconds that each later call may take; None for no limit."""
        self._timeout = timeout

    def sendall(self, data: bytes) -> None:
        """Send all of the bytes."""
        until = self._until()
        done = 0
        while done < len(data):
            try:
                sent = self._stream.send(data, done)
            except OSError as error:
                raise self._explained(error) from error
            done += sent
            if not sent:
                self._wait(select.POLLOUT, until)

    def recv(self, nbytes: int) -> bytes:
        """Receive 1 to `nbytes` bytes; return no bytes after the node has ended the connection."""
        until = self._until()
        while True:
            try:
                data = self._stream.receive(nbytes)
            except OSError as error:
                raise self._explained(error) from error
            if data is not None:
                return data
            # TLS may have to send something itself before it can receive more.
            self._wait(select.POLLOUT if self._stream.receiving_sends else select.POLLIN, until)

    def recvmsg(self, nbytes: int, _room: int = 0, _flags: int = 0) -> tuple[bytes, list[Any], int, None]:
        """Receive bytes as `recv` does, never with file descriptors."""
        return self.recv(nbytes), [], 0, None

    def shutdown(self, how: int) -> None:
        """Shut the connection down. This ends calls of other threads that wait for it."""
        self._stream.shut_down(writing=how == socket.SHUT_WR)

    def fileno(self) -> int:
        """Return the file descriptor; -1 after the connection was closed, or taken over from the detached stream."""
        return self._stream.fileno()

    def detach(self) -> Stream:
        """Return the native stream. This object cannot be used after that."""
        return self._stream

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._stream.close()

    def _until(self) -> float | None:
        return None if self._timeout is None else time.monotonic() + self._timeout

    def _wait(self, events: int, until: float | None) -> None:
        asked = select.poll()
        asked.register(self._stream.fileno(), events)
        left = None if until is None else max(0.0, until - time.monotonic()) * 1000
        if not asked.poll(left):
            raise TimeoutError

    def _explained(self, error: OSError) -> OSError:
        # `Stream` reports a certificate that is not accepted as EACCES, and other failures of TLS as EPROTO.
        if error.errno == errno.EACCES:
            return AccessDeniedError(f"{self._node}: {error.strerror}", node=self._node)
        if error.errno in (errno.EPROTO, errno.EPROTONOSUPPORT):
            return ProtocolError(f"{self._node}: {error.strerror}", node=self._node)
        return error
