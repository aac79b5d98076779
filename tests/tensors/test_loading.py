"""Weights from safetensors files."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import farpool
from farpool import ConfigError, PagedTensor, Pool, UnsupportedError
from tests.tensors.bits import assert_same

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.uint8,
    torch.float8_e4m3fn,
]


def test_every_dtype_and_shape_is_loaded(pool: Pool, tmp_path: Path) -> None:
    plain = {str(dtype): (torch.arange(35).view(5, 7) % 3).to(dtype) for dtype in DTYPES}
    plain.update(scalar=torch.tensor(2.5), empty=torch.empty(0, 3), large=torch.randn(700, 131), one=torch.ones(1))
    safetensors.torch.save_file(plain, tmp_path / "model.safetensors")
    loaded = farpool.load_safetensors(tmp_path / "model.safetensors", pool)
    assert loaded.keys() == plain.keys()
    for name, tensor in loaded.items():
        assert type(tensor) is PagedTensor
        assert tensor.dtype == plain[name].dtype
        assert tensor.shape == plain[name].shape
        if tensor.dtype is torch.float8_e4m3fn:
            assert_same(tensor.float(), plain[name].float(), name)
        else:
            assert_same(tensor, plain[name], name)


def test_a_model_takes_its_weights_from_the_file_and_trains(pool: Pool, tmp_path: Path) -> None:
    def make(device: str) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300), nn.Linear(300, 64)).to(device)

    plain = make("cpu")
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(plain.state_dict(), path)
    content = path.read_bytes()
    module = make("meta")
    module.load_state_dict(farpool.load_safetensors(path, pool), assign=True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, module)]
    for _ in range(3):
        for model, optimizer in zip((plain, module), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
    for (name, left), right in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert type(left) is PagedTensor
        assert isinstance(left, nn.Parameter)
        assert type(left.grad) is PagedTensor
        assert_same(left, right[1], name)
    assert path.read_bytes() == content


def test_loaded_weights_can_be_restored(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    plain = nn.Linear(30, 20)
    safetensors.torch.save_file(plain.state_dict(), path)
    module = nn.Linear(30, 20)
    module.load_state_dict(farpool.load_safetensors(path, pool), assign=True)
    assert_same(farpool.restore(module).weight, plain.weight)
    assert type(module.weight) is nn.Parameter
    gc.collect()
    assert pool.live == 0


def test_files_that_cannot_be_loaded_are_typed_errors(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(ConfigError):
        farpool.load_safetensors(tmp_path / "bad.safetensors", pool)
    with pytest.raises(ConfigError):
        farpool.load_safetensors(tmp_path / "missing.safetensors", pool)
    header = b'{"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}}'
    (tmp_path / "f4.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    with pytest.raises(UnsupportedError, match=r"'w'.*F4"):
        farpool.load_safetensors(tmp_path / "f4.safetensors", pool)
    assert pool.live == 0
