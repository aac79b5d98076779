"""The other end of a connection: its certificate and its user. And the TLS of the manager's own end."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from farpool.cluster.node.users import user_of
from farpool.cluster.wire.certificate import AUTHORITY, CERTIFICATE, PRIVATE_KEY
from farpool.cluster.wire.private_file import read_file
from farpool.errors import ConfigError

__all__ = ["EXTENSION", "Peer", "PeerProtocol", "common_name_in", "identity_in", "tls_context"]

EXTENSION = "farpool.peer"
"""Key of the `Peer` in a request's extensions."""
_REQUEST_TIMEOUT_S = 30.0
"""Seconds after which a connection without a request is closed; at most twice as long if parts of one come slowly."""
_SPIFFE = "spiffe://"


class Peer:
    """The other end of a connection.

    Parameters
    ----------
    transport : asyncio.BaseTransport
        The connection.

    Attributes
    ----------
    identity : str
        Identity in the client's certificate; empty if there is none.
    common_name : str
        The certificate's common name, by which nodes know the client; empty if there is none.
    """

    def __init__(self, transport: asyncio.BaseTransport) -> None:
        secure = transport.get_extra_info("ssl_object")
        certificate = None if secure is None else secure.getpeercert(binary_form=True)
        self.identity = identity_in(certificate) if certificate else ""
        self.common_name = common_name_in(certificate) if certificate and self.identity else ""
        self._socket = transport.get_extra_info("socket")

    def user(self) -> int | None:
        """Return the number of the user at the other end; None if the system does not know it. Blocking."""
        return user_of(self._socket)


def identity_in(certificate: bytes) -> str:
    """Return the identity in a client's certificate, which the TLS library has verified.

    Returns
    -------
    str
        The SPIFFE URI, or else the common name. Empty if there is no identity, more than one SPIFFE URI or common name,
        or if the certificate is not for clients.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    try:
        parsed = x509.load_der_x509_certificate(certificate)
        usages = parsed.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        if ExtendedKeyUsageOID.CLIENT_AUTH not in usages:
            return ""
        names = [str(one.value) for one in parsed.subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
        uris: list[str] = []
        for extension in parsed.extensions:
            if isinstance(extension.value, x509.SubjectAlternativeName):
                uris += extension.value.get_values_for_type(x509.UniformResourceIdentifier)
    except Exception:  # of many kinds, for example for an extension that is there twice
        return ""
    found = [uri for uri in uris if uri.startswith(_SPIFFE)] or names
    # A common name in the form of a URI must not pass for one.
    return found[0] if len(found) == 1 and (found is not names or not found[0].startswith(_SPIFFE)) else ""


def common_name_in(certificate: bytes) -> str:
    """Return the common name in a client's certificate; empty if there is none, or more than one."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        subject = x509.load_der_x509_certificate(certificate).subject
    except ValueError:
        return ""
    names = [str(one.value) for one in subject.get_attributes_for_oid(NameOID.COMMON_NAME)]
    return names[0] if len(names) == 1 else ""


def tls_context(folder: Path) -> ssl.SSLContext:
    """Return a context with the certificate in a folder. Clients may show a certificate of the authority in it.

    Raises
    ------
    ConfigError
        The files cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_OPTIONAL
    context.num_tickets = 0  # a session that is resumed would not verify the client's certificate again
    for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY):
        read_file(folder / name, "--tls", private=name == PRIVATE_KEY)
    try:
        context.load_cert_chain(folder / CERTIFICATE, folder / PRIVATE_KEY)
        context.load_verify_locations(folder / AUTHORITY)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--tls: {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY} in {folder} cannot be used: {error}", setting="tls"
        ) from error
    return context


class PeerProtocol(H11Protocol):
    """uvicorn's protocol, which also tells the application about the other end of the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer, app = Peer(transport), self.app

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            scope.setdefault("extensions", {})[EXTENSION] = peer
            await app(scope, receive, send)

        self.app = with_peer
        # uvicorn itself ends only connections that send nothing after a request.
        self.loop.call_later(_REQUEST_TIMEOUT_S, self._end_without_request, None)

    def _end_without_request(self, before: RequestResponseCycle | None) -> None:
        """Close the connection if it has no request, and had none since the last look, whose request was `before`."""
        cycle = getattr(self, "cycle", None)
        if self.transport.is_closing():
            return
        if cycle is before and (cycle is None or cycle.response_complete):
            self.transport.close()
        else:
            self.loop.call_later(_REQUEST_TIMEOUT_S, self._end_without_request, cycle)
