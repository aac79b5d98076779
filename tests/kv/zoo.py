"""Tiny language models with seeded weights, one for each way in which a cache is used."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from farpool.kv.engines.transformers_config import cache_argument

__all__ = ["NAMES", "VOCABULARY", "generate", "make", "prompt"]

VOCABULARY = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NAMES = ("llama", "gpt2", "mixtral", "mistral", "gemma2")
"""All layers of ``mistral`` have sliding windows, and every other one of ``gemma2``."""


def make(name: str) -> Any:
    """The model of this name, the same in each process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        if name == "gpt2":
            sizes = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 512}
            special = {name: _SIZES[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
            return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **special)).eval()
        if name == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**_SIZES, num_local_experts=3)).eval()
        if name == "mistral":
            return MistralForCausalLM(MistralConfig(**_SIZES, sliding_window=24)).eval()
        if name == "gemma2":
            return Gemma2ForCausalLM(Gemma2Config(**_SIZES, head_dim=12, sliding_window=24)).eval()
        return LlamaForCausalLM(LlamaConfig(**_SIZES)).eval()


def prompt(tokens: int, sequences: int = 1, seed: int = 7) -> torch.Tensor:
    """Random token ids of shape ``(sequences, tokens)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (sequences, tokens), generator=generator)


def generate(model: Any, inputs: torch.Tensor, cache: Any, **how: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Tokens and logits of a generation that uses a cache; sampling is seeded."""
    torch.manual_seed(11)
    found = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        **{cache_argument(model): cache, "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, **how},
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences, list(found.logits)
