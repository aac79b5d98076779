"""Addresses of registries as users write them: ``sqlite:///PATH`` or ``etcd://HOST,HOST2/PREFIX?ca=FILE``."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote

from farpool.abc.registry import Registry
from farpool.errors import ConfigError

if TYPE_CHECKING:
    import ssl

__all__ = [
    "NODES_VARIABLES",
    "default_registry",
    "is_missing_file",
    "is_registry",
    "open_registry",
    "without_password",
]

NODES_VARIABLES = ("FARPOOL_NODES", "FARPOOL_POOL")
"""Environment variables that name nodes where a program names none; the first one that is set counts."""
_EXPECTED = "expected a path, sqlite:///PATH, or etcd://HOST:PORT,HOST:PORT/PREFIX (docs/registry.md)"
_ENDPOINT = re.compile(
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9_](?:[A-Za-z0-9._-]*)))(?::(?P<port>[0-9]{1,5}))?", re.ASCII
)
_SCHEMES = ("etcd://", "sqlite://")
_OPTIONS = {"ca", "cert", "key", "password_file", "tls"}


def is_registry(text: str) -> bool:
    """Return True if a text that may be a node's address is a registry's."""
    return text.startswith(_SCHEMES)


def without_password(text: str) -> str:
    """Return a registry's address without its password, for errors, which end up in logs."""
    # To the last @, as a password may have one, and an address that is refused may have anything.
    return re.sub(r"(://[^/:]*):.*@", r"\1:…@", text, flags=re.DOTALL)


def is_missing_file(text: str) -> bool:
    """Return True if a registry's address names a file that does not exist."""
    if text.startswith("etcd://"):
        return False
    return not os.path.exists(unquote(text.removeprefix("sqlite://")) if text.startswith("sqlite://") else text)


def default_registry() -> str:
    """Return the address of the registry that a program uses if it names none.

    This is the address in ``FARPOOL_REGISTRY``; else the one in the first of `NODES_VARIABLES` that names a registry;
    else a file's path in the user's state folder.
    """
    named = os.environ.get("FARPOOL_REGISTRY", "")
    if named:
        return named
    for name in NODES_VARIABLES:
        text = os.environ.get(name, "").strip()
        if is_registry(text):
            return text
    state = os.environ.get("XDG_STATE_HOME", "")
    return str((Path(state) if state else Path.home() / ".local" / "state") / "farpool" / "registry.sqlite")


def open_registry(where: str | os.PathLike[str] | None = None, *, timeout: float = 5.0) -> Registry:
    """Open a registry: a SQLite file, or an etcd cluster.

    Parameters
    ----------
    where : str or path, optional
        A SQLite file, which all processes of this host can share: a path, or ``sqlite:///PATH``. An etcd cluster:
        ``etcd://[USER[:PASSWORD]@]HOST[:PORT],.../[PREFIX][?OPTIONS]``. Options, joined with ``&``: ``ca=FILE``,
        ``cert=FILE`` and ``key=FILE`` for TLS, ``tls=1`` for TLS with the system's authorities, ``password_file=FILE``.
        None stands for the address that `default_registry` returns.
    timeout : float
        Seconds that a call may take, unless the call has a `timeout` of its own.

    Raises
    ------
    ConfigError
        `where` is not such an address, or one of its options names a file that cannot be read.
    RegistryError
        The registry cannot be opened.
    """
    # We import each kind here, because a program without names needs neither.
    from farpool.cluster.registry.sqlite import SqliteRegistry

    text = os.fspath(default_registry() if where is None else where)
    scheme, separator, rest = text.partition("://")
    if not separator:
        if not text or "\0" in text:
            raise _wrong(text, "it is not a path")
        return SqliteRegistry(text, timeout=timeout)
    if scheme == "sqlite":
        if not rest.startswith("/"):
            raise _wrong(text, "the path of a file begins with /")
        return SqliteRegistry(unquote(rest), timeout=timeout)
    if scheme != "etcd":
        raise _wrong(text, f"there is no kind of registry {scheme!r}")
    return _etcd(text, rest, timeout)


def _etcd(text: str, rest: str, timeout: float) -> Registry:
    from farpool.cluster.registry.etcd import EtcdRegistry

    place, _, query = rest.partition("?")
    authority, _, path = place.partition("/")
    login, _, hosts = authority.rpartition("@")
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name not in _OPTIONS or name in options or not value:
            raise _wrong(
                text, f"the option {name!r} is unknown, given twice or empty; known are {', '.join(sorted(_OPTIONS))}"
            )
        options[name] = value
    endpoints = []
    for one in hosts.split(","):
        match = _ENDPOINT.fullmatch(one)
        port = int(match["port"] or 2379) if match else 0
        if match is None or not 1 <= port <= 65535:
            raise _wrong(text, f"{one!r} is not HOST:PORT")
        endpoints.append((match["six"] or match["host"].lower(), port))
    if len(set(endpoints)) < len(endpoints):
        raise _wrong(text, "an endpoint is given twice")
    user, _, password = login.partition(":")
    if "password_file" in options:
        if password:
            raise _wrong(text, "the password is given twice")
        password = _read(options["password_file"], "password_file").strip()
    if options.get("tls", "1") not in ("0", "1") or (
        options.get("tls") == "0" and {"ca", "cert", "key"} & set(options)
    ):
        raise _wrong(text, "tls is 1, or 0 without ca, cert and key")
    if "key" in options and "cert" not in options:
        raise _wrong(text, "the option key needs the option cert")
    secure = options.get("tls") == "1" or {"ca", "cert"} & set(options)
    prefix = unquote(path).strip("/") or "farpool"
    return EtcdRegistry(
        *endpoints,
        prefix=f"{prefix}/",
        context=_context(options) if secure else None,
        user=unquote(user),
        password=password if "password_file" in options else unquote(password),
        timeout=timeout,
    )


def _context(options: dict[str, str]) -> ssl.SSLContext:
    import ssl

    for name in ("ca", "cert", "key"):
        if name in options:
            # The ssl module's error would not name the file.
            _read(options[name], name)
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"the files for the registry's TLS ({', '.join(options)}) cannot be used: {error}; expected PEM files",
            setting="registry",
        ) from error
    return context


def _read(path: str, option: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the registry's {option} {path!r} cannot be read: {error}; expected a text file", setting="registry"
        ) from error


def _wrong(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"the registry's address {without_password(text)!r} is wrong: {why}; {_EXPECTED}", setting="registry"
    )
