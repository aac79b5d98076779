"""The client's side of a control connection: calls by name, and replies that may pass file descriptors."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from farpool.closing import Closing
from farpool.cluster.wire.dial import Dialled, remaining
from farpool.cluster.wire.frames import META_BYTES_MAX, Frame, FrameReader, Op, Status, pack_frame
from farpool.cluster.wire.handshake import Welcome
from farpool.cluster.wire.refusals import refusal
from farpool.decoding import prepared
from farpool.errors import NodeError, NodeTimeoutError, ProtocolError

__all__ = ["FILES_MAX", "Control"]

FILES_MAX = 3
"""Maximum number of file descriptors that one reply passes."""


class Control(Closing):
    """Makes calls over one control connection, one at a time. Thread-safe.

    If a call gets no complete reply in time, the connection is closed, because the late reply could be taken for the
    reply to the next call. Further calls then raise `NodeError`.

    Parameters
    ----------
    dialled : Dialled
        A control connection, which this object owns from now on.

    Attributes
    ----------
    welcome : Welcome
        The node's welcome at the end of the handshake.
    """

    def __init__(self, dialled: Dialled) -> None:
        self.welcome: Welcome = dialled.welcome
        self._node = dialled.node
        self._socket = dialled.socket
        self._credential = dialled.credential
        self._reader = FrameReader(self._node)
        self._request = 0
        self._closed = False
        # Protects the socket, the reader and the request's number: a thread must not read another one's reply.
        self._lock = threading.Lock()

    @property
    def is_closed(self) -> bool:
        """True if the connection was closed, or broke."""
        return self._closed

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """Make a call, and return the node's result.

        Parameters
        ----------
        name : str
            Name of the call; docs/wire.md lists all calls.
        deadline : float
            Time of `time.monotonic` by which the reply must have arrived.
        **arguments
            The call's arguments.

        Raises
        ------
        NodeTimeoutError, ProtocolError, NodeError
            There was no valid reply; the connection is closed.
        AccessDeniedError, NodeFullError, LeaseLostError, ProtocolError
            The node refused the call.
        """
        result, files = self.call_with_files(name, deadline, **arguments)
        for file in files:
            os.close(file)
        return result

    def call_with_files(self, name: str, deadline: float, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
        """Make a call; return its result and the file descriptors of the reply, which the caller closes."""
        if not self._take_turn(deadline):
            raise NodeTimeoutError(f"{self._node}: another thread's call did not end in time", node=self._node)
        try:
            # Asked with the lock: `close`, or a call that failed, may have come first.
            if self._closed:
                raise NodeError(f"{self._node}: this connection was closed", node=self._node)
            return self._exchange(name, deadline, arguments)
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the connection. Idempotent. If another thread is making a call, its call ends with `NodeError`."""
        # The order matters. The shutdown ends the wait of a thread that holds the lock. Only with the lock may we close
        # the descriptor: the system gives its number away again, and that thread would read another file.
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._socket.close()

    def _take_turn(self, deadline: float) -> bool:
        return self._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def _exchange(self, name: str, deadline: float, arguments: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._request += 1
        meta = msgspec.msgpack.encode({"call": name, **arguments})
        if len(meta) > META_BYTES_MAX:
            raise ValueError(f"the arguments of {name} are {len(meta)} bytes, expected at most {META_BYTES_MAX}")
        tenant = self.welcome.tenant
        request = pack_frame(Op.CALL, meta, request=self._request, tenant=tenant, credential=self._credential)
        files: list[int] = []
        try:
            with self._closing_at_failure(name):
                self._socket.settimeout(remaining(deadline))
                self._socket.sendall(request)
                frame = self._receive(deadline, files)
                result = self._result(frame, name)
            # A refusal is a whole reply, so the connection stays open.
            if frame.status != Status.DONE:
                raise refusal(frame.status, f"{name}: {result.get('error', 'no reason given')}", self._node)
        except BaseException:
            # Descriptors may have come with a reply that is of no use, and the caller does not get them.
            for file in files:
                os.close(file)
            raise
        return result, files

    def _receive(self, deadline: float, files: list[int]) -> Frame:
        room = socket.CMSG_LEN(FILES_MAX * array.array("i").itemsize)
        while True:
            self._socket.settimeout(remaining(deadline))
            # Not socket.recv_fds: before Python 3.12 it drops its flags, and children would inherit the descriptors.
            data, passed, flags, _ = self._socket.recvmsg(self._reader.needed, room, socket.MSG_CMSG_CLOEXEC)
            for level, kind, content in passed:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    # A truncated message may end in the middle of a descriptor.
                    files.extend(array.array("i", content[: len(content) // 4 * 4]))
            if not data:
                raise ConnectionResetError("it ended the connection")
            if flags & socket.MSG_CTRUNC or len(files) > FILES_MAX:
                raise ProtocolError(
                    f"{self._node} passed more than {FILES_MAX} files, or more than this process may have open",
                    node=self._node,
                )
            frame = self._reader.feed(data)
            if frame is not None:
                return frame

    def _result(self, frame: Frame, name: str) -> dict[str, Any]:
        if frame.op != Op.CALL or frame.request != self._request:
            raise ProtocolError(
                f"{self._node} answered operation {frame.op}, request {frame.request}; expected operation "
                f"{Op.CALL.value} ({name}), request {self._request}",
                node=self._node,
            )
        try:
            return msgspec.msgpack.decode(frame.meta, type=prepared(dict[str, Any]))
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ProtocolError(
                f"{self._node} answered {name} with bytes that are no map: {error}", node=self._node
            ) from error

    @contextlib.contextmanager
    def _closing_at_failure(self, name: str) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # The reply may still come, or half of it was read: nothing that follows could be told apart from it.
            self._closed = True
            self._socket.close()
            if isinstance(error, TimeoutError) and not isinstance(error, NodeError):
                raise NodeTimeoutError(f"{self._node} did not answer {name} in time", node=self._node) from error
            if isinstance(error, OSError) and not isinstance(error, NodeError):
                raise NodeError(
                    f"{self._node}: the connection broke during {name}: {error.strerror or error}", node=self._node
                ) from error
            raise
