"""The right bytes of each block: a function of its namespace and of all tokens up to its end, in a few variants.

Computed from the tokens alone, without keys, hashes of chains and headers: so a mistake in any of these is seen.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace

from farpool.kv import Group, Namespace

__all__ = ["PAGE", "VARIANTS", "is_right", "namespace", "payload", "prompt"]

PAGE = 16
"""Tokens of a block."""
VARIANTS = 3
"""Bits in which copies of one block may differ from writer to writer; each copy is whole."""
ROOTS, BRANCHES = 5, 3
_SHARED, _BRANCH, _OWN = 3, 3, 4
"""Blocks of a prompt that all of its root, of its branch, and of its leaf have in common."""

_FIRST = Namespace(
    engine="farpool",
    model="a model of tests",
    weights="step 0",
    dtype="bfloat16",
    layout="a row after the other",
    tokens_per_block=PAGE,
    groups=(Group(("0..2",), 3000), Group(("3..7",), 14_000, "sliding", 64)),
)


def namespace(step: int, kind: int) -> Namespace:
    """A namespace: that of a training step's weights, of a tenant, in a layout, compressed or not."""
    tenant, layout, codec = (("one", "a", ""), ("one", "b", ""), ("two", "a", ""), ("two", "a", "zstd"))[kind]
    return replace(_FIRST, weights=f"step {step}", tenant=tenant, layout=layout, codec=codec)


def prompt(rng: random.Random) -> list[int]:
    """Tokens of a prompt: long or short, and some of them those of other prompts, too."""
    root = rng.randrange(ROOTS)
    branch = rng.randrange(BRANCHES)
    leaf = rng.randrange(BRANCHES)
    parts = [(root,)] * _SHARED + [(root, branch)] * _BRANCH + [(root, branch, leaf)] * _OWN
    count = rng.randint(1, len(parts))
    tokens: list[int] = []
    for number, part in enumerate(parts[:count]):
        own = random.Random(repr((number, part)))
        tokens += [own.randrange(50_000) for _ in range(PAGE)]
    return tokens + [rng.randrange(50_000) for _ in range(rng.randrange(PAGE))]


def payload(space: Namespace, tokens: Sequence[int], group: int, variant: int) -> bytes:
    """The bytes of the last block of these tokens, as one of the writers makes them; they can be compressed."""
    seed = hashlib.sha256(space.encoded + repr((list(tokens), group, variant)).encode()).digest()
    nbytes = space.groups[group].block_bytes
    return bytes([variant]) + hashlib.shake_128(seed).hexdigest(nbytes // 2).encode()[: nbytes - 1]


def is_right(data: bytes, space: Namespace, tokens: Sequence[int], group: int) -> bool:
    """Tell if these are the bytes that some writer makes for the last block of these tokens."""
    return len(data) > 0 and data[0] < VARIANTS and data == payload(space, tokens, group, data[0])
