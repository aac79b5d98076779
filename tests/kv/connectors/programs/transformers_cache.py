"""The contract's cases for `farpool.kv.FarpoolCache`, under a tiny model of transformers that generates with it.

``python -m tests.kv.connectors.programs.transformers_cache TRANSPORT [CASE ...]`` prints the facts by case. A request
is complete if it has generated the tokens that it generates with a ``DynamicCache`` whose prefix was computed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from farpool import Dram, Pool, Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import token_chain, transformers
from farpool.kv.engines.transformers import FarpoolCache, prefix_blocks
from farpool.kv.engines.transformers_config import cache_argument
from farpool.kv.header import pack_header
from farpool.kv.journal import recorded
from tests.forking import in_forked_child
from tests.kv import zoo
from tests.kv.connectors.cases import BLOCKS, CASES
from tests.nodes import PATIENCE, eventually, stats

STEP = 16
TOKENS = BLOCKS * STEP
DEADLINE = 0.4
Facts = dict[str, Any]


def prompt(seed: int) -> torch.Tensor:
    """A prompt of which all blocks can be loaded: one token more is left to compute."""
    return zoo.prompt(TOKENS + 1, seed=seed)


def bytes_of(cache: FarpoolCache, number: int) -> list[bytes]:
    """Payloads of the first blocks of a cache."""
    assert cache._prefix is not None
    return [bytes(one) for one in cache._prefix.payloads.read(range(number))] if number else []


class Engine:
    """A program that generates with prefixes from a node."""

    def __init__(
        self,
        node: RunningNode,
        transport: str,
        *,
        dtype: torch.dtype = torch.float32,
        weights: str = "1",
        timeout: float = PATIENCE,
    ) -> None:
        self.model = zoo.make("llama").to(dtype)
        self.pool = Pool("64KiB", [Dram("64MiB")])
        settings = {"nodes": [node.address], "weights_id": weights, "transport": transport, "timeout": timeout}
        self.blocks = prefix_blocks(self.model, settings, tokens_per_block=STEP)

    def cache(self) -> FarpoolCache:
        return FarpoolCache(self.model, pool=self.pool, prefixes=self.blocks)

    def computed(self, tokens: torch.Tensor, cache: Any) -> Any:
        """The cache, with these tokens computed in one pass."""
        with torch.no_grad():
            self.model(tokens, **{cache_argument(self.model): cache})
        return cache

    def save(self, seed: int, number: int = BLOCKS) -> list[bytes]:
        """Compute and save the first blocks of a prompt; return their payloads."""
        tokens = prompt(seed)[:, : number * STEP]
        cache = self.computed(tokens, self.cache())
        cache.save(tokens)
        return bytes_of(cache, number)

    def ask(
        self,
        seed: int,
        kept: list[bytes],
        meanwhile: Callable[[], None] = lambda: None,
        *,
        request: str = "",
        judged: bool = True,
    ) -> Facts:
        """Run a request: load the stored prefix, and generate; `meanwhile` runs between lookup and load."""
        lookup = self.blocks.lookup

        def looked_up(*args: Any, **kwargs: Any) -> Any:
            found = lookup(*args, **kwargs)
            meanwhile()
            return found

        before = self.blocks.stats().get("lookup.done", 0)
        tokens, cache = prompt(seed), self.cache()
        with replaced(self.blocks, "lookup", looked_up):
            loaded = cache.load(tokens, request=request, judged=judged)
        found = self.blocks.stats()["lookup.done"] - before
        wrong = sum(one != other for one, other in zip(bytes_of(cache, loaded // STEP), kept, strict=False))
        sequences, _ = zoo.generate(self.model, tokens, cache, max_new_tokens=3)
        reference = DynamicCache(config=self.model.config)
        if loaded:
            self.computed(tokens[:, :loaded], reference)
        expected, _ = zoo.generate(self.model, tokens, reference, max_new_tokens=3)
        completed = torch.equal(sequences, expected)
        return {"found": found, "loaded": loaded // STEP, "wrong": wrong, "completed": completed}

    def close(self) -> None:
        self.blocks.close()
        gc.collect()  # a store remembers errors of nodes, whose tracebacks refer to caches
        self.pool.close()


@contextlib.contextmanager
def replaced(of: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object have another method for a while."""
    setattr(of, name, value)
    try:
        yield
    finally:
        delattr(of, name)


@contextlib.contextmanager
def running(node: RunningNode, transport: str, **settings: Any) -> Iterator[Engine]:
    engine = Engine(node, transport, **settings)
    try:
        yield engine
    finally:
        engine.close()


