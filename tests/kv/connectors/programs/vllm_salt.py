"""Two tenants of vLLM with their own salts send the same prompts: the hits of the second one, and their times.

``python -m tests.kv.connectors.programs.vllm_salt`` prints it. Requests, their hashes and the manager are vLLM's own;
only the model is left out, whose KV is random.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.request import Request

from farpool.cluster.node.process import RunningNode, running_node
from tests.kv.connectors.programs.vllm_tier import BLOCK, TOKENS, Engine, running
from tests.kv.pairs import Comparison, compared, times_of_pairs

PAIRS = 2000
LOST_PAIRS = 200
"""Pairs of the control, each of which loads a block."""
BATCH = 40

Prompt = list[int]


def prompts(count: int, rng: random.Random) -> list[Prompt]:
    return [[rng.randrange(1 << 15) for _ in range(TOKENS)] for _ in range(count)]


def keys_of(tokens: Sequence[Prompt], salt: str | None) -> list[Any]:
    """Key of the one block of each prompt, as vLLM hashes a request with this salt."""
    hasher = kv_cache_utils.get_request_block_hasher(TOKENS, sha256)
    keys = []
    for number, prompt in enumerate(tokens):
        sampling = SamplingParams(max_tokens=1)
        request = Request(f"{salt} {number}", prompt, sampling, None, cache_salt=salt, block_hasher=hasher)
        (block,) = request.block_hashes
        keys.append(make_offload_key(block, 0))
    return keys


def save(engine: Engine, keys: Sequence[Any]) -> None:
    """Offload a block for each key to the node, and forget it in the engine's memory."""
    bytes_of = np.random.default_rng(0).integers(0, 256, (BATCH, BLOCK), dtype=np.uint8)
    for start in range(0, len(keys), BATCH):
        own = keys[start : start + BATCH]
        engine.save(own, bytes_of[: len(own)])
        engine.forget()


def compare(node: RunningNode, salts: tuple[str | None, str | None], pairs: int, seed: int) -> tuple[int, Comparison]:
    """Time the second tenant's lookups of prompts that the first one has saved, paired with new prompts.

    Returns
    -------
    tuple of int and Comparison
        How many of the first tenant's prompts the second one found, and the times.
    """
    rng = random.Random(seed)
    saved, nowhere = prompts(pairs, rng), prompts(pairs, rng)
    with running("mapped", [node], hold_out=False) as engine:
        save(engine, keys_of(saved, salts[0]))
        groups = keys_of([*saved, *nowhere], salts[1])
        # Both kinds are copied in mixed order, so that this process's memory reveals nothing.
        for number in rng.sample(range(len(groups)), len(groups)):
            groups[number] = type(groups[number])(bytearray(groups[number]))
        requests: dict[Any, Any] = {}
        hits = 0

        def ask(key: Any) -> None:
            nonlocal hits
            requests[key] = request = engine.begin([key])
            with engine.lock:
                hits += engine.manager.lookup(key, request) is not LookupResult.MISS

        def undo(key: Any) -> None:
            engine.end(requests.pop(key))
            engine.settle()

        ask(groups[-1])  # connects
        undo(groups[-1])
        hits = 0
        times = times_of_pairs(ask, undo, groups[:pairs], groups[pairs:], rng)
    return hits, compared(*times)


def main() -> None:
    kv_cache_utils.init_none_hash(sha256)
    facts: dict[str, Any] = {}
    with running_node("512MiB") as node:
        for name, salts, pairs, seed in (
            ("apart", ("alice", "bob"), PAIRS, 1),
            ("apart again", ("alice", "bob"), PAIRS, 2),
            ("lost", (None, None), LOST_PAIRS, 3),
        ):
            hits, times = compare(node, salts, pairs, seed)
            facts[name] = {"hits": hits, "times": asdict(times)}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
