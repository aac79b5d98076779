"""What torch itself offers beside layers and optimizers: transforms, checkpointing, autocast, averages, copies."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential
from torch.utils.data import DataLoader, TensorDataset

from farpool import UnsupportedError
from tests.ecosystem.optimizers import regression
from tests.ecosystem.program import Place, Program, Refusal

__all__ = ["PROGRAMS"]


def _steps(model: nn.Module, inputs: Any, loss_of: Callable[[Any], torch.Tensor] | None = None) -> Iterator[Any]:
    """Losses and norms of three steps, then weights and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = outputs.square().mean() if loss_of is None else loss_of(outputs)
        loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss
    yield from model.parameters()
    yield from model.buffers()


def _recurrent(kind: str, **settings: Any) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(getattr(nn, kind)(16, 24, num_layers=2, **settings))
        yield from _steps(model, torch.randn(6, 3, 16), lambda outputs: outputs[0].square().mean())
        with torch.no_grad():
            packed = nn.utils.rnn.pack_padded_sequence(torch.randn(6, 3, 16), torch.tensor([6, 4, 2]))
            if not settings.get("batch_first"):
                yield model(packed)[0].data

    return run


def _encoder(place: Place) -> Iterator[torch.Tensor]:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=False)
    model = place(nn.TransformerEncoder(layer, 3))
    inputs = torch.randn(2, 7, 32)
    yield from _steps(model.train(), inputs)
    padding = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    with torch.inference_mode():  # the fast path
        yield model.eval()(inputs)
        yield model(inputs, src_key_padding_mask=padding)


def _encoder_and_decoder(place: Place) -> Iterator[torch.Tensor]:
    model = place(nn.Transformer(32, 4, 1, 2, 64, batch_first=True))
    source, target = torch.randn(2, 7, 32), torch.randn(2, 5, 32)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    loss = model(source, target, tgt_mask=mask).square().mean()
    loss.backward()
    yield loss
    yield from (parameter.grad for parameter in model.parameters())


def _attention(place: Place) -> Iterator[torch.Tensor]:
    model = place(nn.MultiheadAttention(32, 4, kdim=16, vdim=16, add_bias_kv=True, batch_first=True))
    query, key = torch.randn(2, 5, 32), torch.randn(2, 7, 16)
    for needs_weights in (True, False):
        outputs, weights = model(query, key, key, need_weights=needs_weights)
        outputs.square().mean().backward()
        yield outputs
        if weights is not None:
            yield weights
    yield from (parameter.grad for parameter in model.parameters())


def _convolutions(place: Place) -> Iterator[torch.Tensor]:
    model = place(
        nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, groups=4),
            nn.GroupNorm(4, 16),
            nn.SiLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 3, stride=2),
            nn.InstanceNorm2d(24, affine=True, track_running_stats=True),
            nn.ConvTranspose2d(24, 8, 4, stride=2),
            nn.BatchNorm2d(8, momentum=None),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 10),
        )
    )
    inputs = torch.randn(4, 3, 16, 16)
    yield from _steps(model.train(), inputs)
    with torch.no_grad():
        yield model.eval()(inputs)
        yield model(inputs.to(memory_format=torch.channels_last))


def _channels_last(place: Place) -> Iterator[torch.Tensor]:
    model = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1) for _ in range(4)))
    model = place(model.to(memory_format=torch.channels_last))
    yield from _steps(model, torch.randn(2, 16, 8, 8).contiguous(memory_format=torch.channels_last))


def _bag(mode: str) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(nn.Sequential(nn.EmbeddingBag(256, 16, mode=mode), nn.Linear(16, 16), nn.Linear(16, 16)))
        yield from _steps(model, torch.randint(0, 256, (5, 7)))

    return run


def _lazy(place: Place) -> Iterator[torch.Tensor]:
    model = nn.Sequential(nn.LazyLinear(24), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(24), nn.LazyLinear(8))
    inputs = torch.randn(6, 24)
    model(inputs)
    yield from _steps(place(model), inputs)


def _vmap_over_inputs(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    weights = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor], inputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (inputs,)), target)

    inputs, targets = torch.randn(5, 24), torch.randn(5, 4)
    with torch.no_grad():
        yield torch.func.vmap(loss, in_dims=(None, 0, 0))(weights, inputs, targets)
    gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(weights, inputs, targets)
    yield from gradients.values()  # one for each sample


