"""Layers that keep their weights in unusual ways, or read them on paths of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import farpool
from farpool import PagedTensor, Pool, UnsupportedError
from tests.process.pitfalls.compare import integers, randn, same, twin
from tests.process.pitfalls.harness import scenario

Make = Callable[[], nn.Module]


def _trained(call: Callable[[nn.Module], Any], *, steps: int = 2) -> Callable[[nn.Module], Any]:
    """Train with AdamW, then evaluate; everything on the way is part of the result."""

    def program(model: nn.Module) -> Any:
        parameters = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(parameters, lr=0.01) if parameters else None
        seen: list[Any] = []
        model.train()
        for _ in range(steps):
            out = call(model)
            seen.append(out)
            if optimizer is not None:
                optimizer.zero_grad()
                _loss(out).backward()
                optimizer.step()
        model.eval()
        with torch.no_grad():
            seen.append(call(model))
        with torch.inference_mode():
            evaluated = call(model)
        return _detached(seen), _detached(evaluated)

    return program


def _loss(out: Any) -> torch.Tensor:
    if isinstance(out, torch.Tensor):
        return (out * out).mean()
    return sum(
        _loss(item) for item in out if item is not None and (not isinstance(item, torch.Tensor) or item.requires_grad)
    )


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    return [_detached(item) for item in value if item is not None]


x2, x3, x4 = (lambda: randn(5, 12)), (lambda: randn(4, 7, 12)), (lambda: randn(2, 4, 9, 9))


def _attention(module: nn.Module) -> Any:
    x = x3()
    return module(x, x, x, need_weights=True)


def _masked_encoder(module: nn.Module) -> Any:
    padding = torch.zeros(4, 7, dtype=torch.bool)
    padding[:, 5:] = True
    return module(x3(), src_key_padding_mask=padding)


LAYERS: dict[str, tuple[Make, Callable[[nn.Module], Any]]] = {
    "Linear": (lambda: nn.Linear(12, 7), lambda m: m(x2())),
    "Linear without bias": (lambda: nn.Linear(12, 7, bias=False), lambda m: m(x2())),
    "Linear of a vector": (lambda: nn.Linear(12, 7), lambda m: m(randn(12))),
    "Linear of a batch of sequences": (lambda: nn.Linear(12, 7), lambda m: m(x3())),
    "Bilinear": (lambda: nn.Bilinear(12, 12, 5), lambda m: m(x2(), x2() * 2)),
    "LSTM": (lambda: nn.LSTM(12, 8, 2, bidirectional=True, batch_first=True), lambda m: m(x3())),
    "LSTM with a projection": (lambda: nn.LSTM(12, 8, proj_size=3), lambda m: m(x3())),
    "LSTM with dropout": (lambda: nn.LSTM(12, 8, 2, dropout=0.4), lambda m: m(x3())),
    "GRU": (lambda: nn.GRU(12, 8, 2, bidirectional=True), lambda m: m(x3())),
    "RNN": (lambda: nn.RNN(12, 8, 2, nonlinearity="relu"), lambda m: m(x3())),
    "packed sequence": (
        lambda: nn.LSTM(12, 8, batch_first=True),
        lambda m: m(nn.utils.rnn.pack_padded_sequence(x3(), torch.tensor([7, 5, 3, 1]), batch_first=True))[0].data,
    ),
    "LSTMCell": (lambda: nn.LSTMCell(12, 8), lambda m: m(x2())),
    "GRUCell": (lambda: nn.GRUCell(12, 8), lambda m: m(x2())),
    "weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(12, 7)), lambda m: m(x2())),
    "spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(12, 7)), lambda m: m(x2())),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(12, 7)), lambda m: m(x2())),
    "old spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(12, 7)), lambda m: m(x2())),
    "MultiheadAttention": (lambda: nn.MultiheadAttention(12, 3, batch_first=True), _attention),
    "MultiheadAttention with other keys": (
        lambda: nn.MultiheadAttention(12, 3, kdim=12, vdim=12, add_bias_kv=True, batch_first=True),
        _attention,
    ),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(12, 3, 16, batch_first=True), lambda m: m(x3())),
    "TransformerEncoderLayer, norm first": (
        lambda: nn.TransformerEncoderLayer(12, 3, 16, activation="gelu", norm_first=True, batch_first=True),
        lambda m: m(x3()),
    ),
    "TransformerEncoder with padding": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2),
        _masked_encoder,
    ),
    "Transformer": (
        lambda: nn.Transformer(12, 3, 1, 1, 16, batch_first=True),
        lambda m: m(x3(), randn(4, 3, 12)),
    ),
    "Embedding": (lambda: nn.Embedding(50, 12), lambda m: m(integers(50, 4, 7))),
    "Embedding with padding": (lambda: nn.Embedding(50, 12, padding_idx=3), lambda m: m(integers(6, 4, 7))),
    "Embedding with max_norm": (lambda: nn.Embedding(50, 12, max_norm=1.5), lambda m: m(integers(6, 4, 7)).sum()),
    "Embedding scaled by frequency": (
        lambda: nn.Embedding(50, 12, scale_grad_by_freq=True),
        lambda m: m(integers(6, 4, 7)),
    ),
    "EmbeddingBag mean": (lambda: nn.EmbeddingBag(50, 12), lambda m: m(integers(50, 4, 7))),
    "EmbeddingBag sum with weights": (
        lambda: nn.EmbeddingBag(50, 12, mode="sum"),
        lambda m: m(integers(50, 4, 7), per_sample_weights=randn(4, 7)),
    ),
    "EmbeddingBag max with offsets": (
        lambda: nn.EmbeddingBag(50, 12, mode="max"),
        lambda m: m(integers(50, 9), torch.tensor([0, 4, 4])),
    ),
    "Conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), lambda m: m(randn(2, 4, 9))),
    "Conv2d": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1), lambda m: m(x4())),
    "Conv2d grouped": (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), lambda m: m(x4())),
    "Conv2d dilated, reflecting": (
        lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2, padding_mode="reflect"),
        lambda m: m(x4()),
    ),
    "Conv2d of channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        lambda m: m(x4().to(memory_format=torch.channels_last)),
    ),
    "Conv3d": (lambda: nn.Conv3d(2, 3, 2), lambda m: m(randn(1, 2, 4, 4, 4))),
    "ConvTranspose1d": (lambda: nn.ConvTranspose1d(4, 6, 3), lambda m: m(randn(2, 4, 9))),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, output_padding=1), lambda m: m(x4())),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(12), lambda m: m(x2())),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), lambda m: m(x4())),
    "BatchNorm2d without statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), lambda m: m(x4())),
    "BatchNorm2d with a cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), lambda m: m(x4())),
    "BatchNorm2d of channels last": (
        lambda: nn.BatchNorm2d(4),
        lambda m: m(x4().to(memory_format=torch.channels_last)),
    ),
    "InstanceNorm2d": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), lambda m: m(x4())),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), lambda m: m(x4())),
    "LayerNorm": (lambda: nn.LayerNorm([7, 12]), lambda m: m(x3())),
    "RMSNorm": (lambda: nn.RMSNorm(12), lambda m: m(x3())),
    "LocalResponseNorm": (lambda: nn.LocalResponseNorm(2), lambda m: m(x4())),
    "PReLU": (lambda: nn.PReLU(4), lambda m: m(x4())),
    "CrossEntropyLoss with weights": (
        lambda: nn.Sequential(nn.Linear(12, 5), nn.CrossEntropyLoss(weight=torch.rand(5), label_smoothing=0.1)),
        lambda m: m[1](m[0](x2()), torch.tensor([0, 1, 2, 3, 4])),
    ),
    "AdaptiveLogSoftmaxWithLoss": (
        lambda: nn.AdaptiveLogSoftmaxWithLoss(12, 30, [5, 15]),
        lambda m: m(x2(), torch.tensor([1, 7, 20, 29, 0])).loss,
    ),
    "ParameterList and ParameterDict": (
        lambda: _Lists(),
        lambda m: m(x2()),
    ),
    "buffers of many types": (lambda: _Buffers(), lambda m: m(x2())),
    "LazyLinear after its first pass": (lambda: _initialised(nn.LazyLinear(5)), lambda m: m(x2())),
}


def _pruned(layer: nn.Linear) -> nn.Linear:
    from torch.nn.utils import prune

    return prune.random_unstructured(layer, "weight", amount=0.3)


def _initialised(module: nn.Module) -> nn.Module:
    module(x2())
    return module


class _Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([nn.Parameter(torch.randn(12, 12)) for _ in range(3)])
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(12)), "b": nn.Parameter(torch.randn(()))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.listed:
            x = torch.tanh(x @ weight + self.named["a"]) * self.named["b"]
        return x


class _Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12))
        self.register_buffer("mask", torch.rand(12) > 0.5)
        self.register_buffer("counter", torch.tensor(0))
        self.register_buffer("small", torch.randint(-128, 127, (12,), dtype=torch.int8))
        self.register_buffer("phase", torch.randn(12, dtype=torch.complex64))
        self.register_buffer("wide", torch.randn(12, dtype=torch.float64))
        self.register_buffer("halved", torch.randn(12).half())
        self.register_buffer("brain", torch.randn(12).bfloat16())
        self.register_buffer("nothing", None)
        self.register_buffer("empty", torch.empty(0, 4))
        self.register_buffer("hidden", torch.ones(12), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counter += 1
        self.small.add_(1)
        self.mask.logical_not_()
        self.phase.mul_(1j)
        y = x * self.weight * self.mask + self.small + self.phase.real * self.hidden + self.halved + self.brain
        return (y * self.counter + self.wide).float() + self.empty.sum()


@scenario(each={name.replace(",", "").replace(" ", "_"): case for name, case in LAYERS.items()})
def a_layer_trains_and_evaluates_to_the_same_bits(pool: Pool, case: tuple[Make, Callable[[nn.Module], Any]]) -> None:
    make, call = case
    twin(pool, make, _trained(call))


COMPUTED_AHEAD: dict[str, tuple[Make, Callable[[nn.Module], Any]]] = {
    "old weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(12, 7)), lambda m: m(x2())),
    "pruned": (lambda: _pruned(nn.Linear(12, 7)), lambda m: m(x2())),
}


@scenario(each={name.replace(" ", "_"): case for name, case in COMPUTED_AHEAD.items()})
def a_layer_whose_weight_was_computed_ahead_is_refused_by_name_or_equal(
    pool: Pool, case: tuple[Make, Callable[[nn.Module], Any]]
) -> None:
    make, call = case
    twin(pool, make, _trained(call), typed=(UnsupportedError,), says="weight_")


@scenario()
def the_fused_inference_path_of_an_encoder_is_equal_or_not_taken(pool: Pool) -> None:
    def program(model: nn.Module) -> Any:
        model.eval()
        with torch.no_grad():
            plain_mask = model(x3())
        with torch.inference_mode():
            return plain_mask, model(x3()), _masked_encoder(model)

    twin(pool, lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 16, batch_first=True), 2), program)


@scenario()
def a_recurrent_module_keeps_its_weak_references(pool: Pool) -> None:
    def check(module: nn.LSTM) -> None:
        held = [reference() for reference in module._flat_weight_refs]
        assert all(a is b for a, b in zip(held, module.parameters(), strict=True))
        assert all(a is b for a, b in zip(module._flat_weights, module.parameters(), strict=True))

    module = nn.LSTM(12, 8, 2, bidirectional=True)
    expected = module(x3())[0].detach()
    farpool.offload(module, pool)
    check(module)
    module.flatten_parameters()
    same(module(x3())[0].detach(), expected)
    module.double().float()
    check(module)
    farpool.restore(module)
    check(module)
    same(module(x3())[0].detach(), expected)


@scenario()
def a_parametrization_registered_after_offload_works(pool: Pool) -> None:
    def program(layer: nn.Linear) -> Any:
        parametrizations.weight_norm(layer)
        out = layer(x2())
        out.sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        parametrize.remove_parametrizations(layer, "weight")
        return out.detach(), gradients, layer(x2()).detach()

    twin(pool, lambda: nn.Linear(12, 7), program)


@scenario()
def a_layer_added_to_an_offloaded_module_stays_plain_until_it_is_offloaded(pool: Pool) -> None:
    model = farpool.offload(nn.Sequential(nn.Linear(12, 12)), pool)
    model.append(nn.Linear(12, 3))
    assert type(model[1].weight) is nn.Parameter
    before = model(x2()).detach()
    farpool.offload(model, pool)
    assert all(type(p) is PagedTensor for p in model.parameters())
    same(model(x2()).detach(), before)


@scenario()
def a_parameter_assigned_to_an_offloaded_module_works(pool: Pool) -> None:
    def program(layer: nn.Linear) -> Any:
        layer.bias = nn.Parameter(torch.ones(7))
        layer.weight = nn.Parameter(layer.weight.detach() * 2)
        out = layer(x2())
        out.sum().backward()
        return out.detach()

    twin(pool, lambda: nn.Linear(12, 7), program)


@scenario()
def freezing_and_thawing_parameters_works(pool: Pool) -> None:
    def program(model: nn.Module) -> Any:
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for thawed in (False, True, False):
            model[0].requires_grad_(thawed)
            optimizer.zero_grad()
            model(x2()).sum().backward()
            optimizer.step()
        return [p.grad is None for p in model.parameters()]

    twin(pool, lambda: nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 3)), program)
