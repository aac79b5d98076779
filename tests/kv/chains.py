"""The chains of hashes by which engines name blocks of tokens, written again from their published descriptions.

It imports nothing of an engine. As a program it prints the result of `everything` as JSON.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import struct
from collections.abc import Callable, Sequence
from typing import Any

import cbor2

try:
    from blake3 import blake3
except ImportError:
    blake3 = None  # type: ignore[assignment, misc]

from farpool.kv import Group, Namespace, block_key, token_chain

__all__ = ["ENCODINGS", "SALTED", "everything", "lmcache", "sglang", "sglang_seed", "vllm", "vllm_none"]

ENCODINGS: dict[str, Callable[[Any], bytes]] = {
    "sha256": lambda value: pickle.dumps(value, protocol=5),
    "sha256_cbor": lambda value: cbor2.dumps(value, canonical=True),
}
"""Encodings of vLLM's hashed values, by the name of the algorithm."""
SALTED = (("cache_salt", "alice"),)
"""Value that vLLM hashes in addition to the tokens of the first block of a request with a salt."""


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def vllm_none(algorithm: str, seed: str = "vllm-none-hash") -> bytes:
    """Return the hash before the first block; the seed is the value of PYTHONHASHSEED, if that is set."""
    return sha256(ENCODINGS[algorithm](seed))


def vllm(algorithm: str, parent: bytes, tokens: Sequence[int], extra: object = None) -> bytes:
    """Return the hash of a block from the hash of its parent."""
    return sha256(ENCODINGS[algorithm]((parent, tuple(tokens), extra)))


def sglang_seed(extra_key: str | None = None, salt: str | None = None) -> bytes:
    """Return the bytes before the first page of a request with an extra key or a salt."""
    data = b"sglang-cache-namespace-v1"
    for text in (extra_key, salt):
        data += b"\0" if text is None else b"\1" + struct.pack("<Q", len(text.encode())) + text.encode()
    return sha256(data)


def sglang(tokens: Sequence[int], page: int, prior: bytes = b"") -> list[bytes]:
    """Hashes of pages, the last of which may be a short one."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens), page):
        own = tokens[start : start + page]
        wide = max(own) >= 1 << 32
        data = b"\xff" * wide + b"".join(one.to_bytes(8 if wide else 4, "little") for one in own)
        prior = sha256(prior + data)
        hashes.append(prior)
    return hashes


def lmcache(tokens: Sequence[int], chunk: int) -> list[bytes]:
    """Return the hash before the first chunk, and the hashes of all whole chunks; needs blake3."""
    assert blake3 is not None
    hashes = [blake3(bytes(12)).digest()]
    for start in range(0, len(tokens) - chunk + 1, chunk):
        data = b"".join(one.to_bytes(4, "big") for one in tokens[start : start + chunk])
        hashes.append(blake3(hashes[-1] + data).digest())
    return hashes


def everything() -> dict[str, Any]:
    """Return all hashes whose digits are published, and farpool's keys made from them, as hexadecimal digits.

    ``hash of Python`` is one that depends on PYTHONHASHSEED.
    """
    said: dict[str, Any] = {"hash of Python": hash("farpool")}
    chains: dict[str, list[bytes]] = {}
    for algorithm in ENCODINGS:
        none = vllm_none(algorithm)
        first = vllm(algorithm, none, range(1000, 1016))
        chains[f"vllm {algorithm}"] = [none, first, vllm(algorithm, first, [5] * 16, SALTED)]
    tokens = range(1000, 1064)
    chains["sglang sha256"] = sglang(tokens, 16)
    chains["sglang salted"] = sglang(tokens, 16, sglang_seed(salt="alice"))
    chains["farpool sha256"] = token_chain(tokens, 16)
    chains["farpool salted"] = token_chain(tokens, 16, sglang_seed(salt="alice"))
    if blake3 is not None:
        chains["lmcache blake3"] = lmcache(range(1000, 1512), 256)
    said["chains"] = {name: [one.hex() for one in chain] for name, chain in chains.items()}
    said["keys"] = {}
    for name, chain in chains.items():
        engine, algorithm = name.split()
        space = Namespace(
            engine=engine,
            model="m",
            weights="w",
            dtype="bfloat16",
            layout="l",
            tokens_per_block=16,
            groups=(Group(("0..3",), 4096),),
            hash=algorithm,
        )
        said["keys"][name] = [block_key(space.digest, one, 1, 1 << 24).hex() for one in chain]
    return said


if __name__ == "__main__":
    print(json.dumps(everything()))
