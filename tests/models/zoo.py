"""Models built from their configurations with a fixed seed, and batches for them.

Their library is imported when one is built: it takes seconds, which collecting tests need not spend.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Batch = dict[str, torch.Tensor]

LAYERS, HIDDEN, HEADS, INNER, VOCABULARY = 8, 128, 4, 512, 512


def _text() -> Batch:
    tokens = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens}


def _pictures() -> Batch:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([3, 7])}


def _bert() -> torch.nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            max_position_embeddings=64,
        )
    )


def _gpt2() -> torch.nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=HIDDEN, n_layer=LAYERS, n_head=HEADS, n_inner=INNER, n_positions=64)
    )


def _llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            intermediate_size=INNER,
            max_position_embeddings=64,
        )
    )


def _vit() -> torch.nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            intermediate_size=INNER,
            num_labels=10,
        )
    )


ZOO: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], Batch]]] = {
    "bert": (_bert, _text),
    "gpt2": (_gpt2, _text),
    "llama": (_llama, _text),
    "vit": (_vit, _pictures),
}


def build(name: str) -> tuple[torch.nn.Module, Batch]:
    """A model with seeded weights in training mode (dropout included), and a batch."""
    make, batch = ZOO[name]
    torch.manual_seed(0)
    return make().train(), batch()


def weight_bytes(model: torch.nn.Module) -> int:
    """Bytes of the distinct parameters and buffers."""
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
