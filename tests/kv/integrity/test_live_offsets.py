"""A cache was opened again, took memory that was in use for free, and gave it to other blocks.

A reader then finds a whole and correctly checksummed block at the place of its own: that of another request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import BlockCache, Reason
from farpool.kv.block_format import BlockFormat
from tests.kv.test_blocks import blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE, eventually

COUNT = 64


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("2MiB") as one:
        yield one


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_a_node_that_starts_again_gives_no_memory_of_a_block_to_another(node: RunningNode, transport: str) -> None:
    with BlockCache([node.address], NAMESPACE, transport=transport, timeout=PATIENCE) as cache:  # type: ignore[arg-type]
        keys, values = blocks(cache, COUNT)
        assert cache.save(keys, values) == [None] * COUNT
        node.restart()
        more, others = blocks(cache, 4 * COUNT, first=100_000)
        eventually(lambda: cache.save(more[:1], others[:1]) == [None])
        cache.save(more, others)  # more than fits: the node must reuse memory
        into = targets(5 * COUNT)
        reasons = cache.load([*keys, *more], into)
        wrong = sum(
            reason is None and b"".join(one) != b"".join(value)
            for one, value, reason in zip(into, [*values, *others], reasons, strict=True)
        )
        assert wrong == 0
        assert set(reasons) <= {None, Reason.ABSENT}
        assert reasons.count(None) >= COUNT  # there was something to compare


@pytest.fixture
def exchanged(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    """Load two blocks each of which lies, whole and checksummed, at the other's place."""
    with BlockCache([node.address], NAMESPACE, timeout=PATIENCE) as cache:
        keys, values = blocks(cache, 2, first=200_000)
        eventually(lambda: cache.save(keys, values) == [None] * 2)
        calls = cache._link.calls()
        read = calls.get_into_many

        def other_place(keys: Sequence[bytes], places: Sequence[Any], timeout: float) -> Any:
            return read(keys[::-1], places, timeout)

        monkeypatch.setattr(calls, "get_into_many", other_place)

        def load() -> tuple[list[Reason | None], bool]:
            into = targets(2)
            reasons = cache.load(keys, into)
            return reasons, [b"".join(one) for one in into] == [b"".join(value) for value in values[::-1]]

        yield load


def test_a_whole_block_of_another_request_is_refused(exchanged: Callable[[], Any]) -> None:
    reasons, _ = exchanged()
    assert reasons == [Reason.FOREIGN] * 2


def test_without_the_check_of_the_header_it_would_be_loaded(
    exchanged: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BlockFormat, "checked", lambda self, keys, *given: [None] * len(keys))
    assert exchanged() == ([None] * 2, True)
