"""A release of an engine changed the order of bytes in a block, and the block's shape stayed equal.

Here a block has two KV heads. One release stores the heads apart, the next one stores them token by token. Sizes, types
and checksums are equal, so only the names of blocks can tell them apart. The connectors for vLLM, SGLang and LMCache
put the engine's release into each name; `tests/kv/connectors` checks that with the engines (case ``other_release``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import BlockCache, Reason
from farpool.kv.namespace import Group, Namespace
from tests.nodes import PATIENCE

HEADS, TOKENS, NUMBERS = 2, 16, 8
SPACE = Namespace(
    engine="engine",
    model="tiny",
    weights="1",
    dtype="float32",
    layout="2x16x8",
    tokens_per_block=TOKENS,
    groups=(Group(("0",), HEADS * TOKENS * NUMBERS * 4),),
)


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as one:
        yield one


def read_by_the_next_release(node: RunningNode, old: Namespace, new: Namespace) -> tuple[Reason | None, bool]:
    """Save heads in the order of the old release, and load them as the next one does; True if the heads are equal."""
    heads = torch.arange(HEADS * TOKENS * NUMBERS, dtype=torch.float32).view(HEADS, TOKENS, NUMBERS)
    place = torch.zeros(TOKENS, HEADS, NUMBERS)
    with (
        BlockCache([node.address], old, timeout=PATIENCE) as writer,
        BlockCache([node.address], new, timeout=PATIENCE) as reader,
    ):
        chain = b"the same tokens"
        assert writer.save([writer.key(chain)], [heads.numpy()]) == [None]
        (reason,) = reader.load([reader.key(chain)], [place.numpy()])
    return reason, bool(torch.equal(place.transpose(0, 1), heads))


def test_blocks_of_another_release_are_missing(node: RunningNode) -> None:
    old, new = (replace(SPACE, extra=(("release", release),)) for release in ("0.1", "0.2"))
    assert read_by_the_next_release(node, old, new) == (Reason.ABSENT, False)


def test_without_the_release_in_the_name_heads_would_be_mixed_up(node: RunningNode) -> None:
    assert read_by_the_next_release(node, SPACE, SPACE) == (None, False)
