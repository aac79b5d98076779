"""Measurement of the time to first token: the model, its KV memory, and the rows of the race."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer

from farpool.cluster.node.process import running_node
from farpool.errors import FarpoolError
from farpool.kv.memory import Layer, TensorMemory
from farpool.kv.prefix import PrefixCache
from farpool.kv.transformers_config import cache_argument
from farpool_bench.kv_peers import KVPeers
from farpool_bench.kv_ttft_outcome import Outcome, Point, Row, Settings
from farpool_bench.measure import in_turn
from farpool_bench.ring import Ring
from farpool_bench.sockets import Sockets, build_sockets, read

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool.cluster.wire.channel import Transport
    from farpool_bench.benchmark import Progress

__all__ = ["measure"]

_BLOCK = 16
_HEAD = 64
_VOCABULARY = 4096
_PATIENCE = 30.0
"""Seconds that a call of farpool may take: here a late answer is to be measured, not to be given up."""


class _Model:
    """A model of Llama's shape with weights by seed, and memory for the KV of its longest prefix."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        heads = settings.hidden // _HEAD
        self._model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=_VOCABULARY,
                hidden_size=settings.hidden,
                intermediate_size=settings.hidden * 11 // 4,
                num_hidden_layers=settings.layers,
                num_attention_heads=heads,
                num_key_value_heads=max(1, heads // 4),
                max_position_embeddings=8192,
            )
        ).train(False)
        self._argument = cache_argument(self._model)
        longest = max(settings.tokens)
        self.prompt = torch.randint(0, _VOCABULARY, (1, longest + 1))
        # Keys and values of a layer are one tensor, so that a copy of blocks of all layers is one call.
        shape = (settings.layers, 2, 1, max(1, heads // 4), longest, _HEAD)
        self.kv = torch.zeros(shape)
        self.spare = torch.zeros(shape)
        self.token_bytes = self.kv[..., 0, :].nbytes

    def seconds(self, tokens: int) -> float:
        """Seconds of a pass over the prompt with so many tokens before the last, and no KV."""
        return self._pass(DynamicCache(config=self._model.config), self.prompt[:, : tokens + 1])[0]

    def go_on(self, tokens: int) -> tuple[float, torch.Tensor]:
        """Seconds of a pass over the token behind the KV in memory, and its logits."""
        cache = DynamicCache(config=self._model.config)
        for layer, (keys, values) in zip(_layers(cache), self.kv[..., :tokens, :], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return self._pass(cache, self.prompt[:, tokens : tokens + 1])

    def prefill(self, tokens: int) -> torch.Tensor:
        """Compute the KV of a prefix into memory; return the logits of the token behind it."""
        cache = DynamicCache(config=self._model.config)
        self._pass(cache, self.prompt[:, :tokens])
        for layer, (keys, values) in zip(_layers(cache), self.kv[..., :tokens, :], strict=True):
            assert layer.keys is not None
            assert layer.values is not None
            keys.copy_(layer.keys)
            values.copy_(layer.values)
        return self._pass(cache, self.prompt[:, tokens : tokens + 1])[1]

    def memory(self, tokens: int) -> TensorMemory:
        """View the memory of a prefix's KV as farpool fills it."""
        return TensorMemory([(keys, values) for keys, values in self.kv[..., :tokens, :]])

    def _pass(self, cache: DynamicCache, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
        with torch.inference_mode():
            start = time.perf_counter()
            logits = self._model(ids, use_cache=True, logits_to_keep=1, **{self._argument: cache}).logits
            return time.perf_counter() - start, logits


def _layers(cache: DynamicCache) -> list[DynamicLayer]:
    return [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]


class _Sample:
    """A row that runs: gets the KV, computes, and keeps both times."""

    def __init__(self, name: str, model: _Model, tokens: int, fetch: Callable[[], float], wanted: torch.Tensor) -> None:
        self.name = name
        self.compute: list[float] = []
        self.fetching: list[float] = []
        self.equal = True
        self._model, self._tokens, self._fetch, self._wanted = model, tokens, fetch, wanted

    def take(self) -> float:
        """Take one sample."""
        fetching = self._fetch()
        compute, logits = self._model.go_on(self._tokens)
        self.fetching.append(fetching)
        self.compute.append(compute)
        self.equal = self.equal and torch.equal(logits, self._wanted)
        return fetching + compute


def measure(settings: Settings, progress: Progress) -> Outcome:
    """Measure each length of the prefix."""
    model = _Model(settings)
    nbytes = model.token_bytes * max(settings.tokens)
    with ExitStack() as stack:
        peers = stack.enter_context(KVPeers(settings.lmcache, 0.0, 4 * nbytes, ("fs", "L1")))
        sockets = build_sockets(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-"))))
        node = stack.enter_context(running_node(dram=str(max(64 << 20, 4 * nbytes)))).address
        points = [_measure(settings, model, peers, sockets, node, tokens, progress) for tokens in settings.tokens]
        return Outcome(torch.get_num_threads(), peers.names, tuple(points))


def _measure(
    settings: Settings,
    model: _Model,
    peers: KVPeers,
    sockets: tuple[Path | None, str],
    node: str,
    tokens: int,
    progress: Progress,
) -> Point:
    ring = Ring(model.token_bytes * _BLOCK, tokens // _BLOCK)
    with ExitStack() as stack:
        wanted = model.prefill(tokens)
        samples: list[_Sample] = []
        missing: list[Row] = []
        for name, fetch in _own(stack, settings, model, node, tokens):
            samples.append(_Sample(name, model, tokens, fetch, wanted))
        for peer in peers.contenders(stack, "tcp", ring):
            if peer.each is None or peer.fetch is None:
                missing.append(Row(peer.name, None, None, None, None, None, peer.reason))
            else:
                peer.each(True)
                work = partial(_of_peer, peer.fetch, model.spare[..., :tokens, :], ring)
                samples.append(_Sample(peer.name, model, tokens, work, wanted))
        for name, copy in _bare(stack, model, sockets[0], tokens):
            samples.append(_Sample(name, model, tokens, copy, wanted))
        if sockets[0] is None:
            missing.append(Row("bare C sockets", None, None, None, None, None, sockets[1]))
        for sample in samples:
            sample.take()
            sample.compute.clear()
            sample.fetching.clear()
        works: list[Callable[[], float]] = [partial(model.seconds, tokens), *(sample.take for sample in samples)]
        recompute = in_turn(works, settings.rounds_for(tokens), f"{tokens} tokens", progress)[0]
    rows = [
        Row.of(
            one.name,
            tuple(one.compute),
            tuple(one.fetching),
            recompute,
            one.equal if one.name.startswith("farpool") else None,
        )
        for one in samples
    ]
    return Point(tokens, model.token_bytes * tokens, recompute, (*rows, *missing))


def _own(
    stack: ExitStack, settings: Settings, model: _Model, node: str, tokens: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Save a prefix, and return for each transport the work of getting it back, which takes its own time."""
    prompt = model.prompt[0, : tokens + 1].tolist()
    ways: tuple[Transport, ...] = ("mapped", "tcp")
    for way in ways:
        cache = PrefixCache(
            [node],
            [Layer(model.token_bytes // settings.layers)] * settings.layers,
            model="bench",
            # Blocks of its own for each length: those of a shorter prefill would stay, and differ in last bits.
            weights_id=f"seed-0/{tokens}",
            dtype="float32",
            block=_BLOCK,
            hold_out=False,
            transport=way,
            timeout=_PATIENCE,
        )
        stack.callback(cache.close)
        memory = model.memory(tokens)
        cache.save(prompt[:tokens], memory)

        def fetch(cache: PrefixCache = cache, memory: TensorMemory = memory) -> float:
            model.kv[..., :tokens, :].zero_()
            start = time.perf_counter()
            loaded = cache.fetch(prompt, memory).tokens
            taken = time.perf_counter() - start
            if loaded != tokens:
                raise FarpoolError(f"farpool: {loaded} of {tokens} tokens were loaded")
            return taken

        yield f"farpool, {'TCP' if way == 'tcp' else way}", fetch


def _bare(
    stack: ExitStack, model: _Model, sockets: Path | None, tokens: int
) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield works that move as many bytes in one piece, without looking them up, checking or scattering them."""
    nbytes = model.token_bytes * tokens
    target = model.spare.view(-1).view(torch.uint8)[:nbytes]
    into, source = memoryview(cast("Buffer", target.numpy())), memoryview(bytearray(nbytes))

    def copy() -> None:
        into[:] = source

    works = {"bare memcpy": copy}
    if sockets is not None:
        server = stack.enter_context(Sockets(sockets, nbytes, 1))
        works["bare C sockets"] = partial(read, stack.enter_context(server.connect()), into)
    for name, work in works.items():

        def taken(work: Callable[[], None] = work) -> float:
            target.zero_()
            start = time.perf_counter()
            work()
            return time.perf_counter() - start

        yield name, taken


def _of_peer(fetch: Callable[[], float], kv: torch.Tensor, ring: Ring) -> float:
    """Seconds of a peer's lookup and load, and of the copy from blocks to memory like the engine's.

    The blocks are not the model's KV: numbers of other kinds take other times to compute with.
    """
    fetched = fetch()
    layers, two, one, heads, tokens, size = kv.shape
    blocks = torch.frombuffer(ring.buffers[0].obj, dtype=torch.float32)[: math.prod(kv.shape)]
    start = time.perf_counter()
    places = kv.view(layers, two, one, heads, tokens // _BLOCK, _BLOCK, size)
    places.copy_(blocks.view(tokens // _BLOCK, layers, two, one, heads, _BLOCK, size).permute(1, 2, 3, 4, 0, 5, 6))
    return fetched + (time.perf_counter() - start)
