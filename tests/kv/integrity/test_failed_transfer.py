"""A transfer failed, and the cache reported the block as loaded: the model went on with what the buffer held before.

The transport here reports that it has moved each block, and moves nothing, or only its header's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from farpool.cluster.node.process import running_node
from farpool.kv import BlockCache, Reason
from farpool.kv.block_format import BlockFormat
from farpool.kv.header import HEADER_BYTES
from tests.kv.test_blocks import BLOCK, blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE


@pytest.fixture(scope="module")
def saved() -> Iterator[tuple[BlockCache, list[bytes]]]:
    with running_node() as node, BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        keys, values = blocks(cache, 4)
        assert cache.save(keys, values) == [None] * 4
        yield cache, keys


@pytest.fixture
def nothing_moves(saved: tuple[BlockCache, list[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the transport report each block as moved, although it has written nothing."""
    cache, _ = saved

    def reported(keys: Sequence[bytes], targets: Sequence[Any], timeout: float) -> list[int]:
        return [HEADER_BYTES + BLOCK] * len(keys)

    monkeypatch.setattr(cache._link.calls(), "get_into_many", reported)


@pytest.mark.usefixtures("nothing_moves")
def test_a_block_of_which_nothing_has_arrived_is_not_reported_as_loaded(saved: tuple[BlockCache, list[bytes]]) -> None:
    cache, keys = saved
    assert cache.load(keys, targets(4)) == [Reason.FOREIGN] * 4


@pytest.mark.usefixtures("nothing_moves")
def test_without_the_check_of_the_header_it_would_be(
    saved: tuple[BlockCache, list[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, keys = saved
    monkeypatch.setattr(BlockFormat, "checked", lambda self, keys, *given: [None] * len(keys))
    into = targets(4)
    assert cache.load(keys, into) == [None] * 4
    assert not any(any(part) for one in into for part in one)  # and the model would go on with zeros
