"""Records in the registry that this release cannot read, and why."""

from __future__ import annotations

import msgspec
import pytest

from farpool.cluster.registry.records import decode_record, encode_record
from farpool.errors import RegistryDamagedError


class _Box(msgspec.Struct):
    size: int
    format: int = 2


def decoded(value: bytes, *, any_format: bool = False) -> _Box:
    return decode_record("box/1", value, _Box, known=2, advice="build it again", any_format=any_format)


def test_a_record_is_read_as_it_was_written() -> None:
    assert decoded(encode_record(_Box(3))) == _Box(3)
    assert decoded(encode_record(_Box(3, format=1))) == _Box(3, format=1)


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"{}", b'{"size": "large"}', b"[" * 10_000])
def test_damage_is_named_with_advice(value: bytes) -> None:
    with pytest.raises(RegistryDamagedError, match=r"entry 'box/1' is not a _Box: .*; build it again") as caught:
        decoded(value)
    assert caught.value.key == "box/1"


@pytest.mark.parametrize("value", [b'{"size": 3, "format": 3}', b'{"size": {"width": 3}, "format": 3}'])
def test_a_later_format_is_no_damage_even_if_its_fields_have_other_types(value: bytes) -> None:
    with pytest.raises(RegistryDamagedError, match=r"has format 3, expected at most 2; a later release .*update this"):
        decoded(value)


def test_a_later_format_can_be_read_as_far_as_it_is_the_same() -> None:
    assert decoded(b'{"size": 3, "color": "red", "format": 3}', any_format=True) == _Box(3, format=3)
