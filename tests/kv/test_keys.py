"""Keys, namespaces and headers: published vectors, and everything that has to make a difference."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from farpool.errors import ConfigError
from farpool.kv import Group, Namespace, Reason, block_key, token_chain
from farpool.kv.header import HEADER_BYTES, check_header, pack_header
from farpool.kv.keys import block_keys, token_keys
from tests.kv import chains

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


VECTORS: dict[str, list[tuple[str, str]]] = {
    # vLLM 0.32 and 0.33: NONE, tokens 1000 to 1015 behind it, and behind these 16 times token 5 with a salt.
    "vllm sha256": [
        ("066b1e89", "d71198"),
        ("9d9c413731095d0ee811a14814414907cafccd751ce2052f659e8e1f547aeb68", ""),
    ],
    "vllm sha256_cbor": [
        ("9bd96a48", "1eef0"),
        ("15528b726efb88cb4d9efc583657a821bceb1f67307c6e813417567050a24fdc", ""),
        ("d51a363ec933e1197d0351a5804545ec4c08106b12699bf8993da6407a5601a8", ""),
    ],
    # SGLang 0.5.23: tokens 1000 to 1063 in pages of 16, without a salt and with one.
    "sglang sha256": [
        ("4faa8bd53eda3d89d365baa1cce7abcbe618600132b7664d8cccf18db778a47c", ""),
        ("fc228fb55a288afeb5f7d93117caa44931dc430d6ecf7fcfa3c029ac60e0c6b6", ""),
    ],
    "sglang salted": [("ee20eb16560950bbce92cd9ba9b70146693ad6647c27428ff9f0979f503f34c3", "")],
    # LMCache 0.5.6: NONE, and tokens 1000 to 1511 in chunks of 256.
    "lmcache blake3": [
        ("7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b", ""),
        ("d526d88f0c387e4049f866a4c572cbf658276fcae250b069051fd1fff3ad0579", ""),
        ("8be5f115945ff3c4eb943172f8edfdcdf3432274c3d3dbd2436fed9a9fe494f5", ""),
    ],
}
"""First and last digits of hashes that are published, most of them whole, by engine and algorithm."""
VECTORS["farpool sha256"], VECTORS["farpool salted"] = VECTORS["sglang sha256"], VECTORS["sglang salted"]
HASH_SEEDS = ("0", "4242")
"""Values of PYTHONHASHSEED."""


@pytest.fixture(scope="module")
def told() -> Mapping[str, dict[str, Any]]:
    """The chains and keys that programs compute that differ in PYTHONHASHSEED."""
    programs = {
        seed: subprocess.Popen(
            [sys.executable, "-m", "tests.kv.chains"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
        )
        for seed in HASH_SEEDS
    }
    try:
        said = {seed: program.communicate(timeout=120)[0] for seed, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()
            program.communicate()
    return {seed: json.loads(one) for seed, one in said.items()}


def test_the_programs_that_are_compared_hash_texts_in_different_ways(told: Mapping[str, dict[str, Any]]) -> None:
    assert len({one["hash of Python"] for one in told.values()}) == len(HASH_SEEDS)


@pytest.mark.parametrize("seed", HASH_SEEDS)
@pytest.mark.parametrize("name", VECTORS)
def test_chains_have_the_published_digits_in_processes_of_any_hash_seed(
    told: Mapping[str, dict[str, Any]], name: str, seed: str
) -> None:
    if name.startswith("lmcache"):
        pytest.importorskip("blake3", reason="blake3 is not installed")
    for found, (first, last) in zip(told[seed]["chains"][name], VECTORS[name], strict=False):
        assert len(found) == 64
        assert (found[: len(first)], found[len(found) - len(last) :]) == (first, last)
    assert len(told[seed]["chains"][name]) >= len(VECTORS[name])


def test_keys_made_from_the_chains_of_engines_are_the_same_in_all_processes(
    told: Mapping[str, dict[str, Any]],
) -> None:
    here = chains.everything()
    for one in told.values():
        assert one["chains"] == here["chains"]
        assert one["keys"] == here["keys"]
    keys = [key for own in here["keys"].values() for key in own]
    assert set(here["keys"]) >= set(VECTORS) - {"lmcache blake3"}
    for name, own in here["keys"].items():
        for key, chain in zip(own, here["chains"][name], strict=True):
            assert len(key) == 128
            assert key[:8] == b"fpk1".hex()
            assert key[40:] == chain + "00000001" + "01000000" + "00000000"
    # The hashes that two engines have in common are in keys that they do not have in common.
    assert here["chains"]["farpool sha256"] == here["chains"]["sglang sha256"]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("algorithm", chains.ENCODINGS)
def test_a_seed_of_an_engine_makes_other_chains_and_other_namespaces(algorithm: str) -> None:
    seeds = ("vllm-none-hash", *HASH_SEEDS)
    spaces = [replace(NAMESPACE, engine="vllm", hash=algorithm, seed=seed) for seed in seeds]
    links = [chains.vllm(algorithm, chains.vllm_none(algorithm, seed), range(16)) for seed in seeds]
    assert len(set(links)) == len({one.digest for one in spaces}) == len(seeds)
    # The same hash behind two seeds would still not be the same key.
    assert len({block_key(one.digest, links[0]) for one in spaces}) == len(seeds)


@given(st.lists(st.integers(0, 2**33), max_size=40), st.integers(1, 9), st.sampled_from([None, "", "alice", "häß"]))
def test_farpool_and_sglang_hash_pages_alike(tokens: list[int], page: int, salt: str | None) -> None:
    prior = b"" if salt is None else chains.sglang_seed(salt=salt)
    assert token_chain(tokens, page, prior) == chains.sglang(tokens, page, prior)[: len(tokens) // page]


def test_the_digest_of_a_namespace_is_of_its_fields_in_canonical_cbor() -> None:
    encoded = cbor2.dumps({**asdict(NAMESPACE), "schema": 1}, canonical=True)
    assert NAMESPACE.digest == hashlib.sha256(encoded).digest()[:16]
    # These digits must never change: other digits would be other keys, and all stored blocks would be lost.
    assert NAMESPACE.digest.hex() == "725e7a8bb0f4877a41d80009e9d61970"


def test_a_page_with_a_large_token_is_hashed_in_its_wide_form_and_no_other_page_is() -> None:
    tokens = [1, 2, 3, 2**32, 5, 6]
    wide = b"\xff" + b"".join(one.to_bytes(8, "little") for one in tokens[2:4])
    first = hashlib.sha256(b"".join(one.to_bytes(4, "little") for one in tokens[:2])).digest()
    second = hashlib.sha256(first + wide).digest()
    third = hashlib.sha256(second + b"".join(one.to_bytes(4, "little") for one in tokens[4:])).digest()
    assert token_chain(tokens, 2) == [first, second, third]


@given(st.lists(st.integers(0, 2**40), max_size=50), st.integers(1, 9))
def test_a_chain_continues_from_any_of_its_pages_and_omits_a_short_one(tokens: list[int], page: int) -> None:
    whole = token_chain(tokens, page)
    assert len(whole) == len(tokens) // page
    for done in range(1, len(whole)):
        assert token_chain(tokens[done * page :], page, whole[done - 1]) == whole[done:]


@pytest.mark.parametrize("tokens", [[-1], [2**64], ["a"], [1.5]])
def test_values_that_are_no_tokens_are_refused(tokens: list[Any]) -> None:
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


def test_a_key_has_64_bytes_and_contains_all_its_parts() -> None:
    chain = bytes(range(32))
    key = block_key(NAMESPACE.digest, chain, 3, 5)
    assert key == b"fpk1" + NAMESPACE.digest + chain + b"\0\0\0\3\0\0\0\5" + bytes(4)
    assert block_key(NAMESPACE.digest, chain[:16])[20:52] == chain[:16] + bytes(16)
    for wrong in ((b"short", chain, 0, 0), (NAMESPACE.digest, b"", 0, 0), (NAMESPACE.digest, bytes(33), 0, 0)):
        with pytest.raises(ConfigError, match="expected 16, and 1 to 32"):
            block_key(*wrong)
    with pytest.raises(ConfigError, match="group"):
        block_key(NAMESPACE.digest, chain, -1)


def test_a_header_fits_its_own_payload_and_no_other() -> None:
    key = block_key(NAMESPACE.digest, bytes(32))
    header = pack_header(key, 100, 100)
    assert len(header) == HEADER_BYTES == 64
    assert check_header(header, key, 100, 100) is None
    assert check_header(header, key, 101, 100) == Reason.WRONG_SIZE
    assert check_header(header, key, 100, 99) == Reason.WRONG_SIZE
    assert check_header(header[:6] + b"\2\0" + header[8:], key, 100, 100) == Reason.WRONG_VERSION  # of the layout
    for other in (block_key(bytes(16), bytes(32)), block_key(NAMESPACE.digest, bytes(32), 1)):
        assert check_header(header, other, 100, 100) == Reason.FOREIGN


@given(st.integers(0, 8 * 56 - 1))
def test_a_bit_that_is_flipped_in_a_header_makes_it_a_miss(bit: int) -> None:
    key = block_key(NAMESPACE.digest, bytes(32))
    header = bytearray(pack_header(key, 100, 100))
    header[bit // 8] ^= 1 << bit % 8
    assert check_header(header, key, 100, 100) is not None


@given(
    tokens=st.lists(st.one_of(st.integers(0, 1 << 16), st.integers(0, (1 << 64) - 1)), max_size=40),
    page=st.integers(1, 9),
    groups=st.integers(0, 3),
    shard=st.integers(0, (1 << 32) - 1),
    form=st.sampled_from([list, tuple, lambda tokens: array("Q", tokens)]),
)
def test_keys_of_tokens_equal_the_keys_of_their_chain(
    tokens: list[int], page: int, groups: int, shard: int, form: Callable[[list[int]], Sequence[int]]
) -> None:
    digest = NAMESPACE.digest
    expected = [
        block_key(digest, chain, group, shard) for group in range(groups) for chain in token_chain(tokens, page, digest)
    ]
    assert token_keys(form(tokens), page, digest, groups, shard) == expected
    assert block_keys(digest, token_chain(tokens, page, digest), range(groups), shard) == expected


@pytest.mark.parametrize("token", [-1, 1 << 64, 1.0, "1", None])
def test_keys_of_wrong_tokens_are_refused(token: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected whole numbers from 0 to 2\*\*64 - 1"):
        token_keys([1, token, 1 << 40], 3, NAMESPACE.digest, 1)


@pytest.mark.parametrize("form", [bytes, bytearray])
def test_bytes_are_tokens_like_others(form: Callable[[Sequence[int]], Sequence[int]]) -> None:
    tokens = list(range(64))
    assert token_keys(form(tokens), 16, NAMESPACE.digest, 1) == token_keys(tokens, 16, NAMESPACE.digest, 1)


def test_keys_of_wrong_sizes_are_refused() -> None:
    for shard in (-1, 1 << 32, 0.5):
        with pytest.raises(ConfigError, match="expected whole numbers below"):
            token_keys([1], 1, NAMESPACE.digest, 1, shard)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"page is 16\.0"):
        token_keys([1], 16.0, NAMESPACE.digest, 1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="page is 0"):
        token_keys([1], 0, NAMESPACE.digest, 1)
    assert token_keys([1], 1 << 60, NAMESPACE.digest, 1) == []
    with pytest.raises(ConfigError, match="a key has 15 bytes of namespace"):
        token_keys([1], 1, NAMESPACE.digest[1:], 1)
    with pytest.raises(ConfigError, match=r"\[0, 32, 33\] of hash"):
        block_keys(NAMESPACE.digest, [b"", bytes(32), bytes(33)], [0])
