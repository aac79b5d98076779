"""Caches of transformers with keys and values in a pool: the bits of `DynamicCache`, whatever is done with them."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from farpool import Dram, Pool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError, PoolClosedError, PoolFullError, UnsupportedError
from farpool.kv import BlockCache, Judge
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.engines.transformers_layer import PagedLayer
from farpool.kv.journal import recorded
from farpool_bench.link import fetched, written
from tests.kv import zoo
from tests.nodes import PATIENCE

STEP = 8
"""Tokens of a block of a prefix."""

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
}


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {name: zoo.make(name) for name in zoo.NAMES}


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool whose fast tier has room for a small part of the tests' data."""
    with Pool("16KiB", [Dram("8MiB")]) as pool:
        yield pool


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", zoo.NAMES)
def test_tokens_and_logits_equal_a_dynamic_cache(models: dict[str, Any], pool: Pool, name: str, way: str) -> None:
    model, inputs = models[name], zoo.prompt(40, sequences=2)
    expected, logits = zoo.generate(model, inputs, DynamicCache(config=model.config), **WAYS[way])
    cache = FarpoolCache(model.config, pool=pool)
    found, found_logits = zoo.generate(model, inputs, cache, **WAYS[way])
    assert torch.equal(found, expected)
    assert len(found_logits) == len(logits)
    assert all(torch.equal(a, b) for a, b in zip(found_logits, logits, strict=True))
    assert cache.get_seq_length() == 40 + 12 - 1
    if name != "mistral":  # all of its layers have sliding windows, so nothing of it is in the pool
        assert fetched(pool.stats()) > pool.fast // 4


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_and_attention_kernels_give_the_same_bits(dtype: torch.dtype, attention: str, pool: Pool) -> None:
    model = zoo.make("llama").to(dtype)
    model.set_attn_implementation(attention)
    inputs = zoo.prompt(33, sequences=3)
    expected, logits = zoo.generate(model, inputs, DynamicCache(config=model.config))
    found, found_logits = zoo.generate(model, inputs, FarpoolCache(model.config, pool=pool))
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(found_logits, logits, strict=True))


def test_guessed_tokens_are_removed(models: dict[str, Any], pool: Pool) -> None:
    model, inputs = models["llama"], zoo.prompt(12).repeat(1, 3)
    expected, _ = zoo.generate(model, inputs, DynamicCache(config=model.config), prompt_lookup_num_tokens=4)
    found, _ = zoo.generate(model, inputs, FarpoolCache(model.config, pool=pool), prompt_lookup_num_tokens=4)
    assert torch.equal(found, expected)


def test_debug_mode_finds_no_tensor_that_outlives_its_pin(models: dict[str, Any]) -> None:
    model, inputs = models["llama"], zoo.prompt(30)
    expected, _ = zoo.generate(model, inputs, DynamicCache(config=model.config))
    with Pool("32KiB", [Dram("8MiB")], debug=True) as pool:
        found, _ = zoo.generate(model, inputs, FarpoolCache(model.config, pool=pool))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_changes_equals_a_dynamic_cache(models: dict[str, Any], pool: Pool, seed: int) -> None:
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    heads, widths = chance.choice([(1, (5, 5)), (2, (12, 12)), (3, (8, 4))])
    config = models["llama"].config
    ours, theirs = (
        FarpoolCache(config, pool=pool, tokens_per_block=chance.choice([None, 1, 5])),
        DynamicCache(config=config),
    )
    batch = chance.randint(1, 3)
    compared = 0
    for _ in range(40):
        change = chance.choice(["update"] * 5 + ["crop", "reorder", "repeat", "select", "reset", "copy"])
        tokens = theirs.get_seq_length()
        if change == "update":
            new = chance.choice([1, 1, 1, 2, 9, 30])
            for layer in range(2):
                states = [
                    torch.randn(batch, new, heads, width, generator=generator).transpose(1, 2) for width in widths
                ]
                for a, b in zip(ours.update(*states, layer), theirs.update(*states, layer), strict=True):
                    assert torch.equal(a, b)
                    assert a.stride() == b.stride()
                    assert a.data_ptr() % 64 == b.data_ptr() % 64 == 0
                    compared += 1
        elif change == "crop":
            remove = -chance.randint(0, max(0, tokens - 1))
            ours.crop(remove)
            theirs.crop(remove)
        elif change == "reorder":
            order = torch.randint(0, batch, (batch,), generator=generator)
            ours.reorder_cache(order)
            theirs.reorder_cache(order)
        elif change == "repeat" and tokens and batch < 8:
            ours.batch_repeat_interleave(2)
            theirs.batch_repeat_interleave(2)
            batch *= 2
        elif change == "select" and tokens:
            chosen = torch.randperm(batch, generator=generator)[: chance.randint(1, batch)]
            ours.batch_select_indices(chosen)
            theirs.batch_select_indices(chosen)
            batch = len(chosen)
        elif change == "reset":
            ours.reset()
            theirs.reset()
            batch = chance.randint(1, 3)
        elif change == "copy":
            abandoned, ours = ours, copy.deepcopy(ours)
            if tokens:  # later writes of the other one must not be visible here
                states = [torch.zeros(batch, heads, 3, width) for width in widths]
                abandoned.update(*states, 0)
        assert ours.get_seq_length() == theirs.get_seq_length()
        assert ours.get_mask_sizes(2, 0) == theirs.get_mask_sizes(2, 0)
    assert compared >= 20


