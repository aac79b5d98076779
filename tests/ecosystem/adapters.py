"""Fine-tuning with peft: each kind of adapter is trained, and what it says about merging and generating holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.ecosystem.program import Place, Program
from tests.ecosystem.text_models import language_model, tokens, train

__all__ = ["PROGRAMS"]

_TARGETS = ["q_proj", "v_proj", "down_proj"]
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "target_modules": _TARGETS}),
    "LoRA of embeddings": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, "target_modules": _TARGETS}),
    "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True, "target_modules": "all-linear"}),
    "LoRA with saved modules": (
        "LoraConfig",
        {"r": 4, "target_modules": _TARGETS, "modules_to_save": ["lm_head"]},
    ),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 6, "target_r": 4, "tinit": 1, "tfinal": 1, "total_step": 6, "target_modules": _TARGETS},
    ),
    "LoHa": ("LoHaConfig", {"r": 4, "target_modules": _TARGETS}),
    "LoKr": ("LoKrConfig", {"r": 4, "target_modules": _TARGETS}),
    "OFT": ("OFTConfig", {"r": 0, "oft_block_size": 4, "target_modules": ["q_proj"]}),
    "VeRA": ("VeraConfig", {"r": 8, "target_modules": ["q_proj", "o_proj"]}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
}


def _adapted(kind: str) -> Any:
    import peft

    config, settings = _KINDS[kind]
    return peft.get_peft_model(language_model("llama"), getattr(peft, config)(task_type="CAUSAL_LM", **settings))


def _training(kind: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(_adapted(kind).train())
        batch = tokens()
        yield from train(model, {"input_ids": batch, "labels": batch})

    return run


def _ranks(place: Place) -> Iterator[torch.Tensor]:
    """AdaLoRA's own loop, which takes ranks away by what gradients say."""
    model = place(_adapted("AdaLoRA").train())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = tokens()
    for step in range(4):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(step)
        optimizer.zero_grad()
        yield loss
    yield from model.parameters()


def _adapters_on_top(place: Place) -> Iterator[torch.Tensor]:
    """The base goes first; adapters are added to it afterwards, trained and switched."""
    import peft

    base = place(language_model("qwen2"))
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=_TARGETS, init_lora_weights="gaussian")
    model = peft.get_peft_model(base, config)
    model.add_adapter("other", config)
    place(model)
    batch = tokens()
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    yield loss
    model.eval()
    with torch.no_grad():
        model.set_adapter("other")
        yield model(input_ids=batch).logits
        with model.disable_adapter():
            yield model(input_ids=batch).logits
        model.set_adapter("default")
        yield model(input_ids=batch).logits
        yield from peft.get_peft_model_state_dict(model).values()


def _merge(kind: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(_adapted(kind).eval())
        batch = tokens()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.add_(torch.randn(parameter.shape) * 0.02)
            model.merge_adapter()
            yield model(input_ids=batch).logits
            model.unmerge_adapter()
            yield model(input_ids=batch).logits
            merged = model.merge_and_unload()
            yield merged(input_ids=batch).logits
            yield from merged.parameters()

    return run


def _generation(place: Place) -> Iterator[torch.Tensor]:
    model = place(_adapted("LoRA").eval())
    model.generation_config.pad_token_id = 0
    yield model.generate(input_ids=tokens(2, 6), max_new_tokens=5, do_sample=True)


PROGRAMS = [
    *(Program(f"peft/{kind}/train", _training(kind)) for kind in _KINDS),
    Program("peft/AdaLoRA/ranks are taken away", _ranks),
    Program("peft/LoRA/adapters on a base that is in the pool", _adapters_on_top),
    Program("peft/LoRA/merge and unload", _merge("LoRA")),
    Program("peft/DoRA/merge and unload", _merge("DoRA")),
    Program("peft/LoRA/generate", _generation),
]
