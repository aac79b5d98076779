"""torch.compile, torch.func, tracing: the same result, or a typed error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import farpool
from farpool import UnsupportedError
from farpool.tensors.factories import from_tensor
from tests.tensors.bits import assert_same
from tests.tensors.evil_pool import EvilPool

WEIGHT = torch.linspace(-1, 1, 12).view(3, 4)
VALUES = torch.linspace(0, 2, 8).view(2, 4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_module_gives_the_same_bits(backend: str, evil: EvilPool) -> None:
    torch._dynamo.reset()
    results = []
    for is_paged in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        if is_paged:
            farpool.offload(module, evil)
        output = (torch.compile(module, backend=backend) if is_paged else module)(VALUES)
        output.sum().backward()
        results.append([output, *[parameter.grad for parameter in module.parameters()]])
    assert_same(results[1], results[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_transforms_of_functions_give_the_same_bits(evil: EvilPool) -> None:
    def loss(weight: torch.Tensor) -> torch.Tensor:
        return (VALUES @ weight.t()).square().sum()

    for function in (
        lambda w: torch.func.grad(loss)(w),
        lambda w: torch.vmap(lambda row: row * 2 + VALUES[0])(w),
        lambda w: torch.vmap(lambda row: nn.functional.linear(row, w))(VALUES),
        lambda w: torch.func.jvp(loss, (w,), (torch.ones(3, 4),)),
        lambda w: torch.func.vjp(loss, w)[1](torch.tensor(1.0)),
        lambda w: torch.func.functional_call(nn.Linear(4, 3, bias=False), {"weight": w}, (VALUES,)),
    ):
        assert_same(function(from_tensor(evil, WEIGHT)), function(WEIGHT))


def test_collectives_and_modules_wrapped_for_data_parallelism_are_refused(evil: EvilPool) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UnsupportedError, match=r"pool\.materialize"):
            distributed.all_reduce(from_tensor(evil, WEIGHT))
        plain = nn.Linear(4, 3)
        wrapped = nn.parallel.DistributedDataParallel(plain)
        with pytest.raises(UnsupportedError, match="wrapping the module"):
            farpool.offload(wrapped, evil)
        assert type(plain.weight) is nn.Parameter
    finally:
        distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_export_is_refused(evil: EvilPool) -> None:
    module = farpool.offload(nn.Linear(4, 3), evil)
    with pytest.raises(UnsupportedError, match=r"farpool\.restore\(module\)"):
        torch.export.export(module, (VALUES,))


def test_symbolic_tracing_keeps_the_paged_parameters(evil: EvilPool) -> None:
    module = farpool.offload(nn.Linear(4, 3), evil)
    assert_same(torch.fx.symbolic_trace(module)(VALUES), module(VALUES))


def test_an_ensemble_is_run_with_a_copy_on_the_meta_device(evil: EvilPool) -> None:
    def run(*models: nn.Module) -> list[Any]:
        parameters, buffers = torch.func.stack_module_state(list(models))
        structure = copy.deepcopy(models[0]).to("meta")

        def call(parameters: Any, buffers: Any) -> torch.Tensor:
            return torch.func.functional_call(structure, (parameters, buffers), (VALUES,))

        outputs = torch.func.vmap(call)(parameters, buffers)
        outputs.square().sum().backward()
        return [outputs, *[tensor.grad for tensor in parameters.values()]]

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).eval()

    expected = run(*map(make, range(3)))
    assert_same(run(*[farpool.offload(make(seed), evil) for seed in range(3)]), expected)