def test_copies_share_their_common_blocks(models: dict[str, Any], pool: Pool) -> None:
    model, inputs = models["llama"], zoo.prompt(40)
    cache = FarpoolCache(model.config, pool=pool, tokens_per_block=16)
    with torch.no_grad():
        model(inputs, **{cache_argument(model): cache})
    before = pool.live
    answers = []
    for seed in range(2):
        question = torch.cat([inputs, zoo.prompt(4, seed=seed)], -1)
        found, _ = zoo.generate(model, question, copy.deepcopy(cache), max_new_tokens=3)
        reference = DynamicCache(config=model.config)
        with torch.no_grad():
            model(inputs, **{cache_argument(model): reference})
        expected, _ = zoo.generate(model, question, reference, max_new_tokens=3)
        assert torch.equal(found, expected)
        answers.append(copy.deepcopy(cache))
    assert pool.live == before
    assert cache.get_seq_length() == 40


def test_only_the_last_block_of_a_layer_is_written_again(models: dict[str, Any]) -> None:
    config = models["llama"].config
    states = torch.ones(1, 2, 1, 12)
    with Pool("16KiB", [Dram("8MiB")]) as pool:
        cache = FarpoolCache(config, pool=pool, tokens_per_block=8)
        block = 2 * 2 * 8 * 12 * 4
        cache.update(*[states.expand(1, 2, 400, 12)] * 2, 0)
        before = written(pool.stats())
        for _ in range(8):
            cache.update(states, states, 0)
        assert (
            written(pool.stats()) - before <= 9 * block + pool.fast
        )  # blocks that were dirty before may be evicted in between
        assert fetched(pool.stats()) > 7 * 40 * block


