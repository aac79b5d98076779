"""Reads a tape file, chunk by chunk."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from farpool.errors import TapeFileError, TapeTruncatedError
from farpool.memory.tape.layout import (
    CHUNK_BYTES,
    DATA,
    DONE,
    HEADER_BYTES,
    META,
    ChunkHeader,
    check_header,
    decompress,
)
from farpool.memory.tape.records import Metadata, Record
from farpool.memory.tape.wire import Decoder

__all__ = ["TapeFile"]


class TapeFile:
    """A tape file that can be read. Each iteration over it yields all its records in the order of the program.

    If the writer did not finish the file, the iteration raises `TapeTruncatedError` after the records of the last whole
    chunk. If a chunk is damaged, the iteration raises `TapeFileError` after the records of the chunks before it.

    Parameters
    ----------
    path : path

    Raises
    ------
    TapeFileError
        There is no such file, it is not a tape file, or it has a newer version.
    TapeTruncatedError
        The file ends before the end of its first chunk.

    Attributes
    ----------
    path : Path
    metadata : Metadata
        Origin of the tape.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with self._open() as file:
            self.metadata = self._begin(file, Decoder())

    def __iter__(self) -> Iterator[Record]:
        decoder = Decoder()
        with self._open() as file:
            self._begin(file, decoder)
            number = 1
            while True:
                offset = file.tell()
                kind, payload = self._chunk(file, number)
                try:
                    if kind == DONE:
                        decoder.check_totals(payload)
                        break
                    if kind != DATA:
                        raise ValueError(f"unknown kind {kind!r}")
                    records = decoder.records(payload)
                except ValueError as error:
                    raise self._damaged(number, offset, str(error)) from None
                # A chunk is decoded as a whole before its first record is delivered, so a damaged chunk delivers none.
                yield from records
                number += 1
            if file.read(1):
                raise self._damaged(number, offset, "bytes follow the last chunk")

    def _open(self) -> BinaryIO:
        try:
            return open(self.path, "rb")
        except OSError as error:
            raise TapeFileError(f"{self.path}: cannot read it: {error.strerror}") from error

    def _begin(self, file: BinaryIO, decoder: Decoder) -> Metadata:
        check_header(file.read(HEADER_BYTES), str(self.path))
        kind, payload = self._chunk(file, 0)
        try:
            if kind != META:
                raise ValueError(f"unknown kind {kind!r}")
            return decoder.metadata(payload)
        except ValueError as error:
            raise self._damaged(0, HEADER_BYTES, str(error)) from None

    def _chunk(self, file: BinaryIO, number: int) -> tuple[bytes, bytes]:
        """Read the kind and the payload of the next chunk."""
        offset = file.tell()
        fields = file.read(CHUNK_BYTES)
        header = ChunkHeader.unpack(fields) if len(fields) == CHUNK_BYTES else None
        # A damaged length may reach beyond the end of the file, and must not make us allocate memory for it.
        rest = os.fstat(file.fileno()).st_size - file.tell()
        if header is None or header.stored > rest:
            raise TapeTruncatedError(
                f"the tape file {self.path} ends before the end of chunk {number}, which begins at byte {offset}: its "
                "recording was not closed; the chunks before it are good"
            )
        stored = file.read(header.stored)
        if not header.verified(stored):
            raise self._damaged(number, offset, "its checksum is wrong")
        if header.number != number:
            raise self._damaged(number, offset, f"it has the number {header.number}")
        try:
            return header.kind, decompress(header, stored)
        except ValueError as error:
            raise self._damaged(number, offset, str(error)) from None

    def _damaged(self, number: int, offset: int, why: str) -> TapeFileError:
        return TapeFileError(
            f"chunk {number} of the tape file {self.path}, at byte {offset}, is damaged: {why}; the chunks before it "
            "are good"
        )
