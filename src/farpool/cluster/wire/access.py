"""Access keys: a node uses them to authenticate programs. This module also reads the keys, for both sides.

An access key has a name, a secret that node and program share, rights and a tenant.

A node reads its keys from a TOML file that no other user may read::

    [keys.trainer]
    secret = "at least 16 bytes, better 32 random ones"
    rights = ["read", "write", "publish"]
    tenant = 0
    bytes = "4GiB"
    class = "bulk"

A program has one key, written as ``NAME:SECRET``: in the argument ``key``, in the environment variable ``FARPOOL_KEY``,
or in a file that the variable ``FARPOOL_KEY_FILE`` names.

Over TLS a certificate replaces the secret. The certificate's common name is then the name of the access key. A key that
is used only with certificates needs no secret.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from farpool.cluster.wire.frames import Right
from farpool.cluster.wire.private_file import read_file
from farpool.decoding import prepared
from farpool.errors import ConfigError
from farpool.sizes import parse_size

__all__ = [
    "KEY_FILE_VARIABLE",
    "KEY_VARIABLE",
    "LONGEST_NAME",
    "AccessKey",
    "Grant",
    "client_key",
    "is_key_name",
    "load_keys",
    "read_key",
]

KEY_VARIABLE = "FARPOOL_KEY"
KEY_FILE_VARIABLE = "FARPOOL_KEY_FILE"
LONGEST_NAME = 64
_SECRET_BYTES_MIN = 16
_NAME = re.compile(rf"[A-Za-z0-9._-]{{1,{LONGEST_NAME}}}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AccessKey:
    """Access key of a program: a name, and the secret shared with a node.

    Attributes
    ----------
    name : str
        1 to 64 letters, digits, dots, dashes and underscores.
    secret : bytes
        At least 16 bytes. Never crosses the wire, and is not part of `repr`.
    """

    name: str
    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _check(self.name, self.secret, "the access key")

    @classmethod
    def parse(cls, text: str, what: str = "key") -> AccessKey:
        """Read ``NAME:SECRET``. The text after the first colon is the secret, which is encoded in UTF-8.

        Raises
        ------
        ConfigError
            The text is not of this form. The error does not repeat it.
        """
        name, separator, secret = text.partition(":") if isinstance(text, str) else ("", "", "")
        if not separator:
            raise ConfigError(f"{what} has no colon, expected an access key as NAME:SECRET", setting=what)
        _check(name, secret.encode(), what)
        return cls(name, secret.encode())


@dataclass(frozen=True, slots=True)
class Grant:
    """A node's record of an access key: its secret, rights, tenant and byte limit.

    Attributes
    ----------
    secret : bytes
        Shared with the programs that use the key; empty for a key that is used with certificates alone.
    rights : Right
        Rights that the key gives.
    tenant : int
        Tenant whose objects and leases the key gives access to.
    bytes : int
        Maximum bytes that users of the key may hold in leases, pins and unfinished publishes; 0 for the node's own
        limit.
    latency : bool
        True if small requests over connections with this key are served first.
    """

    secret: bytes = field(repr=False)
    rights: Right
    tenant: int
    bytes: int = field(default=0, compare=False)  # not compared: a new limit ends no open connection
    latency: bool = False


class _Entry(msgspec.Struct, forbid_unknown_fields=True, rename={"traffic": "class"}):
    rights: list[str]
    secret: str | msgspec.UnsetType = msgspec.UNSET
    tenant: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)] = 0
    bytes: str | int | msgspec.UnsetType = msgspec.UNSET
    traffic: Literal["bulk", "latency"] = "bulk"


def is_key_name(text: str) -> bool:
    """Return True if an access key can have this name."""
    return _NAME.fullmatch(text) is not None


def client_key(key: AccessKey | str | None = None, environment: Mapping[str, str] = os.environ) -> AccessKey | None:
    """Return the access key that this program uses, or None if it has none.

    Parameters
    ----------
    key : AccessKey or str or None
        The program's argument; a string is ``NAME:SECRET``. Without it the environment decides: ``FARPOOL_KEY`` is
        ``NAME:SECRET``, ``FARPOOL_KEY_FILE`` names a file whose only line is ``NAME:SECRET``. An empty variable counts
        as not set.
    environment : mapping
        Environment variables.

    Raises
    ------
    ConfigError
        The text is not an access key, the file cannot be read or is open to other users, or both variables are set.
    """
    if key is not None:
        return key if isinstance(key, AccessKey) else AccessKey.parse(key)
    text, path = environment.get(KEY_VARIABLE, ""), environment.get(KEY_FILE_VARIABLE, "")
    if text and path:
        raise ConfigError(f"{KEY_VARIABLE} and {KEY_FILE_VARIABLE} are both set, expected one of them")
    if text:
        return AccessKey.parse(text, KEY_VARIABLE)
    return read_key(path, KEY_FILE_VARIABLE) if path else None


def read_key(path: str | os.PathLike[str], setting: str) -> AccessKey:
    """Read an access key from a file whose only line is ``NAME:SECRET``. `setting` is what named the file, for errors.

    Raises
    ------
    ConfigError
        The text is not an access key, or the file cannot be read or is open to other users.
    """
    what = f"{setting} {os.fspath(path)}"
    return AccessKey.parse(_decoded(read_file(path, setting, private=True), what).strip(), what)


def load_keys(path: str | os.PathLike[str]) -> dict[str, Grant]:
    """Read the access keys that a node accepts, by name.

    Parameters
    ----------
    path : str or path-like
        A TOML file, as shown at the top of this module.

    Raises
    ------
    ConfigError
        The file cannot be read, other users may read it, it is not valid TOML, or it has a key that cannot be used.
    """
    file = os.fspath(path)
    text = _decoded(read_file(file, "keys", private=True), file)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{file} is no TOML: {error}", setting="keys") from error
    table = document.get("keys")
    if document.keys() - {"keys"} or not isinstance(table, dict) or not table:
        raise ConfigError(
            f"{file} has {', '.join(document) or 'nothing'}, expected [keys.NAME] with secret, rights and tenant",
            setting="keys",
        )
    return {name: _grant(name, entry, f"{file}: keys.{name}") for name, entry in table.items()}


def _grant(name: str, entry: Any, what: str) -> Grant:
    try:
        settings = msgspec.convert(entry, prepared(_Entry))
    except msgspec.ValidationError as error:
        # The message names field and type, never the value.
        raise ConfigError(f"{what}: {error}; expected secret, rights, tenant, bytes, class", setting="keys") from None
    secret = None if isinstance(settings.secret, msgspec.UnsetType) else settings.secret.encode()
    _check(name, secret, what)
    rights = Right(0)
    for right in settings.rights:
        if right.upper() not in Right.__members__ or right != right.lower():
            known = ", ".join(known.lower() for known in Right.__members__)
            raise ConfigError(f"{what}.rights has {right!r}, expected some of {known}", setting="keys")
        rights |= Right[right.upper()]
    if Right.REPAIR in rights and settings.tenant:
        raise ConfigError(
            f"{what} has the right 'repair' and the tenant {settings.tenant}, expected tenant 0: the right is for the "
            "objects of all tenants",
            setting="keys",
        )
    nbytes = 0 if isinstance(settings.bytes, msgspec.UnsetType) else parse_size(settings.bytes, f"{what}.bytes")
    # An empty secret marks a key that only a certificate can prove (`NodeHandshake._greet`).
    return Grant(secret or b"", rights, settings.tenant, nbytes, settings.traffic == "latency")


def _check(name: str, secret: bytes | None, what: str) -> None:
    if not is_key_name(name):
        raise ConfigError(
            f"{what} has the name {name!r}, expected 1 to {LONGEST_NAME} letters, digits, dots, dashes or underscores",
            setting="key",
        )
    if secret is not None and len(secret) < _SECRET_BYTES_MIN:
        raise ConfigError(
            f"{what} has a secret of {len(secret)} bytes, expected at least {_SECRET_BYTES_MIN}; "
            "for example what 'openssl rand -hex 32' prints",
            setting="key",
        )


def _decoded(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{what} is not text in UTF-8, expected access keys") from None
