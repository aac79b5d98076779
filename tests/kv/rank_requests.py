"""Requests of a tensor-parallel engine, as each rank handles them: the same calls, on blocks that may be evicted.

It is also a program: each process is then one rank, and collectives of gloo compare the answers of all ranks.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from farpool.kv import Layer, Match, PrefixCache, Prompt, StoreRanks, TensorMemory

if TYPE_CHECKING:
    from farpool.kv import Ranks

BLOCK, BLOCKS, HEADS, WIDTH = 4, 6, 2, 4
FULL = Layer(2 * HEADS * WIDTH * 4)
MODELS = {"full": [FULL] * 2, "windows": [FULL, Layer(2 * HEADS * WIDTH * 4, "sliding", window=6)]}
PROMPTS = 12
WAITING = 0.05
"""Seconds that a rank waits for the others."""

Answer = tuple[int, int, int]
"""Numbers of tokens: to load by the lookup, computed at the front, and usable after the load."""


def prompt(number: int) -> list[int]:
    """Tokens of a request, a third of which it has in common with others."""
    return [number % 3] * (2 * BLOCK) + [100 + number] * (BLOCK * (BLOCKS - 2)) + [number]


def value(rank: int, layer: int, tokens: Sequence[int], number: int) -> float:
    """Return the KV of a token, which differs between ranks, layers, prefixes and places."""
    return float(rank + 10 * layer + 100 * number + 10_000 * (tokens[number] + 1))


def memory(rank: int, tokens: Sequence[int], *, filled: bool) -> tuple[list[torch.Tensor], TensorMemory]:
    """KV of a sequence on one rank, or room for it."""
    tensors = [torch.zeros(1, 2 * HEADS, len(tokens), WIDTH) for _ in range(2)]
    if filled:
        for layer, tensor in enumerate(tensors):
            for number in range(len(tokens)):
                tensor[:, :, number] = value(rank, layer, tokens, number)
    return tensors, TensorMemory([(tensor,) for tensor in tensors])


@dataclass
class Engine:
    """One rank. One seed gives its faults, and another one gives its calls, which are the same on all ranks."""

    rank: int
    cache: PrefixCache
    model: str
    seed: int = 0

    def __post_init__(self) -> None:
        self.calls = random.Random(self.seed)  # the same on all ranks
        self.luck = random.Random(1000 * self.seed + self.rank + 1)  # of this rank alone
        self.troubles = {"missing": 0, "evicted": 0, "late blocks": 0, "late rank": 0}

    def happens(self, trouble: str, chance: float) -> bool:
        happens = self.luck.random() < chance
        self.troubles[trouble] += happens
        return happens

    def drop_some(self, tokens: Sequence[int]) -> None:
        keys, *_ = self.cache._sequence(tokens, "")
        self.cache._blocks.drop(self.luck.sample(keys, 1))

    def request(self, number: int) -> Answer:
        """Handle one request, and check the bytes that have come."""
        tokens = prompt(self.calls.randrange(PROMPTS))
        way, split = self.calls.choice(["load", "fetch", "many", "async", "layers"]), self.calls.random() < 0.3
        if self.happens("missing", 0.05):
            self.drop_some(tokens)
        if self.happens("late rank", 0.002):
            time.sleep(3 * WAITING)
        into, place = memory(self.rank, tokens, filled=False)
        match, loaded = self.looked_up_and_loaded(way, tokens, place, split, f"request {number}")
        self.check(into, tokens, match, loaded)
        left = len(tokens) - loaded
        # Each rank has a clock of its own. Computing is far slower than loading for a while, and then far faster.
        seconds = left * self.luck.uniform(0.5, 2) * (0.1 if number % 40 < 25 else 1e-9)
        self.cache.computed(left, seconds, context=loaded, match=match)
        self.cache.save(tokens, memory(self.rank, tokens, filled=True)[1])
        return match.tokens, match.compute, loaded

    def looked_up_and_loaded(
        self, way: str, tokens: list[int], place: TensorMemory, split: bool, request: str
    ) -> tuple[Match, int]:
        if way == "fetch":
            match = self.cache.fetch(tokens, place, request=request)
            return match, match.tokens
        if way == "many":
            other = prompt(self.calls.randrange(PROMPTS))
            match, _ = self.cache.lookup([Prompt(tokens), Prompt(other)], split=split)
        elif way == "async":
            match = self.cache.lookup(tokens, request=request, split=split, wait=False).result()
        else:
            match = self.cache.lookup(tokens, request=request, split=split)
        if self.happens("evicted", 0.05):
            self.drop_some(tokens)
        timeout = 1e-6 if self.happens("late blocks", 0.05) else 10.0
        if way == "layers":
            loads = self.cache.load_parts(match, place, timeout=timeout)
            return match, min(load.tokens.result() for load in loads)
        if way == "async":
            return match, self.cache.load(match, place, timeout=timeout, wait=False).result()
        return match, self.cache.load(match, place, timeout=timeout)

    def check(self, into: Sequence[torch.Tensor], tokens: Sequence[int], match: Match, loaded: int) -> None:
        """Compare the KV that the model needs after the loaded tokens with the KV that a rank saves."""
        for layer, one in enumerate(MODELS[self.model]):
            first = max(match.compute, loaded - one.window + 1 if one.kind == "sliding" else 0)
            for number in range(first, loaded):
                assert bool((into[layer][:, :, number] == value(self.rank, layer, tokens, number)).all())


def cache_of(address: str, rank: int, size: int, model: str, ranks: Ranks | None) -> PrefixCache:
    return PrefixCache(
        [address],
        MODELS[model],
        model=f"{model} on {size}",
        weights_id="1",
        dtype="float32",
        block=BLOCK,
        pieces=2 if model == "full" else 1,
        timeout=10.0,
        parallel={"tp": size},
        rank=rank,
        ranks=ranks,
    )


def main(address: str, port: int, rank: int, size: int, requests: int) -> None:
    """Be one rank."""
    from torch import distributed

    store = distributed.TCPStore(
        "127.0.0.1", port, size, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    ranks = StoreRanks(store, rank, size, timeout=WAITING)
    with cache_of(address, rank, size, "full", ranks) as cache:
        engine = Engine(rank, cache, "full")
        loaded = differ = 0
        for number in range(requests):
            answer = engine.request(number)
            lowest, highest = torch.tensor(answer), torch.tensor(answer)
            distributed.all_reduce(lowest, distributed.ReduceOp.MIN)
            distributed.all_reduce(highest, distributed.ReduceOp.MAX)
            differ += not torch.equal(lowest, highest)
            loaded += answer[2] > 0
    print(differ, loaded, *engine.troubles.values(), flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:6]))
