"""Caches without an engine's connector probe each kind of memory at its first use, and refuse it if bytes differ."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from farpool import Dram, Pool, Store
from farpool._native import Slices
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ProbeError
from farpool.kv import Layer, PrefixCache, Reason, TensorMemory
from farpool.kv import probe as probe_module
from farpool.kv.blocks import BlockCache
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.engines.transformers_layer import PagedLayer
from farpool.kv.journal import recorded
from farpool.kv.probe import Probe
from tests.kv import zoo
from tests.nodes import PATIENCE, eventually

BLOCK, HEADS, WIDTH = 4, 2, 4
PROMPT = list(range(12))
LAYERS = [Layer(2 * HEADS * WIDTH * 4), Layer(2 * HEADS * WIDTH * 4, "sliding", window=6)]


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as one:
        yield one


def tensors(seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of the prompt, in both layers."""
    made = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(1, HEADS, 12, WIDTH, generator=made) for _ in range(2)) for _ in LAYERS]


def cache_of(address: str, model: str, **settings: Any) -> PrefixCache:
    given = {"timeout": PATIENCE, "hold_out": False, **settings}
    return PrefixCache([address], LAYERS, model=model, weights_id="1", dtype="float32", block=BLOCK, **given)


class HeadsSwapped(TensorMemory):
    """Memory that names the heads of each tensor in another order than its tensors have."""

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        super().__init__(layers)
        for number, (chunks, token_bytes) in enumerate(self._layers):
            self._layers[number] = (chunks[::-1], token_bytes)


class OrderChanges(threading.local):
    """Memory of an engine's own that names the heads in one of two orders, by chance.

    Each thread has its own chances: one thread makes a whole probe, and others do not change what the probe meets.
    With this seed, a probe of either group meets both orders.
    """

    def __init__(self, layers: Sequence[tuple[torch.Tensor, ...]]) -> None:
        self.own, self.luck = TensorMemory(layers), random.Random(3)

    def parts(self, layer: int, start: int, stop: int) -> Any:
        (slices,) = self.own.parts(layer, start, stop) or ()
        views = slices.views()  # type: ignore[union-attr]
        return self.luck.choice([views, views[::-1]])


