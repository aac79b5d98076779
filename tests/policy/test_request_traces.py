"""Trace files: both formats, and what is said where a file is neither."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from farpool._native import CacheSimulation, RequestTrace
from farpool.errors import ConfigError
from farpool_bench import request_traces


def misses(trace: RequestTrace, policy: str = "belady", capacity: int = 20) -> int:
    cache = CacheSimulation(policy, capacity)
    cache.run(trace, 0, len(trace))
    return cache.misses


def records(*requests: tuple[int, int, int]) -> bytes:
    return b"".join(struct.pack("<IQIq", time, *request) for time, request in enumerate(requests))


def test_oracle_general_is_read_with_its_next_uses(tmp_path: Path) -> None:
    path = tmp_path / "trace.oracleGeneral.bin"
    path.write_bytes(records((7, 10, 2), (2**64 - 1, 10, -1), (7, 10, -1), (8, 0, -1)))
    trace = request_traces.read(path)
    assert (len(trace), trace.objects(), trace.footprint(), trace.left_out) == (3, 2, 20, 1)
    assert misses(trace) == 2


def test_next_uses_are_found_where_the_file_has_none(tmp_path: Path) -> None:
    ids = [1, 2, 3, 1, 2, 4, 1, 2, 3]
    path = tmp_path / "trace.bin"
    path.write_bytes(records(*((number, 10, -2) for number in ids)))
    text = tmp_path / "trace.csv"
    text.write_text("".join(f"{time},{number},10\n" for time, number in enumerate(ids)))
    for trace in (request_traces.read(path), request_traces.read(text)):
        assert (misses(trace), misses(trace, "lru")) == (7, 9)


@pytest.mark.parametrize(
    "text",
    [
        "0,7,10\n1,8,20\n",
        "0,7,10\r\n1,8,20",
        "0.5, 7, 10\n 1.5, 8, 20\n",
        "time,object,size\n0,7,10\n1,8,20\n",
        "Size,Obj_ID\n10,7\n20,8\n",
        "op,key,nbytes,tenant\nget,7,10,a\nset,8,20,b\n",
    ],
)
def test_csv_is_read_with_and_without_a_header(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.CSV"
    path.write_bytes(text.encode())
    trace = request_traces.read(path)
    assert (len(trace), trace.footprint()) == (2, 30)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.csv", b"0,7,10\n1,8\n", "line 2: it has 2 fields, expected 3"),
        ("a.csv", b"0,7,10\n1,8,big\n", "line 2: the size is 'big'"),
        ("a.csv", b"0,7,10\n1,8,-3\n", "line 2: the size is '-3'"),
        ("a.csv", b"0,7,10\n1,x8,3\n", "line 2: the object is 'x8'"),
        ("a.csv", b"0,7,10\n1,18446744073709551616,3\n", "line 2: the object is '18446744073709551616'"),
        ("a.csv", b"0,7,10\n\n1,8,3\n", "line 2: it has 1 fields"),
        ("a.csv", b"time,object\n0,7\n", "line 1: the header names no column 'size'"),
        ("a.csv", b"id,key,size\n1,2,3\n", "line 1: the header names object twice"),
        ("a.csv", b"time,object,size\n", "holds no requests"),
        ("a.csv", b"", "is empty"),
        ("a.bin", b"x" * 25, "25 bytes, which is no multiple"),
        ("a.bin", records((1, 1, -1), (1, 1, -7)), "record 2: its next use is -7"),
        ("a.bin.zst", b"\x28\xb5\x2f\xfd" + b"x" * 20, "zstd -d"),
        ("a.bin.gz", b"\x1f\x8b\x08" + b"x" * 21, "gzip -d"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        request_traces.read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read: No such file"):
        request_traces.read(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        request_traces.read(tmp_path)


def test_a_trace_needs_a_size_for_each_request_and_a_pattern_that_is_known() -> None:
    with pytest.raises(ValueError, match="2 objects and 1 sizes"):
        RequestTrace([1, 2], [3])
    with pytest.raises(ConfigError, match="'random' is not known; expected one of zipf"):
        request_traces.generate("random", 10)
