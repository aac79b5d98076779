"""What is written is read; what is damaged, cut off or newer is refused by name."""

from __future__ import annotations

import os
import resource
import signal
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool._native import crc32c
from farpool.errors import FarpoolError, TapeFileError, TapeTruncatedError
from farpool.memory.pager import Mode
from farpool.memory.pager.storage import Cut
from farpool.memory.tape import Access, Content, Create, Free, Metadata, Record, Run, TapeFile, TapeWriter
from farpool.memory.tape.layout import DATA, HEADER_BYTES, META, pack_chunk, pack_header
from farpool.memory.tape.records import TICK
from farpool.memory.tape.wire import Encoder
from farpool.memory.tiers import TierInfo

METADATA = Metadata(
    farpool="1.2.3",
    date="2026-01-02T03:04:05+00:00",
    device="cpu",
    budget=1 << 20,
    cut=Cut(65536, 65536, 8192, 512),
    tiers=(TierInfo("dram", "dram", 1 << 30, 64), TierInfo("nvme", "nvme", 1 << 40, 4096, 1e-4, 3e9, 2e9)),
    classes=("weights", "bytes"),
)
RECORDS: list[Record] = [
    Create(0, 3, 4096, 100, "weights", "layer.weight", Content.POOL, 7),
    Access(0, "aten.mm", (Run(0, 3, Mode.READ),), 0.25, 0.0, 1e-7),
    Access(1, "aten.mm", (Run(1, 1, Mode.WRITE), Run(0, 1, Mode.OVERWRITE, 0)), 0.0, 3.5, 2e-7),
    Free(0, 3),
]


def write(path: Path, *chunks: list[Record]) -> bytes:
    writer = TapeWriter(path, METADATA)
    for chunk in chunks:
        writer.write(chunk)
    writer.finish()
    writer.close()
    return path.read_bytes()


def read(path: Path) -> tuple[list[Record], TapeFileError | None]:
    """The records that can be read, and what ended it."""
    records: list[Record] = []
    try:
        for record in TapeFile(path):
            records.append(record)
    except TapeFileError as error:
        return records, error
    return records, None


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "program.tape"


naturals = st.integers(0, 2**62)
texts = st.text(max_size=8)
seconds = st.integers(0, 10**12).map(lambda ticks: round(ticks * TICK, 7))
creates = st.builds(
    Create, naturals, st.integers(1, 2**40), naturals, naturals, st.sampled_from(METADATA.classes), texts,
    st.sampled_from(Content), naturals,
)  # fmt: skip
runs = st.builds(Run, naturals, st.integers(1, 2**40), st.sampled_from(Mode), st.integers(-1, 2**62))
accesses = st.builds(Access, naturals, texts, st.lists(runs, max_size=4).map(tuple), seconds, seconds, seconds)
records = st.lists(st.one_of(creates, accesses, st.builds(Free, naturals, st.integers(1, 2**40))), max_size=12)


@given(st.lists(records, max_size=4))
def test_every_record_comes_back_as_it_was(chunks: list[list[Record]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program.tape")
        write(path, *chunks)
        tape = TapeFile(path)
        assert tape.metadata == METADATA
        assert list(tape) == [record for chunk in chunks for record in chunk]
        assert list(tape) == list(tape)


def test_a_file_cut_off_anywhere_is_read_up_to_its_last_whole_chunk(path: Path) -> None:
    whole = write(path, RECORDS, RECORDS)
    counts = []
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found, error = read(path)
        assert found == (RECORDS * 2)[: len(found)]
        assert isinstance(error, TapeFileError), length
        assert isinstance(error, TapeTruncatedError) == (length >= HEADER_BYTES), length
        counts.append(len(found))
    assert counts == sorted(counts)
    assert set(counts) == {0, len(RECORDS), 2 * len(RECORDS)}


def test_a_flipped_byte_anywhere_is_found_and_what_lies_before_it_is_read(path: Path) -> None:
    whole = write(path, RECORDS, RECORDS)
    second = whole.index(DATA, whole.index(DATA) + 1)
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
        found, error = read(path)
        assert error is not None, position
        assert found == (RECORDS * 2)[: len(found)]
        if position >= second:
            assert len(found) >= len(RECORDS)


def test_a_damaged_chunk_is_named_with_its_place(path: Path) -> None:
    whole = bytearray(write(path, RECORDS, RECORDS))
    second = whole.index(DATA, whole.index(DATA) + 1)
    whole[second + 30] ^= 1
    path.write_bytes(whole)
    with pytest.raises(TapeFileError, match=f"chunk 2 of the tape file .*program.tape, at byte {second}, is damaged"):
        list(TapeFile(path))


def test_chunks_in_another_order_are_refused(path: Path) -> None:
    whole = write(path, RECORDS, [])
    first = whole.index(DATA)
    second = whole.index(DATA, first + 1)
    third = whole.index(b"DONE")
    path.write_bytes(whole[:first] + whole[second:third] + whole[first:second] + whole[third:])
    with pytest.raises(TapeFileError, match=r"chunk 1 .* it has the number 2"):
        list(TapeFile(path))


def test_bytes_behind_the_end_are_refused(path: Path) -> None:
    path.write_bytes(write(path, RECORDS) + b"x")
    with pytest.raises(TapeFileError, match="bytes follow the last chunk"):
        list(TapeFile(path))


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"\x91\x93\x02\x00", "is damaged"),
        (b"\x91\x93\x02\x00\xff", "is damaged"),
        (b"\x91\x97\x03\x00\x05\x00\x00\x00\x90", "text 5 of 0"),
        (b"\x92\x92\x00\xa1x\x97\x03\x00\x00\x00\x00\x00\x93\x00\x01\x00", "3 integers are no runs"),
        (b"\x92\x92\x00\xa1x\x97\x03\x00\x00\x00\x00\x00\x94\x00\x01\x09\xff", "9 is not a valid Mode"),
        (b"\x92\x92\x00\xa1x\x99\x01\x00\x01\x08\x08\x09\x00\x00\x00", "class 9 of 2"),
    ],
)
def test_a_record_that_cannot_be_one_is_refused_whatever_its_checksum(path: Path, payload: bytes, why: str) -> None:
    meta = pack_chunk(META, 0, Encoder(METADATA.classes).map(METADATA))
    path.write_bytes(pack_header() + meta + pack_chunk(DATA, 1, payload))
    with pytest.raises(TapeFileError, match=why):
        list(TapeFile(path))


