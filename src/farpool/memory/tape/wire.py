"""Records as MessagePack: short arrays that begin with their kind. See docs/tape-file.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from farpool.decoding import prepared
from farpool.memory.pager import Mode
from farpool.memory.tape.records import TICK, Access, Content, Create, Free, Metadata, Record, Run

__all__ = ["Decoder", "Encoder", "Totals"]

Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Text(msgspec.Struct, array_like=True, tag=0, frozen=True):
    text: str


class _Create(msgspec.Struct, array_like=True, tag=1, frozen=True):
    first: Natural
    count: Positive
    block_bytes: Natural
    last_bytes: Natural
    cls: Natural
    name: Natural
    content: Content
    label: Natural


class _Free(msgspec.Struct, array_like=True, tag=2, frozen=True):
    first: Natural
    count: Positive


class _Access(msgspec.Struct, array_like=True, tag=3, frozen=True):
    thread: Natural
    op: Natural
    think: Natural
    stall: Natural
    compute: Natural
    runs: tuple[int, ...]


class Totals(msgspec.Struct, frozen=True):
    """Number of records and number of accesses in a file. The file's last chunk contains both."""

    records: Natural
    accesses: Natural


_PER_RUN = 4
_DIGITS = 7


class Encoder:
    """Turns records into payloads. It writes each text into the file once, and then refers to it by number."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = {cls: index for index, cls in enumerate(classes)}
        self._texts: dict[str, int] = {}
        self._encoder = msgspec.msgpack.Encoder()
        self.totals = Totals(0, 0)

    def map(self, fields: Metadata | Totals) -> bytes:
        """Encode metadata or totals as a payload."""
        return self._encoder.encode(fields)

    def records(self, records: Sequence[Record]) -> bytes:
        """Encode records as a payload."""
        rows: list[_Text | _Create | _Free | _Access] = []
        accesses = 0
        for record in records:
            if isinstance(record, Access):
                accesses += 1
                op = self._text(record.op, rows)
                think, stall, compute = _ticks(record.think), _ticks(record.stall), _ticks(record.compute)
                flat: list[int] = []
                for run in record.runs:
                    flat += (run.first, run.count, run.mode, run.table)
                rows.append(_Access(record.thread, op, think, stall, compute, tuple(flat)))
            elif isinstance(record, Create):
                cls, name = self._classes[record.cls], self._text(record.name, rows)
                sizes = record.block_bytes, record.last_bytes
                rows.append(_Create(record.first, record.count, *sizes, cls, name, record.content, record.label))
            else:
                rows.append(_Free(record.first, record.count))
        self.totals = Totals(self.totals.records + len(records), self.totals.accesses + accesses)
        return self._encoder.encode(rows)

    def _text(self, text: str, rows: list[_Text | _Create | _Free | _Access]) -> int:
        number = self._texts.get(text)
        if number is None:
            number = self._texts[text] = len(self._texts)
            rows.append(_Text(text))
        return number


class Decoder:
    """Turns payloads into records. It remembers all texts so far, because later records refer to them by number.

    Its methods raise `ValueError` for a payload that they cannot decode. msgspec's own errors are `ValueError`, too.
    """

    def __init__(self) -> None:
        self._rows = msgspec.msgpack.Decoder(prepared(list[_Text | _Create | _Free | _Access]))
        self._classes: tuple[str, ...] = ()
        self._texts: list[str] = []
        self.totals = Totals(0, 0)

    def metadata(self, payload: bytes) -> Metadata:
        """Decode the metadata, which the first chunk holds."""
        metadata = msgspec.msgpack.decode(payload, type=prepared(Metadata))
        self._classes = metadata.classes
        return metadata

    def check_totals(self, payload: bytes) -> None:
        """Raise `ValueError` unless the totals in the last chunk match the records that were read."""
        written = msgspec.msgpack.decode(payload, type=prepared(Totals))
        if written != self.totals:
            raise ValueError(f"{self.totals} read, {written} written")

    def records(self, payload: bytes) -> list[Record]:
        """Decode all records of a payload; raise `ValueError` if one of them cannot be decoded."""
        records: list[Record] = []
        accesses = 0
        for row in self._rows.decode(payload):
            if isinstance(row, _Access):
                accesses += 1
                records.append(self._access(row))
            elif isinstance(row, _Text):
                self._texts.append(row.text)
            elif isinstance(row, _Free):
                records.append(Free(row.first, row.count))
            else:
                cls, name = _entry(self._classes, row.cls, "class"), _entry(self._texts, row.name, "text")
                records.append(
                    Create(row.first, row.count, row.block_bytes, row.last_bytes, cls, name, row.content, row.label)
                )
        self.totals = Totals(self.totals.records + len(records), self.totals.accesses + accesses)
        return records

    def _access(self, row: _Access) -> Access:
        flat = row.runs
        if len(flat) % _PER_RUN:
            raise ValueError(f"{len(flat)} integers are no runs of {_PER_RUN}")
        runs = tuple(
            Run(first, count, Mode(mode), table)
            for first, count, mode, table in zip(*(flat[field::_PER_RUN] for field in range(_PER_RUN)), strict=True)
        )
        # A multiple of 1e-7 is not exact in binary; rounding gives the float nearest to the decimal number.
        think, stall, compute = (round(ticks * TICK, _DIGITS) for ticks in (row.think, row.stall, row.compute))
        return Access(row.thread, _entry(self._texts, row.op, "text"), runs, think, stall, compute)


def _ticks(seconds: float) -> int:
    return round(seconds / TICK)


def _entry(entries: Sequence[str], index: int, what: str) -> str:
    if index >= len(entries):
        raise ValueError(f"{what} {index} of {len(entries)}")
    return entries[index]
