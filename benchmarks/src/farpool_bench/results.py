"""Result files of benchmarks: what was measured, where and when, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from farpool.errors import ConfigError
from farpool.observe.provenance import Provenance
from farpool_bench.benchmark import load
from farpool_bench.page import Section

__all__ = ["encode", "read"]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    benchmark: str
    provenance: Provenance
    result: msgspec.Raw


def encode(section: Section) -> str:
    """Encode a result as indented JSON."""
    parts = {"benchmark": section.name, "provenance": section.provenance, "result": section.outcome}
    return msgspec.json.format(msgspec.json.encode(parts)).decode()


def read(path: Path) -> Section:
    """Read a result file that ``farpool bench NAME --json`` wrote.

    Raises
    ------
    ConfigError
        The file cannot be read or is not a result file of this version.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_File)
        benchmark = load(file.benchmark)
        outcome: Any = msgspec.json.decode(file.result, type=benchmark.Outcome)
    except OSError as error:
        raise ConfigError(f"result {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"result {path} is not what 'farpool bench NAME --json' writes in this version: {error}; run it again"
        ) from error
    return Section(file.benchmark, benchmark, outcome, file.provenance)
