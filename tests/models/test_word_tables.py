"""Models whose word table, with its gradient and moments, is larger than the fast tier train to the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import farpool

STEPS = 2


def gpt2_small() -> torch.nn.Module:
    return GPT2LMHeadModel(GPT2Config())


def t5_small() -> torch.nn.Module:
    return T5ForConditionalGeneration(
        T5Config(d_model=512, d_ff=2048, d_kv=64, num_heads=8, num_layers=6, decoder_start_token_id=0)
    )


def groups(model: torch.nn.Module) -> list[dict[str, object]]:
    """Weights decay, biases and norms do not, as transformers' `Trainer` has it."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.01},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def train(model: torch.nn.Module) -> list[float]:
    tokens = torch.randint(0, 30000, (1, 8), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3, fused=True)
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def digests(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: hashlib.sha256(parameter.detach().numpy().tobytes()).hexdigest()
        for name, parameter in model.named_parameters()
    }


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def build(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.manual_seed(0)
    return make().train()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("make", [gpt2_small, t5_small])
def test_a_quarter_of_weights_gradients_and_moments_trains_to_the_same_bits(
    make: Callable[[], torch.nn.Module],
) -> None:
    model = build(make)
    nbytes = 4 * sum(parameter.nbytes for parameter in model.parameters())
    largest = max(parameter.nbytes for parameter in model.parameters())
    losses = train(model)
    expected = digests(model)
    del model

    model = build(make)
    fast = nbytes // 4
    assert 4 * largest > fast
    with farpool.Pool(fast, dram=nbytes, timeout=120) as pool:
        farpool.offload(model, pool)
        assert train(model) == losses
        assert pool.stats().fast.peak <= fast
        farpool.restore(model)
    assert digests(model) == expected
