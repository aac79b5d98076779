"""Who a tensor is: optimizers made before and after, ties, rebinding, resizing, changes of type and device."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import nn

import farpool
from farpool import Pool, UnsupportedError
from tests.process.pitfalls.compare import (
    assert_usable,
    churn,
    may_raise,
    plain,
    randn,
    refused,
    same,
    state_of,
    twin,
    twins,
)
from tests.process.pitfalls.harness import scenario

OPTIMIZERS: dict[str, Any] = {
    f"{name} {form}": (kind, {**options, **({"foreach": form == "foreach", "fused": form == "fused"})})
    for name, kind, options in (
        ("SGD with momentum", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("Adam", torch.optim.Adam, {"lr": 0.01}),
        ("AdamW", torch.optim.AdamW, {"lr": 0.01}),
    )
    for form in ("for-loop", "foreach", "fused")
}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 8))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = (model(randn(5, 24, seed=step)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _trained(kind: Any, options: dict[str, Any]) -> tuple[nn.Module, list[torch.Tensor], torch.optim.Optimizer]:
    model = small_model()
    optimizer = kind(model.parameters(), **options)
    return model, train(model, optimizer), optimizer


@scenario(each=OPTIMIZERS)
def an_optimizer_made_before_offload_trains_the_paged_parameters(pool: Pool, case: Any) -> None:
    kind, options = case
    expected, losses, _ = _trained(kind, options)
    model = small_model()
    optimizer = kind(model.parameters(), **options)
    identities = [id(p) for p in model.parameters()]
    farpool.offload(model, pool)
    assert [id(p) for p in model.parameters()] == identities
    assert all(type(p) is farpool.PagedTensor and isinstance(p, nn.Parameter) for p in model.parameters())
    same(train(model, optimizer), losses, "losses")
    same(state_of(model), state_of(expected), "weights")
    farpool.restore(model)
    assert [id(p) for p in model.parameters()] == identities
    assert all(type(p) is nn.Parameter for p in model.parameters())
    same(state_of(model), state_of(expected), "restored weights")


@scenario(each=OPTIMIZERS)
def an_optimizer_made_after_offload_trains_to_the_same_bits(pool: Pool, case: Any) -> None:
    kind, options = case
    expected, losses, expected_optimizer = _trained(kind, options)
    model = farpool.offload(small_model(), pool)
    optimizer = kind(model.parameters(), **options)
    same(train(model, optimizer), losses, "losses")
    same(state_of(model), state_of(expected), "weights")
    same(optimizer.state_dict()["state"], expected_optimizer.state_dict()["state"], "optimizer state")
    moments = [
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()
    ]
    assert moments
    assert all(type(v) is farpool.PagedTensor for v in moments), "the optimizer's state is not paged"


@scenario()
def training_goes_on_after_restore_and_after_offloading_again(pool: Pool) -> None:
    expected = small_model()
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.01)
    losses = [train(expected, optimizer) for _ in range(3)]
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    same(train(model, optimizer), losses[0])
    farpool.offload(model, pool)
    same(train(model, optimizer), losses[1])
    farpool.restore(model)
    same(train(model, optimizer), losses[2])
    same(state_of(model), state_of(expected))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.embedding(tokens))))


@scenario()
def tied_weights_stay_tied_and_train_equal(pool: Pool) -> None:
    tokens = torch.arange(12) % 40

    def program(model: Tied) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(tokens), tokens.flip(0)).backward()
            optimizer.step()
        assert model.head.weight is model.embedding.weight
        assert len(list(model.parameters())) == 3
        return model.state_dict()

    twin(pool, Tied, program)
    model = farpool.offload(Tied(), pool)
    state = model.state_dict()
    assert state["head.weight"]._storage is state["embedding.weight"]._storage
    other = Tied()
    other.load_state_dict(state)
    same(other.state_dict(), state)
    farpool.restore(model)
    assert model.head.weight is model.embedding.weight


@scenario()
def parameters_that_share_memory_without_being_one_go_on_sharing(pool: Pool) -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = randn(8, 6)
            self.register_buffer("whole", whole)
            self.upper = nn.Parameter(whole[:4])
            self.lower = nn.Parameter(whole[4:])

    def program(model: Halves) -> Any:
        with torch.no_grad():
            model.upper.mul_(2)
            model.whole[5].fill_(9)
        return model.whole.clone(), model.lower.clone()

    twin(pool, Halves, program)


@scenario()
def weak_references_and_hooks_of_a_parameter_survive(pool: Pool) -> None:
    def program(layer: nn.Linear) -> Any:
        (layer(randn(3, 4)) ** 2).sum().backward()
        return layer.weight.grad, layer.weight.extra

    def make() -> nn.Linear:
        layer = nn.Linear(4, 4)
        layer.weight.register_hook(lambda grad: grad * 2)
        layer.weight.extra = "kept"
        return layer

    twin(pool, make, program)
    layer = make()
    reference = weakref.ref(layer.weight)
    farpool.offload(layer, pool)
    assert reference() is layer.weight
    farpool.restore(layer)
    assert reference() is layer.weight


DATA: dict[str, Any] = {
    "plain": lambda p: randn(6, 5, seed=9),
    "of another shape": lambda p: randn(3, 2, seed=9),
    "paged": lambda p: (
        p.detach().clone() + 1 if type(p) is not farpool.PagedTensor else p.pool.from_tensor(plain(p) + 1)
    ),
    "transposed": lambda p: randn(5, 6, seed=9).t(),
    "of another type": lambda p: randn(6, 5, seed=9, dtype=torch.float64),
    "own": lambda p: p.data,
    "own transposed": lambda p: p.data.t(),
    "empty": lambda p: torch.empty(0),
}


@scenario(each=DATA)
def setting_data_rebinds(pool: Pool, value: Any) -> None:
    def program(tensor: torch.Tensor) -> Any:
        identity = id(tensor)
        new = value(tensor)
        tensor.data = new
        assert id(tensor) == identity
        with torch.no_grad():
            tensor.mul_(2)
        return tensor.sum(), tensor.t() if tensor.dim() == 2 else None

    twin(pool, lambda: randn(6, 5), program)
    # torch refuses another type for a leaf that requires a gradient.
    twin(pool, lambda: randn(6, 5).requires_grad_(), program, typed=(RuntimeError, UnsupportedError))


@scenario()
def setting_data_of_a_parameter_before_training_trains_the_new_values(pool: Pool) -> None:
    def program(layer: nn.Linear) -> Any:
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        layer.weight.data = randn(4, 4, seed=8)
        layer.bias.data.copy_(randn(4, seed=5))
        layer(randn(3, 4)).sum().backward()
        optimizer.step()
        layer.weight.data = layer.weight.data.clone()
        layer.weight.data[0] = 7
        return layer(randn(3, 4))

    twin(pool, lambda: nn.Linear(4, 4), program)


@scenario()
def set_is_refused_on_both_sides(pool: Pool) -> None:
    paged, other = pool.from_tensor(randn(4, 4)), randn(4, 4)
    before = other.clone()
    with refused(pool):
        paged.set_(other)
    with refused(pool):
        other.set_(paged)
    with refused(pool):
        paged.set_(pool.from_tensor(randn(2)))
    with refused(pool):
        paged.set_()
    with refused(pool):
        paged.set_(torch.empty(4).untyped_storage())
    same(paged, randn(4, 4))
    same(other, before)


@scenario()
def set_with_a_geometry_makes_no_alias(pool: Pool) -> None:
    paged, other = pool.from_tensor(randn(4, 4)), randn(4, 4)
    try:
        other.set_(source=paged, storage_offset=0, size=(2,), stride=(1,))
        other.sum()
        other.add_(1)
    except (UnsupportedError, RuntimeError):
        pass
    same(paged, randn(4, 4))


@scenario()
def assigning_paged_data_to_a_plain_tensor_makes_no_alias(pool: Pool) -> None:
    paged, target = pool.from_tensor(randn(4, 4)), torch.zeros(4, 4)
    try:
        target.data = paged
    except (RuntimeError, TypeError):  # torch itself, or UnsupportedError
        pass
    else:
        same(target, randn(4, 4))
        target.add_(1)
    same(paged, randn(4, 4))
    assert_usable(pool)


@scenario()
def resizing_to_the_same_size_is_nothing_and_to_another_is_refused(pool: Pool) -> None:
    paged = pool.from_tensor(randn(6, 4))
    neighbour = pool.from_tensor(randn(6, 4, seed=5))
    assert paged.resize_(6, 4) is paged
    for size in ((60, 40), (4, 6), (2, 2), (0,), (24,)):
        with refused(pool):
            paged.resize_(size)
    with refused(pool):
        paged.resize_as_(torch.empty(100))
    assert torch.zeros(3).resize_as_(paged).shape == (6, 4)
    same(paged, randn(6, 4))
    same(neighbour, randn(6, 4, seed=5))


@scenario()
def an_empty_view_cannot_be_resized_over_its_neighbours(pool: Pool) -> None:
    base = pool.from_tensor(randn(8))
    view = base[3:3]
    with refused(pool):
        view.resize_(100)
    result = torch.ops.aten.alias(base[2:2])
    with refused(pool):
        result.resize_(5)
    same(base, randn(8))


TYPES = {
    "to float64": lambda t: t.to(torch.float64),
    "to float16": lambda t: t.to(torch.float16),
    "to bfloat16": lambda t: t.to(torch.bfloat16),
    "to its own type": lambda t: t.to(torch.float32),
    "to a copy": lambda t: t.to(torch.float32, copy=True),
    "half": lambda t: t.half(),
    "double": lambda t: t.double(),
    "bfloat16": lambda t: t.bfloat16(),
    "float": lambda t: t.float(),
    "int": lambda t: t.int(),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "type": lambda t: t.type(torch.float64),
    "type_as": lambda t: t.type_as(torch.zeros(1, dtype=torch.float64)),
    "type_as a paged one": lambda t: torch.zeros(1, dtype=torch.float64).type_as(t),
    "to another tensor's": lambda t: t.to(torch.zeros(1, dtype=torch.float16)),
    "to cpu": lambda t: t.to("cpu"),
    "cpu": lambda t: t.cpu(),
    "to channels last": lambda t: t.view(1, 2, 5, 3).to(memory_format=torch.channels_last).clone(),
    "with a gradient": lambda t: (
        torch.autograd.grad((t.detach().requires_grad_().double() ** 2).sum(), [])
        if False
        else t.double().half().float()
    ),
}


@scenario()
def a_tensor_changes_its_type_as_in_torch(pool: Pool) -> None:
    twins(pool, lambda: randn(6, 5), TYPES)
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e38, -1e-45, 0.0, -0.0, 3e9, -3e9] * 300)
    twins(pool, lambda: special.clone(), {name: case for name, case in TYPES.items() if "channels" not in name})


@scenario(each={name: getattr(nn.Module, name) for name in ("half", "double", "bfloat16", "float")})
def a_module_changes_its_type_as_in_torch(pool: Pool, change: Any) -> None:
    def program(model: nn.Module) -> Any:
        before = [id(p) for p in model.parameters()]
        change(model)
        model.to(torch.float64)
        assert [id(p) for p in model.parameters()] == before
        return model(randn(2, 24, dtype=torch.float64))

    twin(pool, small_model, program)


@scenario()
def a_module_changes_its_type_while_it_has_gradients(pool: Pool) -> None:
    def program(model: nn.Module) -> Any:
        model(randn(2, 24)).sum().backward()
        model.double()
        assert all(p.grad.dtype is torch.float64 for p in model.parameters())
        model(randn(2, 24, dtype=torch.float64)).sum().backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()

    twin(pool, small_model, program)


@scenario()
def moving_to_another_device_is_refused_or_right(pool: Pool) -> None:
    paged = pool.from_tensor(randn(4))
    assert paged.to("meta").is_meta  # no byte moves
    for move in (nn.Module.to, nn.Module.to_empty):
        moved = move(farpool.offload(small_model(), pool), device="meta")
        assert all(parameter.is_meta for parameter in moved.parameters())
    if not torch.cuda.is_available():
        for call in (lambda: paged.cuda(), lambda: paged.to("cuda")):
            with refused(pool, Exception):
                call()
    model = farpool.offload(small_model(), pool)
    assert model.to("cpu") is model
    assert model.cpu() is model
    same(model.state_dict(), small_model().state_dict())


@scenario()
def a_module_whose_buffer_is_a_view_with_history_is_refused_by_name_or_right(pool: Pool) -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("whole", randn(4, 4))
            self.register_buffer("part", self.whole[1:])

    model = Holder()
    with may_raise(UnsupportedError) as refusal:
        farpool.offload(model, pool)
    if (error := refusal.error) is not None:
        assert "whole" in str(error) or "part" in str(error), error
        assert type(model.linear.weight) is nn.Parameter
    model.whole.fill_(2)
    assert bool((plain(model.part) == 2).all())


@scenario()
def reference_cycles_do_not_keep_storages(pool: Pool) -> None:
    class Node:
        pass

    tensor = pool.from_tensor(randn(100))
    node = Node()
    node.tensor, node.self, tensor.owner = tensor, node, node
    del tensor, node
    gc.collect()
    assert pool.live == 0
    churn(pool)
