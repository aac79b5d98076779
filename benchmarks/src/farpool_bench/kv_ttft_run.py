"""Measurement of the time to first token: the model, its KV memory, and the rows of one length of the prefix."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from transformers import DynamicCache

from farpool.errors import FarpoolError
from farpool.kv.cache import PrefixCache
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.memory import Layer, TensorMemory
from farpool_bench.harness import Row
from farpool_bench.measure import in_turn, median_interval, median_ratio
from farpool_bench.sockets import Sockets, read
from farpool_bench.stack import llama
from farpool_bench.users import Ring

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from farpool.cluster.wire.channel import Transport

_BLOCK = 16
_HEAD = 64
_VOCABULARY = 4096
_CALL_TIMEOUT_S = 30.0
"""Long, because a late answer is to be measured here, not to be given up."""


class Model:
    """A model of Llama's shape with weights by seed, and memory for the KV of its longest prefix."""

    def __init__(self, bench: Any) -> None:
        heads = bench.hidden // _HEAD
        self._model = llama(
            vocab_size=_VOCABULARY,
            hidden_size=bench.hidden,
            intermediate_size=bench.hidden * 11 // 4,
            num_hidden_layers=bench.layers,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // 4),
            max_position_embeddings=8192,
        )
        self._argument = cache_argument(self._model)
        longest = max(bench.tokens)
        self.prompt = torch.randint(0, _VOCABULARY, (1, longest + 1), generator=torch.Generator().manual_seed(0))
        # Keys and values of a layer are one tensor, so that a copy of blocks of all layers is one call.
        self.kv, self.spare = torch.zeros(2, bench.layers, 2, 1, max(1, heads // 4), longest, _HEAD)
        self.layers = bench.layers
        self.token_bytes = self.kv[..., 0, :].nbytes

    def seconds(self, tokens: int) -> float:
        """Seconds of a pass over the prompt with so many tokens before the last, and no KV."""
        return self._pass(DynamicCache(config=self._model.config), self.prompt[:, : tokens + 1])[0]

    def go_on(self, tokens: int) -> tuple[float, torch.Tensor]:
        """Seconds of a pass over the token behind the KV in memory, and its logits."""
        cache: Any = DynamicCache(config=self._model.config)
        for layer, (keys, values) in zip(cache.layers, self.kv[..., :tokens, :], strict=True):
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values
        return self._pass(cache, self.prompt[:, tokens : tokens + 1])

    def prefill(self, tokens: int) -> torch.Tensor:
        """Compute the KV of a prefix into memory; return the logits of the token behind it."""
        cache: Any = DynamicCache(config=self._model.config)
        self._pass(cache, self.prompt[:, :tokens])
        for layer, (keys, values) in zip(cache.layers, self.kv[..., :tokens, :], strict=True):
            keys.copy_(layer.keys)
            values.copy_(layer.values)
        return self._pass(cache, self.prompt[:, tokens : tokens + 1])[1]

    def _pass(self, cache: DynamicCache, ids: torch.Tensor) -> tuple[float, torch.Tensor]:
        with torch.inference_mode():
            start = time.perf_counter()
            logits = self._model(ids, use_cache=True, logits_to_keep=1, **{self._argument: cache}).logits
            return time.perf_counter() - start, logits


class _Sample:
    """A way to the KV that runs: gets the KV, computes, and keeps both times."""

    def __init__(self, name: str, model: Model, tokens: int, fetch: Callable[[], float], wanted: torch.Tensor) -> None:
        self.name = name
        self.times: list[tuple[float, float]] = []
        self.equal = True
        self._model, self._tokens, self._fetch, self._wanted = model, tokens, fetch, wanted

    def take(self) -> float:
        """Take one sample."""
        fetching = self._fetch()
        compute, logits = self._model.go_on(self._tokens)
        self.times.append((fetching, compute))
        self.equal = self.equal and torch.equal(logits, self._wanted)
        return fetching + compute

    def row(self, recompute: tuple[float, ...]) -> Row:
        """Make its row: seconds to the first token, and of these until the KV is in the engine's memory."""
        fetching = tuple(fetching for fetching, _ in self.times)
        seconds = tuple(map(sum, self.times))
        shares = [mine / whole for mine, whole in zip(fetching, recompute, strict=True)]
        return Row(
            name=self.name,
            seconds=seconds,
            fetching=fetching,
            speedup=median_ratio(recompute, seconds),
            # Time until the KV is there, of computing it again: median, and the ends of its 95 % interval.
            share=(statistics.median(shares), *median_interval(shares)),
            # True if the logits equal the logits after a prefix computed here, bit for bit. None for the peers, whose
            # blocks are not the model's.
            equal=self.equal if self.name.startswith("farpool") else None,
            remark=None,
        )


def measure_case(bench: Any, tokens: int) -> Row:
    """Measure all ways to the KV of a prefix of so many tokens; the prompt has one more."""
    model = bench.model
    ring = Ring(model.token_bytes * _BLOCK, tokens // _BLOCK)
    # A short pass takes less time, and varies more.
    rounds = bench.rounds * max(1, min(4, 512 // tokens))
    with ExitStack() as stack:
        wanted = model.prefill(tokens)
        missing: dict[str, str] = {}
        fetches = list(_own(stack, model, bench.node, tokens))
        for peer in bench.peers.contenders(stack, "tcp", ring):
            if peer.user is None:
                missing[peer.name] = peer.reason
            else:
                peer.user.seconds_each(True, len(ring), 0.0)
                fetch = partial(_of_peer, peer.user.fetch_seconds, model.spare[..., :tokens, :], ring)
                fetches.append((peer.name, fetch))
        fetches += _bare(stack, bench, tokens)
        if bench.sockets is None:
            missing["bare C sockets"] = bench.no_sockets
        samples = [_Sample(name, model, tokens, fetch, wanted) for name, fetch in fetches]
        for sample in samples:
            sample.take()
            sample.times.clear()
        works: list[Callable[[], float]] = [partial(model.seconds, tokens), *(sample.take for sample in samples)]
        recompute = in_turn(works, rounds, f"{tokens} tokens", bench.progress)[0]
    nothing = dict.fromkeys(("seconds", "fetching", "speedup", "share", "equal"))
    rows = [one.row(recompute) for one in samples]
    rows += [Row(name=name, **nothing, remark=remark) for name, remark in missing.items()]
    return Row(tokens=tokens, nbytes=model.token_bytes * tokens, recompute=recompute, rows=tuple(rows))


def _own(stack: ExitStack, model: Model, node: str, tokens: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Save a prefix, and return for each transport the work of getting it back, which takes its own time."""
    prompt, kv = model.prompt[0, : tokens + 1].tolist(), model.kv[..., :tokens, :]
    ways: tuple[Transport, ...] = ("mapped", "tcp")
    for way in ways:
        cache = PrefixCache(
            [node],
            [Layer(model.token_bytes // model.layers)] * model.layers,
            model="bench",
            # Each length has blocks of its own: the blocks of a shorter prefill would stay, and differ in last bits.
            weights_id=f"seed-0/{tokens}",
            dtype="float32",
            block=_BLOCK,
            hold_out=False,
            transport=way,
            timeout=_CALL_TIMEOUT_S,
        )
        stack.callback(cache.close)
        memory = TensorMemory([(keys, values) for keys, values in kv])
        cache.save(prompt[:tokens], memory)
        yield f"farpool, {'TCP' if way == 'tcp' else way}", partial(_timed, kv, partial(_load, cache, prompt, memory))


def _load(cache: PrefixCache, prompt: list[int], memory: TensorMemory) -> None:
    loaded = cache.fetch(prompt, memory).tokens
    if loaded != len(prompt) - 1:
        raise FarpoolError(f"farpool: {loaded} of {len(prompt) - 1} tokens were loaded")


def _bare(stack: ExitStack, bench: Any, tokens: int) -> Iterator[tuple[str, Callable[[], float]]]:
    """Yield works that move as many bytes in one piece, without looking them up, checking or scattering them."""
    nbytes = bench.model.token_bytes * tokens
    target = bench.model.spare.view(-1).view(torch.uint8)[:nbytes]
    into, source = memoryview(cast("Buffer", target.numpy())), memoryview(bytearray(nbytes))
    yield "bare memcpy", partial(_timed, target, partial(into.__setitem__, slice(None), source))
    if bench.sockets is not None:
        server = stack.enter_context(Sockets(bench.sockets, nbytes, 1))
        work = partial(read, stack.enter_context(server.connect()), into)
        yield "bare C sockets", partial(_timed, target, work)


def _timed(target: torch.Tensor, work: Callable[[], Any]) -> float:
    """Seconds of a work that fills a target, which is cleared before."""
    target.zero_()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


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
