"""Access patterns of benchmark programs, reproducible by seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

KINDS = ("random", "strided", "looping", "branching", "pointer-chasing")


def pattern(kind: str, rng: random.Random, blocks: int, length: int) -> list[int]:
    """Generate the numbers of the blocks that a program of a kind accesses, in order."""
    walk = {
        "random": _random,
        "strided": _strided,
        "looping": _looping,
        "branching": _branching,
        "pointer-chasing": _chasing,
    }[kind]
    return list(islice(walk(rng, blocks), length))


def _random(rng: random.Random, blocks: int) -> Iterator[int]:
    while True:
        yield rng.randrange(blocks)


def _strided(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks at a steady step, which starts from a new place now and then."""
    step, at = rng.choice([1, 1, 2, 3, 5, 7]), rng.randrange(blocks)
    while True:
        yield at % blocks
        at = at + step if rng.random() > 0.02 else rng.randrange(blocks)


def _looping(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks in a loop, either round and round, or to and fro like forward and backward passes."""
    order = rng.sample(range(blocks), blocks)
    if rng.random() < 0.5:
        order += order[::-1]
    while True:
        yield from order


def _branching(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks of a common part, followed by one of several branches, chosen at random."""
    common = rng.sample(range(blocks), rng.randint(2, max(3, blocks // 2)))
    branches = [rng.sample(range(blocks), rng.randint(2, max(3, blocks // 3))) for _ in range(rng.randint(3, 6))]
    while True:
        yield from common
        yield from rng.choice(branches)


def _chasing(rng: random.Random, blocks: int) -> Iterator[int]:
    """Blocks along a random permutation, starting anew after some hops."""
    following = rng.sample(range(blocks), blocks)
    hops = rng.choice([blocks, 20, 50, 10**9])
    at = rng.randrange(blocks)
    while True:
        for _ in range(hops):
            yield at
            at = following[at]
        at = rng.randrange(blocks)
