"""Prefix reuse over real nodes: full, grouped, latent, sliding and recurrent layers, whole and in part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from farpool._native import Slices
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from farpool.kv import Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.engine_memory import Batch
from farpool.kv.journal import recorded
from farpool.kv.memory import Layer, TensorMemory, layer_groups
from tests.kv.test_cost import prefill
from tests.nodes import PATIENCE, eventually

BLOCK = 4
HEADS, SIZE = 2, 8
FULL = Layer(2 * HEADS * SIZE * 2)
LATENT = Layer(SIZE * 2, "mla")
SLIDING = Layer(2 * HEADS * SIZE * 2, "sliding", window=7)
STATE = Layer(64, "recurrent")
KINDS = {
    "full": [FULL] * 3,
    "mla": [LATENT] * 3,
    "sliding": [FULL, SLIDING, SLIDING, FULL],
    "recurrent": [FULL, STATE, STATE],
    "all": [FULL, SLIDING, LATENT, STATE, FULL],
}
TOKENS = list(range(1, 31))


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("256MiB") as node:
        yield node


@pytest.fixture
def make(node: RunningNode, request: pytest.FixtureRequest) -> Iterator[Callable[..., PrefixCache]]:
    made: list[PrefixCache] = []

    def one(layers: Sequence[Layer], **changes: Any) -> PrefixCache:
        given = {"model": request.node.name, "weights_id": "1", "dtype": "float16", "block": BLOCK, "timeout": PATIENCE}
        made.append(PrefixCache([node.address], layers, **{**given, **changes}))
        return made[-1]

    yield one
    for cache in made:
        cache.close()


class Made:
    """KV of a sequence as a model would make it: each value says its layer, its token and all tokens before it."""

    def __init__(self, layers: Sequence[Layer], tokens: Sequence[int], held: int | None = None) -> None:
        self.layers, self.tokens = layers, tokens
        self.held = len(tokens) if held is None else held
        self.memory: dict[tuple[int, int], bytearray] = {}

    def value(self, layer: int, token: int) -> bytes:
        nbytes = self.layers[layer].nbytes
        return (repr((layer, self.tokens[: token + 1])).encode()[-nbytes:] * nbytes)[:nbytes]

    def computed(self) -> Made:
        for layer, one in enumerate(self.layers):
            # Engines keep whole blocks, so some tokens before the window are there as well.
            first = max(0, self.held - one.window + 1) // BLOCK * BLOCK if one.kind == "sliding" else 0
            for token in range(first, self.held):
                self.memory[layer, token] = bytearray(self.value(layer, token))
        return self

    def parts(self, layer: int, start: int, stop: int) -> list[bytearray] | None:
        if self.layers[layer].kind == "recurrent":
            start = stop - 1
        tokens = range(start, stop)
        if self.layers[layer].kind == "recurrent" and self.held != stop and (layer, start) in self.memory:
            return None  # a model keeps only its last state
        if any((layer, token) not in self.memory for token in tokens):
            return None
        return [self.memory[layer, token] for token in tokens]

    def empty(self) -> Made:
        for layer, one in enumerate(self.layers):
            for token in range(len(self.tokens)):
                self.memory[layer, token] = bytearray(one.nbytes)
        self.held = -1
        return self


class Target(Made):
    """Place for KV that is to be loaded."""

    def parts(self, layer: int, start: int, stop: int) -> list[bytearray] | None:
        if self.layers[layer].kind == "recurrent":
            start = stop - 1
        return [self.memory[layer, token] for token in range(start, stop)]


class Short(Target):
    """Place that lacks all layers."""

    def parts(self, layer: int, start: int, stop: int) -> list[bytearray] | None:
        return None


def target(layers: Sequence[Layer], tokens: Sequence[int]) -> Target:
    made = Target(layers, tokens)
    made.empty()
    return made


def check(layers: Sequence[Layer], tokens: Sequence[int], into: Made, usable: int, first: int = 0) -> None:
    """All that a model needs to go on behind `usable` tokens has to be there."""
    for layer, one in enumerate(layers):
        low = {"sliding": max(0, usable - one.window + 1), "recurrent": usable - 1}.get(one.kind, 0)
        for token in range(max(low, first), usable):
            assert into.memory[layer, token] == into.value(layer, token), (layer, token)


def use_first(cache: PrefixCache, layers: Sequence[Layer]) -> None:
    """Let a cache make its probes of memory, so that a test counts only what comes after them."""
    engine = cache._transfers.memory
    steps: tuple[tuple[Literal["save", "load"], Made], ...] = (
        ("save", Made(layers, TOKENS).computed()),
        ("load", target(layers, TOKENS)),
    )
    for step, memory in steps:
        batch = Batch("")
        for number in range(len(cache.parts)):
            batch.use(step, number, memory, 0)
        assert engine.admit(step, batch, time.monotonic() + PATIENCE) is None


def keys_of(cache: PrefixCache, tokens: Sequence[int]) -> list[bytes]:
    """Keys of all blocks of a sequence."""
    return cache._sequence(tokens, "")[0]


def save_steps(cache: PrefixCache, layers: Sequence[Layer], tokens: Sequence[int]) -> None:
    """Save as an engine does that computes block by block."""
    for held in range(BLOCK, len(tokens) + 1, BLOCK):
        cache.save(tokens[:held], Made(layers, tokens, held).computed(), start=held - BLOCK)


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_saved_is_loaded_by_another_program(make: Callable[..., PrefixCache], kind: str) -> None:
    layers = KINDS[kind]
    save_steps(make(layers), layers, TOKENS[:24])
    reader = make(layers)
    match = reader.lookup(TOKENS, request=kind)
    assert (match.tokens, match.found, match.compute, match.reason) == (24, 24, 0, Reason.ABSENT)
    into = target(layers, TOKENS)
    assert reader.load(match, into) == 24
    check(layers, TOKENS, into, 24)
    assert reader.lookup([7, *TOKENS]).tokens == 0
    other = [*TOKENS[:13], 0, 0, 0, 0]
    assert reader.lookup(other).tokens == 12


@pytest.mark.parametrize("kind", ["sliding", "recurrent", "all"])
def test_a_prefix_ends_where_every_layer_can_go_on(make: Callable[..., PrefixCache], kind: str) -> None:
    layers = KINDS[kind]
    cache = make(layers)
    # All at once: of sliding layers only the window is left, of recurrent ones the last state.
    cache.save(TOKENS[:24], Made(layers, TOKENS, 24).computed())
    assert cache.lookup(TOKENS).tokens == 24
    shorter = [*TOKENS[:20], *[99] * 8]
    assert cache.lookup(shorter).tokens == 0


def test_a_whole_prompt_leaves_a_token_to_compute(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:16])
    assert cache.lookup(TOKENS[:16]).tokens == 12
    assert cache.lookup(TOKENS[:16], leave=0).tokens == 16
    assert cache.lookup(TOKENS[:3]).tokens == 0
    assert cache.lookup([]).tokens == 0


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_layers_are_divided_into_groups_without_loss(data: st.DataObject) -> None:
    layers = data.draw(st.lists(st.sampled_from([FULL, LATENT, SLIDING, STATE]), min_size=1, max_size=12))
    pieces = data.draw(st.integers(1, 5))
    groups = layer_groups(layers, BLOCK, pieces)
    assert sorted(number for one in groups for number in one.layers) == list(range(len(layers)))
    for one in groups:
        assert len({layers[number].kind for number in one.layers}) == 1
        each = 1 if one.group.kind == "recurrent" else BLOCK
        assert one.group.block_bytes == each * sum(layers[number].nbytes for number in one.layers)


def test_layers_come_one_after_the_other(make: Callable[..., PrefixCache]) -> None:
    layers = [FULL] * 6
    save_steps(make(layers, pieces=3), layers, TOKENS[:16])
    cache = make(layers, pieces=3)
    match = cache.lookup(TOKENS)
    into = target(layers, TOKENS)
    loads = cache.load_parts(match, into)
    assert [one.layers for one in loads] == [(0, 1), (2, 3), (4, 5)]
    assert [one.tokens.result(PATIENCE) for one in loads] == [16] * 3
    check(layers, TOKENS, into, 16)
    assert make(layers).lookup(TOKENS).tokens == 0


def test_loads_and_saves_go_on_in_the_background(make: Callable[..., PrefixCache]) -> None:
    layers = KINDS["full"]
    cache = make(layers)
    saved = cache.save(TOKENS[:16], Made(layers, TOKENS, 16).computed(), wait=False)
    assert saved.result(PATIENCE) == 4
    into = target(layers, TOKENS)
    assert cache.load(cache.lookup(TOKENS), into, wait=False).result(PATIENCE) == 16
    check(layers, TOKENS, into, 16)
    assert cache.drain(PATIENCE)


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_tensors_are_saved_and_loaded_in_place(
    make: Callable[..., PrefixCache], heads_first: bool, dtype: torch.dtype
) -> None:
    shape = (1, HEADS, 40, SIZE) if heads_first else (40, HEADS, SIZE)
    dim = -2 if heads_first else 0
    torch.manual_seed(0)
    pairs = [tuple((torch.randn(shape) * 50).to(dtype) for _ in "kv") for _ in range(3)]
    layers = [Layer(2 * HEADS * SIZE * dtype.itemsize)] * 3
    make(layers).save(TOKENS[:20], TensorMemory(pairs, dim))
    cache = make(layers)
    into = [tuple(torch.zeros_like(one) for one in pair) for pair in pairs]
    assert cache.load(cache.lookup(TOKENS), TensorMemory(into, dim)) == 20
    for pair, loaded in zip(pairs, into, strict=True):
        for one, other in zip(pair, loaded, strict=True):
            assert torch.equal(one.narrow(dim, 0, 20), other.narrow(dim, 0, 20))
            assert not other.narrow(dim, 20, 20).any()


def test_a_window_is_loaded_into_tensors_that_hold_only_it() -> None:
    tensor = torch.arange(8.0).reshape(1, 1, 8, 1)
    memory = TensorMemory([(tensor,)], first=[10])
    parts = memory.parts(0, 12, 16)
    assert parts is not None
    (slices,) = parts
    assert isinstance(slices, Slices)
    assert slices.views() == [tensor[0, 0, 2:6].numpy().tobytes()]
    assert memory.parts(0, 8, 12) is None
    assert memory.parts(0, 16, 20) is None


def test_memory_that_does_not_fit_is_refused_and_nothing_is_written(make: Callable[..., PrefixCache]) -> None:
    layers = KINDS["full"]
    cache = make(layers)
    save_steps(cache, layers, TOKENS[:16])
    match = cache.lookup(TOKENS)

    class Short(Target):
        def parts(self, layer: int, start: int, stop: int) -> list[bytearray] | None:
            return (super().parts(layer, start, stop) or [])[1:] if layer == 1 else super().parts(layer, start, stop)

    into = Short(layers, TOKENS)
    into.empty()
    with pytest.raises(ConfigError, match="expected 768"):
        cache.load(match, into)
    assert not any(any(one) for one in into.memory.values())
    with pytest.raises(ConfigError, match="not contiguous"):
        TensorMemory([(torch.zeros(1, 2, 3, 4).transpose(1, 3),)])


def test_a_block_that_is_lost_shortens_the_prefix(make: Callable[..., PrefixCache], node: RunningNode) -> None:
    for kind, left in (("full", 8), ("sliding", 0)):
        layers = KINDS[kind]
        cache = make(layers, model=kind)
        save_steps(cache, layers, TOKENS[:16])
        match = cache.lookup(TOKENS)
        assert match.tokens == 16
        cache._blocks.drop([keys_of(cache, TOKENS[:16])[2]])
        into = target(layers, TOKENS)
        assert cache.load(match, into) == left
        check(layers, TOKENS, into, left)


def test_kv_of_other_weights_is_not_seen_and_that_of_the_old_ones_comes_back(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:16])
    cache.weights_id = "2"
    assert cache.weights_id == "2"
    assert cache.lookup(TOKENS).tokens == 0
    other = Made([FULL], [*TOKENS], 16).computed()
    other.memory[0, 0][:] = bytes(FULL.nbytes)
    assert cache.save(TOKENS[:16], other) == 4
    cache.weights_id = "1"
    into = target([FULL], TOKENS)
    assert cache.load(cache.lookup(TOKENS), into) == 16
    check([FULL], TOKENS, into, 16)
    assert cache.purge() == 4
    assert cache.lookup(TOKENS).tokens == 0


@pytest.mark.parametrize(
    "change",
    [
        {"weights_id": "2"},
        {"dtype": "bfloat16"},
        {"layout": "tokens-first"},
        {"model": "other"},
        {"tenant": "other"},
        {"pieces": 2},
        {"layers": [FULL]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_who_disagrees_finds_nothing_and_reads_no_note(
    make: Callable[..., PrefixCache], change: dict[str, Any]
) -> None:
    writer = make([FULL, FULL])
    save_steps(writer, [FULL, FULL], TOKENS[:16])
    reader = make(**{"layers": [FULL, FULL], **change})
    assert reader.lookup(TOKENS).reason == Reason.ABSENT
    taken = reader.take(writer.handoff(TOKENS[:16], 10).note)
    assert (taken.tokens, taken.reason) == (0, Reason.FOREIGN)


def test_a_sequence_is_handed_to_another_process(make: Callable[..., PrefixCache]) -> None:
    layers = KINDS["all"]
    prefiller, decoder = make(layers), make(layers)
    save_steps(prefiller, layers, TOKENS[:24])
    match = decoder.take(prefiller.handoff(TOKENS[:24], 60).note)
    into = target(layers, TOKENS)
    assert decoder.load(match, into) == 24
    check(layers, TOKENS, into, 24)
    for wrong in (b"", b"\xc0", b"note"):
        with pytest.raises(ConfigError, match="not the note of a handoff"):
            decoder.take(wrong)


def test_what_replaces_a_sequence_keeps_what_both_share(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    new = [*TOKENS[:8], *[77] * 8]
    save_steps(cache, [FULL], TOKENS[:24])
    save_steps(cache, [FULL], new)
    assert cache.supersede(TOKENS[:24], new) == 4
    assert cache.lookup(TOKENS).tokens == 8
    assert cache.lookup(new, leave=0).tokens == 16


def test_pins_are_counted_and_let_go(make: Callable[..., PrefixCache]) -> None:
    cache = make(KINDS["sliding"])
    save_steps(cache, KINDS["sliding"], TOKENS[:16])
    assert cache.pin(TOKENS[:16], 60) == 8
    cache.unpin(TOKENS[:16])


def test_what_was_prefetched_needs_no_node(make: Callable[..., PrefixCache], node: RunningNode) -> None:
    layers = KINDS["full"]
    block_bytes = BLOCK * sum(one.nbytes for one in layers)
    cache = make(layers, near_bytes=4 * block_bytes)
    save_steps(cache, layers, TOKENS[:24])
    assert cache.prefetch_by(TOKENS[:24], PATIENCE, leave=0).result(PATIENCE) == 4
    match = cache.lookup(TOKENS[:17])
    into = target(layers, TOKENS)
    before = cache.stats()["load.bytes"]
    assert cache.load(match, into) == 16
    assert cache.stats()["load.bytes"] == before
    check(layers, TOKENS, into, 16)
    assert cache.prefetch_by(TOKENS, 0.0).result(PATIENCE) == 0
    assert cache.prefetch_by(TOKENS[:8], PATIENCE, leave=0).result(PATIENCE) == 2
    assert cache.load(cache.lookup(TOKENS), target(layers, TOKENS)) == 24


def teach(cache: PrefixCache, linear: float, seconds_a_byte: float) -> None:
    for tokens in (8, 16, 64, 256) * 3:
        cache.computed(tokens, prefill(tokens, 0, 0.0, linear, 0.0))
        cache.judge.loaded(tokens * 1000, tokens * 1000 * seconds_a_byte)


def test_what_is_computed_sooner_is_not_loaded_and_the_journal_says_so(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL], hold_out=False)
    save_steps(cache, [FULL], TOKENS[:24])
    teach(cache, linear=1e-9, seconds_a_byte=1e-3)
    match = cache.lookup(TOKENS, request="cheap to compute")
    assert (match.tokens, match.found, match.reason) == (0, 24, Reason.BYPASSED)
    (decision,) = [one for one in recorded("cheap to compute") if one.step == "decision"]
    assert decision.note == match.plan.why
    assert "compute" in decision.note
    assert cache.load(match, target([FULL], TOKENS)) == 0


def test_a_split_loads_the_end_while_the_front_is_computed(make: Callable[..., PrefixCache]) -> None:
    layers = [FULL]
    cache = make(layers, hold_out=False)
    save_steps(cache, layers, TOKENS[:24])
    teach(cache, linear=100.0, seconds_a_byte=100.0 / FULL.nbytes)
    match = cache.lookup(TOKENS, split=True)
    assert (match.tokens, match.compute) == (24, 12)
    into = target(layers, TOKENS)
    assert cache.load(match, into) == 24
    check(layers, TOKENS, into, 24, first=12)
    assert not any(any(into.memory[0, token]) for token in range(12))
    cache._blocks.drop([keys_of(cache, TOKENS)[4]])
    assert cache.load(match, target(layers, TOKENS)) == 16


def test_a_few_requests_compute_to_measure_the_gain(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:24])
    teach(cache, linear=100.0, seconds_a_byte=1e-9)
    arms = [cache.lookup(TOKENS) for _ in range(64)]
    held = [match for match in arms if match.arm == "hold-out"]
    assert len(held) == 2
    assert {match.tokens for match in held} == {0}
    for match in held:
        cache.computed(24, 2400.0, match=match)
    stats = cache.stats()["gain"]
    assert 0 < stats["hold_out_requests"] <= 2
    assert stats["hold_out_share"] == pytest.approx(1.0, rel=0.05)


def test_loads_that_bring_nothing_count_as_a_loss(make: Callable[..., PrefixCache]) -> None:
    cache = make([FULL])
    save_steps(cache, [FULL], TOKENS[:24])
    teach(cache, linear=100.0, seconds_a_byte=1e-9)
    match = cache.lookup(TOKENS)
    cache.purge()
    for _ in range(3):
        assert cache.load(match, target([FULL], TOKENS)) == 0
    stats = cache.stats()["gain"]
    assert stats["load_requests"] > 2
    assert stats["load_share"] >= 1


def test_loads_of_layers_one_after_the_other_are_judged_once_by_their_shortest_part(
    make: Callable[..., PrefixCache],
) -> None:
    layers = [FULL] * 6
    cache = make(layers, pieces=3)
    save_steps(cache, layers, TOKENS[:16])
    for tokens in (8, 16, 64, 256) * 3:
        cache.computed(tokens, float(tokens))
    match = cache.lookup(TOKENS)
    cache.load_parts(match, target(layers, TOKENS))
    eventually(lambda: cache.stats()["gain"]["load_requests"] == 1)
    assert cache.stats()["gain"]["load_share"] < 0.5
    assert cache.stats()["saved_seconds"] == pytest.approx(16, rel=0.5)
    cache._blocks.drop([keys_of(cache, TOKENS[:16])[4]])  # of the second part its first block
    cache.load_parts(match, target(layers, TOKENS))
    eventually(lambda: cache.stats()["gain"]["load_requests"] > 1)
    assert cache.stats()["gain"]["load_share"] > 0.45  # nothing could be used
    loads = cache.load_parts(match, Short(layers, TOKENS))
    for one in loads:
        with pytest.raises(ConfigError, match="no place"):
            one.tokens.result(PATIENCE)
    assert cache.drain(PATIENCE)
    assert cache.stats()["gain"]["load_requests"] < 2


def test_nodes_that_are_away_are_a_miss(node: RunningNode) -> None:
    with PrefixCache(
        ["tcp://127.0.0.1:1"], [FULL], model="m", weights_id="1", dtype="float16", block=BLOCK, timeout=0.1
    ) as cache:
        assert cache.lookup(TOKENS).reason == Reason.NODE_AWAY
        assert cache.save(TOKENS, Made([FULL], TOKENS).computed()) == 0
        assert cache.pin(TOKENS, 1) == 0
        assert cache.supersede(TOKENS, []) == 0
        assert cache.prefetch_by(TOKENS, 1).result(PATIENCE) == 0


def test_many_threads_share_a_cache(make: Callable[..., PrefixCache]) -> None:
    layers = KINDS["all"]
    cache = make(layers)

    def work(seed: int) -> None:
        own = [*TOKENS[:12], *[seed % 3] * 12]
        for _ in range(5):
            save_steps(cache, layers, own)
            match = cache.lookup(own, leave=0)
            into = target(layers, own)
            usable = cache.load(match, into)
            assert usable == 24
            check(layers, own, into, usable)

    with ThreadPoolExecutor(6) as threads:
        for job in [threads.submit(work, seed) for seed in range(6)]:
            job.result(4 * PATIENCE)


def test_wrong_settings_are_refused() -> None:
    for layers in ([], [Layer(8, "sliding", 4)]):
        with pytest.raises(ConfigError):
            PrefixCache(["tcp://127.0.0.1:1"], layers, model="m", weights_id="", dtype="float16")
    for wrong in ({"nbytes": 0}, {"nbytes": 8, "window": 4}, {"nbytes": 8, "kind": "sliding"}):
        with pytest.raises(ConfigError, match="expected bytes"):
            Layer(**wrong)  # type: ignore[arg-type]