def saved(node: RunningNode) -> int:
    """Blocks that are on a node."""
    with Store(node.address, timeout=PATIENCE) as store:
        return sum(1 for _ in store.keys(b"fpk1"))


def round_trip(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        kept = engine.save(1)
    with running(node, transport) as engine:
        return {"saved": saved(node), **engine.ask(1, kept)}


def partial_batch(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        kept = engine.save(2, BLOCKS // 2)
        return {"saved": saved(node), **engine.ask(2, kept)}


def unknown_keys(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        return {"saved": saved(node), **engine.ask(3, [])}


def wrong_size(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine, Store(node.address, timeout=PATIENCE) as store:
        for number, link in enumerate(token_chain(prompt(4)[0].tolist()[:TOKENS], STEP, engine.blocks.digest)):
            nbytes = engine.blocks.namespace.groups[0].block_bytes + (-64 if number % 2 else 64)
            store.put(engine.blocks.key(link), pack_header(engine.blocks.key(link), nbytes, nbytes) + bytes(nbytes))
        return engine.ask(4, [])


def other_dtype(node: RunningNode, transport: str) -> Facts:
    with running(node, transport, dtype=torch.bfloat16) as other, running(node, transport, dtype=torch.float16) as one:
        other.save(5)
        return {"saved": saved(node), **one.ask(5, [])}


def other_weights(node: RunningNode, transport: str) -> Facts:
    with running(node, transport, weights="2") as other, running(node, transport) as engine:
        other.save(6)
        return {"saved": saved(node), **engine.ask(6, [])}


def node_killed_during_load(node: RunningNode, transport: str) -> Facts:
    with running(node, transport, timeout=DEADLINE) as engine:
        kept = engine.save(7)
        number = saved(node)
        facts = engine.ask(7, kept, meanwhile=node.kill)
        engine.save(8)  # the program continues without the node
        return {"saved": number, **facts, "without_node": engine.ask(8, [])}


def deadline_passed(node: RunningNode, transport: str) -> Facts:
    with running(node, transport, timeout=DEADLINE) as engine:
        kept = engine.save(9)
        number = saved(node)
        memory: list[tuple[memoryview, bytes]] = []
        load = engine.blocks.load

        def loading(keys: Any, targets: Any, **others: Any) -> Any:
            outcomes = load(keys, targets, **others)
            memory.extend((target, bytes(target)) for target in targets)
            return outcomes

        with replaced(engine.blocks, "load", loading):
            facts = engine.ask(9, kept, meanwhile=node.stop)
        node.cont()
        stats(node.address)  # it answers again; it sends its answers to earlier requests first
        time.sleep(0.2)
        late = sum(target != before for target, before in memory)
        again: Facts = {}

        def back() -> bool:
            again.update(engine.ask(9, kept))
            return bool(again["loaded"] == BLOCKS)

        eventually(back)
        told = {"later": again["loaded"], "late_writes": late, "wrong": facts["wrong"] + again["wrong"]}
        return {"saved": number, **facts, **told}


def all_loads_fail(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        kept = engine.save(10)
        number, damaged = saved(node), 0
        with open(node.folder / "objects-0.data", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for payload in kept:
                at = memory.find(payload)
                damaged += at >= 0
                memory[at + len(payload) // 2] ^= 1
        facts = engine.ask(10, kept)
        # The blocks that were computed again are saved, and loaded.
        kept = engine.save(10)
        mended = engine.ask(10, kept)
        told = {"damaged": damaged, "mended": mended["loaded"], "wrong": facts["wrong"] + mended["wrong"]}
        return {"saved": number, **facts, **told}


def offered_again(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        kept = engine.save(11)
        before = stats(node.address)
        engine.save(11)
        again = stats(node.address)["bytes_in"] - before["bytes_in"]
        # Requests are bytes, too: of payloads there are whole blocks or none.
        return {"saved": saved(node), "bytes_again": again // len(kept[0]) * len(kept[0])}


def shutdown_with_jobs_in_flight(node: RunningNode, transport: str) -> Facts:
    before = set(threading.enumerate())
    with running(node, transport, timeout=DEADLINE) as engine:
        nbytes = len(engine.save(12)[0])
        facts = _closed_while_busy(node, engine)
        eventually(lambda: set(threading.enumerate()) <= before)
        gc.collect()
        views = [held for held in gc.get_objects() if type(held) is memoryview and held.nbytes == nbytes]
        left = len(set(threading.enumerate()) - before)
        return {"threads_left": left, "views_left": len(views), **facts}


def _closed_while_busy(node: RunningNode, engine: Engine) -> Facts:
    full = engine.computed(prompt(13), engine.cache())
    with node.suspended():
        # Threads of the program: a cache works in the one that calls it.
        load = engine.blocks.submit(engine.cache().load, prompt(12), judged=False)
        save = engine.blocks.submit(full.save, prompt(13))
        eventually(lambda: not engine.blocks.drain(0) or (load.done() and save.done()))
        busy = load.running() and save.running()
        engine.blocks.close()
    return {"busy": busy, "completed": load.exception(0) is None and save.exception(0) is None}


def fork(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine, tempfile.TemporaryDirectory() as folder:
        kept = engine.save(14)
        told = Path(folder) / "facts"

        def child() -> None:
            engine.pool = Pool("64KiB", [Dram("64MiB")])  # a pool does not outlive a fork
            told.write_text(json.dumps(engine.ask(14, kept)))

        in_forked_child(child, PATIENCE)
        mine, theirs = engine.ask(14, kept), json.loads(told.read_text())
        return {"saved": saved(node), **theirs, "wrong": mine["wrong"] + theirs["wrong"], "parent": mine["loaded"]}


def concurrent_threads(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine, ThreadPoolExecutor(4) as threads:

        def use(seed: int) -> Facts:
            kept = engine.save(seed)
            cache = engine.cache()
            loaded = cache.load(prompt(seed), judged=False) // STEP
            return {"loaded": loaded, "wrong": sum(a != b for a, b in zip(bytes_of(cache, loaded), kept, strict=True))}

        found = list(threads.map(use, range(20, 24)))
        return {"saved": saved(node), **{name: sum(one[name] for one in found) for name in ("loaded", "wrong")}}


class Clock:
    """The clock of the caches, which only computing and loading move: to load a block takes ten times as long."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        self._load, engine.blocks.load = engine.blocks.load, self.load  # type: ignore[method-assign]
        # A cache measures the time between the first layer and the last one.
        engine.model.model.layers[1].register_forward_pre_hook(self.compute)

    def monotonic(self) -> float:
        return self.now

    def compute(self, _: Any, states: tuple[torch.Tensor]) -> None:
        self.now += states[0].shape[1] / STEP

    def load(self, keys: Any, *others: Any, **more: Any) -> Any:
        self.now += 15 * len(keys)  # three layers count for two of them
        return self._load(keys, *others, **more)


def slow_link_is_bypassed(node: RunningNode, transport: str, *, judged: bool = True) -> Facts:
    with running(node, transport) as engine:
        facts: Facts = {"loaded": 0, "bypassed": 0, "told": 0, "wrong": 0, "completed": True}
        transformers.time = Clock(engine)  # type: ignore[attr-defined]
        try:
            for seed, turn in [*((seed, turn) for seed in range(8) for turn in range(2)), *((n, 2) for n in range(4))]:
                name = f"slow link {uuid.uuid4().hex}"
                if turn == 0:
                    engine.save(seed)
                    continue
                kept = bytes_of(engine.computed(prompt(seed)[:, :TOKENS], engine.cache()), BLOCKS)
                told = engine.ask(seed, kept, request=name, judged=judged and turn == 2)
                facts["loaded"] += told["loaded"]
                facts["bypassed"] += told["found"] - told["loaded"]
                facts["told"] += any(entry.reasons == {"bypassed": BLOCKS} for entry in recorded(name))
                facts["wrong"] += told["wrong"]
                facts["completed"] &= told["completed"]
        finally:
            transformers.time = time  # type: ignore[attr-defined]
        return facts


def hold_out_off(node: RunningNode, transport: str) -> Facts:
    return slow_link_is_bypassed(node, transport, judged=False)


def hash_seeds(node: RunningNode, transport: str) -> Facts:
    with running(node, transport) as engine:
        chain = token_chain(range(1000, 1000 + 2 * STEP), STEP, engine.blocks.digest)
        return {
            "keys": [engine.blocks.key(link).hex() for link in chain],
            "vectors": [link.hex() for link in token_chain(range(1000, 1000 + 2 * STEP), STEP)],
        }


def main(transport: str, *cases: str) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in cases or CASES:
        began = time.monotonic()
        with running_node("256MiB") as node:
            try:
                found[name] = globals()[name](node, transport)
            except Exception:
                found[name] = {"error": traceback.format_exc()}
        found[name]["seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
