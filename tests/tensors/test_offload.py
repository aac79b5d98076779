"""offload and restore: in place, identities and aliases kept, all or nothing."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import PagedTensor, Pool, PoolClosedError, PoolFullError, PoolMixError, UnsupportedError
from farpool.tensors.leaving import materialize_all
from tests.tensors.bits import assert_same, tensors_of
from tests.tensors.evil_pool import EvilPool


class Model(nn.Module):
    """Tied weights, buffers of several kinds, and parameters that share memory."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 8)
        self.rnn = nn.LSTM(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        flat = torch.randn(40)
        self.first = nn.Parameter(flat[:16].view(2, 8))
        self.second = nn.Parameter(flat[20:36].view(8, 2), requires_grad=False)
        self.register_buffer("counts", torch.arange(5))
        self.register_buffer("scale", flat[3:7])
        self.register_buffer("unsaved", torch.ones(3, dtype=torch.bool), persistent=False)
        self.empty = nn.Parameter(torch.empty(0, 4))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.table(tokens))
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2) + (self.first.t() @ self.second.t()).sum(1)
        return self.head(hidden * self.scale.sum())


TOKENS = torch.arange(12).view(3, 4)


def test_everything_is_paged_and_keeps_its_identity(evil: EvilPool) -> None:
    model, plain = Model(), Model()
    before = tensors_of(model)
    references = {name: weakref.ref(tensor) for name, tensor in before.items()}
    assert farpool.offload(model, evil) is model
    after = tensors_of(model)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(references[name]() is tensor for name, tensor in before.items())
    assert all(type(tensor) is PagedTensor for tensor in after.values())
    assert all(isinstance(parameter, nn.Parameter) for parameter in model.parameters())
    assert not any(isinstance(buffer, nn.Parameter) for buffer in model.buffers())
    for name, tensor in tensors_of(plain).items():
        assert_same(after[name], tensor, name)
        assert after[name].stride() == tensor.stride()
        assert after[name].requires_grad == tensor.requires_grad
    assert model.head.weight is model.table.weight
    assert list(model.state_dict()) == list(plain.state_dict())


def test_classes_and_names_are_kept_with_the_storages(evil: EvilPool) -> None:
    model = Model()
    model.other = nn.Embedding(20, 8)
    farpool.offload(model, evil)
    assert model.other.weight._storage.cls == "embedding"
    assert model.table.weight._storage.cls == "weights", "it is read whole by the tied head"
    assert model.table.weight._storage.name == "table.weight"
    assert model.table.weight._storage.row_bytes == 32


def test_tensors_that_shared_memory_share_a_storage(evil: EvilPool) -> None:
    model = farpool.offload(Model(), evil)
    assert model.first._storage is model.second._storage is model.scale._storage
    assert model.table.weight._storage is not model.first._storage
    with torch.no_grad():
        model.first.zero_()
    assert_same(model.scale, torch.zeros(4))


def test_a_model_trains_to_the_same_bits_and_comes_back(evil: EvilPool) -> None:
    models = [Model(), Model()]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for round_ in range(4):
        if round_ == 1:
            farpool.offload(models[1], evil)
        if round_ == 3:
            farpool.restore(models[1])
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(TOKENS).square().mean().backward()
            optimizer.step()
        plain, other = (tensors_of(model) for model in models)
        for name, tensor in plain.items():
            assert_same(other[name], tensor, name)
    for name, tensor in tensors_of(models[1]).items():
        assert type(tensor) in (torch.Tensor, nn.Parameter), name
    assert models[1].head.weight is models[1].table.weight
    assert models[1].first.untyped_storage().data_ptr() == models[1].second.untyped_storage().data_ptr()


def test_nothing_of_the_module_is_left_in_the_pool_after_restore(pool: Pool) -> None:
    model = farpool.offload(Model(), pool)
    model(TOKENS).sum().backward()
    assert pool.live
    farpool.restore(model)
    gc.collect()
    assert pool.live == 0
    pool.close()


