"""A program's channel to one node: control connection, data connections, mapped objects, leases.

To *make contact* is to open a control connection to the node. The node then gives the program a *session*: a number
under which the node groups the connections, leases and pins of one program. The node also reports on which host it
runs. If that is the program's host, the channel uses the node's UNIX socket from then on: only a UNIX socket can pass
the file descriptors with which the program maps the node's memory.

If the node has closed the connection, the next use of the channel makes contact again, with the same session. The
program keeps its leases and pins if it makes contact within the node's *grace*: the time for which a node keeps a
session without connections.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from farpool import forks
from farpool._native import Connection, ConnectionPool, ObjectReader, RemoteEnd, Stream, TenantEpoch
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import Connected, Dialled, dial
from farpool.cluster.wire.fabrics import load_fabric
from farpool.cluster.wire.frames import Credential, Right
from farpool.cluster.wire.host import host_id
from farpool.cluster.wire.lease import ClaimedExtent, Lease, map_lease
from farpool.cluster.wire.node_memory import NodeMemory
from farpool.cluster.wire.settings import BUILT_IN, Transport
from farpool.errors import NodeError, NodeFullError, NodeTimeoutError

if TYPE_CHECKING:
    import mmap

    from farpool.cluster.wire.access import AccessKey
    from farpool.cluster.wire.handshake import Purpose, Welcome

__all__ = ["SPIN_S", "Channel", "Transport"]

SPIN_S = 50e-6
"""Seconds for which a wait polls before it sleeps.

