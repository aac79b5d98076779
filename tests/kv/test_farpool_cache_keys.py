"""The name of a prefix of a `FarpoolCache`: no prompt gets keys and values that depend on something else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    CLIPVisionConfig,
    DynamicCache,
    Gemma3TextConfig,
    GPT2Config,
    HrmTextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PaliGemmaConfig,
    Qwen2VLConfig,
    T5Config,
)

from farpool import Dram, Pool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError, UnsupportedError
from farpool.kv import BlockCache
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument, inputs_beside_tokens
from farpool.kv.journal import recorded
from tests.kv import zoo
from tests.nodes import PATIENCE

STEP = 8
IMAGE = 99
"""Token that stands for a part of an image."""


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("64MiB") as node:
        yield node


@pytest.fixture
def settings(node: RunningNode, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"nodes": [node.address], "weights_id": request.node.name, "timeout": PATIENCE}


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("64KiB", [Dram("16MiB")]) as pool:
        yield pool


def computed(model: Any, cache: Any, inputs: torch.Tensor, **others: Any) -> torch.Tensor:
    """Logits of a pass of the model."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=inputs, **{cache_argument(model): cache}, **others).logits
    return logits


def llava() -> Any:
    """A tiny model that sees images."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(**sizes, image_size=28, patch_size=14, projection_dim=32)
    text = LlamaConfig(**sizes, vocab_size=128, pad_token_id=0)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE, vision_feature_layer=-1)
    return LlavaForConditionalGeneration(config).eval()


# ---- images ----------------------------------------------------------------------------------------------------------


def test_a_prompt_never_gets_the_keys_of_another_image(pool: Pool, settings: dict[str, Any]) -> None:
    model = llava()
    inputs = torch.tensor([[1] + [IMAGE] * 4 + list(range(3, 30))])
    one, other = (torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, inputs[:, :24], pixel_values=one)
        with pytest.raises(ConfigError, match=r"vision_config.*salt="):
            cache.save(inputs[:, :24])
        assert cache.save(inputs[:, :24], salt="one") == 24
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        for tokens in (inputs, inputs[:, :3]):  # even if nothing could be found
            with pytest.raises(ConfigError, match=r"vision_config.*salt="):
                cache.load(tokens)
        assert cache.load(inputs, salt="other") == 0
        assert cache.load(inputs, salt=b"one") == 24
        found = computed(model, cache, inputs[:, 24:])
    answers = []
    for image in (one, other):
        reference = DynamicCache(config=model.config)
        computed(model, reference, inputs[:, :24], pixel_values=image)
        answers.append(computed(model, reference, inputs[:, 24:]))
    assert torch.equal(found, answers[0])
    assert not torch.equal(found, answers[1])


def test_a_salt_separates_prompts_of_any_model(pool: Pool, settings: dict[str, Any]) -> None:
    model, inputs = zoo.make("llama"), zoo.prompt(40)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, inputs)
        assert cache.save(inputs, salt="adapter 1") == 40
        for salt, tokens in (("", 0), ("adapter 2", 0), (b"adapter 1", 32)):
            assert FarpoolCache(model, pool=pool, prefixes=blocks).load(inputs, salt=salt) == tokens


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(), ""),
        (GPT2Config(), ""),
        (GPT2Config(add_cross_attention=True), "add_cross_attention"),
        (T5Config(), "is_encoder_decoder"),
        (LlavaConfig(), "vision_config"),
        (LlamaConfig(audio_token_id=7), "audio_token_id"),
    ],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_models_with_more_inputs_than_tokens_are_known_by_their_configuration(config: Any, says: str) -> None:
    found = inputs_beside_tokens(config)
    assert says in found
    assert bool(found) == bool(says)


# ---- models of which equal tokens have different keys ----------------------------------------------------------------


def rotary(**parameters: Any) -> LlamaConfig:
    sizes = {**zoo._SIZES, "max_position_embeddings": 64}
    return LlamaConfig(**sizes, rope_parameters={"rope_theta": 1e4, **parameters})


LONG = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0] * 6,
    "long_factor": [4.0] * 6,
    "original_max_position_embeddings": 64,
}
PLAIN = {"rope_type": "default", "rope_theta": 1e4}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (rotary(**LONG), "longrope"),
        (rotary(**DYNAMIC), "dynamic"),
        (LlamaConfig(**zoo._SIZES, rope_scaling={"type": "dynamic", "factor": 4.0}), "dynamic"),
        (Gemma3TextConfig(rope_parameters={"sliding_attention": PLAIN, "full_attention": DYNAMIC}), "dynamic"),
        (LlavaConfig(text_config=rotary(**DYNAMIC)), "dynamic"),
        (HrmTextConfig(), "prefix_lm"),
        (Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention"),
        (PaliGemmaConfig(), "paligemma"),
        (Qwen2VLConfig(), "spatial_merge_size"),
    ],
    ids=["longrope", "dynamic", "rope_scaling", "one kind of layers", "text", "prefix", "both ways", "pali", "spatial"],
)
def test_models_whose_keys_depend_on_later_tokens_are_refused(
    pool: Pool, settings: dict[str, Any], config: Any, says: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"{says}.*without prefixes"):
        prefix_blocks(config, settings, dtype=torch.float32)
    FarpoolCache(config, pool=pool)


@pytest.mark.parametrize("parameters", [LONG, DYNAMIC], ids=["longrope", "dynamic"])
def test_without_prefixes_they_compute_the_same_bits(pool: Pool, parameters: dict[str, Any]) -> None:
    torch.manual_seed(5)
    model, inputs = LlamaForCausalLM(rotary(**parameters)).eval(), zoo.prompt(60)  # and continues beyond 64
    found = zoo.generate(model, inputs, FarpoolCache(model, pool=pool))
    expected = zoo.generate(model, inputs, DynamicCache(config=model.config))
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda parameters: parameters["rope_type"],
)
def test_keys_of_a_long_prompt_begin_like_the_keys_of_a_short_one(
    pool: Pool, settings: dict[str, Any], parameters: dict[str, Any]
) -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(rotary(**parameters)).eval()
    long = zoo.prompt(120)
    short = torch.cat([long[:, :32], zoo.prompt(8, seed=3)], -1)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, long)
        assert cache.save(long) == 120
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        assert cache.load(short, judged=False) == 32
        reference = DynamicCache(config=model.config)
        computed(model, reference, short[:, :32])
        found, expected = (computed(model, one, short[:, 32:]) for one in (cache, reference))
    # The last bits equal a product of more rows, with any cache.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


# ---- sequences whose positions or tokens are others ------------------------------------------------------------------


def test_a_padded_sequence_is_neither_saved_nor_loaded(pool: Pool, settings: dict[str, Any]) -> None:
    model = zoo.make("llama")
    padded = torch.cat([torch.zeros(1, 8, dtype=torch.long), zoo.prompt(32)], -1)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, padded)
        with pytest.raises(ConfigError, match="padding"):
            cache.save(padded)
        with pytest.raises(ConfigError, match="padding"):
            FarpoolCache(model, pool=pool, prefixes=blocks).load(padded)


def test_one_of_several_sequences_is_not_saved(pool: Pool, settings: dict[str, Any]) -> None:
    model, inputs = zoo.make("llama"), zoo.prompt(20, sequences=2)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, inputs, attention_mask=torch.tensor([[1] * 20, [0] * 5 + [1] * 15]))
        cache.batch_select_indices(torch.tensor([1]))
        for one in (cache, copy.deepcopy(cache)):
            with pytest.raises(ConfigError, match="several sequences"):
                one.save(inputs[1])
        cache.reset()
        computed(model, cache, inputs[1:])
        assert cache.save(inputs[1]) == 16


def test_only_the_tokens_that_were_loaded_are_saved(pool: Pool, settings: dict[str, Any]) -> None:
    model, inputs, other = zoo.make("llama"), zoo.prompt(40), zoo.prompt(40, seed=3)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, inputs[:, :24])
        assert cache.save(inputs[:, :24]) == 24
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        assert cache.load(inputs) == 24
        computed(model, cache, inputs[:, 24:])
        for tokens, salt in ((other, ""), (inputs, "another")):
            with pytest.raises(ConfigError, match="differ from those"):
                cache.save(tokens, salt=salt)
        assert cache.save(inputs) == 40
        cache.crop(16 - 40)
        turned = torch.cat([inputs[:, :16], other[:, 16:]], -1)
        computed(model, cache, turned[:, 16:])
        with pytest.raises(ConfigError, match="differ from those"):
            cache.save(other)
        assert cache.save(turned) == 40


# ---- data types ------------------------------------------------------------------------------------------------------


def test_the_dtype_comes_from_the_model_or_has_to_be_given(settings: dict[str, Any]) -> None:
    model = zoo.make("llama").to(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"dtype=model\.dtype"):
        prefix_blocks(model.config, settings)
    told = copy.deepcopy(model.config)
    told.dtype = torch.bfloat16
    for one, given in ((model, {}), (told, {}), (model.config, {"dtype": torch.bfloat16})):
        with prefix_blocks(one, settings, **given) as blocks:
            assert blocks.namespace.dtype == "bfloat16"


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_prefixes_of_another_dtype_are_a_miss_and_not_an_error(pool: Pool, settings: dict[str, Any], name: str) -> None:
    model, inputs = zoo.make(name), zoo.prompt(60)
    with prefix_blocks(model, settings, tokens_per_block=STEP) as blocks:
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        computed(model, cache, inputs[:, :48])
        assert cache.save(inputs[:, :48]) == 48
        model.to(torch.bfloat16)
        expected, _ = zoo.generate(model, inputs, DynamicCache(config=model.config))
        told = copy.deepcopy(model.config)
        told.dtype = torch.bfloat16
        for number, one in enumerate((model, told)):
            request = f"{name} of another dtype {number}"
            cache = FarpoolCache(one, pool=pool, prefixes=blocks)
            assert cache.load(inputs, request=request) == 0
            found, _ = zoo.generate(model, inputs, cache)
            assert torch.equal(found, expected)
            (entry,) = recorded(request)
            assert (entry.blocks, entry.done, entry.reasons) == (7, 0, {"other_dtype": 7})
            assert "prefixes are of float32 and the model is of bfloat16" in entry.note


def test_blocks_of_other_engines_are_refused(pool: Pool, settings: dict[str, Any]) -> None:
    model = zoo.make("llama")
    with prefix_blocks(model, settings) as blocks:
        foreign = BlockCache(settings["nodes"], replace(blocks.namespace, engine="farpool"))
    with foreign, pytest.raises(ConfigError, match="prefix_blocks"):
        FarpoolCache(model, pool=pool, prefixes=foreign)
