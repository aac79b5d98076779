"""Weights that change while requests are under way: KV of one set is never saved as, nor loaded for, another's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode
from farpool.kv import Reason
from farpool.kv.cache import Match, PrefixCache
from farpool.kv.journal import recorded
from tests.kv.test_prefix import FULL, KINDS, TOKENS, Made, check, keys_of, make, node, save_steps, target
from tests.nodes import PATIENCE

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]


def outdated(make: Make, **changes: Any) -> tuple[PrefixCache, Match]:
    """A cache, and a lookup from before its weights changed."""
    cache = make([FULL] * 2, **changes)
    save_steps(cache, [FULL] * 2, TOKENS[:16])
    match = cache.lookup(TOKENS, request="outdated")
    assert (match.tokens, match.weights_id) == (16, "1")
    cache.weights_id = "2"
    return cache, match


@pytest.mark.parametrize("way", ["alone", "together", "in the background", "part by part"])
def test_a_match_of_old_weights_loads_nothing_and_the_journal_says_why(make: Make, way: str) -> None:
    cache, match = outdated(make, pieces=2)
    into = target([FULL] * 2, TOKENS)
    loaded = {
        "alone": lambda: [cache.load(match, into)],
        "together": lambda: cache.load([match, match], [into, into]),
        "in the background": lambda: [cache.load(match, into, wait=False).result(PATIENCE)],
        "part by part": lambda: [one.tokens.result(PATIENCE) for one in cache.load_parts(match, into)],
    }[way]()
    assert set(loaded) == {0}
    assert not any(any(one) for one in into.memory.values())
    assert recorded("outdated")[-1].reasons == {Reason.OTHER_WEIGHTS: 4}
    assert cache.stats()["load.other_weights"] >= 4
    cache.weights_id = "1"
    assert cache.load(match, into) == 16
    check([FULL] * 2, TOKENS, into, 16)


def test_what_is_near_of_old_weights_is_not_used(make: Make) -> None:
    cache = make([FULL], near_bytes=1 << 20)
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.prefetch_by(TOKENS, PATIENCE).result(PATIENCE) == 4
    match = cache.lookup(TOKENS)
    cache.weights_id = "2"
    assert cache.load(match, target([FULL], TOKENS)) == 0
    assert cache.lookup(TOKENS).tokens == 0


def test_a_save_that_waits_for_a_thread_keeps_the_weights_of_its_beginning(make: Make) -> None:
    cache = make([FULL], threads=1)
    gate = threading.Event()
    cache._blocks.submit(gate.wait, PATIENCE)
    tokens = TOKENS[:16]
    saved = cache.save(tokens, Made([FULL], TOKENS, 16).computed(), wait=False)
    cache.weights_id = "2"
    tokens.clear()  # the list is the engine's
    gate.set()
    assert saved.result(PATIENCE) == 4
    assert cache.lookup(TOKENS).found == 0
    cache.weights_id = "1"
    assert cache.lookup(TOKENS).found == 16


def test_an_engine_says_which_weights_have_computed_what_it_saves(make: Make) -> None:
    cache = make([FULL])
    match = cache.lookup(TOKENS)
    cache.weights_id = "2"
    made = Made([FULL], TOKENS, 16).computed()
    assert cache.save(TOKENS[:16], made, weights_id=match.weights_id) == 4
    assert cache.lookup(TOKENS).found == 0
    assert cache.save(TOKENS[:8], made, weights_id="3", wait=False).result(PATIENCE) == 2
    for weights, found in (("1", 16), ("2", 0), ("3", 8)):
        cache.weights_id = weights
        assert cache.lookup(TOKENS).found == found


def test_weights_that_change_during_a_load_make_it_a_miss(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make(KINDS["all"])
    save_steps(cache, KINDS["all"], TOKENS[:16])
    match = cache.lookup(TOKENS)
    load = cache._blocks.load

    def changed(*arguments: Any, **settings: Any) -> list[Reason | None]:
        cache.weights_id = "2"
        return load(*arguments, **settings)

    monkeypatch.setattr(cache._blocks, "load", changed)
    assert cache.load(match, target(KINDS["all"], TOKENS)) == 0


def test_counters_and_pins_stay_when_weights_change(make: Make, node: RunningNode) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.pin(TOKENS[:16], 1000) == 4
    keys = keys_of(cache, TOKENS[:16])
    cache.weights_id = "2"
    assert cache.stats()["save.done"] == 4
    with Store(node.address, timeout=PATIENCE) as store:
        assert [info.pins for key in keys if (info := store.stat(key))] == [1] * 4
    cache.weights_id = "1"
    assert cache.purge() == 4