def _vmap_over_models(place: Place) -> Iterator[torch.Tensor]:
    """An ensemble: weights of several models stacked, in the pool, and called at once."""
    models = [regression() for _ in range(3)]
    weights, buffers = torch.func.stack_module_state(models)
    stacked = place(nn.ParameterList(weights.values()))
    values = dict(zip(weights, stacked, strict=True))

    def call(parameters: Any, inputs: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(models[0], (parameters, buffers), (inputs,))

    outputs = torch.func.vmap(call, in_dims=(0, None))(values, torch.randn(5, 24))
    outputs.square().mean().backward()
    yield outputs
    yield from (parameter.grad for parameter in stacked)


def _transforms(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    weights = {name: value.detach() for name, value in model.named_parameters()}
    inputs = torch.randn(3, 24)

    def call(parameters: Any) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (inputs,)).square().mean()

    gradients, value = torch.func.grad_and_value(call)(weights)
    yield value
    yield from gradients.values()
    directions = {name: torch.ones(value.shape) for name, value in weights.items()}
    yield torch.func.jvp(call, (weights,), (directions,))[1]
    yield from torch.func.vjp(call, weights)[1](torch.tensor(1.0))[0].values()
    yield torch.func.jacrev(lambda row: model(row))(inputs[0])
    yield torch.func.hessian(lambda row: model(row).square().sum())(inputs[0])


def _double_backward(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    inputs = torch.randn(4, 24, requires_grad=True)
    (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    penalty.backward()
    yield penalty
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)


def _checkpoints(reentrant: bool) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(nn.Sequential(*(nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.2)) for _ in range(5))))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs = torch.randn(4, 24, requires_grad=True)
        for _ in range(2):
            hidden = inputs
            for layer in model:
                hidden = checkpoint(layer, hidden, use_reentrant=reentrant)
            loss = hidden.square().mean() + checkpoint_sequential(model, 2, inputs, use_reentrant=reentrant).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
        yield inputs.grad
        yield from model.parameters()

    return run


def _autocast(dtype: torch.dtype) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(regression())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        inputs, targets = torch.randn(6, 24), torch.randn(6, 4)
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = nn.functional.mse_loss(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            yield loss
        yield from model.parameters()

    return run


def _half_weights(dtype: torch.dtype) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        yield from _steps(place(regression().to(dtype)), torch.randn(6, 24).to(dtype))

    return run


def _averages(place: Place) -> Iterator[torch.Tensor]:
    from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

    model = place(nn.Sequential(nn.Linear(24, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 24), nn.Linear(24, 24)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = AveragedModel(model, use_buffers=False)
    moving = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    schedule = SWALR(optimizer, swa_lr=0.05)
    rows = TensorDataset(torch.randn(8, 24))
    for _ in range(3):
        for (inputs,) in DataLoader(rows, batch_size=4):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        for average in (mean, moving):
            average.update_parameters(model)
        schedule.step()
    update_bn(([inputs] for (inputs,) in DataLoader(rows, batch_size=4)), mean)
    for average in (mean, moving):
        yield from average.module.parameters()
        yield from average.module.buffers()


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64, 24)
        self.body = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
        self.head = nn.Linear(24, 64, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table(words)))


def _tied(place: Place) -> Iterator[torch.Tensor]:
    model = place(_Tied())
    words = torch.randint(0, 64, (3, 5))
    yield from _steps(model, words, lambda logits: nn.functional.cross_entropy(logits.flatten(0, 1), words.flatten()))
    assert model.head.weight is model.table.weight


def _parametrized(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Place], Iterator[torch.Tensor]]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(nn.Sequential(*(wrap(nn.Linear(24, 24)) for _ in range(4))))
        inputs = torch.randn(6, 24)
        yield from _steps(model, inputs)
        with torch.no_grad(), parametrize.cached():
            yield model(inputs)
            yield model(inputs)

    return run


def _pruned_before(place: Place) -> Iterator[torch.Tensor]:
    """The masked weight, a result of the parameter, is kept by the layer."""
    model = nn.Sequential(*(nn.Linear(24, 24) for _ in range(4)))
    for layer in model:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    yield from _steps(place(model), torch.randn(6, 24))


def _pruned_in_the_pool(place: Place) -> Iterator[torch.Tensor]:
    model = place(nn.Sequential(*(nn.Linear(24, 24) for _ in range(4))))
    for layer in model:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    yield from _steps(model, torch.randn(6, 24))
    for layer in model:
        prune.remove(layer, "weight")
        yield layer.weight


