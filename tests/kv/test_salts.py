"""Sequences with the same tokens and different salts (adapters, images, users) never meet, whatever is called."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from farpool.errors import ConfigError
from farpool.kv import PrefixCache
from farpool.kv.cache import Match, Prompt
from farpool.kv.keys import block_keys, chain_seed, token_chain, token_keys
from farpool.kv.memory import Layer
from tests.kv.test_prefix import make, node
from tests.nodes import PATIENCE

__all__ = ["make", "node"]  # fixtures

Make = Callable[..., PrefixCache]
BLOCK = 4  # see `make`
LAYERS = [Layer(8)] * 2
SALTS: list[bytes | str] = ["", "lora a", "lora b", b"\x01 image", b"\x02 image", "alice", "bob"]
IMAGE = 9999
"""Placeholder that stands in the tokens for whatever image there is."""
PROMPTS = [
    [1, 2, *[IMAGE] * 6, *range(3, 11)],
    [1, 2, *[IMAGE] * 6, *range(50, 58)],
    [*range(20, 36)],
    [*range(20, 28), *range(70, 78)],
]


class Memory:
    """KV of a sequence on the host, made of the salt and all tokens before; or room for it."""

    def __init__(self, tokens: list[int], salt: bytes | str | None) -> None:
        self.made = {
            (layer, number): bytearray(8 if salt is None else of(salt, layer, tokens[: number + 1]))
            for layer in range(len(LAYERS))
            for number in range(len(tokens))
        }

    def parts(self, layer: int, start: int, stop: int) -> list[bytearray]:
        return [self.made[layer, number] for number in range(start, stop)]


def of(salt: bytes | str, layer: int, tokens: list[int]) -> bytes:
    return hashlib.sha256(repr((salt, layer, tokens)).encode()).digest()[:8]


class Reference:
    """Blocks that are there, by salt and tokens up to their ends."""

    def __init__(self) -> None:
        self.blocks: set[tuple[bytes | str, tuple[int, ...]]] = set()

    def of(self, salt: bytes | str, tokens: list[int]) -> list[tuple[bytes | str, tuple[int, ...]]]:
        return [(salt, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]

    def found(self, salt: bytes | str, tokens: list[int]) -> int:
        there = [one in self.blocks for one in self.of(salt, tokens)]
        return BLOCK * (there.index(False) if False in there else len(there))


class Caller:
    """Calls whatever there is, and compares with the reference."""

    def __init__(self, cache: PrefixCache, near: PrefixCache, seed: int) -> None:
        self.cache, self.near, self.chance = cache, near, random.Random(seed)
        self.reference, self.ever = Reference(), Reference()

    def choose(self) -> tuple[list[int], bytes | str]:
        return self.chance.choice(PROMPTS), self.chance.choice(SALTS)

    def check(self, match: Match, tokens: list[int], salt: bytes | str, loaded: int, memory: Memory) -> None:
        assert match.found == loaded == self.reference.found(salt, tokens)
        assert match.salt == (salt if isinstance(salt, bytes) else salt.encode())
        self.check_bytes(tokens, salt, loaded, memory)

    def check_bytes(self, tokens: list[int], salt: bytes | str, loaded: int, memory: Memory) -> None:
        for layer in range(len(LAYERS)):
            for number in range(loaded):
                assert memory.made[layer, number] == of(salt, layer, tokens[: number + 1]), (salt, layer, number)

    def save(self) -> None:
        tokens, salt = self.choose()
        memory, cache = Memory(tokens, salt), self.cache
        other, other_salt = self.choose()
        match self.chance.randrange(4):
            case 0:
                assert cache.save(tokens, memory, salt=salt) == 2 * 4
            case 1:
                memories = [memory, Memory(other, other_salt)]
                assert cache.save([Prompt(tokens, salt), Prompt(other, other_salt)], memories) == [8, 8]
                self.reference.blocks.update(self.reference.of(other_salt, other))
            case 2:
                assert cache.save(tokens, memory, salt=salt, wait=False).result(PATIENCE) == 8
            case _:
                parts = [cache.save(tokens, memory, layers=layers, salt=salt, wait=False) for layers in cache.parts]
                assert [part.result(PATIENCE) for part in parts] == [4, 4]
        self.reference.blocks.update(self.reference.of(salt, tokens))
        self.ever.blocks |= self.reference.blocks

    def load(self) -> None:
        tokens, salt = self.choose()
        other, other_salt = self.choose()
        memory, cache = Memory(tokens, None), self.cache
        match self.chance.randrange(5):
            case 0:
                found = cache.lookup(tokens, salt=salt, leave=0)
                self.check(found, tokens, salt, cache.load(found, memory), memory)
            case 1:
                matches = cache.lookup([Prompt(tokens, salt), Prompt(other, other_salt)], leave=0)
                second = Memory(other, None)
                loaded = cache.load(matches, [memory, second])
                self.check(matches[0], tokens, salt, loaded[0], memory)
                self.check(matches[1], other, other_salt, loaded[1], second)
            case 2:
                found = cache.lookup(Prompt(tokens, salt), leave=0, wait=False).result(PATIENCE)
                self.check(found, tokens, salt, cache.load(found, memory, wait=False).result(PATIENCE), memory)
            case 3:
                found = cache.fetch(tokens, memory, salt=salt, leave=0)
                self.check(found, tokens, salt, found.tokens, memory)
            case _:
                found = cache.lookup(tokens, salt=salt, leave=0)
                parts = [one.tokens.result(PATIENCE) for one in cache.load_parts(found, memory)]
                self.check(found, tokens, salt, min(parts), memory)

    def keep(self) -> None:
        tokens, salt = self.choose()
        there = sum(one in self.reference.blocks for one in self.reference.of(salt, tokens))
        assert self.cache.pin(tokens, 100, salt=salt) == 2 * there
        outcome = self.cache.demote(tokens, salt=salt)  # the node has no lower tier, so that only counts differ
        assert sum(outcome.reasons.values()) == 8
        assert outcome.reasons.get("absent", 0) == 8 - 2 * there
        self.cache.unpin(tokens, salt=salt)

    def hand_on(self) -> None:
        tokens, salt = self.choose()
        handed = self.cache.handoff(tokens, 100, salt=salt)
        memory = Memory(tokens, None)
        found = self.cache.take(handed.note)
        self.check(found, tokens, salt, self.cache.load(found, memory), memory)
        self.cache.drain(PATIENCE)
        self.cache.unpin(tokens, salt=salt)

    def replace(self) -> None:
        (old, salt), (new, _) = self.choose(), self.choose()
        kept = self.reference.of(salt, new)
        gone = {one for one in self.reference.of(salt, old) if one in self.reference.blocks and one not in kept}
        assert self.cache.supersede(old, new, salt=salt) == 2 * len(gone)
        self.reference.blocks -= gone

    def bring_near(self) -> None:
        tokens, salt = self.choose()
        brought = self.near.prefetch_by(tokens, PATIENCE, salt=salt, leave=0).result(PATIENCE) // 2 * BLOCK
        # It may still have blocks near that have left the nodes, and none that were never saved.
        assert self.reference.found(salt, tokens) <= brought <= self.ever.found(salt, tokens)
        tokens, salt = self.choose()
        memory = Memory(tokens, None)
        match = self.near.fetch(tokens, memory, salt=salt, leave=0)
        assert self.reference.found(salt, tokens) <= match.tokens <= self.ever.found(salt, tokens)
        self.check_bytes(tokens, salt, match.tokens, memory)


def called(make: Make, seed: int, times: int) -> Caller:
    given: dict[str, Any] = {"hold_out": False, "pieces": 2, "weights_id": f"seed {seed}"}
    caller = Caller(make(LAYERS, **given), make(LAYERS, near_bytes=1 << 20, **given), seed)
    calls = [caller.save, caller.load, caller.load, caller.keep, caller.hand_on, caller.replace, caller.bring_near]
    for _ in range(times):
        caller.chance.choice(calls)()
    return caller


def test_no_call_confuses_salts(make: Make) -> None:
    caller = called(make, 1, 400)
    assert len({salt for salt, _ in caller.ever.blocks}) == len(SALTS)  # all were saved with the same tokens
    assert caller.cache.stats()["load.done"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 7))
def test_no_call_confuses_salts_for_long(make: Make, seed: int) -> None:
    called(make, seed, 2000)


def test_the_second_adapter_never_loads_the_first_ones_kv(make: Make) -> None:
    cache = make(LAYERS)
    assert cache.save(PROMPTS[0], Memory(PROMPTS[0], "lora a"), salt="lora a") > 0
    assert cache.lookup(PROMPTS[0], salt="lora b").found == 0
    assert cache.lookup(PROMPTS[0]).found == 0
    assert cache.lookup(PROMPTS[0], salt=b"lora a", leave=0).found == len(PROMPTS[0])  # a text stands for its UTF-8


def test_every_call_that_takes_tokens_takes_a_salt() -> None:
    names = {"tokens", "old"}
    checked = 0
    for name, method in inspect.getmembers(PrefixCache, inspect.isfunction):
        parameters = inspect.signature(method).parameters
        if name.startswith("_") or name == "computed":  # which says how many tokens there were
            continue
        if names & parameters.keys():
            checked += 1
            assert "salt" in parameters, name
    assert checked == 11


def test_keys_with_and_without_a_salt_equal_earlier_releases() -> None:
    digest, tokens = bytes(range(16)), [5, 6, 7, 8]
    assert token_keys(tokens, 2, digest, 2) == block_keys(digest, token_chain(tokens, 2, digest), range(2))
    # FarpoolCache has stored KV under such keys.
    seed = chain_seed(digest, b"adapter")
    assert seed.hex() == "ab439b1c5d4cf48895efc4bc539f1b022eaefd2a9013036c679319d3f5ced7e6"
    for form in (list, range):  # by the native core, and by Python
        given: Any = form(tokens) if form is list else range(5, 9)
        assert token_keys(given, 2, digest, 2, 1, b"adapter") == block_keys(
            digest, token_chain(tokens, 2, seed), range(2), 1
        )


@pytest.mark.parametrize("salt", [None, 5, ["a"], bytearray(b"a")])
def test_a_salt_of_another_type_is_refused(make: Make, salt: Any) -> None:
    cache = make(LAYERS)
    for call in (cache.lookup, cache.demote, cache.unpin):
        with pytest.raises(ConfigError, match=r"salt is .*, expected bytes or a text"):
            call(PROMPTS[0], salt=salt)  # type: ignore[operator]


def test_a_note_without_a_salt_equals_an_earlier_release(make: Make) -> None:
    cache = make(LAYERS)
    cache.save(PROMPTS[0], Memory(PROMPTS[0], ""))
    handed: dict[str, Any] = msgspec.msgpack.decode(cache.handoff(PROMPTS[0], 100).note)
    del handed["salt"]
    match = cache.take(msgspec.msgpack.encode(handed))
    assert (match.found, match.salt) == (len(PROMPTS[0]), b"")
