"""Layers with offloaded parameters: forward, backward and buffers have the bits of the plain layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from farpool import offload
from tests.tensors.bits import assert_same, assert_same_training
from tests.tensors.evil_pool import EvilPool


def forward_backward(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[nn.Module], Any]:
    def step(module: nn.Module) -> Any:
        inputs = torch.randn(*shape, dtype=dtype, requires_grad=True)
        result = module(inputs)
        result = result[0] if isinstance(result, tuple) else result
        result.square().sum().backward()
        return [result, inputs.grad]

    return step


def tokens(module: nn.Module) -> Any:
    result = module(torch.randint(0, 77, (3, 9)))
    result.square().sum().backward()
    return result


def forward_only(mode: Callable[[], Any], *shape: int) -> Callable[[nn.Module], Any]:
    def step(module: nn.Module) -> Any:
        module.eval()
        inputs = torch.randn(*shape)
        with mode():
            result = module(inputs)
        return (result[0] if isinstance(result, tuple) else result).detach().clone()

    return step


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.keys = nn.Parameter(torch.randn(2, 7, width))
        self.values = nn.Parameter(torch.randn(2, 7, width))

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(queries, self.keys, self.values)


class Repeated(nn.Module):
    """Gives a layer its input several times."""

    def __init__(self, inner: nn.Module, times: int) -> None:
        super().__init__()
        self.inner = inner
        self.times = times

    def forward(self, value: torch.Tensor) -> Any:
        return self.inner(*[value] * self.times)


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(37, 13), (5, 37)),
    "linear of one row": (lambda: nn.Linear(1, 1), (1, 1)),
    "linear of a batch": (lambda: nn.Linear(65, 129), (2, 3, 65)),
    "linear without bias": (lambda: nn.Linear(127, 31, bias=False), (17, 127)),
    "bilinear": (lambda: Repeated(nn.Bilinear(5, 5, 7), 2), (3, 5)),
    "layer norm": (lambda: nn.LayerNorm(97), (3, 5, 97)),
    "rms norm": (lambda: nn.RMSNorm(33), (4, 33)),
    "group norm": (lambda: nn.GroupNorm(3, 9), (2, 9, 5)),
    "batch norm": (lambda: nn.BatchNorm2d(7), (3, 7, 5, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(5, affine=True, track_running_stats=True), (3, 5, 11)),
    "conv1d": (lambda: nn.Conv1d(3, 7, 5, padding=2), (2, 3, 31)),
    "conv2d": (lambda: nn.Conv2d(5, 9, 3, stride=2), (2, 5, 17, 13)),
    "conv2d in groups": (lambda: nn.Conv2d(6, 6, 3, groups=3, dilation=2), (2, 6, 15, 15)),
    "transposed conv": (lambda: nn.ConvTranspose2d(3, 5, 3), (2, 3, 7, 5)),
    "prelu": (lambda: nn.PReLU(9), (3, 9)),
    "attention": (lambda: Repeated(nn.MultiheadAttention(24, 3, batch_first=True), 3), (2, 5, 24)),
    "scaled dot product": (lambda: Attention(19), (2, 5, 19)),
    "encoder layer": (lambda: nn.TransformerEncoderLayer(24, 3, 50, batch_first=True), (2, 7, 24)),
    "lstm": (lambda: nn.LSTM(11, 13, num_layers=2, bidirectional=True), (5, 2, 11)),
    "gru": (lambda: nn.GRU(11, 13), (5, 2, 11)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(9, 5)), (3, 9)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_trains_to_the_same_bits(name: str, evil: EvilPool) -> None:
    make, shape = LAYERS[name]
    assert_same_training(make, forward_backward(*shape), evil, steps=2)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_layer_answers_with_the_same_bits_without_gradients(
    name: str, mode: Callable[[], Any], evil: EvilPool
) -> None:
    make, shape = LAYERS[name]
    module = assert_same_training(make, forward_only(mode, *shape), evil)
    assert not module.training


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["linear", "linear of a batch", "layer norm", "conv2d", "scaled dot product"])
def test_a_layer_of_another_precision_trains_to_the_same_bits(name: str, dtype: torch.dtype, evil: EvilPool) -> None:
    make, shape = LAYERS[name]
    assert_same_training(lambda: make().to(dtype), forward_backward(*shape, dtype=dtype), evil)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_an_embedding_trains_to_the_same_bits(options: dict[str, Any], evil: EvilPool) -> None:
    assert_same_training(lambda: nn.Embedding(77, 19, **options), tokens, evil)


def test_sparse_gradients_of_an_embedding_stay_sparse_and_train_to_the_same_bits(evil: EvilPool) -> None:
    outcomes = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        module = nn.Embedding(77, 19, sparse=True)
        if is_paged:
            offload(module, evil)
        optimizer = torch.optim.SparseAdam(module.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.randint(0, 77, (3, 9))).square().sum().backward()
            assert module.weight.grad.is_sparse
            optimizer.step()
        outcomes.append(module.weight)
    assert_same(outcomes[1], outcomes[0])


def test_an_embedding_bag_trains_to_the_same_bits(evil: EvilPool) -> None:
    assert_same_training(lambda: nn.EmbeddingBag(77, 19, mode="mean"), tokens, evil)


def test_autocast_gives_the_same_bits(evil: EvilPool) -> None:
    def step(module: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            result = module(torch.randn(3, 5, 24))
        result.float().sum().backward()
        return result

    assert_same_training(lambda: nn.TransformerEncoderLayer(24, 3, 50, batch_first=True), step, evil, steps=2)
