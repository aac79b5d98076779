"""Modules in host memory go into a pool on a GPU, and come back."""

from __future__ import annotations

import pytest
import torch

import farpool
from farpool import PagedTensor
from tests.gpu.programs import batch, build, train, weight_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
def test_a_module_larger_than_the_budget_enters_without_the_fast_tier(debug: bool) -> None:
    plain, inputs = build(), batch()
    model = build().to("cpu")
    with torch.no_grad():
        expected = plain(inputs)
        with farpool.Pool(weight_bytes(model) // 4, dram="200MiB", device="cuda", debug=debug) as pool:
            farpool.offload(model, pool)
            stats = pool.stats()
            assert stats.fast.peak == stats.write_backs == 0
            assert all(p.is_cuda and isinstance(p, PagedTensor) for p in model.parameters())
            for _ in range(3):
                assert torch.equal(model(inputs), expected)
            farpool.restore(model, device="cpu")
    for found, parameter in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.device.type == "cpu"
        assert torch.equal(found, parameter.cpu())


def test_training_that_began_on_the_host_goes_on_in_the_pool() -> None:
    models = [build(), build()]
    for model in models:
        for seed, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(seed)
            parameter.grad = torch.randn(parameter.shape, generator=generator).to("cuda")
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False) for model in models]
    for optimizer in optimizers:
        optimizer.step()
    expected = train(models[0], optimizers[0])
    model, optimizer = models[1].to("cpu"), optimizers[1]
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].cpu()
    with farpool.Pool(int(0.8 * weight_bytes(model)), dram="512MiB", device="cuda") as pool:
        farpool.offload(model, pool)
        farpool.offload(optimizer, pool)
        for loss, other in zip(train(model, optimizer), expected, strict=True):
            assert torch.equal(loss, other)
        farpool.restore(model, device="cpu")
        farpool.restore(optimizer, device="cpu")


def test_a_table_is_cut_without_waiting_for_the_gpu() -> None:
    table = torch.nn.Embedding(50_000, 256)
    rows = table.weight.detach().clone()
    named = torch.arange(0, 50_000, 97, device="cuda")
    with farpool.Pool("8MiB", dram="128MiB", device="cuda") as pool:
        torch.cuda.set_sync_debug_mode("error")
        try:
            farpool.offload(table, pool)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.no_grad():
            assert torch.equal(table(named).cpu(), rows[named.cpu()])
