"""Paging never changes a result: forward and training against plain PyTorch, equal to the last bit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

import farpool
from farpool.cluster.node.process import running_node
from tests.models.zoo import ZOO, build, weight_bytes

STEPS = 3

OPTIMIZERS = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01, **form),
    "adam": lambda p, **form: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=1e-3, **form),
}
STATE = {"sgd": 1, "adam": 2, "adamw": 2}
"""Bytes of optimizer state per byte of weights."""
FORMS = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
SHARES = [0.5, 0.25, 0.1]
UPDATES = list(itertools.product(OPTIMIZERS, FORMS))
SAMPLE = {
    (name, *UPDATES[4 * number % len(UPDATES)], SHARES[(number + 2) % len(SHARES)]) for number, name in enumerate(ZOO)
}
"""Each model, budget, optimizer and form; all combinations are tried by the slow tests."""


def slow_unless(quick: bool, *values: object) -> Any:
    """One combination of parameters, marked slow unless it is one of the quick ones."""
    return pytest.param(*values, marks=[] if quick else pytest.mark.slow)


class Run(NamedTuple):
    losses: list[torch.Tensor]
    weights: list[torch.Tensor]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train(
    model: torch.nn.Module, batch: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer, steps: int = STEPS
) -> list[torch.Tensor]:
    losses = []
    torch.manual_seed(5)
    for _ in range(steps):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@functools.cache
def plain_run(name: str, optimizer: str, form: str) -> Run:
    model, batch = build(name)
    losses = train(model, batch, OPTIMIZERS[optimizer](model.parameters(), **FORMS[form]))
    return Run(losses, [p.detach().clone() for p in model.parameters()])


@functools.cache
def plain_forward(name: str) -> torch.Tensor:
    model, batch = build(name)
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("share", [slow_unless(share == min(SHARES), share) for share in SHARES])
@pytest.mark.parametrize("name", ZOO)
def test_a_forward_pass_is_equal(name: str, share: float) -> None:
    expected = plain_forward(name)
    model, batch = build(name)
    model.eval()
    with farpool.Pool(int(share * weight_bytes(model)), dram="64MiB") as pool:
        farpool.offload(model, pool)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(model(**batch).logits, expected)
        assert pool.stats().fast.peak <= pool.fast
        farpool.restore(model)


@pytest.mark.parametrize(
    ("name", "optimizer", "form", "share"),
    [slow_unless(case in SAMPLE, *case) for case in itertools.product(ZOO, OPTIMIZERS, FORMS, SHARES)],
)
def test_training_is_equal(name: str, optimizer: str, form: str, share: float) -> None:
    expected = plain_run(name, optimizer, form)
    model, batch = build(name)
    paged_bytes = weight_bytes(model) * (2 + STATE[optimizer])
    with farpool.Pool(int(share * paged_bytes), dram="128MiB") as pool:
        farpool.offload(model, pool)
        losses = train(model, batch, OPTIMIZERS[optimizer](model.parameters(), **FORMS[form]))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected.losses, strict=True))
        for parameter, weight in zip(model.parameters(), expected.weights, strict=True):
            assert torch.equal(pool.materialize(parameter), weight)
        stats = pool.stats()
        assert stats.fast.peak <= pool.fast
        if share < 0.5:
            assert stats.evictions > 100
        farpool.restore(model)
        for parameter, weight in zip(model.parameters(), expected.weights, strict=True):
            assert type(parameter) is torch.nn.Parameter
            assert torch.equal(parameter, weight)


@pytest.mark.parametrize("name", [slow_unless(name == "gpt2", name) for name in ZOO])
def test_weights_gradients_and_moments_at_one_sixth_train_to_the_same_bits(name: str, tmp_path: object) -> None:
    expected = plain_run(name, "adamw", "for-loop")
    model, batch = build(name)
    tiers = [farpool.Dram("16MiB"), farpool.Nvme(f"{tmp_path}/far.pool", "256MiB")]
    with farpool.Pool(weight_bytes(model) * 4 // 6, tiers) as pool:
        optimizer = OPTIMIZERS["adamw"](model.parameters(), **FORMS["for-loop"])  # made before offload
        farpool.offload(model, pool)
        losses = train(model, batch, optimizer)
        assert all(torch.equal(a, b) for a, b in zip(losses, expected.losses, strict=True))
        for parameter, weight in zip(model.parameters(), expected.weights, strict=True):
            assert torch.equal(pool.materialize(parameter), weight)
        live = {c.name: c.live for c in pool.stats().classes}
        assert live["optimizer"] >= 2 * sum(p.nbytes for p in model.parameters())
        farpool.restore(model)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[str]]:
    with running_node(ephemeral=True) as a, running_node(ephemeral=True) as b:
        yield [a.address, b.address]


@pytest.mark.parametrize(
    ("name", "transport"),
    [slow_unless(case == ("llama", "tcp"), *case) for case in itertools.product(ZOO, ["tcp", "mapped"])],
)
def test_training_is_equal_with_memory_of_other_processes_below(name: str, transport: str, nodes: list[str]) -> None:
    expected = plain_run(name, "adamw", "foreach")
    model, batch = build(name)
    with farpool.Pool(weight_bytes(model), [farpool.Remote(*nodes, size="64MiB", transport=transport)]) as pool:
        farpool.offload(model, pool)
        losses = train(model, batch, OPTIMIZERS["adamw"](model.parameters(), **FORMS["foreach"]))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected.losses, strict=True))
        for parameter, weight in zip(model.parameters(), expected.weights, strict=True):
            assert torch.equal(pool.materialize(parameter), weight)
        assert pool.stats().evictions > 100
        farpool.restore(model)
        for parameter, weight in zip(model.parameters(), expected.weights, strict=True):
            assert torch.equal(parameter, weight)
