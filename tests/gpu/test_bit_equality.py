"""Paging changes no result on a GPU: against plain PyTorch there, equal to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farpool
from tests.gpu.programs import batch, build, train, weight_bytes

pytestmark = [pytest.mark.usefixtures("gpu"), *(() if torch.cuda.is_available() else (pytest.mark.slow,))]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw, for-loop": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("share", [0.5, 0.25])
def test_a_forward_pass_is_equal(share: float, debug: bool) -> None:
    model, inputs = build(), batch()
    with torch.no_grad():
        expected = model(inputs)
    with farpool.Pool(int(share * weight_bytes(model)), dram="128MiB", device="cuda", debug=debug) as pool:
        farpool.offload(model, pool)
        for _ in range(4):
            with torch.no_grad():
                assert torch.equal(model(inputs), expected)
            with torch.inference_mode():
                assert torch.equal(model(inputs), expected)
        stats = pool.stats()
        assert stats.fast.peak <= pool.fast
        assert stats.evictions > 0
        farpool.restore(model)
    with torch.no_grad():
        assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_dtype_is_equal(dtype: torch.dtype) -> None:
    model, inputs = build().to(dtype), batch().to(dtype)
    with torch.no_grad():
        expected = model(inputs)
        with farpool.Pool(weight_bytes(model) // 3, dram="128MiB", device="cuda") as pool:
            farpool.offload(model, pool)
            for _ in range(3):
                assert torch.equal(model(inputs), expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_equal(name: str) -> None:
    plain = build()
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    model = build()
    with farpool.Pool(int(0.8 * weight_bytes(model)), dram="512MiB", device="cuda") as pool:
        farpool.offload(model, pool)
        losses = train(model, OPTIMIZERS[name](model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(pool.materialize(ours), theirs)
        stats = pool.stats()
        assert stats.fast.peak <= pool.fast
        assert stats.write_backs > 0
        farpool.restore(model)


def test_training_in_debug_mode_finds_nothing() -> None:
    plain = build(layers=4)
    expected = train(plain, OPTIMIZERS["adamw, foreach"](plain.parameters()))
    model = build(layers=4)
    with farpool.Pool(weight_bytes(model), dram="256MiB", device="cuda", debug=True) as pool:
        farpool.offload(model, pool)
        losses = train(model, OPTIMIZERS["adamw, foreach"](model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        assert pool.stats().evictions > 0
        farpool.restore(model)


def test_training_over_a_file_below_is_equal(tmp_path: Path) -> None:
    plain = build(layers=6)
    expected = train(plain, OPTIMIZERS["adamw, for-loop"](plain.parameters()))
    model = build(layers=6)
    tiers = [farpool.Dram("16MiB"), farpool.Nvme(tmp_path / "far.pool", "512MiB")]
    with farpool.Pool(int(0.8 * weight_bytes(model)), tiers, device="cuda") as pool:
        farpool.offload(model, pool)
        losses = train(model, OPTIMIZERS["adamw, for-loop"](model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
        stats = pool.stats()
        assert any(link.source == "nvme" and link.nbytes for link in stats.links)
        assert stats.tiers[1].page_locked == 0
        farpool.restore(model)


def test_a_model_larger_than_the_pool_is_loaded_from_a_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model, inputs = build(), batch()
    with torch.no_grad():
        expected = model(inputs)
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = torch.nn.Sequential(*[type(block)(inputs.shape[1]) for block in model])
    with farpool.Pool(weight_bytes(model) // 4, device="cuda") as pool, torch.no_grad():
        empty.load_state_dict(farpool.load_safetensors(tmp_path / "model.safetensors", pool), assign=True)
        for _ in range(2):
            assert torch.equal(empty(inputs), expected)
