"""What sequences, ranks and processes share: pins are counted, notes tell what is kept, and ranks never meet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from farpool.kv import PoolObjects, Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.journal import recorded
from farpool.memory.pool import Pool
from tests.kv.test_prefix import BLOCK, FULL, KINDS, TOKENS, Made, keys_of, make, node, save_steps, target
from tests.nodes import PATIENCE, eventually

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]
OTHER = [*TOKENS[:8], *[9] * 8]


def pins(node: RunningNode, keys: list[bytes]) -> list[int]:
    with Store(node.address, timeout=PATIENCE) as store:
        return [info.pins for key in keys if (info := store.stat(key))]


def test_what_two_sequences_share_stays_pinned_until_both_are_unpinned(make: Make, node: RunningNode) -> None:
    cache = make([FULL])
    for tokens in (TOKENS[:16], OTHER):
        save_steps(cache, [FULL], tokens)
        assert cache.pin(tokens, 1000) == 4
    assert cache.pin(TOKENS[:16], 1000) == 4  # not once more
    assert pins(node, keys_of(cache, OTHER)) == [2, 2, 1, 1]
    cache.unpin(TOKENS[:16])
    cache.unpin(TOKENS[:16])
    assert pins(node, keys_of(cache, OTHER)) == [1, 1, 1, 1]
    assert pins(node, keys_of(cache, TOKENS[:16])) == [1, 1, 0, 0]
    cache.pin([*OTHER, 1], 1000)  # the same blocks, but another sequence
    cache.unpin(OTHER)
    assert pins(node, keys_of(cache, OTHER)) == [1, 1, 1, 1]
    cache.unpin([*OTHER, 1])
    assert pins(node, keys_of(cache, OTHER)) == [0, 0, 0, 0]


def test_sequences_in_a_pool_share_pins_too_and_the_longest_time_counts() -> None:
    with Pool(fast="1MiB", dram="1MiB") as pool:
        objects = PoolObjects(pool, "256KiB")
        with PrefixCache(objects, [FULL], model="m", weights_id="1", dtype="float16", block=BLOCK) as cache:
            for tokens in (TOKENS[:16], OTHER):
                save_steps(cache, [FULL], tokens)
            assert cache.pin(TOKENS[:16], 1000) == 4
            assert cache.pin(OTHER, 0.001) == 4
            cache.unpin(OTHER)
            assert cache.demote(TOKENS[:16]).reasons == {Reason.PINNED: 4}
            cache.unpin(TOKENS[:16])
            assert cache.demote(TOKENS[:16]).blocks == 4
            assert cache.pin(OTHER, 0.001) == 4
            eventually(lambda: cache.demote(OTHER).blocks == 4)
        objects.close()


def test_a_handoff_tells_how_much_is_kept_and_why_not_more(make: Make) -> None:
    giver = make(KINDS["full"])
    save_steps(giver, KINDS["full"], TOKENS[:8])
    handed = giver.handoff(TOKENS[:16], 60, request="given")
    assert (handed.blocks, handed.reasons) == (2, {Reason.ABSENT: 2})
    assert [(one.step, one.done) for one in recorded("given")] == [("pin", 2)]
    nothing = giver.handoff([5] * 16, 60)
    assert (nothing.blocks, nothing.reasons) == (0, {Reason.ABSENT: 4})
    assert giver.take(nothing.note).found == 0


@pytest.mark.slow
def test_what_was_taken_outlives_the_process_that_gave_it() -> None:
    given: dict[str, Any] = {"model": "m", "weights_id": "1", "dtype": "float16", "block": BLOCK, "timeout": PATIENCE}
    with running_node("64MiB", grace=0.2) as node, PrefixCache([node.address], [FULL], **given) as taker:
        with PrefixCache([node.address], [FULL], **given) as giver:
            save_steps(giver, [FULL], TOKENS[:16])
            handed = giver.handoff(TOKENS[:16], 1000)
        match = taker.take(handed.note)
        assert taker.drain(PATIENCE)
        keys = keys_of(taker, TOKENS[:16])
        eventually(lambda: pins(node, keys) == [1] * 4)  # the giver's have ended with its session
        assert taker.load(match, target([FULL], TOKENS)) == 16
        taker.unpin(TOKENS[:16])
        assert pins(node, keys) == [0] * 4


def test_a_note_of_another_namespace_is_in_the_journal(make: Make) -> None:
    note = make([FULL]).handoff(TOKENS[:16], 10).note
    match = make([FULL], weights_id="2").take(note, request="foreign note")
    assert (match.tokens, match.reason) == (0, Reason.FOREIGN)
    (entry,) = recorded("foreign note")
    assert (entry.step, entry.blocks, entry.done, entry.reasons) == ("lookup", 4, 0, {Reason.FOREIGN: 4})
    assert "other weights" in entry.note


def test_ranks_never_meet(make: Make) -> None:
    layers = KINDS["all"]
    ranks = [make(layers, parallel={"tp": 2, "pp": 2}, rank=rank) for rank in range(4)]
    for number, rank in enumerate(ranks):
        assert rank.lookup(TOKENS).found == 0
        memory = Made(layers, TOKENS, 12).computed()  # of all ranks the same tokens and sizes, but other bytes
        for one in memory.memory.values():
            one[:] = bytes([number + 1]) * len(one)
        assert rank.save(TOKENS[:12], memory) > 0
    for number, rank in enumerate(ranks):
        into = target(layers, TOKENS)
        assert rank.load(rank.lookup(TOKENS), into) == 12
        assert {byte for one in into.memory.values() for byte in one} == {0, number + 1}
    # Who is divided in another way, or not at all, finds nothing of theirs.
    for changes in ({}, {"parallel": {"tp": 4}}, {"parallel": {"tp": 2, "pp": 2}, "extra": {"rope": "yarn"}}):
        assert make(layers, **changes).lookup(TOKENS).found == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 1}, "rank is 1, expected 0 to 0"),
        ({"parallel": {"tp": 2}, "rank": 2}, "rank is 2, expected 0 to 1"),
        ({"parallel": {"tp": 2}, "rank": -1}, "rank is -1"),
        ({"parallel": {"tp": 0}}, "parallel is"),
    ],
)
def test_a_rank_that_does_not_exist_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrefixCache(["tcp://127.0.0.1:1"], [FULL], model="m", weights_id="1", dtype="float16", **settings)
