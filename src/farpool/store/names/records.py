"""What names keep in the registry, and under which keys. NAME is a name with every special character as ``%XX``.

================================== ==============================================================================
``name/NAME``                      the version that counts now, or that the name was unpublished
``history/NAME/VERSION``           what was published (or unpublished), the last hundred
``publication/NAME/ID/PART``       which objects a version holds, 10,000 in a part; there before the name moves
``released/NAME/ID/PART``          the same, of a version that was let go while a node was away
``hold/NAME/ID/WHO``               why a version that is not the current one has to stay: its writer is at work, it is
                                   the previous one, or somebody reads it; bound to a lease of whoever that is
``writer/NAME``                    who may move the name; bound to the writer's lease
``sweeper``                        who lets go of what nobody holds; bound to a lease
================================== ==============================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote, unquote

import msgspec

from farpool.errors import ConfigError

__all__ = [
    "HISTORY_KEPT",
    "PART",
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

HISTORY_KEPT = 100
"""Versions that a name's history goes back."""
PART = 10_000
"""Objects in one part of a publication."""
SWEEPER = "sweeper"
LONGEST_NAME = 200
_HASH = "sha256-"
_FORMAT = 1
_Record = TypeVar("_Record", bound=msgspec.Struct)


class NameRecord(msgspec.Struct, frozen=True):
    """What was published under a name in one version; `publication` is empty where it was unpublished."""

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
    """The objects of (a part of) a version: those whose keys are hashes, and others."""

    hashes: tuple[bytes, ...]
    others: tuple[str, ...]
    format: int = _FORMAT

    @classmethod
    def of(cls, keys: Iterable[str]) -> Publication:
        """The publication of these objects."""
        packed = [_packed(key) for key in keys]
        hashes = tuple(key for key in packed if isinstance(key, bytes))
        return cls(hashes, tuple(key for key in packed if isinstance(key, str)))

    @property
    def keys(self) -> list[str]:
        """The keys of its objects."""
        return [_HASH + digest.hex() for digest in self.hashes] + list(self.others)


class Holder(msgspec.Struct, frozen=True):
    """Who holds something."""

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
        Counts up by one with each publish and each unpublish.
    published : bool
        False if this version says that the name was unpublished.
    nbytes : int
        Bytes of the value, or of all tensors.
    objects : int
        Number of different objects that it holds.
    tensors : bool
        It consists of tensors.
    time : float
        When it was published, in seconds since 1970, by the writer's clock.
    writer : str
        Who published it.
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
        """A record for people."""
        return cls(
            *(name, record.version, bool(record.publication), record.nbytes, record.objects, record.tensors),
            *(record.time, record.writer),
        )


def checked_name(name: str) -> str:
    """A name as it stands in the registry's keys.

    Raises
    ------
    ConfigError
        It has no bytes, more than 200, or characters that nobody can print.
    TypeError
        It is no text.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is a str, this one is a {type(name).__name__}: {name!r}")
    try:
        nbytes = len(name.encode())
    except UnicodeEncodeError:
        nbytes = 0
    if not 1 <= nbytes <= LONGEST_NAME or not name.isprintable():
        raise ConfigError(
            f"the name {name!r} is not one: expected 1 to {LONGEST_NAME} bytes of printable text", setting="name"
        )
    return quote(name, safe="")


def name_of(quoted: str) -> str:
    """The name that `checked_name` has quoted."""
    return unquote(quoted)


def name_key(quoted: str) -> str:
    """Key of a name's current version."""
    return f"name/{quoted}"


def history_key(quoted: str, version: int) -> str:
    """Key of a version's place in the history."""
    return f"history/{quoted}/{version:016}"


def publication_key(quoted: str, publication: str, part: int) -> str:
    """Key of a part of a publication."""
    return f"publication/{quoted}/{publication}/{part:06}"


def hold_key(quoted: str, publication: str, who: str) -> str:
    """Key of a reason to keep a publication."""
    return f"hold/{quoted}/{publication}/{who}"


def writer_key(quoted: str) -> str:
    """Key of a name's writer."""
    return f"writer/{quoted}"


def encode(record: msgspec.Struct) -> bytes:
    """A record as a registry's value."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[_Record], key: str) -> _Record:
    """Read a record; `key` is named in the error.

    Raises
    ------
    ConfigError
        The entry is no such record, or one of a newer farpool.
    """
    try:
        written = msgspec.msgpack.decode(data, type=_Format).format
        if written > _FORMAT:
            raise ConfigError(
                f"the registry's entry {key!r} has format {written}, this farpool reads format {_FORMAT}",
                setting="registry",
            )
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ConfigError(
            f"the registry's entry {key!r} is not one of farpool's: {error}", setting="registry"
        ) from None


def _packed(key: str) -> str | bytes:
    digest = key.removeprefix(_HASH)
    try:
        packed = bytes.fromhex(digest)
    except ValueError:
        return key
    return packed if _HASH + packed.hex() == key else key


class _Format(msgspec.Struct):
    format: int
