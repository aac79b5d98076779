"""Lookups of many keys: keys as bytes, requests of bounded length, answers entered in their places."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from farpool._native import as_keys, looked_up, lookup_requests
from farpool.cluster.wire.frames import LOOKUP
from farpool.errors import ProtocolError


def answer(sizes: Sequence[int | None]) -> bytes:
    """What a node sends that has values of these sizes."""
    count = len(sizes)
    leading = next((number for number, size in enumerate(sizes) if size is None), count)
    bits = sum(1 << number for number, size in enumerate(sizes) if size is not None)
    bitmap = bits.to_bytes((count + 63) // 64 * 8, "little")
    return LOOKUP.pack(count, leading) + bitmap + struct.pack(f"<{count}Q", *(size or 0 for size in sizes))


def keys_of(request: bytes) -> tuple[int, list[bytes]]:
    """Flags and keys of a request."""
    flags, count = LOOKUP.unpack_from(request)
    keys, at = [], LOOKUP.size
    for _ in range(count):
        (nbytes,) = struct.unpack_from("<H", request, at)
        keys.append(request[at + 2 : at + 2 + nbytes])
        at += 2 + nbytes
    assert at == len(request)
    return flags, keys


def test_keys_are_text_or_bytes() -> None:
    assert as_keys(["a", b"\xff\0", "ä", "x" * 256, b"y" * 256]) == [
        b"a",
        b"\xff\0",
        b"\xc3\xa4",
        b"x" * 256,
        b"y" * 256,
    ]
    assert as_keys([]) == []


@pytest.mark.parametrize("wrong", ["", b"", "x" * 257, "ä" * 129, b"x" * 257, "\ud800", 7, None, bytearray(b"key")])
def test_what_cannot_be_a_key_is_left_to_the_caller(wrong: object) -> None:
    assert as_keys(["a", wrong]) is None  # type: ignore[list-item]


@pytest.mark.parametrize(("count", "nbytes", "pages"), [(0, 8, 0), (1, 256, 1), (9000, 4, 3), (1000, 256, 5)])
def test_requests_are_as_few_as_have_room(count: int, nbytes: int, pages: int) -> None:
    keys = [number.to_bytes(nbytes, "little") for number in range(2 * count)]
    places = list(range(1, 2 * count, 2))
    requests = lookup_requests(keys, places, True)
    assert len(requests) == pages
    assert [place for _, own in requests for place in own] == places
    for request, own in requests:
        assert len(request) <= 65536
        assert keys_of(request) == (1, [keys[place] for place in own])
    assert all(keys_of(request)[0] == 0 for request, _ in lookup_requests(keys, places, False))


def test_an_answer_is_entered_in_its_places() -> None:
    source = random.Random(1)
    told = [source.choice([None, 0, 1, 1 << 40]) for _ in range(300)]
    places = source.sample(range(1000), 300)
    sizes: list[int | None] = [None] * 1000
    missing = looked_up(answer(told), places, sizes, "node")
    assert missing == [place for place, size in zip(places, told, strict=True) if size is None]
    assert [sizes[place] for place in places] == told
    assert {size for place, size in enumerate(sizes) if place not in set(places)} == {None}


@pytest.mark.parametrize("meta", [b"", answer([1]), answer([1, 2, 3]), answer([1, 2])[:-1], answer([1, 2]) + b"\0"])
def test_an_answer_to_another_request_is_an_error(meta: bytes) -> None:
    sizes: list[int | None] = [None] * 2
    with pytest.raises(ProtocolError, match="a lookup of 2 keys"):
        looked_up(meta, [0, 1], sizes, "node")
    assert sizes == [None, None]
