"""A program's way to one node: contact, connections, mapped objects, leases.

*Contact* is a control connection. It gives the program its session and says whether the node runs on the same host:
then its UNIX socket is used from there on, as only that one passes file descriptors, and memory is mapped instead of
copied through a socket. When the node has hung up, contact is made anew at the next use, under the same session, so
that what the program holds (leases, pins) lives on within the node's grace.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from farpool._native import Connection, ObjectReader, RemoteEnd
from farpool.errors import NodeError, NodeTimeoutError
from farpool.transport.address import Address
from farpool.transport.control import Control
from farpool.transport.dial import Dialled, dial
from farpool.transport.frames import Right
from farpool.transport.host import host_id
from farpool.transport.lease import Lease, map_lease
from farpool.transport.nixl_agent import bindings
from farpool.transport.nixl_memory import NodeMemory
from farpool.transport.settings import Transport

if TYPE_CHECKING:
    import mmap
    from types import TracebackType

    from farpool.transport.access import AccessKey
    from farpool.transport.handshake import Purpose, Welcome

__all__ = ["SPIN_SECONDS", "Channel", "Loan", "Transport"]

SPIN_SECONDS = 50e-6
"""A reply over loopback or a fast network is there within this time; sleeping would cost as much again."""


class _Dial(Protocol):
    def __call__(
        self, address: Address, purpose: Purpose, *, key: AccessKey | None, session: int, deadline: float, name: str
    ) -> Dialled: ...


class Loan:
    """A connection for the time of a ``with`` block."""

    __slots__ = ("_channel", "_connection", "_deadline")

    def __init__(self, channel: Channel, deadline: float) -> None:
        self._channel = channel
        self._deadline = deadline

    def __enter__(self) -> Connection:
        self._connection = self._channel.take(self._deadline)
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.give(self._connection)


class Channel:
    """A program's way to one node. Thread-safe; nothing is opened before it is needed.

    Parameters
    ----------
    address : Address
        Where the node listens.
    key : AccessKey or None
        The access key; None where the node needs none.
    transport : "auto", "mapped", "tcp" or "nixl"
        As `Transport`.
    spin : float
        Seconds of asking a socket over and over before a wait blocks.
    dial : callable
        As `farpool.transport.dial.dial`.

    Attributes
    ----------
    name : str
        The node's address as text.
    reader : ObjectReader or None
        The mapped objects, after `attach` where mapping is possible.
    one_sided : NodeMemory or None
        The node's memory as NIXL reaches it; None with other transports.
    welcome : Welcome or None
        What the node said at the last contact.

    Raises
    ------
    ConfigError
        The transport is ``nixl`` and NIXL is not installed.
    """

    reader: ObjectReader | None
    one_sided: NodeMemory | None
    welcome: Welcome | None
    _control: Control | None
    _control_socket: socket.socket | None

    def __init__(
        self,
        address: Address,
        *,
        key: AccessKey | None = None,
        transport: Transport = "auto",
        spin: float = SPIN_SECONDS,
        dial: _Dial = dial,
    ) -> None:
        self.name = str(address)
        self._address = address
        self._key = key
        self._transport: Transport = transport
        self._spin = spin
        self._dial = dial
        if transport == "nixl":
            bindings()  # what is not installed is to be known at once
        self._forget_all()
        _channels.add(self)

    def connect(self, deadline: float) -> Welcome:
        """Make contact, unless there is contact.

        Raises
        ------
        NodeError
            The node cannot be reached by the deadline; with ``transport="mapped"`` also if it is on another host.
        ProtocolError, AccessDeniedError
            As of `dial`.
        """
        with self._alone(deadline):
            return self._contact(deadline).welcome

    def attach(self, deadline: float) -> ObjectReader | None:
        """Make contact and map the node's objects.

        Returns
        -------
        ObjectReader or None
            Also in `reader`; None where the node's memory is not mapped, or the key may not read it.

        Raises
        ------
        NodeError
            As of `connect`; also if the node's files cannot be mapped.
        """
        with self._alone(deadline):
            control = self._contact(deadline)
            if self.reader is None and self._mapped and Right.READ in control.welcome.rights:
                self.reader = self._map_objects(control, deadline)
            return self.reader

    def connection(self, deadline: float) -> Loan:
        """A connection for data, for a ``with`` block: an idle one, or a new one that is open by the deadline.

        It is kept for the next use unless it broke or has unanswered requests.
        """
        return Loan(self, deadline)

    def take(self, deadline: float) -> Connection:
        """A connection for data, which `give` takes back."""
        connection = self._idle_connection() or self._new_connection(deadline)
        self._lent.add(connection)
        if self._closed:  # asked after, as `close` has not seen this one
            connection.shut_down()
        return connection

    def give(self, connection: Connection) -> None:
        """Take a connection back, whatever state it is in."""
        self._lent.discard(connection)
        if connection.broken or connection.unanswered:
            connection.close()
            return
        self._idle.append(connection)
        if self._closed:  # asked after, as `close` may have been between
            self._close_idle()

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """Have the node do something; as `Control.call`."""
        return self._reach(deadline).call(name, deadline, **arguments)

    def lend(self, nbytes: int, deadline: float) -> Lease:
        """Borrow memory, mapped where that is possible.

        Raises
        ------
        NodeFullError
            The node has no room for it.
        AccessDeniedError
            The key does not allow to write.
        NodeError
            As of `connect`.
        """
        control = self._reach(deadline)
        lease = int(control.call("lend", deadline, bytes=nbytes)["lease"])
        try:
            memory = None
            if self._mapped:
                memory = map_lease(
                    lambda: control.call_with_files("attach_lease", deadline, lease=lease)[1], nbytes, self.name
                )
        except BaseException:
            with contextlib.suppress(NodeError):
                control.call("release", deadline, lease=lease)
            raise
        return Lease(self, lease, nbytes, memory)

    def end(self, lease: int, nbytes: int, memory: mmap.mmap | None, timeout: float) -> RemoteEnd:
        """The end of a lease that a `RemotePort` uses."""

        def open_connection() -> int:
            return self._open(time.monotonic() + timeout).socket.detach()

        return RemoteEnd(
            self.name,
            lease,
            nbytes,
            memory=memory,
            dial=open_connection,
            tenant=self.welcome.tenant if self.welcome else 0,
            credential=0 if self._key is None else 1,
            spin=self._spin,
        )

    def release(self, lease: int, deadline: float) -> None:
        """Give a lease back to the node.

        Raises
        ------
        NodeError
            The node cannot be told. It frees the memory by itself once the session has ended.
        """
        if self.one_sided is not None:
            self.one_sided.forget(lease)
        self.call("release", deadline, lease=lease)

    def close(self) -> None:
        """End all connections; the session ends after the node's grace. Idempotent. What is mapped stays mapped.

        What other threads wait for ends with `NodeError`; a contact that one is making closes what it opened.
        """
        self._closed = True
        self._close_idle()
        for connection in list(self._lent):
            connection.shut_down()
        control, self._control = self._control, None
        self.reader = None
        if control is not None:
            control.close()
        if self.one_sided is not None:
            self.one_sided.close()

    def _idle_connection(self) -> Connection | None:
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if not connection.stale():
                return connection
            connection.close()
        return None

    def _new_connection(self, deadline: float) -> Connection:
        dialled = self._open(deadline)
        tenant, credential = dialled.welcome.tenant, dialled.credential
        return Connection(dialled.socket.detach(), self.name, tenant=tenant, credential=credential, spin=self._spin)

    def _close_idle(self) -> None:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was faster
                self._idle.pop().close()

    def _forget_all(self) -> None:
        """As new. Also in a forked child, where every connection is the parent's and must not be shut down."""
        self.reader = None
        self.welcome = None
        self._session = 0
        self._closed = False
        self._mapped = False
        self._data_address = self._address
        self._control = None
        self._control_socket = None
        self._idle: list[Connection] = []
        self._lent: set[Connection] = set()
        self._lock = threading.Lock()
        self.one_sided = NodeMemory(self) if self._transport == "nixl" else None

    @contextlib.contextmanager
    def _alone(self, deadline: float) -> Iterator[None]:
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise NodeTimeoutError(f"{self.name}: another thread did not reach the node in time", node=self.name)
        try:
            yield
        finally:
            self._lock.release()

    def _reach(self, deadline: float) -> Control:
        with self._alone(deadline):
            return self._contact(deadline)

    def _open(self, deadline: float) -> Dialled:
        self._reach(deadline)
        return self._dial_to(self._data_address, "data", deadline)

    def _contact(self, deadline: float) -> Control:
        self._refuse_if_closed()
        control = self._control  # taken once, as `close` may drop it at any moment
        if control is not None:
            if not control.is_closed and not _has_hung_up(self._control_socket):
                return control
            control.close()
            self._control = self.reader = None
        dialled = self._dial_to(self._address, "control", deadline)
        if self._transport not in ("tcp", "nixl"):
            dialled = self._local(dialled, deadline)
        self.welcome = dialled.welcome
        self._session = dialled.welcome.session
        self._control_socket = dialled.socket
        self._control = control = Control(dialled)
        if self._closed:  # asked after, as `close` has not seen this one
            control.close()
            self._control = None
        self._refuse_if_closed()
        return control

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise NodeError(f"{self.name}: this channel was closed", node=self.name)

    def _dial_to(self, address: Address, purpose: Purpose, deadline: float, session: int = 0) -> Dialled:
        session = session or self._session
        return self._dial(address, purpose, key=self._key, session=session, deadline=deadline, name=self.name)

    def _local(self, dialled: Dialled, deadline: float) -> Dialled:
        """The same contact over the node's UNIX socket, if it is on this host."""
        welcome = dialled.welcome
        self._mapped = False
        self._data_address = self._address
        try:
            if not welcome.host or welcome.host != host_id():
                raise NodeError(f"{self.name} is on another host, so its memory cannot be mapped", node=self.name)
            if self._address.scheme == "tcp":
                address = Address("unix", path=welcome.socket)
                local = self._dial_to(address, "control", deadline, welcome.session)
                if local.welcome.id != welcome.id:
                    local.socket.close()
                    raise NodeError(f"{self.name}: another node listens at {address}", node=self.name)
                dialled.socket.close()
                dialled, self._data_address = local, address
        except NodeError:
            if self._transport == "mapped":
                dialled.socket.close()
                raise
        except BaseException:
            dialled.socket.close()
            raise
        else:
            self._mapped = True
        return dialled

    def _map_objects(self, control: Control, deadline: float) -> ObjectReader:
        _, files = control.call_with_files("attach_objects", deadline)
        try:
            if len(files) != 3:
                raise NodeError(f"{self.name} passed {len(files)} files of objects, expected 3", node=self.name)
            index, data, visited = files
            writable = Right.PUBLISH in control.welcome.rights
            lifeline = -1 if self._control_socket is None else self._control_socket.fileno()
            return ObjectReader(index, data, visited, self.name, writable=writable, lifeline=lifeline)
        finally:
            for file in files:
                os.close(file)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _has_hung_up(connected: socket.socket | None) -> bool:
    """Tells if the node ended the connection. Reads nothing: another thread may be waiting for a reply on it."""
    descriptor = -1 if connected is None else connected.fileno()  # read once: another thread may close it
    if descriptor < 0:
        return True
    asked = select.poll()
    asked.register(descriptor, select.POLLRDHUP)
    return bool(asked.poll(0))


def _forget_in_child() -> None:
    for channel in list(_channels):
        # Closed, not shut down: the parent goes on using it.
        if channel._control_socket is not None and channel._control_socket.fileno() >= 0:
            os.close(channel._control_socket.detach())
        if channel.one_sided is not None:
            channel.one_sided.leave_to_parent()
        channel._forget_all()


os.register_at_fork(after_in_child=_forget_in_child)
