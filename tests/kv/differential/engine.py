"""An engine with a `PrefixCache`: its weights change while it works, and it uses every call that there is."""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Sequence
from typing import Any

from farpool.errors import NodeError
from farpool.kv import PoolObjects, Reason
from farpool.kv.cache import Match, PrefixCache, Prompt
from farpool.kv.memory import Layer
from tests.kv.differential.client import TIMEOUT, Caller
from tests.kv.differential.truth import PAGE, VARIANTS, prompt

__all__ = ["RANKS", "Engine", "Program", "truth"]

LAYERS = [Layer(100), Layer(60, "sliding", 40), Layer(100), Layer(1500, "recurrent")]
RANKS = 2
_MARK = 0xA5


def truth(weights: str, rank: int, layer: int, tokens: Sequence[int], variant: int) -> bytes:
    """The KV of the last block of these tokens in one layer, or its state behind them, as some writer computes it."""
    one = LAYERS[layer]
    nbytes = one.nbytes if one.kind == "recurrent" else one.nbytes * PAGE
    seed = repr((weights, rank, layer, list(tokens), variant)).encode()
    return bytes([variant]) + hashlib.shake_128(seed).digest(nbytes - 1)


class Memory:
    """KV of a sequence by layer and block."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], bytearray] = {}

    def parts(self, layer: int, start: int, stop: int) -> list[bytearray] | None:
        block = self.blocks.get((layer, stop // PAGE))
        return None if block is None else [block]


class Program:
    """A process of an engine: a rank, its cache, and the weights that all of its threads use.

    Parameters
    ----------
    nodes : sequence of str or PoolObjects
        Where its blocks lie.
    rank : int
        Its part of the KV.
    kind : type
        The cache's class.
    **settings
        Settings of the cache.
    """

    def __init__(
        self, nodes: Sequence[str] | PoolObjects, rank: int, kind: type[PrefixCache] = PrefixCache, **settings: Any
    ) -> None:
        self.rank = rank
        self._lock = threading.Lock()
        self._step = 0
        self.cache = kind(
            nodes,
            LAYERS,
            model="a model of tests",
            weights_id="step 0",
            dtype="uint8",
            block=PAGE,
            parallel={"tp": RANKS},
            rank=rank,
            near_bytes=200_000,
            pieces=2,
            timeout=TIMEOUT,
            **settings,
        )

    def train_to(self, step: int) -> None:
        """Change the weights, if no other thread has got further; old ones never come back."""
        with self._lock:
            if step > self._step:
                self._step = step
                self.cache.weights_id = f"step {step}"


class Engine(Caller):
    """A thread of an engine that has a `PrefixCache`; for the other arguments see `Caller`.

    Parameters
    ----------
    program : Program
        Its process.
    others : sequence of Program
        Processes with which it exchanges sequences.
    """

    def __init__(self, program: Program, others: Sequence[Program], seed: str, requests: int, steps: int) -> None:
        super().__init__(seed, requests, steps)
        self._program, self._others = program, others
        self._cache = program.cache
        self._earlier: list[list[int]] = []

    def _serve(self, step: int, request: str) -> None:
        rng, cache = self._random, self._cache
        self._program.train_to(step)
        tokens = prompt(rng)
        timeout = rng.choices([None, TIMEOUT, 0.02, 0.0], [50, 30, 5, 1])[0]
        if rng.random() < 0.2:
            cache.prefetch_by(tokens, TIMEOUT, request=request)
        lookup = rng.choice(
            [
                lambda: cache.lookup(tokens, request=request, timeout=timeout),
                lambda: cache.lookup(tokens, request=request, timeout=timeout, wait=False).result(),
                lambda: cache.lookup(
                    [Prompt(tokens, request=request), Prompt(tokens[:PAGE], request=request)], timeout=timeout
                )[0],
            ]
        )
        match = self._timed(lookup, timeout)
        if match is None:
            return
        if rng.random() < 0.1:
            self._program.train_to(step + 1)
        self._load(match, tokens, request, timeout)
        self._save(match.weights_id, tokens, request, timeout)
        self._now_and_then(tokens, request)
        self._earlier = [*self._earlier[-5:], tokens]

    def _load(self, match: Match, tokens: list[int], request: str, timeout: float | None) -> None:
        """Load a match in one of the ways that there are, and look at every byte."""
        rng, cache = self._random, self._cache
        into = Memory()
        for layer, one in enumerate(LAYERS):
            nbytes = one.nbytes if one.kind == "recurrent" else one.nbytes * PAGE
            for block in range(1, match.tokens // PAGE + 1):
                into.blocks[layer, block] = bytearray([_MARK]) * nbytes
        load = rng.choice(
            [
                lambda: cache.load(match, into, timeout=timeout),
                lambda: cache.load(match, into, timeout=timeout, wait=False).result(),
                lambda: cache.load([match], [into], timeout=timeout)[0],
                lambda: min(one.tokens.result() for one in cache.load_parts(match, into, timeout=timeout)),
            ]
        )
        in_use = cache.weights_id
        usable = self._timed(load, timeout)
        if usable is None:
            return
        if usable and in_use != match.weights_id:
            self._tell(f"{request}: {usable} tokens of {match.weights_id} were loaded while {in_use} was in use")
        self.seen.outcomes["load.tokens"] += usable
        self.seen.outcomes["load.outdated"] += in_use != match.weights_id
        blocks = usable // PAGE
        for layer, one in enumerate(LAYERS):
            low = max(0, usable - (one.window - 1)) // PAGE if one.kind == "sliding" else 0
            for block in range(blocks if one.kind == "recurrent" else low + 1, blocks + 1):
                if block and not self._is_right(into.blocks[layer, block], match.weights_id, layer, tokens, block):
                    self._tell(f"{request}: block {block} of layer {layer} was loaded with other bytes")
        for block_memory in into.blocks.values():
            self._reuse(block_memory)

    def _is_right(self, data: bytearray, weights: str, layer: int, tokens: list[int], block: int) -> bool:
        return data[0] < VARIANTS and data == truth(weights, self._program.rank, layer, tokens[: block * PAGE], data[0])

    def _save(self, weights: str, tokens: list[int], request: str, timeout: float | None) -> None:
        """Compute with the weights of the lookup, and save, by when others may be in use."""
        rng, cache = self._random, self._cache
        made = Memory()
        for block in range(1, len(tokens) // PAGE + 1):
            for layer in range(len(LAYERS)):
                own = truth(weights, self._program.rank, layer, tokens[: block * PAGE], self._variant)
                made.blocks[layer, block] = bytearray(own)
        given: dict[str, Any] = {"request": request, "weights_id": weights, "timeout": timeout}
        save = rng.choice(
            [
                lambda: cache.save(tokens, made, **given),
                lambda: cache.save(tokens, made, wait=False, **given).result(),
                lambda: sum(
                    [cache.save(tokens, made, layers=part, wait=False, **given).result() for part in cache.parts]
                ),
            ]
        )
        saved = self._timed(save, timeout, 3 * len(cache.parts))
        self.seen.outcomes["save.done"] += saved or 0

    def _now_and_then(self, tokens: list[int], request: str) -> None:
        rng, cache = self._random, self._cache
        other = rng.choice([*self._earlier, tokens])
        what = rng.random()
        if what < 0.08:
            self.seen.outcomes["pin.done"] += self._timed(lambda: cache.pin(tokens, 0.2), None, 2) or 0
        elif what < 0.12:
            self._timed(lambda: cache.unpin(other), None)
        elif what < 0.16:
            self._timed(lambda: cache.supersede(other, tokens), None)
        elif what < 0.2:
            self._timed(lambda: cache.demote(other), None)
        elif what < 0.28:
            handed = self._timed(lambda: cache.handoff(tokens, 0.2), None, 2)
            taker = rng.choice(self._others)
            match = handed and self._timed(lambda: taker.cache.take(handed.note, request=request), None)
            if match and match.reason is Reason.FOREIGN and match.tokens:
                self._tell(f"{request}: a foreign note has tokens")
            if match and match.tokens:
                # The taker's rank has other bytes under the same tokens.
                Engine(taker, [taker], f"{request} taken", 1, 1)._load_for(self, match, tokens, request)
        elif what < 0.29:
            with contextlib.suppress(NodeError):  # whoever purges has to know that a node is away
                cache.purge()

    def _load_for(self, caller: Engine, match: Match, tokens: list[int], request: str) -> None:
        """Load what was handed off, and add what was seen to that of the giver."""
        self._random = random.Random(request)
        self._load(match, tokens, request, None)
        while self._watched:
            self._look_again()
        caller.seen.add(self.seen)