def test_the_last_block_takes_little_more_room_than_its_tokens(models: dict[str, Any], pool: Pool) -> None:
    token = 2 * 2 * 12 * 4
    step = 64
    cache = FarpoolCache(models["llama"].config, pool=pool, tokens_per_block=step)
    reference = DynamicCache(config=models["llama"].config)
    for tokens in range(1, 2 * step + 2):
        states = torch.randn(1, 2, 1, 12)
        for layer in range(2):
            for ours, theirs in zip(
                cache.update(states, -states, layer), reference.update(states, -states, layer), strict=True
            ):
                assert torch.equal(ours, theirs)
        held = next(found.live for found in pool.stats().classes if found.name == "kv") / (2 * token)
        whole, rest = divmod(tokens, step)
        assert tokens <= held <= whole * step + (max(step // 16, 2 * rest) if rest else 0)


def test_operands_are_booked_and_used_again_only_without_references(models: dict[str, Any], pool: Pool) -> None:
    config = models["llama"].config
    cache = FarpoolCache(config, pool=pool)
    states = torch.randn(1, 2, 100, 12)
    one = torch.randn(1, 2, 1, 12)
    first = cache.update(states, states, 0)
    kept = [tensor.transpose(1, 2) for tensor in first]
    copies = [tensor.clone() for tensor in kept]
    places = [tensor.data_ptr() for tensor in first]
    del first
    second = cache.update(states + 1, states + 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True))
    assert not set(places) & {tensor.data_ptr() for tensor in second}
    places = [tensor.data_ptr() for tensor in second]
    del second
    third = cache.update(one, one, 0)
    assert [tensor.data_ptr() for tensor in third] == places
    booked = pool._blocks.ledger.total(owner="KV operands").reserved
    assert 0 < booked <= 2 * states.nbytes * 5 // 4
    del third, cache
    gc.collect()
    assert pool._blocks.ledger.total(owner="KV operands").reserved == 0


def test_a_layer_that_cannot_grow_stays_as_it_was(models: dict[str, Any]) -> None:
    with Pool("16KiB", [Dram("48KiB")]) as pool:
        cache = FarpoolCache(models["llama"].config, pool=pool)
        reference = DynamicCache(config=models["llama"].config)
        states = torch.randn(1, 2, 64, 12)
        for _ in range(100):
            try:
                cache.update(states, states, 0)
            except PoolFullError:
                break
            reference.update(states, states, 0)
        tokens = reference.get_seq_length()
        assert cache.get_seq_length() == tokens
        assert 0 < tokens < 6400
        keys, values = (torch.empty(1, 2, tokens, 12) for _ in range(2))
        layer: Any = cache.layers[0]
        layer.read(0, tokens, keys, values)
        assert torch.equal(keys, reference.layers[0].keys)
        assert torch.equal(values, reference.layers[0].values)


def test_uses_with_other_results_are_refused(models: dict[str, Any], pool: Pool) -> None:
    config = models["llama"].config
    cache = FarpoolCache(config, pool=pool)
    states = torch.randn(1, 2, 4, 12)
    cache.update(states, states, 0)
    with pytest.raises(UnsupportedError, match="gradients"):
        cache.update(states.requires_grad_(), states, 0)
    with pytest.raises(UnsupportedError, match="float64"):
        cache.update(states.double().detach(), states.detach(), 0)
    with pytest.raises(UnsupportedError, match="shape"):
        cache.update(*[torch.randn(2, 2, 4, 12)] * 2, 0)
    for name in ("keys", "values"):
        with pytest.raises(UnsupportedError, match="read"):
            getattr(cache.layers[0], name)
        with pytest.raises(UnsupportedError, match="read"):
            setattr(cache.layers[0], name, states)
    with pytest.raises(UnsupportedError, match="save"):
        pickle.dumps(cache)
    with pytest.raises(UnsupportedError, match="device"):
        FarpoolCache(config, pool=pool).update(states.to("meta"), states.to("meta"), 0)
    with pytest.raises(ValueError, match="minus"):
        cache.crop(1)
    with pytest.raises(ConfigError, match="tokens_per_block"):
        FarpoolCache(config, pool=pool, tokens_per_block=0)
    with pytest.raises(ConfigError, match="prefixes"):
        cache.load([1, 2, 3])
    assert cache.get_seq_length() == 4


def test_a_cache_ends_with_its_pool(models: dict[str, Any]) -> None:
    states = torch.randn(1, 2, 4, 12)
    with Pool("16KiB", [Dram("1MiB")]) as pool:
        cache = FarpoolCache(models["llama"].config, pool=pool)
        cache.update(states, states, 0)
    with pytest.raises(PoolClosedError):
        cache.update(states, states, 0)


def test_layers_with_sliding_windows_stay_as_they_are(models: dict[str, Any], pool: Pool) -> None:
    ours = FarpoolCache(models["gemma2"].config, pool=pool).layers
    theirs = DynamicCache(config=models["gemma2"].config).layers
    assert [type(layer) for layer in ours] == [type(theirs[0]), PagedLayer, type(theirs[2])]


# ---- prefixes --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("64MiB") as node:
        yield node


@pytest.fixture
def settings(node: RunningNode, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"nodes": [node.address], "weights_id": f"seed 5, {request.node.name}", "timeout": PATIENCE}


def blocks_for(model: Any, settings: dict[str, Any]) -> BlockCache:
    return prefix_blocks(model.config, settings, dtype=model.dtype, tokens_per_block=STEP)


def computed(model: Any, inputs: torch.Tensor, split: int, cache: Any = None) -> torch.Tensor:
    """Return the generated tokens if the first `split` tokens are computed first."""
    cache = cache or DynamicCache(config=model.config)
    if split:
        with torch.no_grad():
            model(inputs[:, :split], **{cache_argument(model): cache})
    sequences, _ = zoo.generate(model, inputs, cache)
    return sequences


def saved(model: Any, inputs: torch.Tensor, pool: Pool, blocks: BlockCache) -> int:
    """Compute a prompt, save it, and return how many tokens can be found."""
    cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
    with torch.no_grad():
        model(inputs, **{cache_argument(model): cache})
    return cache.save(inputs)


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
@pytest.mark.parametrize("name", zoo.NAMES)
def test_a_loaded_prefix_continues_like_a_computed_one(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any], name: str, transport: str
) -> None:
    model, inputs = models[name], zoo.prompt(60)
    settings["transport"] = transport
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs[:, :48], pool, blocks) == 48
        cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
        assert cache.load(inputs) == 48 == cache.get_seq_length()
        found, _ = zoo.generate(model, inputs, cache)
        assert torch.equal(found, computed(model, inputs, 48))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_prompt_that_diverges_shares_the_common_blocks(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any], name: str
) -> None:
    model, first = models[name], zoo.prompt(43)
    other = first.clone()
    other[0, 25:] = zoo.prompt(18, seed=8)
    with blocks_for(model, settings) as blocks:
        assert saved(model, first[:, :16], pool, blocks) == 16
        assert saved(model, first, pool, blocks) == 40
        cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
        # Full attention continues from the first difference, a sliding window only from a saved state.
        assert cache.load(other, judged=False) == (24 if name == "llama" else 16)
        assert FarpoolCache(model.config, pool=pool, prefixes=blocks).load(first[:, :40], judged=False) == (
            32 if name == "llama" else 16
        )


