"""Whoever wants an address is told to take a plain copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import farpool
from farpool import Pool, UnsupportedError
from tests.process.pitfalls.compare import may_raise, randn, refused, same, state_of
from tests.process.pitfalls.harness import scenario

RAW: dict[str, Callable[[torch.Tensor], Any]] = {
    "data_ptr": lambda t: t.data_ptr(),
    "numpy": lambda t: t.numpy(),
    "np.asarray": lambda t: np.asarray(t),
    "np.array": lambda t: np.array(t),
    "a numpy function": lambda t: np.sin(t),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "np.from_dlpack": lambda t: np.from_dlpack(t),
    "share_memory_": lambda t: t.share_memory_(),
    "is_shared": lambda t: t.is_shared(),
    "data_ptr of a storage": lambda t: t.untyped_storage().data_ptr(),
    "a storage's bytes": lambda t: t.untyped_storage()[0],
    "a tensor over a storage": lambda t: torch.empty(12).set_(t.untyped_storage(), 0, (12,)),
    "storage": lambda t: t.storage(),
    "pin_memory": lambda t: t.pin_memory(),
    "data_ptr of a view": lambda t: t[1:].data_ptr(),
    "data_ptr of a parameter's storage": lambda t: nn.Parameter(t).untyped_storage().data_ptr(),
}


@scenario(each=RAW)
def raw_memory_is_refused_and_materialize_is_named(pool: Pool, ask: Callable[[torch.Tensor], Any]) -> None:
    tensor = pool.from_tensor(randn(4, 3))
    with refused(pool, UnsupportedError, "materialize"):
        ask(tensor)
    same(tensor, randn(4, 3))
    assert pool.materialize(tensor).numpy().shape == (4, 3)


@scenario(each={"cpu": lambda t: t.cpu().numpy(), "by force": lambda t: t.numpy(force=True)})
def an_array_of_the_values_is_a_copy(pool: Pool, take: Callable[[torch.Tensor], Any]) -> None:
    tensor = pool.from_tensor(randn(4, 3))
    array = take(tensor)
    assert np.array_equal(array, randn(4, 3).numpy())
    array.fill(0)
    same(tensor, randn(4, 3))


@scenario()
def a_buffer_protocol_or_array_interface_is_not_offered(pool: Pool) -> None:
    tensor = pool.from_tensor(randn(4))
    assert not hasattr(tensor, "__cuda_array_interface__")
    assert not hasattr(tensor, "__array_interface__")
    with refused(pool, TypeError):
        memoryview(tensor)
    with refused(pool, (TypeError, ValueError)):
        torch.frombuffer(tensor, dtype=torch.uint8)
    # Native code that asks for the address without asking the tensor.
    with refused(pool, RuntimeError):
        torch.utils.dlpack.to_dlpack(tensor)


@scenario()
def share_memory_of_a_module_is_refused(pool: Pool) -> None:
    model = farpool.offload(nn.Linear(4, 4), pool)
    with refused(pool, UnsupportedError, "materialize"):
        model.share_memory()


@scenario()
def a_materialized_tensor_is_independent(pool: Pool) -> None:
    tensor = pool.from_tensor(randn(4, 3)).requires_grad_()
    copy = pool.materialize(tensor)
    assert type(copy) is torch.Tensor
    assert not copy.requires_grad
    copy.fill_(3)
    same(pool.materialize(tensor), randn(4, 3))
    array = pool.materialize(tensor[1:, ::2].t()).numpy()
    assert np.array_equal(array, randn(4, 3)[1:, ::2].t().numpy())


def _group(folder: Path) -> None:
    store = torch.distributed.FileStore(str(folder / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def _train(model: nn.Module, module: nn.Module) -> Any:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(randn(5, 6)).sum().backward()
        optimizer.step()
    return state_of(module)


@scenario()
def data_parallel_training_is_refused_or_equal(pool: Pool) -> None:
    _group(Path.cwd())
    expected = _train(nn.parallel.DistributedDataParallel(m := _model()), m)
    module = farpool.offload(_model(), pool)
    with may_raise(UnsupportedError) as refusal:
        result = _train(nn.parallel.DistributedDataParallel(module), module)
    if (error := refusal.error) is not None:
        assert "materialize" in str(error), error
        same(module.state_dict(), _model().state_dict())
    else:
        same(result, expected)
    torch.distributed.destroy_process_group()


@scenario()
def offloading_a_module_inside_data_parallel_is_refused_or_equal(pool: Pool) -> None:
    _group(Path.cwd())
    expected = _train(nn.parallel.DistributedDataParallel(m := _model()), m)
    module = _model()
    model = nn.parallel.DistributedDataParallel(module)
    try:
        farpool.offload(module, pool)
        result = _train(model, module)
    except UnsupportedError:
        farpool.restore(module)
        assert all(type(p) is nn.Parameter for p in module.parameters())
        same(module.state_dict(), _model().state_dict())
    else:
        same(result, expected)
    del model
    torch.distributed.destroy_process_group()


def _outputs(model: nn.Module) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        outputs.append(model(randn(5, 6)))
        outputs[-1].sum().backward()
        optimizer.step()
    return [output.detach() for output in outputs]


def _fsdp(module: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def _fsdp2(module: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


@scenario(each={"wrapped": _fsdp, "composed": _fsdp2})
def fully_sharded_training_is_refused_or_equal(pool: Pool, wrap: Callable[[nn.Module], nn.Module]) -> None:
    _group(Path.cwd())
    expected = _outputs(wrap(_model()))
    module = farpool.offload(_model(), pool)
    with may_raise(UnsupportedError) as refusal:
        result = _outputs(wrap(module))
    if (error := refusal.error) is not None:
        assert "materialize" in str(error), error
    else:
        same(result, expected)
    torch.distributed.destroy_process_group()


@scenario()
def collectives_are_refused_or_equal(pool: Pool) -> None:
    _group(Path.cwd())
    other = randn(4, seed=6)
    calls: dict[str, tuple[Callable[[torch.Tensor], Any], torch.Tensor]] = {
        "all_reduce": (lambda t: torch.distributed.all_reduce(t), randn(4)),
        "broadcast": (lambda t: torch.distributed.broadcast(t, 0), randn(4)),
        "all_gather": (lambda t: torch.distributed.all_gather([torch.zeros(4)], t), randn(4)),
        "all_gather_into_tensor": (
            lambda t: torch.distributed.all_gather_into_tensor(torch.zeros(4), t),
            randn(4),
        ),
        "all_gather into": (lambda t: torch.distributed.all_gather([t], other), other),
        "scatter into": (lambda t: torch.distributed.scatter(t, [other], 0), other),
        "reduce_scatter of": (lambda t: torch.distributed.reduce_scatter(torch.zeros(4), [t]), randn(4)),
        "gather of": (lambda t: torch.distributed.gather(t, [torch.zeros(4)]), randn(4)),
    }
    for name, (call, after) in calls.items():
        print(name)
        tensor = pool.from_tensor(randn(4))
        with may_raise(UnsupportedError) as refusal:
            call(tensor)
        if (error := refusal.error) is not None:
            assert "materialize" in str(error), error
            after = randn(4)
        same(tensor, after, name)
    torch.distributed.destroy_process_group()


@scenario()
def sending_a_tensor_to_another_process_sends_its_values(pool: Pool) -> None:
    context = torch.multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    tensor = pool.from_tensor(randn(4))
    with may_raise(UnsupportedError) as refusal:
        queue.put(tensor)
        received = queue.get()
    if (error := refusal.error) is not None:
        assert "materialize" in str(error), error
    else:
        same(received, randn(4))
