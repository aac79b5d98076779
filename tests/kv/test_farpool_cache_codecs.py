"""Prefixes of a `FarpoolCache` that travel compressed: the same bits, or numbers within the stated bound."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from farpool import Dram, Pool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument
from tests.kv import zoo
from tests.kv.test_compression import bounds
from tests.nodes import PATIENCE

STEP = 16


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("64MiB") as node:
        yield node


@pytest.fixture
def settings(node: RunningNode, request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"nodes": [node.address], "weights_id": request.node.name, "timeout": PATIENCE}


def payloads(cache: FarpoolCache, blocks: int) -> list[torch.Tensor]:
    """Whole blocks, then the states of sliding windows, each of shape ``(layers, 2, heads, tokens, width)``."""
    found: list[Any] = []
    assert cache._prefix is not None
    own = cache._prefix.payloads
    if own.full:
        found += own.read(range(blocks))
    if own.sliding:
        found.append(own.read_states())
    return [torch.frombuffer(one, dtype=own.dtype).view(-1, 2, *own.shape(STEP)[1:]) for one in found]


# All layers of mistral have windows of 23 tokens, and every other one of gemma2.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", ["zstd", "int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_loaded_elements_are_within_the_stated_bound(
    settings: dict[str, Any], name: str, codec: str, dtype: torch.dtype
) -> None:
    model, inputs = zoo.make(name).to(dtype), zoo.prompt(60)
    settings["codec"] = codec
    with (
        Pool("64KiB", [Dram("16MiB")]) as pool,
        prefix_blocks(model, settings, tokens_per_block=STEP) as blocks,
        torch.no_grad(),
    ):
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        model(inputs[:, :48], **{cache_argument(model): cache})
        assert cache.save(inputs[:, :48]) == 48
        saved = payloads(cache, 3)
        raw = sum(one.nbytes for one in saved)
        assert blocks.stats()["save.bytes"] < raw
        cache = FarpoolCache(model, pool=pool, prefixes=blocks)
        assert cache.load(inputs, judged=False) == 48
        loaded = payloads(cache, 3)
        assert len(saved) == len(loaded) == {"llama": 3, "mistral": 1, "gemma2": 4}[name]
        for before, after in zip(saved, loaded, strict=True):
            if codec == "zstd":
                assert torch.equal(before, after)
            else:
                error = abs(before.double() - after.double())
                assert (error.numpy() <= bounds(before, "lshtd", int(codec[3:]))).all()
                assert error.any()
        sequences, _ = zoo.generate(model, inputs, cache)
        assert sequences.shape == (1, 72)


def test_without_a_codec_nothing_lossy_is_found(settings: dict[str, Any]) -> None:
    model, inputs = zoo.make("llama"), zoo.prompt(60)
    with (
        Pool("64KiB", [Dram("16MiB")]) as pool,
        prefix_blocks(model, settings | {"codec": "int8"}, tokens_per_block=STEP) as lossy,
        prefix_blocks(model, settings, tokens_per_block=STEP) as exact,
        torch.no_grad(),
    ):
        cache = FarpoolCache(model, pool=pool, prefixes=lossy)
        model(inputs, **{cache_argument(model): cache})
        assert cache.save(inputs) == 48
        assert FarpoolCache(model, pool=pool, prefixes=exact).load(inputs) == 0
        assert FarpoolCache(model, pool=pool, prefixes=lossy).load(inputs) == 48
