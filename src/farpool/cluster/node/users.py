"""Finds the user and the process at the other end of a connection, and the number of a group of this host."""

from __future__ import annotations

import grp
import socket
import struct

from farpool.cluster.wire.shortage import is_shortage
from farpool.errors import ConfigError

__all__ = ["group_id", "process_of", "user_of"]

_CREDENTIALS = struct.Struct("3i")
_SOCK_DIAG = 4
_BY_FAMILY = 20
_REQUEST = struct.Struct("=IHHII BBBBI")
"""Header of a netlink message, followed by the first fields of a query about one socket (linux/inet_diag.h)."""
_ANSWER = struct.Struct("=IHHII BBBB 48x IIIII")
# Interface 0 (any), and the value that tells the kernel not to compare cookies, because we know only the addresses.
_NO_COOKIE = b"\0" * 4 + b"\xff" * 8
_ESTABLISHED = 1


def group_id(name: str) -> int:
    """Return the number of a group of this host; `name` is the group's name or its number.

    Raises
    ------
    ConfigError
        There is no such group.
    """
    try:
        return int(name) if name.isascii() and name.isdigit() else grp.getgrnam(name).gr_gid
    except KeyError:
        raise ConfigError(
            f"--socket-group is {name!r}, and this host has no such group; give a group's name or number",
            setting="socket_group",
        ) from None


def user_of(connection: socket.socket) -> int | None:
    """Return the number of the user who opened the other end of a connection.

    Returns
    -------
    int or None
        The user's number, for a UNIX socket or a TCP connection from this host. None if the connection comes from
        another host, so that the system does not know the user, or if the other end is already closed.

    Raises
    ------
    OSError
        The node could not ask the system for the user, because descriptors or memory are short.
    """
    if connection.family == socket.AF_UNIX:
        return _credentials(connection)[1]
    try:
        return _user_of_tcp(connection)
    except struct.error:
        return None
    except OSError as error:
        if is_shortage(error):  # does not mean that the user is unknown
            raise
        return None


def process_of(connection: socket.socket) -> int:
    """Return the id of the process that opened the other end of a UNIX socket."""
    return _credentials(connection)[0]


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, group = _CREDENTIALS.unpack(said)
    return process, user, group


def _user_of_tcp(connection: socket.socket) -> int | None:
    """Ask the kernel for the user of the socket at the other end. The kernel only knows sockets of this host."""
    (theirs, their_port), (ours, our_port) = connection.getpeername()[:2], connection.getsockname()[:2]
    family = connection.family
    addresses = [socket.inet_pton(family, str(host).partition("%")[0]).ljust(16, b"\0") for host in (theirs, ours)]
    # We ask for the socket at the other end, so its own address is our peer's.
    ends = struct.pack("!HH", their_port, our_port) + b"".join(addresses) + _NO_COOKIE
    head = (_REQUEST.size + len(ends), _BY_FAMILY, 1, 0, 0, family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as asked:
        asked.settimeout(1.0)  # the kernel answers at once
        asked.send(_REQUEST.pack(*head) + ends)
        answer = asked.recv(4096)
    _, kind, _, _, _, _, state, _, _, _, _, _, user, _ = _ANSWER.unpack_from(answer)
    # A socket that its owner has closed has no user, and the kernel reports 0 for it, as if it were root's.
    return int(user) if kind == _BY_FAMILY and state == _ESTABLISHED else None
