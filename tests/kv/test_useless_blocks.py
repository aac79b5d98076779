"""Values that nobody can use must not stay under a block's key: nobody could save the block anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode
from farpool.kv import BlockCache, Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.header import HEADER_BYTES, pack_header
from farpool.kv.journal import recorded
from tests.kv.test_blocks import BLOCK as BLOCK_BYTES
from tests.kv.test_blocks import blocks, cache, targets
from tests.kv.test_prefix import BLOCK, FULL, TOKENS, Made, check, keys_of, make, node, target
from tests.nodes import PATIENCE

__all__ = ["cache", "make", "node"]  # fixtures

Make = Callable[..., PrefixCache]
PAYLOAD = BLOCK * FULL.nbytes


@pytest.fixture
def store(node: RunningNode) -> Iterator[Store]:
    with Store(node.address, timeout=PATIENCE) as store:
        yield store


def values(key: bytes) -> dict[str, bytes]:
    """Values that cannot be the block of a key, of another size or of the right one."""
    return {
        "short": b"x" * 100,
        "long": bytes(PAYLOAD + HEADER_BYTES + 1),
        "foreign": pack_header(bytes(64), PAYLOAD, PAYLOAD) + bytes(PAYLOAD),
    }


@pytest.mark.parametrize("kind", ["short", "long", "foreign"])
def test_a_useless_value_is_a_miss_once_and_the_block_can_be_saved_anew(make: Make, store: Store, kind: str) -> None:
    cache = make([FULL])
    key = keys_of(cache, TOKENS[:16])[1]
    store.put(key, values(key)[kind])
    made = Made([FULL], TOKENS, 16).computed()
    assert cache.save(TOKENS[:4], made) == 1
    match = cache.lookup(TOKENS, request=f"useless {kind}")
    if kind in ("short", "long"):
        assert (match.tokens, match.reason) == (4, Reason.WRONG_SIZE)
        assert recorded(f"useless {kind}")[0].reasons == {Reason.WRONG_SIZE: 1, Reason.ABSENT: 5}
    else:
        assert match.tokens == 8  # its size is right
        assert cache.load(match, target([FULL], TOKENS)) == 4
        assert cache.stats()["load.foreign"] == 1
    assert store.stat(key) is None
    assert cache.save(TOKENS[:16], made) == 4
    into = target([FULL], TOKENS)
    assert cache.load(cache.lookup(TOKENS), into) == 16
    check([FULL], TOKENS, into, 16)


def test_a_save_replaces_a_value_of_another_size(make: Make, store: Store) -> None:
    cache = make([FULL])
    store.put(keys_of(cache, TOKENS[:16])[0], b"x" * 100)
    assert cache.save(TOKENS[:16], Made([FULL], TOKENS, 16).computed()) == 4
    into = target([FULL], TOKENS)
    assert cache.load(cache.lookup(TOKENS), into) == 16
    check([FULL], TOKENS, into, 16)


def test_with_a_codec_smaller_values_are_there_and_larger_ones_are_not(make: Make, store: Store) -> None:
    cache = make([FULL], codec="zstd")
    made = Made([FULL], TOKENS, 16).computed()
    assert cache.save(TOKENS[:12], made) == 3
    key = keys_of(cache, TOKENS[:16])[3]
    store.put(key, bytes(PAYLOAD + HEADER_BYTES + 1))
    match = cache.lookup(TOKENS)
    assert (match.tokens, match.reason) == (12, Reason.WRONG_SIZE)
    assert store.stat(key) is None


def test_one_who_asks_for_another_size_than_its_namespace_says_drops_nothing(cache: BlockCache) -> None:
    keys, given = blocks(cache, 2)
    assert cache.save(keys, given) == [None] * 2
    for nbytes in (0, BLOCK_BYTES - 1, BLOCK_BYTES + 1):
        assert cache.load(keys, [bytearray(nbytes)] * 2) == [Reason.WRONG_SIZE] * 2
        assert cache.lookup(keys, stored=[nbytes + HEADER_BYTES] * 2).is_whole
        assert cache.save(keys, [bytes(nbytes)] * 2) == [None] * 2
    assert cache.load(keys, targets(2)) == [None] * 2
