"""Keys, namespaces and headers: published vectors, and everything that has to make a difference."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.errors import ConfigError
from farpool.kv import Group, Namespace, Reason, block_key, token_chain
from farpool.kv.header import HEADER_BYTES, check_header, pack_header

NAMESPACE = Namespace(
    engine="farpool",
    model="tiny",
    weights="step-1",
    dtype="float16",
    layout="layers-first",
    tokens_per_block=16,
    groups=(Group(("0..3",), 4096), Group(("4",), 1024, "sliding", 32)),
)
OTHERS: dict[str, Any] = {
    "engine": "vllm",
    "model": "other",
    "weights": "step-2",
    "dtype": "bfloat16",
    "layout": "tokens-first",
    "tokens_per_block": 32,
    "groups": (Group(("0..3",), 4096), Group(("4",), 1024, "sliding", 64)),
    "hash": "blake3",
    "seed": "7",
    "tokens_per_hash": 8,
    "heads": 2,
    "head_dim": 64,
    "parallel": (("tp", 2),),
    "tenant": "alice",
    "codec": "zstd",
    "extra": (("rope", "yarn"),),
}


def test_pages_have_the_hashes_that_sglang_gives_them() -> None:
    tokens = range(1000, 1064)
    assert [one.hex() for one in token_chain(tokens, 16)][:2] == [
        "4faa8bd53eda3d89d365baa1cce7abcbe618600132b7664d8cccf18db778a47c",
        "fc228fb55a288afeb5f7d93117caa44931dc430d6ecf7fcfa3c029ac60e0c6b6",
    ]
    salt = hashlib.sha256(b"sglang-cache-namespace-v1\x00\x01" + (5).to_bytes(8, "little") + b"alice").digest()
    assert token_chain(tokens, 16, salt)[0].hex() == "ee20eb16560950bbce92cd9ba9b70146693ad6647c27428ff9f0979f503f34c3"


def test_a_page_with_a_large_token_is_hashed_in_its_wide_form_and_no_other_page_is() -> None:
    tokens = [1, 2, 3, 2**32, 5, 6]
    wide = b"\xff" + b"".join(one.to_bytes(8, "little") for one in tokens[2:4])
    first = hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in tokens[:2])).digest()
    second = hashlib.sha256(first + wide).digest()
    third = hashlib.sha256(second + b"".join(one.to_bytes(4, "little") for one in tokens[4:])).digest()
    assert token_chain(tokens, 2) == [first, second, third]


@given(st.lists(st.integers(0, 2**40), max_size=50), st.integers(1, 9))
def test_a_chain_goes_on_from_any_of_its_pages_and_leaves_the_short_one_out(tokens: list[int], page: int) -> None:
    whole = token_chain(tokens, page)
    assert len(whole) == len(tokens) // page
    for done in range(1, len(whole)):
        assert token_chain(tokens[done * page :], page, whole[done - 1]) == whole[done:]


@pytest.mark.parametrize("tokens", [[-1], [2**64], ["a"], [1.5]])
def test_what_is_no_token_is_refused(tokens: list[Any]) -> None:
    with pytest.raises(ConfigError, match="tokens"):
        token_chain(tokens, 1)


def test_each_field_of_a_namespace_makes_it_another_one() -> None:
    assert set(OTHERS) == set(Namespace.__dataclass_fields__)
    others = [replace(NAMESPACE, **{name: value}) for name, value in OTHERS.items()]
    digests = {NAMESPACE.digest, *(one.digest for one in others)}
    assert len(digests) == len(OTHERS) + 1
    for one in [NAMESPACE, *others]:
        assert Namespace.decode(one.encoded) == one


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("weights", ""), ("dtype", None), ("tokens_per_block", 0), ("heads", -1), ("heads", True), ("groups", ())],
        *[("groups", ("0..2",)), ("tenant", None), ("seed", 5), ("codec", b"zstd"), ("hash", None)],
    ],
)
def test_a_namespace_that_names_nothing_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        replace(NAMESPACE, **{name: value})


@pytest.mark.parametrize("data", [b"", b"\xff", b"\x01", b"\xa0", b"\xa1fschema\x01", NAMESPACE.encoded[:-1]])
def test_bytes_that_are_no_namespace_are_refused(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not the encoding of a namespace"):
        Namespace.decode(data)


def test_a_key_has_64_bytes_and_says_all_its_parts() -> None:
    chain = bytes(range(32))
    key = block_key(NAMESPACE.digest, chain, 3, 5)
    assert key == b"fpk1" + NAMESPACE.digest + chain + b"\0\0\0\3\0\0\0\5" + bytes(4)
    assert block_key(NAMESPACE.digest, chain[:16])[20:52] == chain[:16] + bytes(16)
    for wrong in ((b"short", chain, 0, 0), (NAMESPACE.digest, b"", 0, 0), (NAMESPACE.digest, bytes(33), 0, 0)):
        with pytest.raises(ConfigError, match="expected 16, and 1 to 32"):
            block_key(*wrong)
    with pytest.raises(ConfigError, match="group"):
        block_key(NAMESPACE.digest, chain, -1)


def test_keys_do_not_depend_on_the_hash_seed_of_python() -> None:
    program = (
        "from farpool.kv import Namespace, block_key, token_chain\n"
        f"namespace = Namespace.decode({NAMESPACE.encoded!r})\n"
        "print(block_key(namespace.digest, token_chain(range(64), 16)[-1], 1, 2).hex())"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("0", "1")
    }
    assert said == {block_key(NAMESPACE.digest, token_chain(range(64), 16)[-1], 1, 2).hex() + "\n"}


def test_a_header_fits_its_own_payload_and_no_other() -> None:
    key = block_key(NAMESPACE.digest, bytes(32))
    header = pack_header(key, 100, 100)
    assert len(header) == HEADER_BYTES == 64
    assert check_header(header, key, 100, 100) is None
    assert check_header(header, key, 101, 100) == Reason.WRONG_SIZE
    assert check_header(header, key, 100, 99) == Reason.WRONG_SIZE
    assert check_header(header, key, 100, 100, layout_version=2) == Reason.WRONG_VERSION
    for other in (block_key(bytes(16), bytes(32)), block_key(NAMESPACE.digest, bytes(32), 1)):
        assert check_header(header, other, 100, 100) == Reason.FOREIGN


@given(st.integers(0, 8 * 56 - 1))
def test_a_bit_that_is_flipped_in_a_header_makes_it_a_miss(bit: int) -> None:
    key = block_key(NAMESPACE.digest, bytes(32))
    header = bytearray(pack_header(key, 100, 100))
    header[bit // 8] ^= 1 << bit % 8
    assert check_header(header, key, 100, 100) is not None
