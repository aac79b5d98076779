"""Codecs of KV blocks: lossless to the bit, lossy within their bound, and safe on whatever is read back."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from farpool.errors import ConfigError
from farpool.kv import Group, Namespace
from farpool.kv.compressed import codec_for
from farpool.kv.compression import Codec, CodecError, decode, encode
from farpool.kv.quantization import GROUP, Axes

FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
AXES = Axes("slthd", (2, 2, 40, 3, 48))  # no whole number of groups, of tokens or of channels
REVIEW = settings(max_examples=60, deadline=None, derandomize=True)


def codec(name: str, dtype: str, axes: Axes | None = None) -> Codec:
    found = codec_for(name, dtype, axes)
    assert found is not None
    return found


def stored(codec: Codec, *parts: Any) -> bytes:
    return b"".join(encode(codec, parts))


def there_and_back(codec: Codec, payload: bytes) -> bytes:
    target = bytearray(len(payload))
    decode(codec, stored(codec, payload), [target])
    return bytes(target)


def bytes_of(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def like_kv(dtype: str, axes: Axes = AXES, seed: int = 0) -> torch.Tensor:
    """Gaussian elements whose channels differ in size, like the channels of keys, in the given order of axes."""
    generator = torch.Generator().manual_seed(seed)
    shape = [dict(zip(axes.order, axes.sizes, strict=True)).get(axis, 1) for axis in "slthd"]
    scales = torch.exp(2 * torch.randn(shape[-1], generator=generator))
    values = torch.randn(shape, generator=generator) * scales
    absent = [number for number, axis in enumerate("slthd") if axis not in axes.order]
    values = values.squeeze(absent)
    kept = [axis for axis in "slthd" if axis in axes.order]
    return values.permute([kept.index(axis) for axis in axes.order]).to(FLOATS[dtype]).contiguous()


@REVIEW
@given(st.sampled_from(["float64", "float32", "bfloat16", "fp8_e4m3"]), st.binary(max_size=400), st.data())
def test_zstd_restores_every_byte_of_any_payload_in_any_parts(dtype: str, payload: bytes, data: Any) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(payload)), max_size=3)))
    ends = [0, *cuts, len(payload)]
    parts = [payload[a:b] for a, b in itertools.pairwise(ends)]
    lossless = codec("zstd", dtype)
    kept = stored(lossless, *parts)
    targets = [bytearray(len(part)) for part in parts]
    decode(lossless, kept, targets)
    assert b"".join(targets) == payload
    assert len(kept) <= len(payload)
    assert kept == stored(lossless, payload)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_zstd_keeps_all_bit_patterns_of_sixteen_bits(dtype: str) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16).repeat(5).tobytes() + b"\x7f"
    lossless = codec("zstd", dtype)
    assert len(stored(lossless, patterns)) < len(patterns) / 2
    assert there_and_back(lossless, patterns) == patterns


@pytest.mark.parametrize("dtype", FLOATS)
def test_zstd_makes_gaussian_elements_smaller_and_noise_no_larger(dtype: str) -> None:
    payload = bytes_of(like_kv(dtype))
    noise = np.random.default_rng(1).bytes(len(payload))
    lossless = codec("zstd", dtype)
    assert len(stored(lossless, payload)) < 0.95 * len(payload)
    assert there_and_back(lossless, payload) == payload
    assert stored(lossless, noise) == noise
    assert there_and_back(lossless, noise) == noise


def test_no_name_is_no_codec() -> None:
    assert codec_for("", "anything") is None


@pytest.mark.parametrize("name", ["zstd", "int8", "int4"])
def test_nothing_encodes_to_nothing(name: str) -> None:
    nothing = codec("zstd", "bfloat16")
    assert stored(nothing) == stored(nothing, b"", b"") == b""
    decode(nothing, b"", [])
    decode(nothing, b"", [bytearray(), bytearray()])


def step_and_magnitude(group: np.ndarray[Any, Any], axis: int, bits: int) -> tuple[Any, Any]:
    smallest, largest = group.min(axis, keepdims=True), group.max(axis, keepdims=True)
    return (largest - smallest) / (2**bits - 1), np.maximum(abs(smallest), abs(largest))


def bounds(values: torch.Tensor, order: str, bits: int) -> np.ndarray[Any, Any]:
    """Largest error that is allowed for each element, from the definition in float64."""
    wide = values.double().numpy()
    bound = np.empty_like(wide)
    unit = torch.finfo(values.dtype).eps
    whole: tuple[Any, ...] = (slice(None),) * wide.ndim
    halves = [(0, "t"), (1, "d")] if "s" in order else [(slice(None), "d")]
    for half, letter in halves:
        axis = order.index(letter)
        for start in range(0, wide.shape[axis], GROUP):
            place = list(whole)
            if "s" in order:
                place[order.index("s")] = slice(half, half + 1)  # type: ignore[operator]
            place[axis] = slice(start, start + GROUP)
            step, magnitude = step_and_magnitude(wide[tuple(place)], axis, bits)
            # Half a unit in the last place of a magnitude is at most eps / 2 of it, or half the smallest subnormal.
            rounding = np.maximum(magnitude * unit / 2, torch.finfo(values.dtype).smallest_normal * unit / 2)
            most = np.minimum(step, step / 2 + rounding) + step / 1024 + magnitude * 2.0**-21
            bound[tuple(place)] = np.broadcast_to(most, bound[tuple(place)].shape)
    return bound


ORDERS = [
    AXES,
    Axes("lsthd", (2, 2, 33, 1, 32)),
    Axes("thsd", (17, 3, 2, 64)),
    Axes("lhsdt", (2, 3, 2, 16, 70)),
    Axes("ltd", (2, 5, 81)),
    Axes("slhtd", (2, 5, 8, 40, 128)),  # more than is worked on at a time
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("axes", ORDERS, ids=lambda axes: axes.order)
def test_quantized_elements_keep_within_the_bound(axes: Axes, bits: int, dtype: str) -> None:
    values = like_kv(dtype, axes)
    lossy = codec(f"int{bits}", dtype, axes)
    payload = bytes_of(values)
    kept = stored(lossy, payload)
    target = torch.empty_like(values)
    decode(lossy, kept, [target.view(torch.uint8).numpy()])
    error = abs(target.double().numpy() - values.double().numpy())
    assert (error <= bounds(values, axes.order, bits)).all()
    assert error.max() > 0
    assert len(kept) < len(payload)


def test_the_stored_form_has_the_bytes_that_the_page_states() -> None:
    axes = Axes("slthd", (2, 1, 64, 2, 64))
    payload = bytes_of(like_kv("bfloat16", axes))
    elements = len(payload) // 2
    for bits in (8, 4):
        assert len(stored(codec(f"int{bits}", "bfloat16", axes), payload)) == elements * bits // 8 + elements // 32 * 4


@pytest.mark.parametrize("bits", [8, 4])
def test_elements_whose_step_is_too_small_for_a_float_are_stored_as_they_are(bits: int) -> None:
    axes = Axes("std", (2, 3, 5))
    for tiny in (1, 3, 127, 128, 5000):
        raw = np.array([0] * 29 + [tiny], np.uint32).tobytes()
        assert stored(codec(f"int{bits}", "float32", axes), raw) == raw
        assert there_and_back(codec(f"int{bits}", "float32", axes), raw) == raw


@REVIEW
@given(
    st.sampled_from(list(FLOATS)),
    st.sampled_from([8, 4]),
    st.lists(st.integers(0, 2**32 - 1), min_size=2 * 3 * 5, max_size=2 * 3 * 5),
    st.integers(0, 31),
)
@example("float32", 8, [0] * 29 + [1], 0)  # a step that is too small for float32
def test_for_all_bits_the_error_is_bounded_or_nothing_is_lost(
    dtype: str, bits: int, patterns: list[int], shift: int
) -> None:
    axes = Axes("std", (2, 3, 5))
    size = FLOATS[dtype].itemsize
    raw = (np.array(patterns, np.uint32) >> shift).astype(f"<u{size}").tobytes()
    values = torch.frombuffer(bytearray(raw), dtype=FLOATS[dtype]).reshape(axes.sizes)
    lossy = codec(f"int{bits}", dtype, axes)
    kept = stored(lossy, raw)
    target = bytearray(len(raw))
    decode(lossy, kept, [target])
    if len(kept) == len(raw):
        assert target == raw
    else:
        got = torch.frombuffer(target, dtype=FLOATS[dtype]).reshape(axes.sizes)
        assert torch.isfinite(values).all()
        assert (abs(got.double() - values.double()).numpy() <= bounds(values, axes.order, bits)).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_no_number_is_stored_as_it_is(dtype: str, odd: float) -> None:
    values = like_kv(dtype)
    values[1, 0, 39, 2, 47] = odd
    payload = bytes_of(values)
    for name in ("int8", "int4"):
        assert stored(codec(name, dtype, AXES), payload) == payload


@pytest.mark.parametrize(("low", "high"), [(-3e38, 3e38), (0.0, 1e-42), (1e-40, 2e-40), (2e38, 2.1e38)])
def test_a_range_that_single_precision_cannot_count_is_stored_as_it_is(low: float, high: float) -> None:
    values = torch.full(AXES.sizes, low)
    values[:, :, ::2, :, ::2] = high
    payload = bytes_of(values)
    assert stored(codec("int8", "float32", AXES), payload) == payload


@pytest.mark.parametrize("dtype", FLOATS)
def test_equal_elements_and_subnormal_ones_are_restored(dtype: str) -> None:
    lossy = codec("int8", dtype, AXES)
    constant = torch.full(AXES.sizes, -1.5).to(FLOATS[dtype])
    assert there_and_back(lossy, bytes_of(constant)) == bytes_of(constant)
    zeros = torch.zeros(AXES.sizes, dtype=FLOATS[dtype])
    zeros[:, :, ::2] = -0.0
    assert len(stored(lossy, bytes_of(zeros))) < zeros.nbytes
    assert there_and_back(lossy, bytes_of(zeros)) == bytes(zeros.nbytes)
    smallest = torch.full(AXES.sizes, torch.finfo(FLOATS[dtype]).smallest_normal / 2).to(FLOATS[dtype])
    assert there_and_back(lossy, bytes_of(smallest)) == bytes_of(smallest)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("int8", "d5b943e8335eb44e-8607d2afb20e244c-4c25984d7cc4f2d3"),
        ("int4", "dab6add9114fc571-4e0ee4bdc6fbb630-d36f5ab62f8bbc05"),
    ],
)
def test_quantized_bytes_are_these_everywhere(name: str, digest: str) -> None:
    # Made of integers, so that no random generator and no library function has a say.
    counts = torch.arange(math.prod(AXES.sizes), dtype=torch.int64)
    values = ((counts * 2654435761 % 65521) - 32760).float() / 1024
    found = [
        hashlib.sha256(stored(codec(name, dtype, AXES), bytes_of(values.to(FLOATS[dtype])))).hexdigest()[:16]
        for dtype in FLOATS
    ]
    assert "-".join(found) == digest


def damaged(data: Any, kept: bytes) -> bytes:
    way = data.draw(st.sampled_from(["flip", "cut", "grow", "other"]))
    if way == "cut":
        return kept[: data.draw(st.integers(0, len(kept) - 1))]
    if way == "grow":
        return kept + data.draw(st.binary(min_size=1, max_size=20))
    if way == "other":
        return data.draw(st.binary(max_size=len(kept) + 10))
    changed = bytearray(kept)
    # Half of them in the lengths and the heads of the frames.
    for place in data.draw(st.lists(st.integers(0, 40) | st.integers(0, len(kept) - 1), min_size=1, max_size=4)):
        changed[min(place, len(kept) - 1)] ^= 1 << data.draw(st.integers(0, 7))
    return bytes(changed)


@settings(REVIEW, max_examples=300)
@given(st.sampled_from(["zstd", "int8", "int4"]), st.sampled_from(list(FLOATS)), st.data())
@pytest.mark.slow
def test_damaged_bytes_are_refused_or_decoded_and_nothing_else_is_written(name: str, dtype: str, data: Any) -> None:
    axes = Axes("std", (2, 40, 6))
    one = codec(name, dtype, axes)
    payload = bytes_of(like_kv(dtype, axes))
    kept = damaged(data, stored(one, payload))
    memory = bytearray(b"\xa5" * (len(payload) + 64))
    middle = data.draw(st.integers(0, len(payload)))
    view = memoryview(memory)
    with contextlib.suppress(CodecError):
        decode(one, kept, [view[16 : 16 + middle], view[48 + middle : 48 + len(payload)]])
    around = memory[:16] + memory[16 + middle : 48 + middle] + memory[48 + len(payload) :]
    assert around == b"\xa5" * 64


@pytest.mark.parametrize("name", ["zstd", "int8", "int4"])
def test_a_form_that_is_cut_or_grown_is_always_refused(name: str) -> None:
    one = codec(name, "bfloat16", AXES)
    payload = bytes_of(like_kv("bfloat16"))
    kept = stored(one, payload)
    for wrong in (b"", kept[:7], kept[:-1], kept + b"\0", payload + b"\0"):
        with pytest.raises(CodecError):
            decode(one, wrong, [bytearray(len(payload))])
    for nbytes in (len(payload) - 2, len(payload) + 2, 0):
        with pytest.raises(CodecError):
            decode(one, kept, [bytearray(nbytes)])


def test_a_frame_that_claims_terabytes_allocates_nothing() -> None:
    import zstandard

    lossless = codec("zstd", "fp8_e4m3")
    frame = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(1 << 17)))
    head = zstandard.frame_header_size(bytes(frame[:18]))
    assert zstandard.frame_content_size(bytes(frame)) == 1 << 17
    huge = frame[:4] + bytes([frame[4] | 0xC0]) + frame[5 : head - 4] + (1 << 42).to_bytes(8, "little") + frame[head:]
    assert zstandard.frame_content_size(bytes(huge)) == 1 << 42
    with pytest.raises(CodecError, match="one frame"):
        decode(lossless, len(huge).to_bytes(8, "little") + huge, [bytearray(1 << 17)])


def test_one_codec_serves_many_threads() -> None:
    lossless, lossy = codec("zstd", "bfloat16"), codec("int4", "bfloat16", AXES)
    payloads = [bytes_of(like_kv("bfloat16", seed=seed)) for seed in range(4)]
    expected = [(stored(lossless, payload), stored(lossy, payload)) for payload in payloads]
    wrong = []

    def work(number: int) -> None:
        for _ in range(10):
            payload = payloads[number]
            if (stored(lossless, payload), stored(lossy, payload)) != expected[number]:
                wrong.append(number)
            if there_and_back(lossless, payload) != payload:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "engine": "farpool",
        "model": "m",
        "weights": "w",
        "dtype": "bfloat16",
        "layout": "slthd",
        "tokens_per_block": 16,
        "groups": (Group(("0..3",), 2 * 4 * 16 * 2 * 64 * 2),),
        "heads": 2,
        "head_dim": 64,
    }
    return Namespace(**{**fields, **changes})


def test_axes_follow_from_a_namespace_whose_layout_names_them() -> None:
    assert Axes.of(namespace(), 0) == Axes("slthd", (2, 4, 16, 2, 64))
    latents = namespace(layout="ltd", heads=0, head_dim=576, groups=(Group(("0", "1"), 2 * 16 * 576 * 2, "mla"),))
    assert Axes.of(latents, 0) == Axes("ltd", (2, 16, 576))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "NHD"},
        {"layout": "sthd"},
        {"heads": 0},
        {"groups": (Group(("0..3",), 1000),)},
        {"groups": (Group(("0..3",), 2 * 4 * 16 * 2 * 64 * 2, "recurrent"),)},
    ],
)
def test_axes_that_do_not_follow_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="layout"):
        Axes.of(namespace(**changes), 0)


@pytest.mark.parametrize(
    ("name", "dtype", "axes"),
    [
        ("gzip", "bfloat16", None),
        ("zstd", "int3", None),
        ("int8", "fp8_e4m3", AXES),
        ("int4", "bfloat16", None),
    ],
)
def test_payloads_that_cannot_be_encoded_are_refused_at_once(name: str, dtype: str, axes: Axes | None) -> None:
    with pytest.raises(ConfigError, match=r"expected|needs|use"):
        codec_for(name, dtype, axes)


@pytest.mark.parametrize(
    ("order", "sizes"), [("std", (2, 3)), ("sd", (2, 3)), ("ttd", (1, 1, 1)), ("xtd", (1, 1, 1)), ("std", (3, 1, 1))]
)
def test_axes_that_mean_nothing_are_refused(order: str, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="axes"):
        Axes(order, sizes)


def test_a_payload_of_another_size_than_the_axes_is_refused() -> None:
    with pytest.raises(ConfigError, match="axes"):
        encode(codec("int8", "bfloat16", AXES), [bytes(10)])