def test_generated_tokens_are_saved_and_stored_ones_not_sent_again(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any]
) -> None:
    for name in ("llama", "mistral"):
        model, inputs = models[name], zoo.prompt(30)
        with blocks_for(model, settings) as blocks:
            cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
            sequences, _ = zoo.generate(model, inputs, cache)
            assert cache.save(sequences) == 40
            before = blocks.stats()["save.bytes"]
            assert cache.save(sequences) == 40
            assert blocks.stats()["save.bytes"] == before
            follow_up = torch.cat([sequences, zoo.prompt(5, seed=3)], -1)
            other = FarpoolCache(model.config, pool=pool, prefixes=blocks)
            assert other.load(follow_up) == 40
            cache.crop(40 - cache.get_seq_length()) if name == "llama" else None
            if name == "llama":  # the bits of the first one go on
                expected, _ = zoo.generate(model, follow_up, cache)
                found, _ = zoo.generate(model, follow_up, other)
                assert torch.equal(found, expected)


def test_a_gap_ends_the_loaded_prefix(models: dict[str, Any], pool: Pool, settings: dict[str, Any]) -> None:
    from farpool.kv import token_chain

    model, inputs = models["gemma2"], zoo.prompt(60)
    with blocks_for(model, settings) as blocks:
        for tokens in (16, 48):
            assert saved(model, inputs[:, :tokens], pool, blocks) == tokens
        chain = token_chain(inputs[0].tolist(), STEP, blocks.digest)
        blocks.drop([blocks.key(chain[3])])
        cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
        assert cache.load(inputs) == 16 == cache.get_seq_length()
        found, _ = zoo.generate(model, inputs, cache)
        assert torch.equal(found, computed(model, inputs, 16))


def test_other_weights_dtypes_and_configurations_find_nothing(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any]
) -> None:
    model, inputs = models["llama"], zoo.prompt(40)
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs, pool, blocks) == 40
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, "rope_theta": 5e5}
    others = [
        prefix_blocks(model.config, settings | {"weights_id": "another"}, dtype=model.dtype, tokens_per_block=STEP),
        prefix_blocks(model.config, settings | {"tenant": "another"}, dtype=model.dtype, tokens_per_block=STEP),
        prefix_blocks(model.config, settings, dtype=torch.float16, tokens_per_block=STEP),
        prefix_blocks(config, settings, dtype=model.dtype, tokens_per_block=STEP),
    ]
    for blocks in others:
        with blocks:
            assert FarpoolCache(model.config, pool=pool, prefixes=blocks).load(inputs) == 0
    with blocks_for(model, settings) as blocks:
        assert FarpoolCache(model.config, pool=pool, prefixes=blocks).load(inputs) == 32


def test_a_cache_names_the_layers_that_it_cannot_save(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any]
) -> None:
    model, inputs = models["llama"], zoo.prompt(20, sequences=2)
    with blocks_for(model, settings) as blocks:
        cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
        with torch.no_grad():
            model(inputs, **{cache_argument(model): cache})
        with pytest.raises(ConfigError, match="one sequence"):
            cache.save(inputs)
        with pytest.raises(ConfigError, match="one sequence"):
            cache.save(inputs[0])
        with pytest.raises(ConfigError, match="holds 20 tokens"):
            cache.load(inputs[0])
        foreign = BlockCache(settings["nodes"], replace(blocks.namespace, layout="other"))
        with pytest.raises(ConfigError, match="layout"):
            FarpoolCache(model.config, pool=pool, prefixes=foreign)
    with pytest.raises(ConfigError, match="weights_id"):
        prefix_blocks(model.config, {"nodes": settings["nodes"]})