def test_hooks_and_attributes_stay_with_a_parameter(evil: EvilPool) -> None:
    called: list[str] = []
    layer = nn.Linear(3, 3)
    layer.weight.note = "mine"
    layer.weight.register_hook(lambda grad: called.append("before") or grad * 2)
    layer.weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
    for change in (lambda: None, lambda: farpool.offload(layer, evil), lambda: farpool.restore(layer)):
        change()
        called.clear()
        layer.zero_grad()
        layer(torch.ones(1, 3)).sum().backward()
        assert called == ["before", "after"]
        assert layer.weight.note == "mine"
        assert_same(layer.weight.grad, torch.full((3, 3), 2.0))


def test_offloading_twice_changes_nothing_and_new_layers_are_added(evil: EvilPool) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    farpool.offload(model, evil)
    storage = model[0].weight._storage
    model.append(nn.Linear(3, 3))
    farpool.offload(model, evil)
    assert model[0].weight._storage is storage
    assert type(model[1].weight) is PagedTensor
    with pytest.raises(PoolMixError, match=r"0\.weight"):
        farpool.offload(model, EvilPool())


def test_gradients_that_are_not_paged_go_where_their_parameters_go(
    evil: EvilPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")

    model = nn.ModuleList([nn.Linear(8, 8), nn.Embedding(50, 8, sparse=True)])
    farpool.offload(model, evil)
    model[0](model[1](torch.tensor([1, 3]))).sum().backward()
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    assert gradients[2].is_sparse
    # Another device stands in for the host of a machine whose pool is on a GPU.
    monkeypatch.setattr(sys.modules["farpool.tensors.offload"], "to_cpu", elsewhere)
    farpool.restore(model, device="cpu")
    assert list(model.parameters()) == parameters
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert type(parameter) is nn.Parameter
        assert parameter.grad is gradient
        assert parameter.device.type == gradient.device.type == "meta"
    assert parameters[2].grad.is_sparse


def test_restoring_a_plain_module_does_nothing() -> None:
    model = nn.Linear(3, 3)
    weight = model.weight
    assert farpool.restore(model) is model
    assert model.weight is weight
    assert type(weight) is nn.Parameter


def test_existing_gradients_are_paged_too(evil: EvilPool) -> None:
    model, plain = Model(), Model()
    for module in (model, plain):
        module(TOKENS).sum().backward()
    farpool.offload(model, evil)
    assert type(model.first.grad) is PagedTensor
    assert model.first.grad._storage.cls == "gradient"
    for module in (model, plain):
        module(TOKENS).sum().backward()
    for name, tensor in tensors_of(plain).items():
        assert_same(tensors_of(model)[name], tensor, name)


def test_progress_is_told_in_bytes(evil: EvilPool) -> None:
    seen: list[tuple[int, int]] = []
    farpool.offload(Model(), evil, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


class Odd(torch.Tensor):
    pass


def with_parameter(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.good = nn.Parameter(torch.ones(3))
    module.inner = nn.Module()
    module.inner.bad = nn.Parameter(tensor, requires_grad=False)
    return module


def with_buffer(tensor: torch.Tensor) -> nn.Module:
    module = nn.Module()
    module.good = nn.Parameter(torch.ones(3))
    module.inner = nn.Module()
    module.inner.register_buffer("bad", tensor)
    return module


REFUSED: dict[str, Callable[[], nn.Module]] = {
    "meta": lambda: with_parameter(torch.ones(3, device="meta")),
    "sparse": lambda: with_buffer(torch.eye(3).to_sparse()),
    "subclass": lambda: with_parameter(torch.ones(3).as_subclass(Odd)),
    "history": lambda: with_buffer(torch.ones(3, requires_grad=True) * 2),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_paged_is_named_and_nothing_is_changed(name: str, evil: EvilPool) -> None:
    module = REFUSED[name]()
    with pytest.raises(UnsupportedError, match=r"inner\.bad"):
        farpool.offload(module, evil)
    assert not any(type(tensor) is PagedTensor for tensor in tensors_of(module).values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_is_refused(evil: EvilPool) -> None:
    module = torch.jit.trace(nn.Linear(3, 3), torch.ones(1, 3))
    with pytest.raises(UnsupportedError, match="scripted"):
        farpool.offload(module, evil)


def test_a_parameter_that_a_graph_holds_is_refused(evil: EvilPool) -> None:
    model = nn.Linear(3, 3)
    output = model(torch.ones(1, 3, requires_grad=True))
    with pytest.raises(UnsupportedError, match="weight is held by an autograd graph"):
        farpool.offload(model, evil)
    output.sum().backward()
    farpool.offload(model, evil)
    assert type(model.weight) is PagedTensor


def test_a_backward_pass_across_offload_is_an_error_and_not_a_lost_gradient(evil: EvilPool) -> None:
    layer = nn.Linear(3, 3)
    output = layer(torch.ones(1, 3))
    farpool.offload(layer, evil)
    with pytest.raises(UnsupportedError, match="between forward and backward"):
        output.sum().backward()
    assert layer.weight.grad is None


def test_a_module_that_does_not_fit_is_left_as_it_was() -> None:
    with Pool("64KiB", dram="64KiB") as pool:
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
        before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        identities = {name: id(tensor) for name, tensor in tensors_of(model).items()}
        with pytest.raises(PoolFullError):
            farpool.offload(model, pool)
        for name, tensor in tensors_of(model).items():
            assert type(tensor) is nn.Parameter
            assert id(tensor) == identities[name]
            assert_same(tensor, before[name], name)
        gc.collect()
        assert pool.live == 0


def test_a_failing_progress_callback_undoes_the_offload(evil: EvilPool) -> None:
    calls = []

    def fail(done: int, total: int) -> None:
        calls.append(done)
        if len(calls) == 3:
            raise KeyboardInterrupt

    model = Model()
    with pytest.raises(KeyboardInterrupt):
        farpool.offload(model, evil, progress=fail)
    assert not any(type(tensor) is PagedTensor for tensor in tensors_of(model).values())
    plain = tensors_of(Model())
    for name, tensor in tensors_of(model).items():
        assert_same(tensor, plain[name], name)


def test_a_module_of_a_closed_pool_cannot_be_restored_and_stays_as_it_is(evil: EvilPool) -> None:
    model = farpool.offload(Model(), evil)
    evil.closed = True
    with pytest.raises(PoolClosedError):
        farpool.restore(model)
    assert all(type(tensor) is PagedTensor for tensor in tensors_of(model).values())


def test_all_tensors_of_a_pool_become_plain_when_it_is_closed_so(pool: Pool) -> None:
    model, plain = Model(), Model()
    other: Any = pool.from_tensor(torch.arange(6.0))
    window = other.detach()[2:4]
    optimizers = []
    farpool.offload(model, pool)
    for module in (model, plain):
        optimizer = torch.optim.AdamW(module.parameters())
        module(TOKENS).sum().backward()
        optimizer.step()
        optimizers.append(optimizer)
    with pytest.raises(PoolClosedError):
        pool.close()
    pool.close(materialize=True)
    assert pool.closed
    for name, tensor in tensors_of(plain).items():
        assert type(tensors_of(model)[name]) in (torch.Tensor, nn.Parameter)
        assert_same(tensors_of(model)[name], tensor, name)
    for parameter, twin in zip(plain.parameters(), model.parameters(), strict=True):
        for key, value in optimizers[1].state[parameter].items():
            assert_same(optimizers[0].state[twin][key], value)
    window.zero_()
    assert_same(other, torch.tensor([0.0, 1.0, 0.0, 0.0, 4.0, 5.0]))
    assert type(other) is torch.Tensor


def test_a_view_with_history_prevents_materializing_and_nothing_is_changed(evil: EvilPool) -> None:
    model = farpool.offload(nn.Linear(3, 3), evil)
    view = model.weight.t()
    with pytest.raises(UnsupportedError):
        materialize_all(evil)  # type: ignore[arg-type]
    assert type(model.weight) is PagedTensor
    del view
    materialize_all(evil)  # type: ignore[arg-type]
    assert type(model.weight) is nn.Parameter
