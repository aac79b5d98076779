"""Training with each optimizer of torch, in each of its forms, and with those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim

from tests.ecosystem.program import Place, Program

__all__ = ["PROGRAMS", "regression"]

_STATES: dict[str, tuple[Callable[..., optim.Optimizer], dict[str, Any], int, tuple[str, ...]]] = {
    # name: class, settings, bytes of state for each byte of weights, forms
    "Adadelta": (optim.Adadelta, {"weight_decay": 0.01}, 2, ("for-loop", "foreach")),
    "Adagrad": (optim.Adagrad, {"lr_decay": 0.1}, 1, ("for-loop", "foreach", "fused")),
    "Adam": (optim.Adam, {"lr": 1e-3, "weight_decay": 0.01}, 2, ("for-loop", "foreach", "fused")),
    "Adam amsgrad": (optim.Adam, {"lr": 1e-3, "amsgrad": True}, 3, ("for-loop", "foreach", "fused")),
    "AdamW": (optim.AdamW, {"lr": 1e-3}, 2, ("for-loop", "foreach", "fused")),
    "Adamax": (optim.Adamax, {"weight_decay": 0.01}, 2, ("for-loop", "foreach")),
    "ASGD": (optim.ASGD, {"t0": 1}, 1, ("for-loop", "foreach")),
    "NAdam": (optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.01}, 2, ("for-loop", "foreach")),
    "RAdam": (optim.RAdam, {}, 2, ("for-loop", "foreach")),
    "RMSprop": (optim.RMSprop, {"momentum": 0.9, "centered": True}, 3, ("for-loop", "foreach")),
    "Rprop": (optim.Rprop, {}, 2, ("for-loop", "foreach")),
    "SGD": (optim.SGD, {"lr": 0.05}, 0, ("for-loop", "foreach", "fused")),
    "SGD momentum": (
        optim.SGD,
        {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
        1,
        ("for-loop", "foreach", "fused"),
    ),
    "Adafactor": (optim.Adafactor, {}, 0, ("for-loop", "foreach")),
}
_FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def regression() -> nn.Sequential:
    """A small network with normalization."""
    return nn.Sequential(
        *(layer for _ in range(4) for layer in (nn.Linear(24, 24), nn.LayerNorm(24), nn.GELU())), nn.Linear(24, 4)
    )


def _state(optimizer: optim.Optimizer) -> Iterator[torch.Tensor]:
    for values in optimizer.state.values():
        yield from (value for value in values.values() if isinstance(value, torch.Tensor))


def _training(make: Callable[..., optim.Optimizer], settings: dict[str, Any]) -> Callable[[Place], Any]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        model = place(regression())
        optimizer = make(model.parameters(), **settings)
        schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        inputs, targets = torch.randn(8, 24), torch.randn(8, 4)
        for _ in range(4):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            schedule.step()
            yield loss
        yield from model.parameters()
        yield from _state(optimizer)

    return run


def _closure(place: Place) -> Iterator[torch.Tensor]:
    model = place(regression())
    optimizer = optim.LBFGS(model.parameters(), max_iter=4, history_size=3, line_search_fn="strong_wolfe")
    inputs, targets = torch.randn(8, 24), torch.randn(8, 4)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = nn.functional.mse_loss(model(inputs), targets)
        value.backward()
        return value

    for _ in range(2):
        yield optimizer.step(loss)
    yield from model.parameters()


def _sparse(make: Callable[..., optim.Optimizer], settings: dict[str, Any]) -> Callable[[Place], Any]:
    def run(place: Place) -> Iterator[torch.Tensor]:
        table = place(nn.Embedding(512, 16, sparse=True))
        optimizer = make(table.parameters(), **settings)
        for _ in range(4):
            optimizer.zero_grad()
            loss = table(torch.randint(0, 512, (6, 4))).square().mean()
            loss.backward()
            optimizer.step()
            yield loss
        yield table.weight
        yield from _state(optimizer)

    return run


def _muon(place: Place) -> Iterator[torch.Tensor]:
    model = place(nn.Sequential(*(nn.Linear(24, 24, bias=False) for _ in range(4))))
    optimizer = optim.Muon(model.parameters(), lr=0.01)
    inputs = torch.randn(8, 24)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        yield loss
    yield from model.parameters()


def _groups(place: Place) -> Iterator[torch.Tensor]:
    """Two groups with settings of their own, one of which joins later, and a value clipped by a hook."""
    model = place(regression())
    optimizer = optim.AdamW(model[:6].parameters(), lr=1e-3, weight_decay=0.1)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(model.parameters(), 0.01))
    inputs, targets = torch.randn(8, 24), torch.randn(8, 4)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(model[6:].parameters()), "lr": 1e-2, "weight_decay": 0.0})
        loss = nn.functional.huber_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        yield loss
    yield from model.parameters()


def _transformers_adafactor(place: Place) -> Iterator[torch.Tensor]:
    from transformers.optimization import Adafactor, get_linear_schedule_with_warmup

    model = place(regression())
    optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=False, warmup_init=False, lr=1e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 4)
    inputs, targets = torch.randn(8, 24), torch.randn(8, 4)
    for _ in range(4):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        schedule.step()
        yield loss
    yield from model.parameters()


PROGRAMS = [
    *(
        Program(f"optim/{name}/{form}", _training(make, {**settings, **_FORMS[form]}), copies=2 + states)
        for name, (make, settings, states, forms) in _STATES.items()
        for form in forms
    ),
    Program("optim/LBFGS", _closure, copies=4),
    Program("optim/Muon", _muon, copies=3),
    Program("optim/SparseAdam", _sparse(optim.SparseAdam, {"lr": 0.01}), copies=3),
    Program("optim/Adagrad/sparse gradients", _sparse(optim.Adagrad, {"lr": 0.1}), copies=2),
    Program("optim/SGD/sparse gradients", _sparse(optim.SGD, {"lr": 0.1}), copies=1),
    Program("optim/groups and hooks", _groups, copies=4),
    Program("transformers/Adafactor", _transformers_adafactor, copies=2),
]
