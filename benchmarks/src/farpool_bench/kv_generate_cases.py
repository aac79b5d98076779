"""Measurement of one case of the benchmark of generation with keys and values in a pool."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import DynamicCache

from farpool import Pool
from farpool.kv.engines.transformers import FarpoolCache
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.engines.transformers_layer import PagedLayer
from farpool.memory.pool.pool import blocks_of
from farpool_bench.harness import Row, told
from farpool_bench.link import Copier, Pooled, lower_tier
from farpool_bench.measure import Rival
from farpool_bench.render import rate_text
from farpool_bench.stack import llama

_SHARE = 4
"""Keys and values are this many times as large as the budget."""
_SETTLE = 12
"""Number of tokens before samples are taken."""
_VOCABULARY = 1024


class _Tokens:
    """Generation of two tokens in each round, with each cache; the resident one gives the logits of all."""

    def __init__(self, bench: Any, caches: dict[str, Any], model: Any) -> None:
        self._caches, self._model = caches, model
        self._argument = cache_argument(model)
        self._numbers = dict.fromkeys(caches, 0)
        self._expected: list[torch.Tensor] = []
        for cache in caches.values():
            _fill(cache, bench)

    def next(self, name: str) -> float:
        """Seconds of the next token with a cache; RuntimeError if its logits are not the resident one's."""
        number = self._numbers[name]
        self._numbers[name] += 1
        inputs = torch.tensor([[number % _VOCABULARY]])
        start = time.perf_counter()
        with torch.no_grad():
            logits = self._model(inputs, use_cache=True, **{self._argument: self._caches[name]}).logits
        seconds = time.perf_counter() - start
        if name == "resident":
            self._expected = [*self._expected[-1:], logits]
        elif not torch.equal(logits, self._expected[number % 2]):
            raise RuntimeError(f"{name}: the logits differ from the resident cache's logits")
        return seconds


def measure_case(bench: Any, rate: float) -> Row:
    """Measure the pool, and demand fetching, in turn with a cache that is wholly resident."""
    model = llama(
        vocab_size=_VOCABULARY,
        hidden_size=bench.query_heads * bench.head_dim,
        intermediate_size=2 * bench.query_heads * bench.head_dim,
        num_hidden_layers=bench.layers,
        num_attention_heads=bench.query_heads,
        num_key_value_heads=bench.kv_heads,
        head_dim=bench.head_dim,
        max_position_embeddings=2 * bench.context,
    )
    kv_bytes = bench.layers * 2 * bench.kv_heads * bench.context * bench.head_dim * torch.float32.itemsize
    budget = kv_bytes // _SHARE
    most = bench.context + 2 * (bench.rounds + _SETTLE)
    # As much as `OperandMemory` takes for the keys and values of a layer.
    operands = kv_bytes // bench.layers // bench.context * most * 33 // 32
    fewest = kv_bytes - budget
    resident, with_copies = [], []
    with (
        Copier(rate) as copier,
        Pool(budget - operands, [lower_tier(kv_bytes * 3 // 2, rate)]) as pool,
        Pool(budget - operands, [lower_tier(kv_bytes * 3 // 2, rate)], prefetch=False) as demand_pool,
    ):
        caches = {
            "resident": DynamicCache(config=model.config),
            "farpool": FarpoolCache(model.config, pool=pool),
            "demand fetching": FarpoolCache(model.config, pool=demand_pool),
        }
        tokens = _Tokens(bench, caches, model)
        ours = Pooled(pool, lambda between: tokens.next("farpool"))
        rival = Rival("demand fetching", lambda: [tokens.next("demand fetching") for _ in range(2)][1])
        for done in told(bench.progress, rate_text(rate), range(-_SETTLE // 2, bench.rounds)):
            resident.append(tokens.next("resident"))
            with_copies.append(copier.while_copying(lambda: tokens.next("resident"), fewest))
            ours.measure()
            rival.sample()
            if done < 0:
                for samples in (resident, with_copies, ours, rival.samples):
                    samples.clear()
        peak = pool.stats().fast.peak
        booked = blocks_of(pool).ledger.total(owner="KV operands").reserved
        if booked > operands:
            raise RuntimeError(f"operands take {booked} bytes, {operands} are counted against the budget")
        caches.clear()  # the caches must not outlive the pools
    rivals = (rival, Rival("transformers' offloaded cache", None, "needs CUDA"))
    return Row(
        ours.row(fewest / rate, resident, with_copies, rivals),
        rate=rate,
        kv_bytes=kv_bytes,  # before the first token is generated
        budget_bytes=budget,  # fast memory in all; operands hold the keys and values that attention gets
        operand_bytes=operands,
        peak_bytes=peak,  # of the pool's arena
        fewest_bytes=fewest,  # that a token has to bring in
    )


def _fill(cache: Any, bench: Any) -> None:
    """Put a context of random keys and values into a cache, the same into each.

    To compute one of this length would take many times as long as all that is measured.
    """
    generator = torch.Generator().manual_seed(1)
    shape = (1, bench.kv_heads, bench.context, bench.head_dim)
    for number, layer in enumerate(cache.layers):
        keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
        if type(layer) is PagedLayer:
            layer.extend(keys, values)
        else:
            cache.update(keys, values, number)
