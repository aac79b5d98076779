"""Mixtures of experts: the bits of the resident model, and hardly more bytes moved than the routed experts have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import farpool

IMPLEMENTATIONS = ["eager", "batched_mm", "grouped_mm"]
LAYERS, EXPERTS, ROUTED, HIDDEN, INNER = 3, 8, 2, 64, 256
EXPERT = 3 * HIDDEN * INNER * 4
"""Bytes of an expert of one layer."""
FAST = EXPERTS * EXPERT // 2
WARM, COUNTED = 8, 16
"""Tokens before and while the bytes are counted."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mixtral(implementation: str, **options: int) -> MixtralForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 128,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": ROUTED,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    model = MixtralForCausalLM(MixtralConfig(**{**sizes, **options}))
    model.set_experts_implementation(implementation)
    return model


def moved(pool: farpool.Pool) -> int:
    return sum(link.nbytes for link in pool.stats().links)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_token_moves_little_more_than_its_experts(implementation: str) -> None:
    model = mixtral(implementation).eval()
    tokens = torch.randint(2, 128, (WARM + COUNTED, 1, 1), generator=torch.Generator().manual_seed(1))
    routed = 0

    def count(module: torch.nn.Module, inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        nonlocal routed
        routed += outputs[2].unique().numel() * EXPERT

    with torch.no_grad():
        expected = [model(token).logits for token in tokens]
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(count)
        with farpool.Pool(FAST, dram="16MiB") as pool:
            farpool.offload(model, pool)
            before = 0
            for number, token in enumerate(tokens):
                if number == WARM:
                    before, routed = moved(pool), 0
                assert torch.equal(model(token).logits, expected[number])
            total = moved(pool) - before
            farpool.restore(model)
    assert routed == COUNTED * LAYERS * ROUTED * EXPERT
    # The budget is half a layer, so nearly nothing of a layer is left when the next token comes.
    assert total <= 1.2 * routed


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_generation_has_the_bits_of_the_resident_model(implementation: str) -> None:
    model = mixtral(implementation).eval()
    prompt = torch.randint(2, 128, (2, 12), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 6, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    expected = model.generate(prompt, **options)
    with farpool.Pool(FAST, dram="16MiB") as pool:
        farpool.offload(model, pool)
        found = model.generate(prompt, **options)
        farpool.restore(model)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(left, right) for left, right in zip(found.scores, expected.scores, strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_training_has_the_bits_of_the_resident_model(implementation: str) -> None:
    tokens = torch.randint(2, 128, (2, 1, 4), generator=torch.Generator().manual_seed(3))

    def train(model: torch.nn.Module) -> list[float]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for batch in tokens:
            loss = model(batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain, model = mixtral(implementation, num_hidden_layers=2), mixtral(implementation, num_hidden_layers=2)
    expected = train(plain)
    with farpool.Pool(FAST, dram="64MiB") as pool:
        farpool.offload(model, pool)
        assert train(model) == expected
        farpool.restore(model)
    for (name, left), right in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right), name


def test_experts_of_a_checkpoint_are_cut_at_experts(tmp_path: Path) -> None:
    mixtral("eager").save_pretrained(tmp_path)
    with farpool.Pool(FAST, dram="16MiB") as pool:
        model = farpool.from_pretrained(MixtralForCausalLM, tmp_path, pool)
        for layer in model.model.layers:
            for stack in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                assert stack._storage.cls == "expert"
                assert stack[0].nbytes % stack._storage.block_bytes == 0
        del layer, stack, model
