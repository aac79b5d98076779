"""Records that the registry has as JSON, so that people can read it."""

from __future__ import annotations

from contextlib import suppress
from typing import TypeVar

import msgspec

from farpool.decoding import prepared
from farpool.errors import RegistryDamagedError

__all__ = ["decode_record", "encode_record"]

_Record = TypeVar("_Record", bound=msgspec.Struct)


class _Format(msgspec.Struct):
    format: int = 0


def encode_record(record: msgspec.Struct) -> bytes:
    """Encode a record as the value of an entry."""
    return msgspec.json.encode(record)


def decode_record(
    key: str, value: bytes, kind: type[_Record], *, known: int, advice: str, any_format: bool = False
) -> _Record:
    """Decode an entry's record.

    Parameters
    ----------
    key : str
        The entry's key.
    value : bytes
        Its value.
    kind : type
        The kind of its record, which has its format in the field `format`.
    known : int
        The latest format that this release can read.
    advice : str
        What a person does about an entry that cannot be read.
    any_format : bool
        True to read also a record in a later format, as far as this release can.

    Raises
    ------
    RegistryDamagedError
        The value is not such a record, or a later release of farpool wrote it in a format that this one cannot read.
    """
    try:
        record = msgspec.json.decode(value, type=prepared(kind))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        # The fields of a later format may have other types, which is no damage.
        with suppress(msgspec.DecodeError, ValueError, RecursionError):
            _check_format(key, msgspec.json.decode(value, type=prepared(_Format)), known)
        raise RegistryDamagedError(
            f"the registry's entry {key!r} is not a {kind.__name__}: {error}; {advice}", key=key
        ) from error
    if not any_format:
        _check_format(key, record, known)
    return record


def _check_format(key: str, record: msgspec.Struct, known: int) -> None:
    version: int = getattr(record, "format", 0)
    if version > known:
        raise RegistryDamagedError(
            f"the registry's entry {key!r} has format {version}, expected at most {known}; a later release of farpool "
            "has written it, so update this program",
            key=key,
        )
