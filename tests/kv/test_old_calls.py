"""Calls of `PrefixCache` under their old names, its settings in both forms, and one prompt or several."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from farpool.kv import Prompt
from farpool.kv.cache import PrefixCache
from farpool.kv.old_calls import OldCalls
from farpool.kv.settings import PrefixFields, PrefixSettings
from tests.kv.test_prefix import BLOCK, FULL, TOKENS, Made, check, target
from tests.nodes import PATIENCE

LAYERS = [FULL] * 2
OTHER = [7] * 12


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("64MiB") as node:
        yield node


@pytest.fixture
def cache(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[PrefixCache]:
    settings = PrefixSettings(
        model=request.node.name, weights_id="1", dtype="float16", block=BLOCK, pieces=2, timeout=PATIENCE
    )
    with PrefixCache([node.address], LAYERS, settings) as cache:
        yield cache


def made(tokens: list[int]) -> Made:
    return Made(LAYERS, tokens).computed()


def called(cache: PrefixCache, name: str, new: str, *given: Any, **named: Any) -> Any:
    """Make a call under its old name; it must warn in this file and name the new call."""
    with pytest.warns(DeprecationWarning, match=rf"PrefixCache\.{name} is not in the next release; call {new}") as seen:
        result = getattr(cache, name)(*given, **named)
    assert [one.filename for one in seen] == [__file__]
    return result


def test_each_old_name_warns_and_makes_the_new_call(cache: PrefixCache) -> None:
    assert called(
        cache,
        "save_many",
        r"save\(\[Prompt",
        [TOKENS, OTHER],
        [made(TOKENS), made(OTHER)],
        starts=[8, 0],
        salts=["", "s"],
    ) == [10, 6]
    assert called(cache, "save_async", r"save\(", OTHER, made(OTHER), salt="t").result(PATIENCE) == 6
    assert called(cache, "save_layers", r"save\(", OTHER, made(OTHER), [0]).result(PATIENCE) == 3
    assert cache.save(TOKENS[:8], made(TOKENS)) == 4
    first, second = called(
        cache, "lookup_many", r"lookup\(\[Prompt", [TOKENS, OTHER], salts=[b"", b"s"], requests=["a", "b"], leave=0
    )
    assert [(first.tokens, first.request), (second.tokens, second.salt)] == [(28, "a"), (12, b"s")]
    assert called(cache, "lookup_async", r"lookup\(", tokens=TOKENS).result(PATIENCE).tokens == 28
    into = target(LAYERS, TOKENS)
    assert called(cache, "load_many", r"load\(\[", [first, second], [into, target(LAYERS, OTHER)]) == [28, 12]
    check(LAYERS, TOKENS, into, 28)
    assert called(cache, "load_async", r"load\(", match=first, memory=into).result(PATIENCE) == 28
    parts = called(cache, "load_layers", r"load_parts\(", first, target(LAYERS, TOKENS), timeout=PATIENCE)
    assert [(part.layers, part.tokens.result(PATIENCE)) for part in parts] == [((0,), 28), ((1,), 28)]
    assert called(cache, "lookup_many", "lookup", []) == called(cache, "save_many", "save", [], []) == []
    assert len([name for name in vars(OldCalls) if not name.startswith("_")]) == 8


def test_one_prompt_gives_one_result_and_several_give_a_list(cache: PrefixCache) -> None:
    prompts = [Prompt(TOKENS, "s", "one"), Prompt(OTHER, request="two")]
    assert cache.save(prompts, [made(TOKENS), made(OTHER)], wait=False).result(PATIENCE) == [14, 6]
    one, (same, other) = cache.lookup(prompts[0]), cache.lookup(prompts, wait=False).result(PATIENCE)
    assert (one.tokens, same.tokens, other.tokens) == (28, 28, 8)
    assert [match.request for match in (one, same, other)] == ["one", "one", "two"]
    assert cache.lookup(prompts[:1])[0].tokens == 28
    assert cache.load([same, other], [target(LAYERS, TOKENS), target(LAYERS, OTHER)], wait=False).result(PATIENCE) == [
        28,
        8,
    ]
    assert cache.lookup(()).tokens == 0  # a prompt without tokens
    assert cache.fetch(prompts[0], target(LAYERS, TOKENS)).tokens == 28


def test_a_salt_next_to_a_prompt_with_its_own_is_refused(cache: PrefixCache) -> None:
    calls: list[Callable[..., object]] = [
        lambda **given: cache.lookup(Prompt(TOKENS), **given),
        lambda **given: cache.lookup([Prompt(TOKENS)], **given),
        lambda **given: cache.fetch(Prompt(TOKENS), target(LAYERS, TOKENS), **given),
        lambda **given: cache.save(Prompt(TOKENS), made(TOKENS), **given),
    ]
    for call in calls:
        for given in ({"salt": "s"}, {"request": "r"}):
            with pytest.raises(ConfigError, match="in addition to a Prompt; set the fields of the Prompt"):
                call(**given)


def test_lists_of_tokens_in_place_of_prompts_are_refused(cache: PrefixCache) -> None:
    several: Any = [TOKENS, OTHER]  # as `lookup_many` and `save_many` took them
    for wait in (True, False):
        with pytest.raises(ConfigError, match=r"the first one is \[.*give several prompts as a list of Prompt"):
            cache.lookup(several, wait=wait)
        with pytest.raises(ConfigError, match="give several prompts as a list of Prompt"):
            cache.save(several, [made(TOKENS), made(OTHER)], wait=wait)


def test_a_list_of_prompts_with_another_value_and_a_fetch_of_several_are_refused(cache: PrefixCache) -> None:
    mixed: Any = [Prompt(TOKENS), OTHER]
    with pytest.raises(ConfigError, match="expected a Prompt like the first one"):
        cache.lookup(mixed)
    two: Any = [Prompt(TOKENS), Prompt(OTHER)]
    with pytest.raises(ConfigError, match="got 2 prompts, expected one"):
        cache.fetch(two, made(TOKENS))


def test_settings_are_a_struct_or_its_fields(node: RunningNode, cache: PrefixCache) -> None:
    name = cache._current.namespace.model
    fields: PrefixFields = {"model": name, "weights_id": "1", "dtype": "float16", "block": BLOCK, "pieces": 2}
    cache.save(TOKENS, made(TOKENS))
    with PrefixCache([node.address], LAYERS, timeout=PATIENCE, **fields) as short:
        assert short.lookup(TOKENS).tokens == 28
    given = PrefixSettings(**fields, timeout=PATIENCE)  # type: ignore[typeddict-item]
    with PrefixCache([node.address], LAYERS, given, weights_id="2") as changed:
        assert changed.weights_id == "2"
        assert changed.lookup(TOKENS).tokens == 0
    with pytest.raises(TypeError, match="model"):
        PrefixCache([node.address], LAYERS, weights_id="1", dtype="float16")
    with pytest.raises(TypeError, match="modle"):
        PrefixCache([node.address], LAYERS, modle=name, **fields)  # type: ignore[call-arg]


def test_the_short_form_has_the_fields_of_the_struct_with_their_types() -> None:
    assert get_type_hints(PrefixFields) == get_type_hints(PrefixSettings)
