"""Records and keys of names in the registry. NAME is a name with each special character written as ``%XX``.

================================== ==============================================================================
``name/NAME``                      the current version, or the note that the name was unpublished
``history/NAME/VERSION``           the last hundred versions, published or unpublished
``publication/NAME/ID/PART``       the objects of a version, 10,000 in a part; written before the version is current
``released/NAME/ID/PART``          the objects of a version that readers can no longer open; a sweep releases them
``hold/NAME/ID/WHO``               a reason to keep a version that is not the current one: its writer still publishes
                                   it, it is the previous version, or a program reads it; bound to a lease
``writer/NAME``                    the role of the program that may publish the name (`farpool.cluster.roles`)
``sweeper``                        the role of the program that sweeps; only earlier releases use it
================================== ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from farpool.decoding import prepared
from farpool.errors import ConfigError

__all__ = [
    "HISTORY_VERSIONS_MAX",
    "PART_OBJECTS_MAX",
    "SWEEPER",
    "Holder",
    "NameInfo",
    "NameRecord",
    "Publication",
    "checked_name",
    "decode",
    "encode",
    "history_key",
    "hold_key",
    "name_key",
    "name_of",
    "publication_key",
    "writer_key",
]

HISTORY_VERSIONS_MAX = 100
"""Maximum number of versions in a name's history."""
PART_OBJECTS_MAX = 10_000
"""Maximum number of objects in one part of a publication."""
SWEEPER = "sweeper"
_NAME_BYTES_MAX = 200
_HASH = "sha256-"
_FORMAT = 1
_PUBLICATION_FORMAT = 2
"""Version of the format of publications. Earlier releases, whose sweeps ignore marks, cannot read it and so do not
sweep."""
_Record = TypeVar("_Record", bound=msgspec.Struct)


class NameRecord(msgspec.Struct, frozen=True):
    """Registry record of one version of a name; `publication` is empty if the name was unpublished."""

    version: int
    publication: str
    manifest: str
    nbytes: int
    objects: int
    tensors: bool
    time: float
    writer: str
    format: int = _FORMAT


class Publication(msgspec.Struct, frozen=True):
    """Registry record that lists objects of a version by their keys. Hashes are in `hashes`, other keys in `others`.

    In an entry under ``released/``, `away` names the nodes that did not answer when a sweep last told all nodes to
    release these objects. `away` is None if no sweep has finished that step.
    """

    hashes: tuple[bytes, ...]
    others: tuple[str, ...]
    format: int = _PUBLICATION_FORMAT
    away: tuple[str, ...] | None = None

    @classmethod
    def of(cls, keys: Iterable[str]) -> Publication:
        """Return the publication of the objects with these keys."""
        packed = [_packed(key) for key in keys]
        hashes = tuple(key for key in packed if isinstance(key, bytes))
        return cls(hashes, tuple(key for key in packed if isinstance(key, str)))

    @property
    def keys(self) -> list[str]:
        """Keys of the objects."""
        return [_HASH + digest.hex() for digest in self.hashes] + list(self.others)


class Holder(msgspec.Struct, frozen=True):
    """Registry record of the program that holds a version or a role."""

    who: str
    format: int = _FORMAT


@dataclass(frozen=True, slots=True)
class NameInfo:
    """One version of a name.

    Attributes
    ----------
    name : str
        The name.
    version : int
        Number of the version. Each publish and each unpublish adds one.
    published : bool
        False if this version unpublished the name.
    nbytes : int
        Bytes of the value, or of all tensors.
    objects : int
        Number of different objects of the version.
    tensors : bool
        True if the version consists of tensors.
    time : float
        Time of publication in seconds since 1970, by the writer's clock.
    writer : str
        Name of the writer that published the version, as shown to people.
    """

    name: str
    version: int
    published: bool
    nbytes: int
    objects: int
    tensors: bool
    time: float
    writer: str

    @classmethod
    def of(cls, name: str, record: NameRecord) -> NameInfo:
        """Convert a registry record to the public form."""
        return cls(
            *(name, record.version, bool(record.publication), record.nbytes, record.objects, record.tensors),
            *(record.time, record.writer),
        )


def checked_name(name: str) -> str:
    """Check a name; return it quoted for the registry's keys.

    Raises
    ------
    ConfigError
        The name is empty, has more than 200 bytes, or has characters that cannot be printed.
    TypeError
        The name is not a str.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, this one is a {type(name).__name__}: {name!r}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        nbytes = 0
    if not 1 <= nbytes <= _NAME_BYTES_MAX or not name.isprintable():
        raise ConfigError(
            f"the name {name!r} cannot be used: expected 1 to {_NAME_BYTES_MAX} bytes of printable text", setting="name"
        )
    return quote(name, safe="")


def name_of(quoted: str) -> str:
    """Return the name that `checked_name` has quoted as `quoted`."""
    return unquote(quoted)


def name_key(quoted: str) -> str:
    """Return the registry key of a name's current version."""
    return f"name/{quoted}"


def history_key(quoted: str, version: int) -> str:
    """Return the registry key of a version in the history of a name."""
    # With leading zeros the registry's order of keys is the order of versions.
    return f"history/{quoted}/{version:016}"


def publication_key(quoted: str, publication: str, part: int) -> str:
    """Return the registry key of a part of a publication."""
    return f"publication/{quoted}/{publication}/{part:06}"


def hold_key(quoted: str, publication: str, who: str) -> str:
    """Return the registry key of the entry with which `who` holds a publication."""
    return f"hold/{quoted}/{publication}/{who}"


def writer_key(quoted: str) -> str:
    """Return the registry key of the role of a name's writer."""
    return f"writer/{quoted}"


def encode(record: msgspec.Struct) -> bytes:
    """Encode a record as the value of a registry entry."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[_Record], key: str) -> _Record:
    """Decode the record in a registry entry; errors name the entry's `key`.

    Raises
    ------
    ConfigError
        The data is not a record of this kind, or a newer farpool wrote it.
    """
    try:
        # The format is decoded alone first, because the other fields of a later format may have other types.
        written = msgspec.msgpack.decode(data, type=prepared(_Format)).format
        known = _PUBLICATION_FORMAT if issubclass(kind, Publication) else _FORMAT
        if written > known:
            raise ConfigError(
                f"the registry's entry {key!r} has format {written}, this farpool reads format {known}",
                setting="registry",
            )
        return msgspec.msgpack.decode(data, type=prepared(kind))
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"the registry's entry {key!r} is not a record of farpool: {error}", setting="registry"
        ) from None


def _packed(key: str) -> str | bytes:
    digest = key.removeprefix(_HASH)
    try:
        packed = bytes.fromhex(digest)
    except ValueError:
        return key
    # A key is packed only if it can be restored exactly. A key with capital letters cannot be.
    return packed if _HASH + packed.hex() == key else key


class _Format(msgspec.Struct):
    format: int
