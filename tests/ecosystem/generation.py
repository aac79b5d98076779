"""Generating text with transformers: each way of decoding, with each kind of cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf

from farpool.kv.engines.transformers_config import cache_argument
from tests.ecosystem.program import Place, Program
from tests.ecosystem.text_models import language_model, tokens

__all__ = ["PROGRAMS"]

_WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "sampling": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
    "sampled beams": {"do_sample": True, "num_beams": 2},
    "static cache": {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
}
_MODELS = ("llama", "gpt2", "qwen2_moe", "t5", "mamba")


def _generation(name: str, options: dict[str, Any]) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(language_model(name).eval())
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = 1
        outputs = model.generate(
            tokens(2, 6), max_new_tokens=6, return_dict_in_generate=True, output_scores=True, **options
        )
        yield outputs.sequences
        yield from outputs.scores

    return run


def _assisted(place: Place) -> Iterator[torch.Tensor]:
    model = place(language_model("llama").eval())
    draft = place(language_model("llama", num_hidden_layers=1).eval())
    for part in (model, draft):
        part.generation_config.pad_token_id = 0
        part.generation_config.eos_token_id = 1
    yield model.generate(tokens(1, 6), max_new_tokens=6, do_sample=False, assistant_model=draft)


def _step_by_step(place: Place) -> Iterator[torch.Tensor]:
    """Prefill in two pieces, then step by step with a cache of the program's own."""
    model = place(language_model("mistral").eval())
    cache = hf.DynamicCache(config=model.config)
    argument = cache_argument(model)
    words = tokens(2, 9)
    with torch.inference_mode():
        for piece in (words[:, :5], words[:, 5:]):
            logits = model(piece, **{argument: cache}, use_cache=True).logits
            yield logits
        for _ in range(4):
            logits = model(logits[:, -1:].argmax(-1), **{argument: cache}, use_cache=True).logits
            yield logits


PROGRAMS = [
    *(
        Program(f"generate/{way}/{name}", _generation(name, options))
        for way, options in _WAYS.items()
        for name in (_MODELS if way in ("greedy", "sampling") else ("llama", "t5"))
        if (way, name) != ("static cache", "t5")
    ),
    Program("generate/assisted", _assisted),
    Program("generate/step by step in inference mode", _step_by_step),
]