Over fast networks a reply arrives within this time, and falling asleep and waking up would take as long again.
"""


class _Dial(Protocol):
    def __call__(
        self,
        address: Address,
        purpose: Purpose,
        *,
        key: AccessKey | None,
        session: int,
        deadline: float,
        name: str,
        tenant: int | None = None,
    ) -> Dialled: ...


class Channel:
    """A program's channel to one node: its connections, mapped objects and leases. Thread-safe; opened on first use.

    Parameters
    ----------
    address : Address
        The node's address.
    key : AccessKey or None
        The access key; None if the node needs none.
    transport : str
        How bytes are moved, one of the values of `Transport`.
    spin : float
        Seconds for which a wait polls a socket before it blocks.
    dial : callable
        Function that connects to the node, such as `farpool.cluster.wire.dial.dial`.
    tenant : int or None
        Tenant for which the program acts, which needs the right to repair; None for the tenant of the key.

    Attributes
    ----------
    name : str
        The node's address as text.
    epoch : TenantEpoch
        Highest known epoch of the tenant. All channels of a store share one such object.
    reader : ObjectReader or None
        Reads the node's mapped objects; None before `attach`, or if they cannot be mapped.
    pool : ConnectionPool
        Data connections, idle or in use.
    one_sided : NodeMemory or None
        Access to the node's memory over a fabric; None if the transport is no fabric.
    welcome : Welcome or None
        The node's welcome at the last contact.
    expected : bytes or None
        Identity that the node must have; the channel refuses another node at the address. If empty, the channel accepts
        the node of its next contact, and expects the identity of this node from then on. If None, it accepts any node.
    ticket : bytes
        Ticket that the channel shows again after each contact: a node that has started again knows no claims. Empty for
        none.
    emptied : set of int
        Numbers of extents that the node had to make again when the ticket was shown again, so that their bytes are
        lost.
    stranger : bytes
        Identity of the node that answered at the last contact in place of the expected one; empty if none did.

    Raises
    ------
    ConfigError
        The transport is a fabric that is not installed or cannot be used here.
    """

    reader: ObjectReader | None
    one_sided: NodeMemory | None
    pool: ConnectionPool
    welcome: Welcome | None
    ticket: bytes
    _control: Control | None
    _control_socket: Connected | None

    def __init__(
        self,
        address: Address,
        *,
        key: AccessKey | None = None,
        transport: Transport = "auto",
        spin: float = SPIN_S,
        dial: _Dial = dial,
        tenant: int | None = None,
    ) -> None:
        self.name = str(address)
        self.epoch = TenantEpoch()
        self.expected: bytes | None = None
        self.emptied: set[int] = set()
        self.stranger = b""
        self._address = address
        self._moved_to: Address | None = None
        self._key = key
        self._transport: Transport = transport
        self._spin = spin
        self._dial = dial if tenant is None else partial(dial, tenant=tenant)
        self._fabric = None if transport in BUILT_IN else load_fabric(transport)
        self._begin()
        forks.begin_again(self)

    def connect(self, deadline: float) -> Welcome:
        """Open the control connection, unless it is open.

        Raises
        ------
        NodeError
            The node cannot be reached by the deadline, or ``transport="mapped"`` and the node is on another host.
        ProtocolError, AccessDeniedError
            As raised by `dial`.
        """
        with self._alone(deadline):
            return self._contact(deadline).welcome

    def attach(self, deadline: float) -> ObjectReader | None:
        """Open the control connection, unless it is open, and map the node's objects.

        Returns
        -------
        ObjectReader or None
            The new value of `reader`; None if the node's memory is not mapped, or the key has no right to read.

        Raises
        ------
        NodeError
            As raised by `connect`, or the node's files cannot be mapped.
        """
        with self._alone(deadline):
            control = self._contact(deadline)
            if self.reader is None and self._mapped and Right.READ in control.welcome.rights:
                self.reader = self._map_objects(control, deadline)
                if self._closed:  # asked after, because `close` has not seen this reader, which holds a descriptor
                    self.reader = None
                self._refuse_if_closed()
            return self.reader

    @contextlib.contextmanager
    def connection(self, deadline: float) -> Iterator[Connection]:
        """Borrow a data connection for a ``with`` block: an idle one, or else a new one, opened by the deadline.

        After the block the connection is kept for the next use, unless it broke or has unanswered requests.
        """
        connection = self.take(deadline)
        try:
            yield connection
        finally:
            self.pool.give(connection)

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        """Borrow a data connection: an idle one, or else a new one. With `fresh` it is always a new one.

        The caller gives the connection back to `pool`.
        """
        connection = None if fresh else self.pool.take()
        return connection or self.pool.lend(self._new_connection(deadline))

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        """Make a call over the control connection, as `Control.call` does."""
        return self._reach(deadline).call(name, deadline, **arguments)

    def lend(self, nbytes: int, deadline: float) -> Lease:
        """Borrow memory from the node as a lease, mapped if possible.

        Raises
        ------
        NodeFullError
            The node has no room for it.
        AccessDeniedError
            The key does not have the right to write.
        NodeError
            As raised by `connect`.
        """
        control = self._reach(deadline)
        lease = int(control.call("lend", deadline, bytes=nbytes)["lease"])
        try:
            memory = None
            if self._mapped:
                memory = map_lease(partial(self._lease_files, control, lease, deadline), nbytes, self.name)
        except BaseException:
            # The program never learns the number of this lease, so it could not give it back itself.
            with contextlib.suppress(NodeError):
                control.call("release", deadline, lease=lease)
            raise
        return Lease(self, lease, nbytes, memory)

    def claim(self, ticket: bytes, deadline: float) -> list[ClaimedExtent]:
        """Show a ticket, and return the extents that it names at this node, mapped if possible.

        Show a later ticket in the same way before this one expires; the extents keep their numbers at the node, so
        nothing else is to be done with the result then. After the node has started again, show the ticket again.

        Raises
        ------
        TicketError
            The node refuses the ticket.
        NodeFullError
            The node has no room for an extent.
        AccessDeniedError
            The key does not have the right to write.
        NodeError
            As raised by `connect`.
        """
        control = self._reach(deadline)
        result = control.call("claim", deadline, ticket=ticket)
        claimed = []
        for number, lease, nbytes, made in result["extents"]:
            memory = None
            # A program may write to what it maps, so the node's check of the rights needs a connection.
            if self._mapped and result["rights"] & Right.WRITE:
                memory = map_lease(partial(self._lease_files, control, lease, deadline), nbytes, self.name)
            claimed.append(ClaimedExtent(number, Lease(self, lease, nbytes, memory), made))
        return claimed

    def _lease_files(self, control: Control, lease: int, deadline: float) -> list[int]:
        return control.call_with_files("attach_lease", deadline, lease=lease)[1]

    def end(self, lease: int, nbytes: int, memory: mmap.mmap | None, timeout: float) -> RemoteEnd:
        """Make the object through which a `RemotePort` moves bytes of a lease.

        It uses the mapped `memory`, or connections if `memory` is None.
        """

        def open_connection() -> int | Stream:
            return self._open(time.monotonic() + timeout).socket.detach()

        return RemoteEnd(
            self.name,
            lease,
            nbytes,
            memory=memory,
            dial=open_connection,
            tenant=self.welcome.tenant if self.welcome else 0,
            credential=self._credential,
            spin=self._spin,
        )

    def release(self, lease: int, deadline: float) -> None:
        """Give a lease back to the node.

        Raises
        ------
        NodeError
            The node cannot be reached. The node frees the memory by itself once the session has ended.
        """
        # Detached first: no one-sided transfer may reach memory that the node has freed.
        if self.one_sided is not None:
            self.one_sided.detach(lease)
        self.call("release", deadline, lease=lease)

    def move(self, address: str) -> None:
        """Use another address of the node from the next contact on.

        The session stays, with its leases and pins. Open data connections are used until they break.
        """
        # Without the lock, which a thread that makes contact may hold until its deadline.
        self._moved_to = parse_address(address)
        self.name = str(self._moved_to)

    def close(self) -> None:
        """End all connections. The session ends after the node's grace. Idempotent. Mapped memory stays mapped.

        Waits in other threads end with `NodeError`. A thread that is connecting at that moment closes its new
        connection itself.
        """
        # Set first: a thread that makes contact now looks at this afterwards, and closes what it opened.
        self._closed = True
        self.pool.close()
        control, self._control = self._control, None
        self.reader = None
        if control is not None:
            control.close()
        if self.one_sided is not None:
            self.one_sided.close()

    @property
    def _credential(self) -> int:
        if self._data_address.scheme == "tls":
            return Credential.CERTIFICATE
        return Credential.NONE if self._key is None else Credential.SECRET

    def _new_connection(self, deadline: float) -> Connection:
        dialled = self._open(deadline)
        tenant, credential = dialled.welcome.tenant, dialled.credential
        return Connection(
            dialled.socket.detach(),
            self.name,
            tenant=tenant,
            credential=credential,
            spin=self._spin,
            area=self._mapped,
            epoch=self.epoch,
        )

    def forked(self) -> None:
        """Make the channel start without connections in a forked child.

        The child closes its copies of the sockets but does not shut them down, because the parent still uses them.
        """
        # Not `Control.close`: it would shut the socket down for the parent, too, and wait for a lock that a thread of
        # the parent may have held at the fork.
        if self._control_socket is not None:
            self._control_socket.close()
        if self.one_sided is not None:
            self.one_sided.leave_to_parent()
        self._begin()

    def _begin(self) -> None:
        self.reader = None
        self.ticket = b""
        self.welcome = None
        self._session = 0
        self._closed = False
        self._mapped = False
        self._data_address = self._address
        self._control = None
        self._control_socket = None
        self.pool = ConnectionPool()
        # Held while contact is made. It protects the control connection, the session, the addresses and the reader.
        # `close` does not take it, because contact may last until another call's deadline.
        self._lock = threading.Lock()
        self.one_sided = None if self._fabric is None else NodeMemory(self, self._transport, self._fabric)

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
        # In the second round `_reach` makes contact again, and so finds the node that has the address now.
        for _ in range(2):
            control = self._reach(deadline)
            # Outside the lock, so that several threads can open their data connections at the same time.
            dialled = self._dial_to(self._data_address, "data", deadline)
            if dialled.welcome.identity == control.welcome.identity:
                return dialled
            # Another node has taken the address, but the control connection still leads to the node that had it before.
            dialled.socket.close()
            with self._alone(deadline):
                control.close()
                # Another thread may have made new contact in the meantime; that one stays.
                if self._control is control:
                    self._control = self.reader = None
        raise NodeError(f"{self.name}: two connections to this address led to different nodes", node=self.name)

    def _contact(self, deadline: float) -> Control:
        self._refuse_if_closed()
        moved_to, self._moved_to = self._moved_to, None
        if moved_to is not None:
            self._address = self._data_address = moved_to
        control = self._control  # read once, because `close` may drop it at any moment
        if control is not None:
            if moved_to is None and not control.is_closed and not _has_hung_up(self._control_socket):
                return control
            control.close()
            # The reader belongs to the node that hung up. Its memory stays mapped, but another node may serve the
            # address now.
            self._control = self.reader = None
        dialled = self._dial_to(self._address, "control", deadline)
        self._refuse_another_node(dialled)
        if self._transport in ("auto", "mapped"):
            dialled = self._local(dialled, deadline)
        self.welcome = dialled.welcome
        # The next contact names this session, so that the node finds the program's leases and pins again.
        self._session = dialled.welcome.session
        self._control_socket = dialled.socket
        self._control = control = Control(dialled)
        if self._closed:  # checked afterwards, because `close` has not seen this one
            control.close()
            self._control = None
        self._refuse_if_closed()
        if self.ticket:
            self._show_again(control, deadline)
        return control

    def _show_again(self, control: Control, deadline: float) -> None:
        # If the node refuses the ticket, the transfers report it.
        with contextlib.suppress(NodeError):
            result = control.call("claim", deadline, ticket=self.ticket)
            self.emptied |= {number for number, _, _, made in result["extents"] if made}

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise NodeError(f"{self.name}: this channel was closed", node=self.name)

    def _refuse_another_node(self, dialled: Dialled) -> None:
        found = dialled.welcome.identity
        self.stranger = found if self.expected and found != self.expected else b""
        if self.stranger:
            dialled.socket.close()
            expected = (self.expected or b"").hex()
            raise NodeError(
                f"{self.name}: the node there has the identity {found.hex()}, expected {expected}; list the address at "
                "which the expected node is now",
                node=self.name,
            )
        if self.expected is not None:
            self.expected = found

    def _dial_to(self, address: Address, purpose: Purpose, deadline: float, session: int = 0) -> Dialled:
        session = session or self._session
        return self._dial(address, purpose, key=self._key, session=session, deadline=deadline, name=self.name)

    def _local(self, dialled: Dialled, deadline: float) -> Dialled:
        """Return a control connection over the node's UNIX socket, or `dialled` if the socket cannot be used.

        With the transport ``mapped``, raise `NodeError` instead of returning `dialled`.
        """
        welcome = dialled.welcome
        self._mapped = False
        self._data_address = self._address
        try:
            if not welcome.host or welcome.host != host_id():
                raise NodeError(f"{self.name} is on another host, so its memory cannot be mapped", node=self.name)
            if self._address.scheme != "unix":
                address = Address("unix", path=welcome.socket)
                local = self._dial_to(address, "control", deadline, welcome.session)
                # The welcome names only a path. In this process's file system, for example in a container, another node
                # may listen there.
                if local.welcome.id != welcome.id:
                    local.socket.close()
                    raise NodeError(f"{self.name}: another node listens at {address}", node=self.name)
                dialled.socket.close()
                dialled, self._data_address = local, address
        except NodeError:
            # With ``auto``, mapping only saves time: the connection over the network works as well.
            if self._transport == "mapped":
                dialled.socket.close()
                raise
        except BaseException:
            dialled.socket.close()
            raise
        else:
            self._mapped = True
        return dialled

    def _map_objects(self, control: Control, deadline: float) -> ObjectReader | None:
        try:
            _, files = control.call_with_files("attach_objects", deadline)
        except (
            NodeFullError
        ):  # too many programs map this tenant's objects already, or the node is short of descriptors
            if self._transport == "mapped":
                raise
            return None
        try:
            if len(files) != 3:
                raise NodeError(f"{self.name} passed {len(files)} files of objects, expected 3", node=self.name)
            index, data, visited = files
            # The memory of a killed node stays mapped. The reader looks at this socket to notice that the node is gone.
            lifeline = -1 if self._control_socket is None else self._control_socket.fileno()
            return ObjectReader(index, data, visited, self.name, lifeline=lifeline, epoch=self.epoch)
        finally:
            for file in files:
                os.close(file)


def _has_hung_up(connected: Connected | None) -> bool:
    """Return True if the node ended the connection. Reads no bytes, because another thread may wait for a reply."""
    descriptor = -1 if connected is None else connected.fileno()  # read once: another thread may close it
    if descriptor < 0:
        return True
    asked = select.poll()
    asked.register(descriptor, select.POLLRDHUP)
    return bool(asked.poll(0))
