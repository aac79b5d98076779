"""A lookup and a load in one step: the same KV as in two, the same decisions, and one request where that is enough."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from farpool.errors import ConfigError
from farpool.kv import Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.cost import Arm, CostModel, Plan
from farpool.kv.memory import Layer, TensorMemory
from tests.kv.test_prefix import (
    BLOCK,
    FULL,
    KINDS,
    PATIENCE,
    TOKENS,
    Short,
    check,
    make,
    node,
    save_steps,
    target,
    teach,
    use_first,
)

__all__ = ["make", "node"]

LONG = list(range(1000, 1000 + 40 * BLOCK + 1))


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("tokens", [TOKENS, LONG], ids=["in one request", "after a lookup"])
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_what_a_lookup_and_a_load_give(
    make: Callable[..., PrefixCache], kind: str, tokens: list[int], transport: str
) -> None:
    layers = KINDS[kind]
    save_steps(make(layers), layers, tokens[: len(tokens) // 2])
    there = len(tokens) // 2 // BLOCK * BLOCK
    cache = make(layers, transport=transport)
    into = target(layers, tokens)
    match = cache.fetch(tokens, into)
    assert (match.tokens, match.found, match.reason) == (there, there, Reason.ABSENT)
    check(layers, tokens, into, there)
    assert cache.load(cache.lookup(tokens), target(layers, tokens)) == there


def test_few_blocks_are_got_without_a_lookup(make: Callable[..., PrefixCache]) -> None:
    save_steps(make([FULL]), [FULL], TOKENS)
    cache = make([FULL])
    assert cache.fetch(TOKENS, target([FULL], TOKENS)).tokens == 28
    assert not any(name.startswith("lookup") for name in cache.stats())
    cache.fetch(LONG, target([FULL], LONG))
    assert cache.stats()["lookup.absent"] == 40


def test_whatever_is_not_there_is_a_miss_with_its_reason(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    match = cache.fetch(TOKENS, target([FULL], TOKENS))
    assert (match.tokens, match.found, match.reason) == (0, 0, Reason.ABSENT)
    assert cache.fetch([], target([FULL], [])).tokens == 0
    save_steps(cache, [FULL], TOKENS)
    gone = cache._blocks.drop([cache._sequence(TOKENS, "")[0][2]])
    match = cache.fetch(TOKENS, target([FULL], TOKENS))
    assert (gone, match.tokens, match.reason) == (1, 2 * BLOCK, Reason.ABSENT)
    assert cache.fetch(TOKENS, target([FULL], TOKENS), timeout=0.0).reason == Reason.LATE
    with pytest.raises(ConfigError, match="no place"):
        cache.fetch(TOKENS, Short([FULL], TOKENS))


def test_what_computing_makes_sooner_is_not_asked_for(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS)
    for _ in range(3):
        cache.fetch(TOKENS, target([FULL], TOKENS))
    for _ in range(20):
        cache.computed(28, 1e-9)
    into = target([FULL], TOKENS)
    before = cache.stats()["load.done"]
    match = cache.fetch(TOKENS, into)
    assert (match.tokens, match.found, match.reason) == (0, 28, Reason.BYPASSED)
    assert into.memory == target([FULL], TOKENS).memory
    assert cache.stats()["load.done"] == before


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("tokens", [TOKENS, LONG], ids=["in one request", "after a lookup"])
def test_a_load_that_has_ended_is_not_under_way_any_more(
    make: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch, tokens: list[int], fails: bool
) -> None:
    cache = make([FULL])
    use_first(cache, [FULL])
    save_steps(cache, [FULL], tokens[:28])
    load, under_way = cache._blocks.load, []

    def spied(*given: object, **named: object) -> object:
        under_way.append(cache.judge.begun(0))
        if fails:
            raise ConfigError("no such memory")
        return load(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(cache._blocks, "load", spied)
    with pytest.raises(ConfigError, match="no such memory") if fails else contextlib.nullcontext():
        assert cache.fetch(tokens, target([FULL], tokens)).tokens == 28
    asked = len(tokens) // BLOCK if tokens is TOKENS else 7
    assert under_way == [asked * BLOCK * FULL.nbytes]
    assert cache.judge.begun(0) == 0


def test_what_lies_near_is_no_part_of_the_decision_and_computing_ends_a_load(
    make: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make([FULL], near_bytes=1 << 20, hold_out=False)
    use_first(cache, [FULL])
    save_steps(cache, [FULL], TOKENS)
    assert cache.prefetch_by(TOKENS[:8], PATIENCE, leave=0).result(PATIENCE) == 2
    cache.judge._cost = CostModel()  # which has not measured how long that took
    teach(cache, linear=2.0, seconds_a_byte=1e-3)
    load, timeouts = cache._blocks.load, []
    decide, decided = cache.judge.decide, []

    def spied(*given: object, timeout: float, **named: object) -> object:
        timeouts.append(timeout)
        return load(*given, timeout=timeout, **named)  # type: ignore[arg-type]

    def told(tokens: int, nbytes: int, *, plan: Plan | None, **named: Any) -> tuple[Plan, Arm]:
        decided.append((tokens, nbytes, plan))
        return decide(tokens, nbytes, plan=plan, **named)

    monkeypatch.setattr(cache._blocks, "load", spied)
    monkeypatch.setattr(cache.judge, "decide", told)
    into = target([FULL], TOKENS)
    assert cache.fetch(TOKENS, into).tokens == 28
    check([FULL], TOKENS, into, 28)
    assert decided == [(28, 5 * BLOCK * FULL.nbytes, None)]
    (timeout,) = timeouts
    assert timeout == pytest.approx(28 * 2.0, rel=0.2)


def test_one_of_32_computes_so_that_what_loading_gains_is_known(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS)
    cache.fetch(TOKENS, target([FULL], TOKENS))
    cache.computed(28, 10.0)
    arms = [cache.fetch(TOKENS, target([FULL], TOKENS)) for _ in range(64)]
    held_out = [match for match in arms if match.arm == "hold-out"]
    assert [match.tokens for match in held_out] == [0, 0]
    assert sum(match.tokens == 28 for match in arms) == 62


def test_kv_of_old_weights_is_not_used_for_new_ones(
    make: Callable[..., PrefixCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS)
    load = cache._blocks.load

    def change_and_load(*given: object, **named: object) -> object:
        cache.weights_id = "2"
        return load(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(cache._blocks, "load", change_and_load)
    assert cache.fetch(TOKENS, target([FULL], TOKENS)).tokens == 0
    assert cache.stats()["load.other_weights"] == 7


def test_layers_of_tensors_are_viewed_together() -> None:
    layers = [(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4)) for _ in range(3)]
    memory = TensorMemory(layers, first=[0, 0, 4])
    before, *together, behind = memory.blocks((0, 1), -2, 6, 2)
    assert before is None
    assert behind is None
    assert together[1] is not None
    for view in together[1][0].views():
        view[:] = b"\xff" * len(view)
    assert all(bool((tensor[:, :, 2:4] != 0).all()) for pair in layers[:2] for tensor in pair)
    assert all(not tensor[:, :, :2].any() and not tensor[:, :, 4:].any() for pair in layers[:2] for tensor in pair)
    assert not any(tensor.any() for tensor in layers[2])
    # Each begins with a token of its own.
    mixed = memory.blocks((1, 2), 2, 4, 2)
    assert [one and [len(slices.views()) for slices in one] for one in mixed] == [None, [4, 4], [4, 4], None]


def test_saved_and_fetched_tensors_are_equal(make: Callable[..., PrefixCache]) -> None:
    layers = [Layer(2 * 2 * 8 * 4)] * 3
    computed = [(torch.randn(1, 2, 24, 8), torch.randn(1, 2, 24, 8)) for _ in layers]
    loaded = [(torch.zeros(1, 2, 24, 8), torch.zeros(1, 2, 24, 8)) for _ in layers]
    cache = make(layers, dtype="float32", pieces=2)
    cache.save(TOKENS[:24], TensorMemory(computed))
    assert cache.fetch(TOKENS[:25], TensorMemory(loaded)).tokens == 24
    assert all(
        torch.equal(a, b) for old, new in zip(computed, loaded, strict=True) for a, b in zip(old, new, strict=True)
    )
