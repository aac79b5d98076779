"""State dicts under names: the same bits come back, one tensor in memory at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import farpool
from farpool.cluster.names import Names
from farpool.errors import ConfigError, UnsupportedError
from tests.store.names.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def names(store: MemoryStore, tmp_path: Path) -> Names:
    return Names(store, tmp_path / "registry", timeout=60.0)


def test_tensors_of_every_kind_come_back_with_the_same_bits(names: Names, store: MemoryStore) -> None:
    torch.manual_seed(1)
    tensors = {
        "half": torch.randn(3, 5).to(torch.bfloat16),
        "view": torch.randn(6, 4).T[1:, ::2],
        "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        "conj": torch.randn(4, dtype=torch.complex64).conj(),
        "flags": torch.tensor([True, False]),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3, dtype=torch.float16),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
    }
    names.publish("t", tensors)
    with names.open("t") as opened:
        got = farpool.read_tensors(opened)
    assert list(got) == list(tensors)
    for name, tensor in tensors.items():
        want = tensor.detach().resolve_conj().contiguous()
        assert (got[name].dtype, got[name].shape) == (want.dtype, want.shape)
        if want.numel():
            assert torch.equal(got[name].reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


def test_a_paged_model_is_published_by_layers_and_only_what_has_changed_is_sent_again(
    names: Names, store: MemoryStore
) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with farpool.Pool(fast="64KiB", dram="1MiB") as pool:
        farpool.offload(model, pool)
        names.publish("model", model.state_dict())
        assert store.largest <= 64 * 64 * 4
        sent = store.sent
        with torch.no_grad():
            model[3].weight.mul_(2)
        names.publish("model", model.state_dict())
        assert store.sent == sent + 2  # that weight and the manifest
        farpool.restore(model)
    with names.open("model", 1) as opened:
        old = farpool.read_tensors(opened)
    assert all(torch.equal(old[name], before[name]) for name in before)
    with names.open("model") as opened:
        model.load_state_dict(farpool.read_tensors(opened))
    assert torch.equal(model[3].weight, before["3.weight"] * 2)


def test_what_is_no_dense_tensor_is_refused_and_nothing_is_published(names: Names) -> None:
    for tensor, said in ((torch.empty(2, device="meta"), "meta device"), (torch.eye(2).to_sparse(), "only dense")):
        with pytest.raises(UnsupportedError, match=said):
            names.publish("t", {"good": torch.ones(1), "x": tensor})
    assert names.info("t") is None
    names.publish("v", b"value")
    with names.open("v") as opened, pytest.raises(ConfigError, match="holds a value and no tensors"):
        farpool.read_tensors(opened)
