"""Certificates for TLS: folders with a certificate, its private key and the authority's certificate.

The three files have the names of a Kubernetes TLS secret: ``tls.crt``, ``tls.key`` and ``ca.crt``. ``farpool certs
issue`` makes such a folder (docs/security.md).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

from farpool import forks
from farpool._native import TlsContext, tls_available
from farpool.cluster.wire.private_file import read_file
from farpool.errors import ConfigError

__all__ = ["AUTHORITY", "CERTIFICATE", "PRIVATE_KEY", "TLS_VARIABLE", "CertificateFolder", "client_certificate"]

TLS_VARIABLE = "FARPOOL_TLS"
CERTIFICATE = "tls.crt"
PRIVATE_KEY = "tls.key"
AUTHORITY = "ca.crt"
_MISSING = (
    "this farpool was built without TLS, as OpenSSL was not there; on Debian or Ubuntu: sudo apt-get install "
    "libssl-dev, then build farpool again"
)


class CertificateFolder:
    """A folder with a certificate. If its files have changed, the next connection reads them again. Thread-safe.

    Parameters
    ----------
    path : str or path-like
        The folder.
    what : str
        Setting that names the folder, for errors.

    Raises
    ------
    ConfigError
        This farpool was built without TLS, or the files cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        if not tls_available:
            raise ConfigError(f"{what}: {_MISSING}", setting=what)
        self._path = Path(path)
        self._what = what
        # Protects the state, the context and the texts: any thread may open a connection and find new files.
        self._lock = threading.Lock()
        # We look at the files before we read them, so a change during the reading shows as a change at the next look.
        self._state = self._stated()
        self._context = self._read()
        forks.begin_again(self)

    def forked(self) -> None:
        """Make a new lock in a forked child, because a thread of the parent may hold the old lock."""
        self._lock = threading.Lock()

    @property
    def context(self) -> TlsContext:
        """TLS context for new connections, read from the current files; unchanged if the files cannot be used."""
        with self._lock:
            state = self._stated()
            if state != self._state:
                try:
                    self._context = self._read()
                except ConfigError:
                    return self._context  # they may be only half written: read again at the next connection
                self._state = state
            return self._context

    def reload(self) -> TlsContext:
        """Read the files again, changed or not, and return the new context.

        Raises
        ------
        ConfigError
            The files cannot be used; `context` stays as it was.
        """
        with self._lock:
            state = self._stated()
            # If this raises, the old state stays as well, and the next connection tries the files again.
            self._context = self._read()
            self._state = state
            return self._context

    def ends(self) -> dict[str, float]:
        """Return, by file name, when the certificates in use expire, in seconds since 1970.

        If a file has several certificates, the result has only the earliest time.
        """
        # Imported here, because only metrics need it, and most programs have none.
        from cryptography import x509

        with self._lock:
            texts = {CERTIFICATE: self._texts[0], AUTHORITY: self._texts[1]}
        # Parsed outside the lock, because new connections wait for it.
        return {
            name: min(one.not_valid_after_utc.timestamp() for one in x509.load_pem_x509_certificates(text))
            for name, text in texts.items()
        }

    def _stated(self) -> tuple[tuple[int, int, int], ...]:
        states = []
        for name in (CERTIFICATE, PRIVATE_KEY, AUTHORITY):
            try:
                found = os.stat(self._path / name)
                states.append((found.st_ino, found.st_size, found.st_mtime_ns))
            except OSError:
                states.append((0, 0, 0))
        return tuple(states)

    def _read(self) -> TlsContext:
        certificate = read_file(self._path / CERTIFICATE, self._what)
        key = read_file(self._path / PRIVATE_KEY, self._what, private=True)
        authority = read_file(self._path / AUTHORITY, self._what)
        try:
            context = TlsContext(certificate, key, authority)
        except ValueError as error:
            raise ConfigError(
                f"{self._what}: {CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY} in {self._path} cannot be used: {error}",
                setting=self._what,
            ) from error
        self._texts = certificate, authority
        return context


def client_certificate(environment: Mapping[str, str] = os.environ) -> CertificateFolder:
    """Return the folder that ``FARPOOL_TLS`` names; this program shows the certificate in it to nodes.

    Raises
    ------
    ConfigError
        The variable is not set, or its folder cannot be used.
    """
    path = environment.get(TLS_VARIABLE, "")
    if not path:
        raise ConfigError(
            f"an address that begins with tls:// needs a certificate: set {TLS_VARIABLE} to a folder with "
            f"{CERTIFICATE}, {PRIVATE_KEY} and {AUTHORITY}, for example of 'farpool certs issue'",
            setting=TLS_VARIABLE,
        )
    with _lock.lock:
        if path not in _known:
            _known[path] = CertificateFolder(path, TLS_VARIABLE)
        return _known[path]


_known: dict[str, CertificateFolder] = {}
_lock = forks.ModuleLock()
