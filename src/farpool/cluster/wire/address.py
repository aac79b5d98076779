"""Addresses of nodes: ``tcp://10.0.0.7:7471``, ``tls://[::1]:7471``, ``unix:///path/of/socket``."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

from farpool.errors import ConfigError

__all__ = ["PATH_BYTES_MAX", "Address", "is_host", "parse_address"]

PATH_BYTES_MAX = 107
"""Length of the longest path of a UNIX socket, in bytes. This is the kernel's limit."""
_EXPECTED = "expected an address like 'tcp://10.0.0.7:7471', '[::1]:7471' or 'unix:///run/farpool/socket'"
_HOST = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9_.])?", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Address:
    """Address at which a node listens. `str` gives the normalized form.

    Attributes
    ----------
    scheme : "tcp", "tls" or "unix"
        Kind of socket; ``tls`` is TCP with TLS over it.
    host : str
        A name or an IP address (without brackets), lower case; empty for a UNIX socket.
    port : int
        0 for a UNIX socket.
    path : str
        Absolute path of the UNIX socket, else empty.
    """

    scheme: Literal["tcp", "tls", "unix"]
    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.scheme == "unix":
            return f"unix://{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


def parse_address(text: str, what: str = "address", *, any_port: bool = False) -> Address:
    """Parse the address of a node.

    Parameters
    ----------
    text : str
        ``tcp://HOST:PORT``, ``HOST:PORT``, ``tls://HOST:PORT`` or ``unix://PATH``. An IPv6 address needs brackets.
    what : str
        Name of the parameter or option that has this address, for the error.
    any_port : bool
        Allow port 0, which lets the system choose a free one when listening.

    Raises
    ------
    ConfigError
        The text is not such an address.
    """
    address = _parse(text) if isinstance(text, str) else None
    if address is None:
        raise ConfigError(f"{what} is {text!r}, {_EXPECTED}", setting=what)
    if address.scheme != "unix" and not (0 if any_port else 1) <= address.port <= 65535:
        lowest = "0 (any free one)" if any_port else "1"
        raise ConfigError(f"{what} is {text!r}, expected a port from {lowest} to 65535", setting=what)
    if len(address.path.encode()) > PATH_BYTES_MAX:
        raise ConfigError(
            f"{what} is {text!r}, expected a path of at most {PATH_BYTES_MAX} bytes, which is the limit "
            "for UNIX sockets",
            setting=what,
        )
    return address


def is_host(text: str) -> bool:
    """Return True if the text can be an address's host: a name, an IPv4 address, or an IPv6 address in brackets."""
    return _host(text) is not None


def _parse(text: str) -> Address | None:
    scheme, separator, rest = text.partition("://")
    if not separator:
        scheme, rest = "tcp", text
    if scheme == "unix":
        return Address("unix", path=rest) if rest.startswith("/") and rest.isprintable() else None
    host, separator, port = rest.rpartition(":")
    if scheme not in ("tcp", "tls") or not separator or not _PORT.fullmatch(port):
        return None
    name = _host(host)
    return None if name is None else Address("tls" if scheme == "tls" else "tcp", host=name, port=int(port))


def _host(text: str) -> str | None:
    """Normalize a host name or IP address; return None if the text is neither."""
    if text.startswith("[") and text.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(text[1:-1]))
        except ValueError:
            return None
    if not _HOST.fullmatch(text):
        return None
    # Digits and dots alone have to be a whole IPv4 address: the resolver would also expand 127.1.
    if text.replace(".", "").isdigit():
        try:
            return str(ipaddress.IPv4Address(text))
        except ValueError:
            return None
    return text.lower()