def test_without_its_node_a_prompt_is_computed(models: dict[str, Any], pool: Pool) -> None:
    model, inputs = models["gemma2"], zoo.prompt(60)
    with running_node("32MiB") as node:
        blocks = blocks_for(model, {"nodes": [node.address], "weights_id": "seed 5", "timeout": 0.2})
        with blocks:
            assert saved(model, inputs[:, :48], pool, blocks) == 48
            node.kill()
            cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
            assert cache.load(inputs) == 0
            found, _ = zoo.generate(model, inputs, cache)
            assert torch.equal(found, computed(model, inputs, 0))
            assert cache.save(found) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_has_ended_is_not_under_way_any_more(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    model, inputs = models["gemma2"], zoo.prompt(60)
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs[:, :48], pool, blocks) == 48
        load, under_way = blocks.load, []

        def spied(*given: Any, **named: Any) -> Any:
            under_way.append(blocks.judge.begun(0))
            if fails:
                raise MemoryError("none left")
            return load(*given, **named)

        monkeypatch.setattr(blocks, "load", spied)
        cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
        with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
            assert cache.load(inputs) == 48
        assert min(under_way) > 0
        assert blocks.judge.begun(0) == 0


def taught(seconds_a_token: float) -> Judge:
    """Make a judge that has measured how long computing takes, and quick loads."""
    judge = Judge()
    for tokens in (8, 16, 64, 256):
        judge.computed(tokens, 0, tokens * seconds_a_token)
        judge.loaded(tokens * 1000, tokens * 1e-6)
    return judge


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_it_loads_if_that_is_faster_than_computing_and_the_journal_explains(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any], name: str
) -> None:
    model, inputs = models[name], zoo.prompt(60)
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs[:, :48], pool, blocks) == 48
        measured = blocks.judge.prefill_seconds(48)
        assert 0 < measured < PATIENCE  # of the pass itself

        def load(request: str) -> int:
            cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
            loaded = cache.load(inputs, request=request)
            assert cache.get_seq_length() == loaded
            found, _ = zoo.generate(model, inputs, cache)
            assert torch.equal(found, computed(model, inputs, loaded))
            return loaded

        assert load(f"{name} first") == 48  # nothing to compare it with
        assert blocks.judge.stats()["gain"]["load_requests"] == 1
        blocks.judge = taught(1e-9)
        assert load(f"{name} quick to compute") == 0
        assert blocks.judge.stats()["decisions"] == {"load": 0, "compute": 1, "hold-out": 0}
        blocks.judge = taught(10.0)
        assert load(f"{name} slow to compute") == 48
        assert blocks.judge.stats()["decisions"] == {"load": 1, "compute": 0, "hold-out": 0}
        assert blocks.judge.stats()["saved_seconds"] > 300
        notes = {one.request: one.note for one in recorded(name) if one.step == "decision"}
        assert notes[f"{name} first"].startswith("load: not enough")
        assert notes[f"{name} quick to compute"].startswith("compute: computing all 48 tokens")
        assert notes[f"{name} slow to compute"].startswith("load 48 tokens")


def test_a_few_requests_compute_to_show_what_loading_gains(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any]
) -> None:
    model, inputs = models["llama"], zoo.prompt(60)
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs[:, :48], pool, blocks) == 48
        blocks.judge = taught(10.0)
        held: list[FarpoolCache] = []
        for _ in range(32):
            cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
            if not cache.load(inputs):
                held.append(cache)
        assert len(held) == 1
        assert blocks.judge.stats()["decisions"]["hold-out"] == 1
        assert blocks.judge.stats()["gain"]["hold_out_requests"] == 0
        zoo.generate(model, inputs, held[0])
        assert blocks.judge.stats()["gain"]["hold_out_requests"] == 1  # the prompt, and not the tokens after it


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_another_process_continues_a_prefix_of_this_one(
    models: dict[str, Any], pool: Pool, settings: dict[str, Any], name: str
) -> None:
    model, inputs = models[name], zoo.prompt(60)
    with blocks_for(model, settings) as blocks:
        assert saved(model, inputs[:, :48], pool, blocks) == 48
    program = f"""
import torch
from farpool import Dram, Pool
from farpool.kv.engines.transformers import FarpoolCache
from tests.kv import zoo
from tests.kv.test_farpool_cache import blocks_for
torch.set_num_threads(1)
model, inputs = zoo.make({name!r}), zoo.prompt(60)
with Pool("16KiB", [Dram("8MiB")]) as pool, blocks_for(model, {settings!r}) as blocks:
    cache = FarpoolCache(model.config, pool=pool, prefixes=blocks)
    print(cache.load(inputs), zoo.generate(model, inputs, cache)[0].tolist())
"""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = computed(model, inputs, 48).tolist()
    finally:
        torch.set_num_threads(threads)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONHASHSEED": "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"},
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE,
        check=False,
    )
    assert ran.stdout == f"48 {expected}\n", ran.stderr
