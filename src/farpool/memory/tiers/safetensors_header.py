"""Parser of the header of safetensors files, with strict checks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from farpool.abc.tier import Extent
from farpool.errors import ConfigError

__all__ = ["HEADER_BYTES_MAX", "SafetensorsHeader", "TensorEntry", "parse_header"]

HEADER_BYTES_MAX = 100_000_000  # the format's own limit

_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Entry of one tensor in a safetensors file.

    Attributes
    ----------
    dtype : str
        Element type as the format names it, for example ``BF16``.
    shape : tuple of int
        The tensor's dimensions; empty for a scalar.
    extent : Extent
        Position of the tensor's bytes, counted from the beginning of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    extent: Extent


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The parsed header of a safetensors file.

    Attributes
    ----------
    tensors : mapping of str to TensorEntry
        Entries by the names of the tensors, in the order of the header.
    metadata : mapping of str to str
        The ``__metadata__`` entry, empty if there is none.
    """

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def parse_header(data: bytes, file_bytes: int, path: str) -> SafetensorsHeader:
    """Parse and check a header.

    Parameters
    ----------
    data : bytes
        The JSON text, without the eight bytes before it that give its length.
    file_bytes : int
        Size of the whole file.
    path : str
        Path of the file, for errors.

    Raises
    ------
    ConfigError
        The header does not follow the format: it is not JSON, a dtype is unknown, a size does not match dtype and
        shape, bytes are outside of the file, or tensors overlap or have gaps between them. The message names the
        tensor.
    """
    try:
        header = json.loads(data.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no safetensors file: its header does not parse: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is no JSON object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ConfigError(f"{path}: __metadata__ is not a map of strings")
    data_begin = 8 + len(data)
    tensors = {name: _entry(path, name, fields, data_begin) for name, fields in header.items()}
    _require_whole_file(path, tensors, data_begin, file_bytes)
    return SafetensorsHeader(MappingProxyType(tensors), MappingProxyType(metadata))


def _entry(path: str, name: str, fields: object, data_begin: int) -> TensorEntry:
    where = f"{path}: tensor {name!r}"
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ConfigError(f"{where}: expected dtype, shape and data_offsets, got {_short(fields)}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    bits = _BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise ConfigError(f"{where}: unknown dtype {_short(dtype)}, expected one of {', '.join(_BITS)}")
    if not _sizes(shape):
        raise ConfigError(f"{where}: shape {_short(shape)} is not a list of whole numbers from 0")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ConfigError(f"{where}: data_offsets {_short(offsets)} is not a begin and an end")
    begin, end = offsets
    if math.prod(shape) * bits != (end - begin) * 8:
        raise ConfigError(
            f"{where}: {dtype} of shape {_short(shape)} does not have the {end - begin} bytes of its data_offsets"
        )
    return TensorEntry(dtype, tuple(shape), Extent(data_begin + begin, end - begin))


def _require_whole_file(path: str, tensors: Mapping[str, TensorEntry], data_begin: int, file_bytes: int) -> None:
    at = data_begin
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].extent.offset, item[1].extent.nbytes)):
        extent = entry.extent
        if extent.offset + extent.nbytes > file_bytes:
            raise ConfigError(
                f"{path}: tensor {name!r} ends at byte {extent.offset + extent.nbytes} but the file has {file_bytes} "
                "bytes: it is truncated"
            )
        if extent.offset != at:
            problem = "overlaps the tensor before it" if extent.offset < at else "leaves a gap before it"
            raise ConfigError(f"{path}: tensor {name!r} begins at byte {extent.offset}, expected {at}: it {problem}")
        at += extent.nbytes
    if at != file_bytes:
        raise ConfigError(f"{path} has {file_bytes} bytes but its tensors end at byte {at}")


def _sizes(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice")
    return result


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is no JSON")
