"""Certificates for tests: an authority, what it issues, and sockets with TLS of Python's own that need not behave."""

from __future__ import annotations

import shutil
import socket
import ssl
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from farpool.cluster.wire.address import Address
from farpool.cluster.wire.authority import Authority, Role
from farpool.cluster.wire.handshake import ClientHandshake, Purpose

PATIENCE = 30.0


class Certificates:
    """An authority in a folder, and what it has issued there."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self.authority = Authority.create(folder / name, name, 30)
        self.bundle = folder / name / "ca.crt"

    def node(self, name: str = "node", hosts: Sequence[str] = ("127.0.0.1", "localhost"), days: int = 9) -> Path:
        return self.issue(name, "node", hosts, days)

    def client(self, name: str, days: int = 9) -> Path:
        return self.issue(name, "client", (), days)

    def issue(self, name: str, role: Role, hosts: Sequence[str], days: int = 9, begin: datetime | None = None) -> Path:
        path = self.folder / f"{name}-{sum(1 for _ in self.folder.iterdir())}"
        self.authority.issue(path, name, role, hosts, days=days, begin=begin)
        return path


def with_usages(folder: Path, authority: Path, usages: Sequence[x509.ObjectIdentifier]) -> Path:
    """A copy of a certificate's folder, issued again by the authority in a folder, with this extended key usage."""
    copy = folder.with_name(f"{folder.name}-with-{len(usages)}-usages")
    shutil.copytree(folder, copy)
    old = x509.load_pem_x509_certificate((folder / "tls.crt").read_bytes())
    builder = x509.CertificateBuilder(old.issuer, old.subject, old.public_key(), old.serial_number + 1)
    builder = builder.not_valid_before(old.not_valid_before_utc).not_valid_after(old.not_valid_after_utc)
    for extension in old.extensions:
        if not isinstance(extension.value, x509.ExtendedKeyUsage):
            builder = builder.add_extension(extension.value, extension.critical)
    if usages:
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    key = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    (copy / "tls.crt").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return copy


def believing(folder: Path, bundle: Path) -> Path:
    """A copy of a certificate's folder with another authority."""
    copy = folder.with_name(folder.name + "-believing")
    shutil.copytree(folder, copy)
    shutil.copy(bundle, copy / "ca.crt")
    return copy


def keys_file(path: Path, keys: Mapping[str, tuple[Sequence[str], int]]) -> Path:
    """Access keys without secrets: rights and tenant by name."""
    path.touch(mode=0o600)
    path.write_text(
        "".join(
            f"[keys.{name}]\nrights = {list(rights)}\ntenant = {tenant}\n" for name, (rights, tenant) in keys.items()
        )
    )
    return path


def client_context(folder: Path | None, bundle: Path, *, newest: ssl.TLSVersion | None = None) -> ssl.SSLContext:
    """Of a client that believes the authority in `bundle` and shows the certificate in `folder`, if any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(bundle)
    if folder is not None:
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    if newest is not None:
        context.maximum_version = newest
    return context


def server_context(folder: Path, bundle: Path) -> ssl.SSLContext:
    """Of a node that wants no certificate and checks nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    context.load_verify_locations(bundle)
    return context


def connect(address: Address, context: ssl.SSLContext) -> ssl.SSLSocket:
    """A connection with TLS and nothing said yet."""
    plain = socket.create_connection((address.host, address.port), timeout=PATIENCE)
    try:
        return context.wrap_socket(plain, server_hostname=address.host)
    except BaseException:
        plain.close()
        raise


def introduce(connection: ssl.SSLSocket, purpose: Purpose = "data") -> ClientHandshake:
    """Go through farpool's handshake."""
    handshake = ClientHandshake("node", purpose, None, secure=True)
    to_send = handshake.start()
    while handshake.welcome is None:
        if to_send:
            connection.sendall(to_send)
        to_send = handshake.feed(connection.recv(handshake.needed))
    return handshake
