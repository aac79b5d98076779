"""Language models of transformers: a forward pass, and two steps of training, for each architecture."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers as hf

from tests.ecosystem.program import Place, Program

__all__ = ["PROGRAMS", "VOCABULARY", "language_model", "tokens", "train"]

VOCABULARY = 96

_BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 40,
}
_LLAMA = {**_BERT, "num_key_value_heads": 2, "pad_token_id": 0}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}

_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**_BERT, "embedding_size": 32, "inner_group_num": 3}),
    "bart": ("BartForConditionalGeneration", "BartConfig", _SEQ2SEQ),
    "bert": ("BertForMaskedLM", "BertConfig", _BERT),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "deberta": (
        "DebertaForMaskedLM",
        "DebertaConfig",
        {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "deberta_v2": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_BERT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": 40},
    ),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**_BERT, "embedding_size": 32}),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**_BERT, "bos_token_id": 1, "eos_token_id": 2}),
    "fnet": ("FNetForMaskedLM", "FNetConfig", _BERT),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**_LLAMA, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**_LLAMA, "head_dim": 8, "sliding_window": 8}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 40,
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _BERT),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "rotary_dim": 4},
    ),
    "led": (
        "LEDForConditionalGeneration",
        "LEDConfig",
        {
            **{name: value for name, value in _SEQ2SEQ.items() if name != "max_position_embeddings"},
            "max_encoder_position_embeddings": 40,
            "max_decoder_position_embeddings": 40,
            "attention_window": 4,
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _LLAMA),
    "mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 3, "state_size": 4, "time_step_rank": 4},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_LLAMA, "sliding_window": 8}),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_LLAMA, **_EXPERTS, "num_local_experts": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 40}),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", _LLAMA),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "max_position_embeddings": 40,
            "word_embed_proj_dim": 32,
        },
    ),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", _SEQ2SEQ),
    "phi": ("PhiForCausalLM", "PhiConfig", _BERT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", _LLAMA),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", _LLAMA),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **_LLAMA,
            **_EXPERTS,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_LLAMA, "head_dim": 8}),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", _BERT),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", _LLAMA),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    ),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", {"d_model": 32, "n_layer": 3, "n_head": 4, "d_inner": 64}),
}


def language_model(name: str, **changes: Any) -> Any:
    """A model of an architecture with seeded weights."""
    model, config, settings = _MODELS[name]
    return getattr(hf, model)(getattr(hf, config)(vocab_size=VOCABULARY, **{**settings, **changes}))


def tokens(rows: int = 2, length: int = 12) -> torch.Tensor:
    """A batch of token numbers without special ones."""
    return torch.randint(3, VOCABULARY, (rows, length))


def train(model: torch.nn.Module, batch: dict[str, Any], steps: int = 2) -> Iterator[torch.Tensor]:
    """Losses of steps with AdamW, and then the weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
    yield from model.parameters()
    yield from model.buffers()


def _forward(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(language_model(name).eval())
        batch = tokens()
        with torch.no_grad():
            for _ in range(2):
                yield model(input_ids=batch, labels=batch).logits

    return run


def _training(name: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(language_model(name).train())
        batch = tokens()
        yield from train(model, {"input_ids": batch, "labels": batch})

    return run


PROGRAMS = [
    program
    for name in _MODELS
    for program in (
        Program(f"transformers/{name}/forward", _forward(name)),
        Program(f"transformers/{name}/train", _training(name), copies=4),
    )
]
