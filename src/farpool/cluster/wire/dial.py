"""Dialling a node: connecting to it and doing the handshake, within one deadline for both."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import Address
from farpool.cluster.wire.certificate import client_certificate
from farpool.cluster.wire.frames import Credential
from farpool.cluster.wire.handshake import ClientHandshake, Purpose, Welcome
from farpool.cluster.wire.secure import SecureSocket
from farpool.cluster.wire.shortage import is_shortage
from farpool.cluster.wire.tcp import set_options
from farpool.errors import FarpoolWarning, IncompatibleError, NodeError, NodeTimeoutError

__all__ = ["Connected", "Dialled", "dial", "remaining"]

Connected = socket.socket | SecureSocket
"""Socket that is connected to a node, plain or with TLS."""

_RETRY_INTERVAL_S = 0.002
_Target = tuple[int, Any]
"""Address family, and the address in the form that the socket module expects."""


@dataclass(frozen=True, slots=True)
class Dialled:
    """A connection that is ready for requests.

    Attributes
    ----------
    socket : socket.socket or SecureSocket
        Connected socket in blocking mode, which the caller owns. All bytes after the node's welcome are still unread.
    welcome : Welcome
        The node's welcome at the end of the handshake.
    node : str
        The node's address as the caller knows it, for errors.
    credential : int
        Value for the field `credential` of the frames that the caller sends, one of `Credential`.
    """

    socket: Connected
    welcome: Welcome
    node: str
    credential: int


def dial(
    address: Address,
    purpose: Purpose,
    *,
    key: AccessKey | None = None,
    session: int = 0,
    deadline: float,
    name: str = "",
    tenant: int | None = None,
) -> Dialled:
    """Connect to a node and do the handshake, which authenticates both sides. Blocking.

    Parameters
    ----------
    address : Address
        The node's address.
    purpose : "control" or "data"
        Use of the connection.
    key : AccessKey or None
        The access key; None if the node needs none. Over TLS the certificate replaces the key.
    session : int
        Number of the program's session; 0 if the node shall make a new one.
    deadline : float
        Time of `time.monotonic` by which everything must be done, including the lookup of the host name.
    name : str
        Address by which errors name the node, if the user knows it by another address than `address`; else empty.
    tenant : int or None
        Tenant for which the client acts; None for the tenant of the key.

    Raises
    ------
    NodeTimeoutError
        The deadline passed.
    NodeError
        The node cannot be reached, or ended the connection.
    ProtocolError, IncompatibleError, AccessDeniedError
        As raised by `ClientHandshake.feed` and `SecureSocket.do_handshake`.
    ConfigError
        The address begins with ``tls://``, and there is no certificate that can be used.
    """
    node = name or str(address)
    began = time.monotonic()
    secure = address.scheme == "tls"
    context = client_certificate().context if secure else None
    with _as_node_errors(node, address, began):
        connected: Connected = _connect(address, deadline)
        try:
            if context is not None and isinstance(connected, socket.socket):
                connected = SecureSocket(connected, context, address.host, node)
                connected.settimeout(remaining(deadline))
                connected.do_handshake()
            handshake = ClientHandshake(node, purpose, key, session, secure=secure, tenant=tenant)
            welcome = _shake_hands(connected, handshake, deadline)
            connected.settimeout(None)
        except BaseException as error:
            connected.close()
            if isinstance(error, IncompatibleError):
                _warn(error)
            raise
    credential = Credential.CERTIFICATE if secure else Credential.NONE if key is None else Credential.SECRET
    return Dialled(connected, welcome, node, credential)


def _warn(error: IncompatibleError) -> None:
    """Warn that a node cannot be used. A cache turns the error into misses, and only a warning would tell why."""
    with contextlib.suppress(FarpoolWarning):  # if warnings are errors, the error itself is raised
        warnings.warn(str(error), FarpoolWarning, stacklevel=1)


def remaining(deadline: float) -> float:
    """Return the seconds until the deadline; raise `TimeoutError` if the deadline has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


@contextlib.contextmanager
def _as_node_errors(node: str, address: Address, began: float) -> Iterator[None]:
    where = node if node == str(address) else f"{node} (at {address})"
    try:
        yield
    except NodeError:
        raise
    except TimeoutError as error:
        waited = time.monotonic() - began
        raise NodeTimeoutError(
            f"{where} did not answer within {waited:.3g} s; is a farpool node running there?", node=node
        ) from error
    except OSError as error:
        if is_shortage(error):
            raise NodeError(
                f"{where} cannot be reached, because this process is short of descriptors or memory: {error.strerror}",
                node=node,
            ) from error
        raise NodeError(
            f"{where} cannot be reached: {error.strerror or error}; is a farpool node running there?", node=node
        ) from error


def _connect(address: Address, deadline: float) -> socket.socket:
    targets = _targets(address, deadline)
    for left, (family, target) in zip(range(len(targets), 0, -1), targets, strict=True):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # An address that swallows packets must not use up the time of those after it.
            _connect_one(connection, target, time.monotonic() + remaining(deadline) / left)
            if family != socket.AF_UNIX:
                set_options(connection)
        except BaseException as error:
            connection.close()
            if left == 1 or not isinstance(error, OSError):
                raise
            continue
        return connection
    raise OSError("its name has no address")


def _connect_one(connection: socket.socket, target: Any, deadline: float) -> None:
    while True:
        connection.settimeout(remaining(deadline))
        try:
            connection.connect(target)
        except BlockingIOError:
            # A UNIX socket whose backlog is full does not let wait for room in it.
            time.sleep(_RETRY_INTERVAL_S)
        else:
            return


def _targets(address: Address, deadline: float) -> list[_Target]:
    if address.scheme == "unix":
        return [(socket.AF_UNIX, address.path)]
    try:
        # An IP address needs no resolver, and so no thread.
        return _look_up(address, socket.AI_NUMERICHOST)
    except socket.gaierror:
        return _look_up_in_time(address, deadline)


def _look_up(address: Address, flags: int) -> list[_Target]:
    # Python encodes text with a codec for names beyond ASCII, which is slow to import and raises a UnicodeError for a
    # label that is empty or too long. The resolver refuses such a label like any name that it does not know.
    found = socket.getaddrinfo(address.host.encode(), address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, _, _, _, target in found]


def _look_up_in_time(address: Address, deadline: float) -> list[_Target]:
    """Resolve the host name in a thread. The resolver has no deadline, so we stop waiting for it at our deadline."""
    outcome: list[list[_Target] | OSError] = []

    def ask() -> None:
        try:
            outcome.append(_look_up(address, socket.AI_ADDRCONFIG))
        except OSError as error:
            outcome.append(error)

    # A daemon, because the resolver may take longer than the program runs.
    thread = threading.Thread(target=ask, name="farpool-resolve", daemon=True)
    thread.start()
    thread.join(remaining(deadline))
    if not outcome:
        raise TimeoutError
    if isinstance(outcome[0], OSError):
        raise outcome[0]
    return outcome[0]


def _shake_hands(connected: Connected, handshake: ClientHandshake, deadline: float) -> Welcome:
    to_send = handshake.start()
    while handshake.welcome is None:
        if to_send:
            connected.settimeout(remaining(deadline))
            connected.sendall(to_send)
        connected.settimeout(remaining(deadline))
        # We receive no byte beyond the handshake: what follows belongs to the code that takes the socket over.
        data = connected.recv(handshake.needed)
        if not data:
            raise ConnectionResetError("it ended the connection during the handshake")
        to_send = handshake.feed(data)
    return handshake.welcome