def _loader_workers(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    rows = TensorDataset(torch.randn(12, 24), torch.randn(12, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for inputs, targets in DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, timeout=60):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            yield loss
    yield from model.parameters()


def _copies(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    inputs = torch.randn(5, 24)
    other = copy.deepcopy(model)
    yield from _steps(other, inputs)
    with torch.no_grad():
        yield model(inputs)  # as it was
        model.load_state_dict(other.state_dict())
        yield model(inputs)
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        yield from loaded.values()
        fresh = place(regression())
        fresh.load_state_dict(loaded)
        yield fresh(inputs)


def _hooks(place: Place) -> Iterator[torch.Tensor]:
    """Hooks on modules, tensors and accumulated gradients; each optimizer steps while backward runs."""
    model = place(regression())
    seen: list[torch.Tensor] = []
    optimizers = {parameter: torch.optim.Adam([parameter], lr=1e-3) for parameter in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
        parameter.register_post_accumulate_grad_hook(step)
    for layer in model:
        layer.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.detach().clone()))
        layer.register_full_backward_hook(lambda module, before, after: seen.append(after[0].clone()))
    for _ in range(3):
        model(torch.randn(4, 24)).square().mean().backward()
    yield from seen
    yield from model.parameters()


def _frozen(place: Place) -> Iterator[torch.Tensor]:
    """Part after part is thawed, as in gradual fine-tuning."""
    model = place(regression())
    model.requires_grad_(False)
    inputs = torch.randn(6, 24)
    for layer in reversed(model):
        for parameter in layer.parameters():
            parameter.requires_grad_(True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if trained:
            optimizer = torch.optim.SGD(trained, lr=0.1)
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
    yield from model.parameters()


def _vectors(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()
    yield flat
    nn.utils.vector_to_parameters(flat * 0.5, model.parameters())
    with torch.no_grad():
        yield model(torch.randn(3, 24))


def _initializations(place: Place) -> Iterator[torch.Tensor]:
    model = place(nn.Sequential(*(nn.Linear(24, 24) for _ in range(7))))
    for layer, fill in zip(
        model,
        (
            nn.init.kaiming_normal_,
            nn.init.xavier_uniform_,
            nn.init.orthogonal_,
            nn.init.trunc_normal_,
            nn.init.eye_,
            lambda weight: nn.init.sparse_(weight, 0.3),
            lambda weight: nn.init.normal_(weight, std=0.02),
        ),
        strict=True,
    ):
        fill(layer.weight)
        nn.init.zeros_(layer.bias)
    yield from model.parameters()


def _saved_on_cpu(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    with torch.autograd.graph.save_on_cpu():
        loss = model(torch.randn(4, 24)).square().mean()
    loss.backward()
    yield loss
    yield from (parameter.grad for parameter in model.parameters())


def _exported(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    inputs = torch.randn(3, 24)
    yield torch.export.export(model, (inputs,)).module()(inputs)


def _shared_with_processes(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    model.share_memory()
    yield from model.parameters()


def _as_arrays(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    yield from (torch.from_numpy(parameter.detach().numpy()) for parameter in model.parameters())


PROGRAMS = [
    Program("torch/RNN", _recurrent("RNN", nonlinearity="relu"), copies=4),
    Program("torch/LSTM", _recurrent("LSTM", dropout=0.1), copies=4),
    Program("torch/LSTM with projections", _recurrent("LSTM", proj_size=8), copies=4),
    Program("torch/GRU in both directions", _recurrent("GRU", bidirectional=True), copies=4),
    Program("torch/TransformerEncoder", _encoder, copies=4),
    Program("torch/Transformer", _encoder_and_decoder, copies=2),
    Program("torch/MultiheadAttention", _attention, copies=2),
    Program("torch/convolutions and normalizations", _convolutions, copies=4),
    Program("torch/channels last", _channels_last, copies=4),
    *(Program(f"torch/EmbeddingBag/{mode}", _bag(mode), copies=4) for mode in ("sum", "mean", "max")),
    Program("torch/lazy modules", _lazy, copies=4),
    Program("torch/vmap over samples", _vmap_over_inputs),
    Program("torch/vmap over models", _vmap_over_models, copies=2),
    Program("torch/func", _transforms),
    Program("torch/double backward", _double_backward, copies=2),
    Program("torch/checkpoint", _checkpoints(reentrant=False), copies=3),
    Program("torch/checkpoint/reentrant", _checkpoints(reentrant=True), copies=3),
    Program("torch/autocast/bf16", _autocast(torch.bfloat16), copies=4),
    Program("torch/autocast/fp16", _autocast(torch.float16), copies=4),
    Program("torch/weights in bf16", _half_weights(torch.bfloat16), copies=4),
    Program("torch/weights in fp64", _half_weights(torch.float64), copies=4),
    Program("torch/AveragedModel", _averages, copies=4),
    Program("torch/tied weights", _tied, copies=4),
    Program("torch/weight_norm", _parametrized(parametrizations.weight_norm), copies=4),
    Program("torch/spectral_norm", _parametrized(parametrizations.spectral_norm), copies=4),
    Program("torch/orthogonal", _parametrized(parametrizations.orthogonal), copies=4),
    Program("torch/prune", _pruned_in_the_pool, copies=4),
    Program("torch/prune before offload", _pruned_before, copies=4),
    Program("torch/DataLoader workers", _loader_workers, copies=4),
    Program("torch/deepcopy, state_dict and save", _copies, copies=6),
    Program("torch/hooks and optimizers in backward", _hooks, copies=4),
    Program("torch/gradual thawing", _frozen, copies=2),
    Program("torch/parameters as one vector", _vectors),
    Program("torch/init", _initializations),
    Program("torch/saved tensors on the host", _saved_on_cpu, copies=2),
    Program("torch/export", _exported, refused=Refusal(UnsupportedError, "restore")),
    Program(
        "torch/memory shared with processes",
        _shared_with_processes,
        refused=Refusal(UnsupportedError, r"pool\.materialize"),
    ),
    Program("torch/numpy", _as_arrays, refused=Refusal(UnsupportedError, r"pool\.materialize")),
]
