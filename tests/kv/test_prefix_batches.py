"""Several prompts at the same time, and layers one after the other as they are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from farpool.cluster.store.best_effort import BestEffort
from farpool.errors import ConfigError
from farpool.kv import Reason
from farpool.kv.cache import PrefixCache, Prompt
from farpool.kv.journal import recorded
from tests.kv.test_prefix import FULL, KINDS, TOKENS, Made, check, make, node, save_steps, target, teach, use_first
from tests.nodes import PATIENCE

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]
PROMPTS = [TOKENS, [*TOKENS[:8], *[7] * 12], [5] * 9, []]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often nodes were asked, by call."""
    counts: dict[str, int] = {}

    def count(name: str) -> None:
        real = getattr(BestEffort, name)

        def spied(*arguments: Any, **settings: Any) -> Any:
            counts[name] = counts.get(name, 0) + 1
            return real(*arguments, **settings)

        monkeypatch.setattr(BestEffort, name, spied)

    for name in ("lookup", "get_into_many", "put_many"):
        count(name)
    return counts


def test_an_engine_is_asked_once_for_blocks_that_prompts_share(make: Make) -> None:
    layers = KINDS["full"]
    asked: list[tuple[int, int]] = []

    class Asked(Made):
        def parts(self, layer: int, start: int, stop: int) -> Any:
            asked.append((layer, start))
            return super().parts(layer, start, stop)

    prompt = PROMPTS[0]
    memories = [Asked(layers, prompt).computed() for _ in range(3)]
    cache = make(layers)
    cache.save([1] * 4, Asked(layers, [1] * 4).computed())  # with the probe
    asked.clear()
    assert cache.save([Prompt(prompt, start=start) for start in (16, 0, 8)], memories) == [3, 7, 5]
    assert sorted(asked) == sorted(set(asked))


@pytest.mark.parametrize("near_bytes", [0, 1 << 20])
def test_prompts_are_saved_looked_up_and_loaded_together(make: Make, counted: dict[str, int], near_bytes: int) -> None:
    layers = KINDS["full"]
    cache = make(layers, near_bytes=near_bytes)
    use_first(cache, layers)
    counted.clear()
    memories = [Made(layers, prompt).computed() for prompt in PROMPTS]
    names = [f"together {near_bytes} {number}" for number in range(4)]
    assert cache.save(
        [Prompt(prompt, request=name) for prompt, name in zip(PROMPTS, names, strict=True)], memories
    ) == [7, 5, 2, 0]
    assert counted == {"lookup": 1, "put_many": 2}  # the second is of the namespace's description
    assert cache.stats()["save.done"] == 12  # two blocks are those of two prompts
    if near_bytes:
        assert cache.prefetch_by(PROMPTS[2], PATIENCE).result(PATIENCE) == 2
    counted.clear()
    asked = zip([*PROMPTS, [6] * 9], [*names, "absent"], strict=True)
    matches = cache.lookup([Prompt(prompt, request=name) for prompt, name in asked])
    assert [match.tokens for match in matches] == [28, 16, 8, 0, 0]
    assert [match.reason for match in matches[3:]] == [None, Reason.ABSENT]
    assert [match.request for match in matches] == [*names, "absent"]
    into = [target(layers, prompt) for prompt in [*PROMPTS, [6] * 9]]
    assert cache.load(matches, into) == [28, 16, 8, 0, 0]
    assert counted == {"lookup": 1, "get_into_many": 1}
    for prompt, memory, match in zip(PROMPTS, into, matches, strict=False):
        check(layers, prompt, memory, match.tokens)
    steps = {name: [(one.step, one.blocks, one.done) for one in recorded(name)] for name in names[:2]}
    assert steps == {
        names[0]: [("save", 7, 7), ("lookup", 7, 7), ("decision", 7, 7), ("load", 7, 7)],
        names[1]: [("save", 3, 3), ("lookup", 4, 4), ("decision", 4, 4), ("load", 4, 4)],
    }
    absent = recorded("absent")[0]
    assert (absent.step, absent.done, absent.reasons) == ("lookup", 0, {Reason.ABSENT: 2})


def test_of_prompts_that_are_loaded_together_each_is_as_long_as_its_own_blocks(make: Make) -> None:
    layers = KINDS["sliding"]
    cache = make(layers)
    for prompt in (TOKENS[:24], [3] * 16):
        save_steps(cache, layers, prompt)
    matches = cache.lookup([Prompt(TOKENS[:25]), Prompt([3] * 17)])
    cache._blocks.drop([matches[1].wanted.key(0, 2)])
    into = [target(layers, TOKENS), target(layers, [3] * 17)]
    assert cache.load(matches, into) == [24, 0]
    check(layers, TOKENS, into[0], 24)


def test_together_they_may_take_what_computing_all_of_them_takes(make: Make) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:24])
    teach(cache, linear=1.0, seconds_a_byte=1e-9)
    matches = cache.lookup([Prompt(TOKENS)] * 3)
    assert cache.load(matches, [target([FULL], TOKENS) for _ in matches]) == [24] * 3
    assert cache.stats()["gain"]["load_requests"] == pytest.approx(3, rel=0.1)
    assert cache.stats()["saved_seconds"] == pytest.approx(3 * 24, rel=0.1)
    assert cache.load(matches, [target([FULL], TOKENS) for _ in matches], timeout=0.0) == [0] * 3


def test_layers_are_saved_as_they_are_computed(make: Make) -> None:
    layers = [FULL] * 6
    cache = make(layers, pieces=3)
    assert cache.parts == [(0, 1), (2, 3), (4, 5)]
    made = Made(layers, TOKENS, 16).computed()
    later = {place: made.memory.pop(place) for place in list(made.memory) if place[0] > 1}
    assert cache.save(TOKENS[:16], made, layers=(0, 1), wait=False).result(PATIENCE) == 4
    assert cache.lookup(TOKENS).found == 0
    made.memory.update(later)
    assert cache.save(TOKENS[:16], made, layers=[5, 4, 3, 2], start=8) == 4
    assert cache.save(TOKENS[:8], made, layers=[2, 3, 4, 5], wait=False).result(PATIENCE) == 4
    into = target(layers, TOKENS)
    assert cache.load(cache.lookup(TOKENS), into) == 16
    check(layers, TOKENS, into, 16)
    for wrong in ([0], [0, 1, 2], [9]):
        with pytest.raises(ConfigError, match="are not stored by themselves"):
            cache.save(TOKENS[:16], made, layers=wrong)
