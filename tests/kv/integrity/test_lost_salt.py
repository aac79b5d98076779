"""A tenant's salt was lost on the way to the shared tier: two tenants with the same prompt shared its KV.

A tenant who is given another's KV sees that its prompt was answered faster, and so learns what the other one has asked.
Here both tenants share one node and one access key; the salt alone keeps them apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import BlockCache, token_chain
from tests.kv.pairs import Comparison, compared, significant, times_of_pairs
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE

BLOCKS = 8
"""Blocks of a prompt."""
PAIRS = 2000
ALPHA = 0.01


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("256MiB") as one:
        yield one


def cache_of(node: RunningNode, salt: str) -> BlockCache:
    return BlockCache([node.address], replace(NAMESPACE, extra=(("cache_salt", salt),)), timeout=PATIENCE)


def prompts(cache: BlockCache, count: int, rng: random.Random) -> list[list[bytes]]:
    """Keys of random prompts, as a tenant's engine makes them."""
    made = []
    for _ in range(count):
        tokens = [rng.randrange(1 << 17) for _ in range(16 * BLOCKS)]
        made.append([cache.key(chain) for chain in token_chain(tokens, 16)])
    return made


def found(node: RunningNode, salts: tuple[str, str]) -> int:
    """Return how many blocks of a prompt that the first tenant has saved the second one finds."""
    ours, theirs = (cache_of(node, salt) for salt in salts)
    with ours, theirs:
        (keys,) = prompts(ours, 1, random.Random(f"{salts}"))
        (same,) = prompts(theirs, 1, random.Random(f"{salts}"))
        assert ours.save(keys, [b"kv" * 32] * BLOCKS) == [None] * BLOCKS
        return sum(theirs.lookup(same).found)


def test_another_tenant_finds_nothing_of_the_same_prompt(node: RunningNode) -> None:
    assert found(node, ("alice", "bob")) == 0


def test_without_the_salt_it_would_find_all(node: RunningNode) -> None:
    assert found(node, ("", "")) == BLOCKS


def compare(node: RunningNode, salts: tuple[str, str], seed: int) -> Comparison:
    """Time the second tenant's lookups of prompts that the first one has saved, paired with prompts nobody has."""
    rng = random.Random(seed)
    ours, theirs = (cache_of(node, salt) for salt in salts)
    with ours, theirs:
        state = rng.getstate()
        saved = prompts(ours, PAIRS, rng)
        rng.setstate(state)
        same = prompts(theirs, PAIRS, rng)
        nowhere = prompts(theirs, PAIRS, rng)
        keys = [key for prompt in saved for key in prompt]
        for start in range(0, len(keys), 1024):
            some = keys[start : start + 1024]
            assert ours.save(some, [b"kv" * 32] * len(some)) == [None] * len(some)
        theirs.lookup(nowhere[0])  # connects
        # Both kinds are copied in an order in which they are mixed, so that this process's memory tells nothing.
        groups: list[list[bytes]] = [*same, *nowhere]
        for number in rng.sample(range(len(groups)), len(groups)):
            groups[number] = [bytes(bytearray(key)) for key in groups[number]]

        def ask(prompt: Sequence[bytes]) -> object:
            return theirs.lookup(prompt)

        return compared(*times_of_pairs(ask, lambda prompt: None, groups[:PAIRS], groups[PAIRS:], rng))


@pytest.mark.slow
def test_times_tell_nothing_of_another_tenants_prompts() -> None:
    # A false alarm needs two comparisons with other prompts that both differ by ALPHA: one run in 10,000.
    with running_node("256MiB") as node:
        apart = [compare(node, ("alice", "bob"), seed) for seed in (1, 2)]
        lost = compare(node, ("", ""), 3)
    said = f"with salts: {apart[0]}; {apart[1]}; without: {lost}"
    assert significant({"lost": lost}, ALPHA) == ["lost"], f"too noisy a machine to find what differs; {said}"
    assert not all(significant({"apart": one}, ALPHA) for one in apart), said
