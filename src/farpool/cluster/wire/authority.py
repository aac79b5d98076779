"""Private certificate authority: issues the certificates with which nodes and programs prove their identity.

The authority is a folder with its own certificate (``ca.crt``) and private key (``ca.key``). The authority makes a
folder for each certificate. `farpool.cluster.wire.certificate` reads such a folder. Keys are ECDSA on the curve P-256,
in files that only their owner may read.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from farpool.cluster.wire.access import is_key_name
from farpool.cluster.wire.address import is_host
from farpool.cluster.wire.certificate import AUTHORITY, CERTIFICATE, PRIVATE_KEY
from farpool.cluster.wire.private_file import read_file
from farpool.errors import ConfigError

__all__ = ["AUTHORITY_KEY", "Authority", "Role"]

Role = Literal["node", "client"]
"""Owner of a certificate: a node, which accepts connections, or a client, which opens them."""

AUTHORITY_KEY = "ca.key"
_USAGES = {"node": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
_SKEW = timedelta(minutes=5)
"""Tolerated clock skew: a new certificate is valid from this much time before its making."""


class Authority:
    """Certificate authority in an existing folder; issues and renews certificates.

    Parameters
    ----------
    folder : Path
        Folder with ``ca.crt`` and ``ca.key``.

    Raises
    ------
    ConfigError
        The files cannot be read, other users may read the key, or key and certificate do not belong together.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._certificate = _certificate(folder / AUTHORITY, "--ca")
        self._key = _private_key(folder / AUTHORITY_KEY, "--ca")
        if self._key.public_key() != self._certificate.public_key():
            raise ConfigError(f"--ca: {AUTHORITY_KEY} in {folder} is not the key of {AUTHORITY}", setting="ca")

    @classmethod
    def create(cls, folder: Path, name: str, days: int) -> Authority:
        """Make an authority in a folder that does not exist yet.

        Raises
        ------
        ConfigError
            The folder exists already or cannot be made, or the name cannot be an authority's name.
        """
        subject = _subject(name)
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(UTC)
        public = key.public_key()
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _SKEW)
            .not_valid_after(now + timedelta(days=days))
            # A certificate of this authority can be no authority itself.
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(key, hashes.SHA256())
        )
        with _new_folder(folder, "--ca") as made:
            _write(made, {AUTHORITY: _pem(certificate), AUTHORITY_KEY: _key_pem(key)})
        return cls(folder)

    def issue(
        self,
        folder: Path,
        name: str,
        role: Role,
        hosts: Sequence[str],
        *,
        days: int = 90,
        begin: datetime | None = None,
    ) -> datetime:
        """Make a key and a certificate in a folder that does not exist yet; return when the certificate expires.

        Parameters
        ----------
        folder : Path
            The folder to make, with ``tls.crt``, ``tls.key`` and ``ca.crt``.
        name : str
            Name in the certificate; for a client, the name of its access key at the nodes.
        role : "node" or "client"
            Owner of the certificate.
        hosts : sequence of str
            For a node, the names and IP addresses by which programs reach it; else empty.
        days : int
            Days for which the certificate is valid.
        begin : datetime or None
            Time from which the certificate is valid; 5 minutes ago by default.

        Raises
        ------
        ConfigError
            The folder exists already, or a certificate cannot have one of the given properties.
        """
        files, end = self._made(name, role, _alternatives(role, hosts), days, begin)
        with _new_folder(folder, "--out") as made:
            _write(made, files)
        return end

    def rotate(self, folder: Path, *, days: int = 90) -> tuple[str, datetime]:
        """Replace the key and the certificate in a folder; return the certificate's name and when the new one expires.

        The new certificate has the same name, role and hosts. Each file is replaced as a whole. A node reads the new
        files when it gets SIGHUP; a program reads them when it opens its next connection.

        Raises
        ------
        ConfigError
            The folder's certificate was not issued by this authority, or has no role.
        """
        old = _certificate(folder / CERTIFICATE, "the certificate")
        # The new certificate takes over the old one's name, role and hosts, so this authority must have signed them.
        try:
            old.verify_directly_issued_by(self._certificate)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise ConfigError(
                f"{folder / CERTIFICATE} was not issued by the authority in {self._folder}", setting="ca"
            ) from error
        name = str(old.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)
        try:
            usage = old.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        except x509.ExtensionNotFound as error:
            raise ConfigError(
                f"{folder / CERTIFICATE} has no extended key usage, expected clientAuth or serverAuth; make another "
                "certificate with 'farpool certs issue'",
                setting="folder",
            ) from error
        role: Role = "node" if _USAGES["node"] in usage else "client"
        alternatives = None
        with contextlib.suppress(x509.ExtensionNotFound):
            alternatives = old.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        files, end = self._made(name, role, alternatives, days, None)
        # In the same folder, because `os.replace` cannot move a file to another file system.
        with tempfile.TemporaryDirectory(prefix=".rotate-", dir=folder) as made:
            _write(Path(made), files)
            # A reader that comes between two replacements finds a key and a certificate that do not match. It keeps the
            # files that it read before (`CertificateFolder.context`).
            for file in files:
                os.replace(Path(made) / file, folder / file)
        return name, end

    def _made(
        self,
        name: str,
        role: Role,
        alternatives: x509.SubjectAlternativeName | None,
        days: int,
        begin: datetime | None,
    ) -> tuple[dict[str, bytes], datetime]:
        begin = begin or datetime.now(UTC) - _SKEW
        end = begin + timedelta(days=days)
        if end > self._certificate.not_valid_after_utc:
            last = self._certificate.not_valid_after_utc
            raise ConfigError(
                f"--days is {days}, but the authority's own certificate expires on {last:%Y-%m-%d}; give fewer",
                setting="days",
            )
        key = ec.generate_private_key(ec.SECP256R1())
        public = key.public_key()
        builder = (
            x509.CertificateBuilder()
            .subject_name(_subject(name))
            .issuer_name(self._certificate.subject)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            # The role is part of the certificate, so a stolen client certificate is of no use as a node's
            # (docs/security.md).
            .add_extension(x509.ExtendedKeyUsage([_USAGES[role]]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        authority = (self._folder / AUTHORITY).read_bytes()
        return {PRIVATE_KEY: _key_pem(key), CERTIFICATE: _pem(certificate), AUTHORITY: authority}, end


def _subject(name: str) -> x509.Name:
    if not is_key_name(name):
        raise ConfigError(
            f"the name is {name!r}, expected 1 to 64 letters, digits, dots, dashes or underscores", setting="name"
        )
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _alternatives(role: Role, hosts: Sequence[str]) -> x509.SubjectAlternativeName | None:
    if role == "client":
        if hosts:
            raise ConfigError(f"--host is {hosts[0]!r}, but a client's certificate has no hosts", setting="host")
        return None
    if not hosts:
        raise ConfigError(
            "a node's certificate says which hosts it is for; give --host for each name and IP address by which "
            "programs reach it",
            setting="host",
        )
    names: list[x509.GeneralName] = []
    for host in hosts:
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            if not is_host(host):
                raise ConfigError(
                    f"--host is {host!r}, expected a name or an IP address, without a port", setting="host"
                ) from None
            names.append(x509.DNSName(host.lower()))
    return x509.SubjectAlternativeName(names)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _certificate(path: Path, what: str) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_file(path, what))
    except ValueError as error:
        # A ConfigError is a ValueError, too, and has named the reason already.
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: {path} is no certificate in PEM: {error}", setting=what) from error


def _private_key(path: Path, what: str) -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(read_file(path, what, private=True), password=None)
    except (ValueError, TypeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{what}: {path} is no private key in PEM without a password", setting=what) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{what}: {path} is no key on an elliptic curve", setting=what)
    return key


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


@contextlib.contextmanager
def _new_folder(folder: Path, what: str) -> Iterator[Path]:
    """Make a folder under a temporary name, and rename it when the ``with`` block has filled it.

    A folder that exists already is never overwritten.
    """
    if os.path.lexists(folder):
        raise ConfigError(f"{what}: {folder} is there already, and nothing is overwritten", setting=what)
    made = None
    try:
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        yield made
        made.rename(folder)
    except OSError as error:
        raise ConfigError(f"{what}: {folder} cannot be made: {error.strerror}", setting=what) from error
    finally:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        mode = 0o600 if name in (PRIVATE_KEY, AUTHORITY_KEY) else 0o644
        # The mode is given here and not set later: the key is at no time readable by others.
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            # Before the file gets its name: a crash must not leave a named file without content.
            os.fsync(file.fileno())
