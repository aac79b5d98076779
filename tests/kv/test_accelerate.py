"""Accelerate's hooks with weights from a pool: the bits of a model that is wholly resident."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules

from farpool import Dram, Pool, Store
from farpool.cluster.node.process import running_node
from farpool.errors import ArgumentError, NameMissingError, PoolFullError
from farpool.kv.engines.accelerate import PooledWeights
from farpool_bench.link import fetched
from tests.kv import zoo


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("128KiB", [Dram("8MiB")]) as pool:
        yield pool


def logits(model: Any, inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(inputs).logits
    return found


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_gives_the_same_results_as_with_weights_in_memory(name: str, pool: Pool) -> None:
    plain, inputs = zoo.make(name), zoo.prompt(20, sequences=2)
    expected = logits(plain, inputs)
    by_accelerate = cpu_offload(copy.deepcopy(plain), "cpu", offload_buffers=True)
    weights = PooledWeights.of(plain.state_dict(), pool)
    model = cpu_offload(copy.deepcopy(plain), "cpu", offload_buffers=True, state_dict=weights)
    for _ in range(3):
        assert torch.equal(logits(model, inputs), expected)
        assert torch.equal(logits(by_accelerate, inputs), expected)
        assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(tensor.nbytes for tensor in plain.parameters()) > pool.fast
    assert fetched(pool.stats()) > pool.fast
    tokens, _ = zoo.generate(model, inputs, None, max_new_tokens=4)
    assert torch.equal(tokens, zoo.generate(plain, inputs, None, max_new_tokens=4)[0])


def test_a_model_without_memory_takes_its_weights_from_the_pool(pool: Pool) -> None:
    plain, inputs = zoo.make("llama"), zoo.prompt(20)
    with torch.device("meta"):
        model = type(plain)(plain.config).eval()
    model.model.rotary_emb = copy.deepcopy(plain.model.rotary_emb)  # its frequencies are in no state dict
    weights = PooledWeights.of(plain.state_dict(), pool)
    attach_align_device_hook(model, execution_device="cpu", offload=True, weights_map=weights)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))
    remove_hook_from_submodules(model)


def test_weights_come_from_a_published_name(pool: Pool, tmp_path: Path) -> None:
    plain, inputs = zoo.make("llama"), zoo.prompt(20)
    with (
        running_node("64MiB") as node,
        Store(node.address, registry=str(tmp_path / "names.sqlite"), transport="tcp") as store,
    ):
        store.publish("models/tiny", plain.state_dict())
        weights = PooledWeights.published(store, "models/tiny", pool)
        with pytest.raises(NameMissingError):
            PooledWeights.published(store, "models/other", pool)
    assert sorted(weights) == sorted(plain.state_dict())
    model = cpu_offload(copy.deepcopy(plain), "cpu", state_dict=weights)
    assert torch.equal(logits(model, inputs), logits(plain, inputs))


def test_the_mapping_is_read_only_and_lists_its_weights(pool: Pool) -> None:
    shared = torch.arange(6.0)
    weights = PooledWeights.of({"a": shared, "b": shared, "c": torch.ones(3)}, pool)
    assert pool.live == 2
    assert list(weights) == ["a", "b", "c"]
    assert "b" in weights
    assert "d" not in weights
    assert weights.get("d") is None
    found = weights["a"]
    found.zero_()  # a copy
    assert torch.equal(weights["b"], shared)
    with pytest.raises(TypeError):
        weights["a"] = shared  # type: ignore[index]
    with pytest.raises(KeyError):
        weights["d"]
    with pytest.raises(ArgumentError, match="'a' is a Tensor"):
        PooledWeights({"a": shared})
    with pytest.raises(PoolFullError):
        PooledWeights.of({"large": torch.zeros(4 << 20)}, pool)
