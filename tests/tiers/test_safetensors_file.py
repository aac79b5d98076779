import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from farpool.errors import ConfigError, TierError
from farpool.memory.tiers import Extent, HasPort, SafetensorsFile, Verified
from farpool.memory.tiers.safetensors_header import parse_header

WAIT = 30
ARRAYS = {
    "weight": np.arange(60, dtype=np.float32).reshape(3, 4, 5),
    "half": np.linspace(0, 1, 7).astype(np.float16),
    "flags": np.array([True, False, True]),
    "scalar": np.array(42, dtype=np.int64),
    "empty": np.zeros((0, 3), dtype=np.uint8),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(ARRAYS, path, metadata={"format": "np"})
    return path


def read(tier: SafetensorsFile, name: str) -> bytes:
    extent = tier.tensors[name].extent
    buffer = bytearray(extent.nbytes)
    tier.read_into(extent, memoryview(buffer))
    return bytes(buffer)


def test_every_tensor_is_read_as_it_was_saved(path: Path) -> None:
    with SafetensorsFile(path) as tier:
        assert set(tier.tensors) == set(ARRAYS)
        assert tier.metadata == {"format": "np"}
        for name, array in ARRAYS.items():
            assert tier.tensors[name].shape == array.shape
            assert read(tier, name) == array.tobytes()
        assert {name: entry.dtype for name, entry in tier.tensors.items()} == {
            "weight": "F32",
            "half": "F16",
            "flags": "BOOL",
            "scalar": "I64",
            "empty": "U8",
        }
        assert tier.reserved == sum(array.nbytes for array in ARRAYS.values())
        assert isinstance(tier, HasPort)


def test_info_names_the_file_before_it_is_opened(path: Path) -> None:
    tier = SafetensorsFile(path)
    assert tier.info.name == "model.safetensors"
    assert tier.info.capacity == path.stat().st_size
    assert SafetensorsFile(path.with_name("none"), "mine").info.capacity == 0


def test_it_is_read_only(path: Path) -> None:
    with SafetensorsFile(path) as tier:
        extent = tier.tensors["weight"].extent
        for change in (lambda: tier.reserve(10), lambda: tier.write_from(extent, memoryview(bytes(240)))):
            with pytest.raises(TierError, match="read-only"):
                change()
        with pytest.raises(ValueError, match="read-only"):
            tier.free(extent)
        with pytest.raises(ValueError, match="not the extent of a tensor"):
            tier.read_into(Extent(extent.offset + 4, 10), memoryview(bytearray(10)))
        with pytest.raises(ValueError, match="240"):
            tier.read_into(extent, memoryview(bytearray(10)))


@pytest.mark.parametrize("change", ["truncate", "overwrite", "append"])
def test_a_file_changed_after_opening_gives_a_typed_error(path: Path, change: str) -> None:
    with SafetensorsFile(path) as tier:
        if change == "truncate":
            os.truncate(path, path.stat().st_size - 300)
        elif change == "append":
            with open(path, "ab") as file:
                file.write(b"more")
        else:
            content = path.read_bytes()
            path.write_bytes(content[:-1] + b"\xff")
            os.utime(path, (1, 1))
        last = max(tier.tensors, key=lambda name: tier.tensors[name].extent.offset)
        with pytest.raises(TierError, match=r"truncated|changed") as caught:
            read(tier, last)
        assert caught.value.tier == "model.safetensors"


def test_a_file_renamed_over_is_read_as_it_was(path: Path, tmp_path: Path) -> None:
    with SafetensorsFile(path) as tier:
        other = tmp_path / "other"
        other.write_bytes(b"x")
        other.rename(path)
        assert read(tier, "weight") == ARRAYS["weight"].tobytes()


def test_it_can_be_reopened(path: Path) -> None:
    tier = SafetensorsFile(path)
    for _ in range(2):
        with tier:
            assert read(tier, "half") == ARRAYS["half"].tobytes()
        assert tier.tensors == {}
        with pytest.raises(TierError, match="not open"):
            tier.read_into(Extent(0, 1), memoryview(bytearray(1)))


def test_checksums_do_not_fit_a_file_that_was_never_written(path: Path) -> None:
    tier = SafetensorsFile(path)
    with Verified(tier) as verified, pytest.raises(TierError, match="never written"):
        verified.read_into(tier.tensors["half"].extent, memoryview(bytearray(14)))


@pytest.mark.parametrize("what", ["missing", "folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"cannot be read|is not a file"):
        SafetensorsFile(path).open()


def pack(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


DAMAGED = {
    "no bytes": (b"", "8 or more"),
    "seven bytes": (bytes(7), "8 or more"),
    "an enormous header": (b"\xff" * 8 + b"{}", "header would have"),
    "a header longer than the file": ((100).to_bytes(8, "little") + b"{}", "header would have 100 bytes"),
    "no json": (pack(b"{nonsense"), "does not parse"),
    "no utf-8": (pack(b'{"\xff": 1}'), "does not parse"),
    "deep nesting": (pack(b"[" * 100_000), "does not parse"),
    "not a number": (pack(b'{"a": NaN}'), "NaN is no JSON"),
    "a list": (pack([]), "no JSON object"),
    "a name twice": (pack(b'{"a": 1, "a": 1}'), "'a' appears twice"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "__metadata__"),
    "an entry that is a number": (pack({"a": 1}), "tensor 'a': expected dtype"),
    "a field too many": (pack({"a": entry() | {"more": 1}}, bytes(4)), "tensor 'a': expected dtype"),
    "an unknown dtype": (pack({"a": entry(dtype="F128")}, bytes(4)), "tensor 'a': unknown dtype 'F128'"),
    "a dtype that is a number": (pack({"a": entry(dtype=3)}, bytes(4)), "tensor 'a': unknown dtype 3"),
    "a negative dimension": (pack({"a": entry(shape=[-4])}, bytes(4)), "tensor 'a': shape"),
    "a dimension that is true": (pack({"a": entry(shape=[True])}, bytes(4)), "tensor 'a': shape"),
    "a fractional dimension": (pack({"a": entry(shape=[4.0])}, bytes(4)), "tensor 'a': shape"),
    "offsets backwards": (pack({"a": entry(offsets=[4, 0])}, bytes(4)), "tensor 'a': data_offsets"),
    "three offsets": (pack({"a": entry(offsets=[0, 4, 8])}, bytes(4)), "tensor 'a': data_offsets"),
    "a size that does not match": (pack({"a": entry(shape=[5])}, bytes(4)), "tensor 'a': U8 of shape"),
    "an enormous shape": (pack({"a": entry(shape=[2**40] * 100)}, bytes(4)), "tensor 'a': U8 of shape"),
    "an end outside of the file": (pack({"a": entry()}, bytes(3)), "tensor 'a' ends at byte .* truncated"),
    "an overlap": (pack({"a": entry(), "b": entry(offsets=[2, 6])}, bytes(6)), "tensor 'b' .* overlaps"),
    "a gap": (pack({"a": entry(), "b": entry(offsets=[5, 9])}, bytes(9)), "tensor 'b' .* gap"),
    "bytes after the last tensor": (pack({"a": entry()}, bytes(5)), "tensors end at byte"),
}


@pytest.mark.parametrize(("content", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    tier = SafetensorsFile(path)
    with pytest.raises(ConfigError, match=message) as caught:
        tier.open()
    assert "damaged" in str(caught.value)
    assert tier.tensors == {}


def test_dtypes_smaller_than_a_byte_are_counted_in_bits() -> None:
    text = json.dumps({"a": entry("F4", [3, 2], [0, 3])}).encode()
    assert parse_header(text, 8 + len(text) + 3, "file").tensors["a"].extent == Extent(8 + len(text), 3)


@given(st.integers(0, 10_000), st.integers(1, 255), st.integers(0, 10_000))
def test_a_flipped_or_cut_header_is_accepted_or_a_config_error(position: int, value: int, length: int) -> None:
    header = {"a": entry(), "b": entry("F32", [2, 3], [4, 28])}
    text = bytearray(json.dumps(header).encode())
    nbytes = 8 + len(text) + 28
    text[position % len(text)] ^= value
    for data in (bytes(text), bytes(text[: length % len(text)])):
        try:
            parsed = parse_header(data, nbytes, "file")
        except ConfigError:
            continue
        for item in parsed.tensors.values():
            assert 8 <= item.extent.offset <= item.extent.offset + item.extent.nbytes <= nbytes