def test_a_chunk_that_claims_to_be_huge_takes_no_memory(path: Path) -> None:
    whole = write(path, RECORDS)
    first = whole.index(DATA)
    fields = struct.pack("<4sIII", DATA, 1, 4, 2**32 - 1)
    checksum = struct.pack("<I", crc32c(b"abcd", crc32c(fields)))
    path.write_bytes(whole[:first] + fields + checksum + b"abcd")
    with pytest.raises(TapeFileError, match="4294967295 bytes, at most"):
        list(TapeFile(path))


def with_header(whole: bytes, version: int, features: int) -> bytes:
    fields = struct.pack("<8sIIQI", b"FARTAPE\0", version, 32, features, 0)
    return fields + struct.pack("<I", crc32c(fields)) + whole[HEADER_BYTES:]


def test_a_newer_version_is_refused_by_its_number(path: Path) -> None:
    path.write_bytes(with_header(write(path, RECORDS), 2, 0))
    with pytest.raises(TapeFileError, match=r"tape file of version 2, this farpool reads up to version 1; upgrade"):
        TapeFile(path)


def test_unknown_features_are_refused(path: Path) -> None:
    path.write_bytes(with_header(write(path, RECORDS), 1, 4))
    with pytest.raises(TapeFileError, match="feature bits 0x4"):
        TapeFile(path)


def test_another_file_is_refused_and_not_overwritten(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(TapeFileError, match="not a tape file"):
        TapeFile(path)
    with pytest.raises(TapeFileError, match="it was not touched, choose another path"):
        TapeWriter(path, METADATA)
    assert path.read_bytes() == b"precious"


@pytest.mark.parametrize("special", ["/dev/null", "/dev/full"])
def test_a_device_is_refused(special: str) -> None:
    with pytest.raises(TapeFileError, match="not touched"):
        TapeWriter(special, METADATA)


def test_a_file_that_is_not_there_is_an_os_error_and_a_farpool_error(path: Path) -> None:
    with pytest.raises(TapeFileError, match="No such file") as caught:
        TapeFile(path)
    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, FarpoolError)
    with pytest.raises(TapeFileError, match="No such file"):
        TapeWriter(path / "below", METADATA)


def test_an_older_tape_is_overwritten_but_not_one_that_is_being_written(path: Path) -> None:
    write(path, RECORDS)
    writer = TapeWriter(path, METADATA)
    with pytest.raises(TapeFileError, match="another recording is under way"):
        TapeWriter(path, METADATA)
    writer.finish()
    writer.close()
    assert list(TapeFile(path)) == []


@contextmanager
def files_no_larger_than(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_whole_chunks_only(path: Path) -> None:
    size = len(write(path, RECORDS))
    writer = TapeWriter(path, METADATA)
    writer.write(RECORDS)
    before = os.path.getsize(path)
    assert before < size + 10
    with files_no_larger_than(size + 10), pytest.raises(OSError, match="File too large"):
        writer.write([Create(i, 1, i * 7919, 1, "bytes", str(i * i), Content.NONE, i) for i in range(200)])
    writer.close()
    assert os.path.getsize(path) == before
    found, error = read(path)
    assert found == RECORDS
    assert isinstance(error, TapeTruncatedError)


def test_no_file_is_left_where_none_could_be_begun(path: Path) -> None:
    with files_no_larger_than(10), pytest.raises(TapeFileError, match="cannot write it: File too large"):
        TapeWriter(path, METADATA)
    assert not path.exists()


def test_a_file_that_could_not_be_begun_is_deleted_while_it_is_locked(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[TapeWriter] = []
    close = os.close

    def another_begins(fd: int) -> None:
        monkeypatch.setattr(os, "close", close)
        close(fd)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        others.append(TapeWriter(path, METADATA))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with files_no_larger_than(10):
        monkeypatch.setattr(os, "close", another_begins)
        with pytest.raises(TapeFileError, match="cannot write it: File too large"):
            TapeWriter(path, METADATA)
    (other,) = others
    other.finish()
    other.close()
    assert read(path) == ([], None)