def flips_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damage loaded bytes after their checksum was verified."""
    load = BlockCache.load

    def damaging(self: BlockCache, keys: Sequence[bytes], targets: Sequence[Any], **named: Any) -> Any:
        reasons = load(self, keys, targets, **named)
        part = targets[0][0] if isinstance(targets[0], tuple) else targets[0]
        memoryview(part.views()[0] if isinstance(part, Slices) else part).cast("B")[0] ^= 1
        return reasons

    monkeypatch.setattr(BlockCache, "load", damaging)


FAULTS: dict[str, Callable[..., Any]] = {"a bit": TensorMemory, "heads": HeadsSwapped, "order": OrderChanges}


def wrong(fault: str, monkeypatch: pytest.MonkeyPatch, seed: int = 1) -> tuple[Any, list[tuple[torch.Tensor, ...]]]:
    own = tensors(seed)
    if fault == "a bit":
        flips_a_bit(monkeypatch)
    return FAULTS[fault](own), own


@pytest.mark.parametrize("fault", FAULTS)
def test_no_block_is_saved_after_a_fault_at_the_first_save(
    node: RunningNode, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with cache_of(node.address, f"save {fault}") as cache, caplog.at_level(logging.ERROR, "farpool.kv"):
        memory, own = wrong(fault, monkeypatch)
        before = [one.clone() for layer in own for one in layer]
        assert cache.save(PROMPT, memory, request=f"save {fault}") == 0
        assert isinstance(cache._transfers.memory.probe.error, ProbeError)
        assert "ProbeError: PrefixCache: a known block of" in caplog.text
        assert "This cache loads and saves no blocks" in caplog.text
        assert recorded(f"save {fault}")[-1].reasons == {Reason.UNPROVED: 6}
        assert cache.lookup([*PROMPT, 1]).reason is Reason.UNPROVED
        assert cache.save(PROMPT, TensorMemory(tensors())) == 0  # also through memory that is whole
        assert all(torch.equal(a, b) for a, b in zip(before, [one for layer in own for one in layer], strict=True))
    monkeypatch.undo()
    with cache_of(node.address, f"save {fault}") as other:
        assert other.lookup([*PROMPT, 1]).found == 0


@pytest.mark.parametrize("way", ["load", "fetch", "load_parts"])
@pytest.mark.parametrize("fault", FAULTS)
def test_no_token_is_loaded_after_a_fault_at_the_first_load(
    node: RunningNode, fault: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_of(node.address, f"load {fault}") as cache:
        assert cache.save(PROMPT, TensorMemory(tensors())) == 6
    with cache_of(node.address, f"load {fault}") as cache:
        match = cache.lookup([*PROMPT, 1])
        assert match.tokens == 12
        memory, own = wrong(fault, monkeypatch)
        before = [one.clone() for layer in own for one in layer]
        if way == "fetch":
            assert cache.fetch([*PROMPT, 1], memory).tokens == 0
        elif way == "load":
            assert cache.load(match, memory) == 0
        else:
            assert min(one.tokens.result(PATIENCE) for one in cache.load_parts(match, memory)) == 0
        assert isinstance(cache._transfers.memory.probe.error, ProbeError)
        if fault != "order":  # so no code could put bytes back
            assert all(torch.equal(a, b) for a, b in zip(before, [one for layer in own for one in layer], strict=True))
        monkeypatch.undo()
        assert cache.load(match, TensorMemory(tensors())) == 0


def test_the_probe_runs_once_for_each_kind_of_memory_and_leaves_nothing(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[int] = []
    real = probe_module._carried

    def counted(block: Any, *given: Any) -> Any:
        moved.append(block.nbytes)
        return real(block, *given)

    monkeypatch.setattr(probe_module, "_carried", counted)
    with cache_of(node.address, "once") as cache, Store(node.address) as store:
        before = set(store.keys())
        assert cache.lookup(PROMPT).found == 0
        assert moved == []
        for _ in range(3):
            assert cache.save(PROMPT, TensorMemory(tensors())) == 6
        assert len(set(store.keys()) - before) == 7  # six blocks and their namespace
        for weights in ("1", "2"):
            cache.weights_id = weights
            cache.save(PROMPT, TensorMemory(tensors()))
            into = tensors(1)
            assert cache.load(cache.lookup([*PROMPT, 1]), TensorMemory(into)) == 12
        block = 2 * BLOCK * LAYERS[0].nbytes
        assert moved == [block, block]  # one save and one load, of both groups of layers
        assert cache.stats()["save.done"] == 30
        assert cache.save(PROMPT, OrderIsKept(tensors()), timeout=PATIENCE) == 6
        assert moved == [block, block, block]


class OrderIsKept(OrderChanges):
    """Memory of an engine, without a fault."""

    def parts(self, layer: int, start: int, stop: int) -> Any:
        return self.own.parts(layer, start, stop)


def test_an_unreachable_node_is_a_miss_in_time_and_is_asked_again_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port = one.getsockname()[1]
    with cache_of(f"tcp://127.0.0.1:{port}", "away", timeout=0.5) as cache:
        began = time.monotonic()
        assert cache.save(PROMPT, TensorMemory(tensors())) == 0
        assert time.monotonic() - began < PATIENCE / 2
        assert cache._transfers.memory.probe.error is None
        with running_node(listen=f"127.0.0.1:{port}"):
            eventually(lambda: cache.save(PROMPT, TensorMemory(tensors()), timeout=PATIENCE) == 6)


def test_the_nodes_are_asked_after_a_call_that_has_no_time(node: RunningNode) -> None:
    with cache_of(node.address, "no time") as cache:
        assert cache.save(PROMPT, TensorMemory(tensors()), timeout=0.0) == 0
        assert cache._transfers.memory.probe.error is None
        eventually(lambda: len(cache._transfers.memory.probe._passed) == 2)  # no other call has been made


def test_an_access_key_that_may_only_read_does_not_hide_a_fault(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cache_of(node.address, "only reads") as cache:
        assert cache.save(PROMPT, TensorMemory(tensors())) == 6
    refused = lambda self, keys, values, **named: [Reason.REFUSED] * len(keys)  # noqa: E731
    monkeypatch.setattr(BlockCache, "save", refused)
    for kind, tokens in ((TensorMemory, 12), (HeadsSwapped, 0)):
        with cache_of(node.address, "only reads") as cache:
            into = tensors(1)
            assert cache.load(cache.lookup([*PROMPT, 1]), kind(into)) == tokens
            assert isinstance(cache._transfers.memory.probe.error, ProbeError) is (not tokens)
            assert torch.equal(into[0][0], tensors(0 if tokens else 1)[0][0])


@pytest.mark.parametrize("kind", [TensorMemory, HeadsSwapped])
def test_blocks_of_this_process_also_need_memory_that_passes_the_probe(
    kind: type[TensorMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_node() as one, cache_of(one.address, "near", near_bytes=1 << 20, timeout=0.5) as cache:
        with cache_of(one.address, "near") as saving:
            assert saving.save(PROMPT, TensorMemory(tensors())) == 6
        assert cache.prefetch_by([*PROMPT, 1], PATIENCE).result(PATIENCE) == 5
        match = cache.lookup([*PROMPT, 1])
        one.kill()  # no node is needed for this
        into = tensors(1)
        whole = kind is TensorMemory
        assert cache.load(match, kind(into)) == (12 if whole else 0)
        assert torch.equal(into[0][0], tensors(0 if whole else 1)[0][0])
        assert isinstance(cache._transfers.memory.probe.error, ProbeError) is not whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_memory_made_under_inference_mode_is_probed_outside_it(node: RunningNode, dtype: torch.dtype) -> None:
    def cast(layers: list[tuple[torch.Tensor, ...]]) -> list[tuple[torch.Tensor, ...]]:
        return [tuple((one > 0).to(dtype) for one in layer) for layer in layers]

    layers = [Layer(2 * HEADS * WIDTH * dtype.itemsize), Layer(2 * HEADS * WIDTH * dtype.itemsize, "sliding", window=6)]
    settings: dict[str, Any] = {"timeout": PATIENCE, "hold_out": False, "dtype": str(dtype)[6:], "block": BLOCK}
    with PrefixCache([node.address], layers, model="inference", weights_id="1", **settings) as cache:
        with torch.inference_mode():
            source, into = cast(tensors()), cast(tensors(1))
        assert cache.save(PROMPT, TensorMemory(source)) == 6
        assert cache.load(cache.lookup([*PROMPT, 1]), TensorMemory(into)) == 12
        assert cache._transfers.memory.probe.error is None
        assert all(torch.equal(a, b) for a, b in zip(source[0], into[0], strict=True))


def test_without_the_probe_heads_would_be_swapped(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_of(node.address, "control") as cache:
        assert cache.save(PROMPT, TensorMemory(tensors())) == 6
        monkeypatch.setattr(Probe, "admit", lambda *given, **named: None)
        into = tensors(1)
        assert cache.load(cache.lookup([*PROMPT, 1]), HeadsSwapped(into)) == 12
        assert torch.equal(into[0][0], tensors()[0][1].flip(1))


# ---- transformers ------------------------------------------------------------------------------------------------


def heads_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of the layer whose reads, which only saves use, swap two heads."""
    read = PagedLayer.read

    def swapped(self: PagedLayer, start: int, stop: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        read(self, start, stop, keys, values)
        if stop - start == TOKENS_PER_BLOCK:
            keys.copy_(keys.flip(1))

    monkeypatch.setattr(PagedLayer, "read", swapped)


TOKENS_PER_BLOCK = 8


def filled(model: Any, pool: Pool, blocks: BlockCache, inputs: torch.Tensor) -> FarpoolCache:
    cache = FarpoolCache(model, pool=pool, prefixes=blocks, tokens_per_block=3)
    with torch.no_grad():
        model(inputs, **{cache_argument(model): cache})
    return cache


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        *[(family, fault) for family in ("llama", "mistral", "gemma2") for fault in ("none", "a bit")],
        *[(family, "heads") for family in ("llama", "gemma2")],  # mistral has no layer in a pool
    ],
)
def test_a_cache_of_transformers_probes_before_it_saves(
    node: RunningNode, family: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = zoo.make(family), zoo.prompt(20, seed=3)
    settings = {"nodes": [node.address], "weights_id": f"{family} {fault}", "timeout": PATIENCE}
    if fault == "a bit":
        flips_a_bit(monkeypatch)
    elif fault == "heads":
        heads_are_swapped(monkeypatch)
    tokens = inputs[0].tolist()
    with (
        Pool("64KiB", [Dram("64MiB")]) as pool,
        prefix_blocks(model, settings, tokens_per_block=TOKENS_PER_BLOCK) as blocks,
    ):
        probe = blocks.probe
        assert isinstance(probe, Probe)
        saved = filled(model, pool, blocks, inputs).save(tokens, request=f"{family} {fault}")
        if fault == "none":
            assert (saved, probe.error) == (16, None)
            assert FarpoolCache(model, pool=pool, prefixes=blocks, tokens_per_block=3).load(tokens, judged=False) == 16
            return
        assert saved == 0
        assert "FarpoolCache: a known block" in str(probe.error)
        assert recorded(f"{family} {fault}")[-1].reasons == {Reason.UNPROVED: 2}
        other = FarpoolCache(model, pool=pool, prefixes=blocks)
        assert (other.load(tokens, judged=False), other.get_seq_length()) == (0, 0)
