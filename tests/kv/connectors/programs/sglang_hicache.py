"""The contract of connectors (cases.py) on SGLang: its real controller, with all of its threads, over real nodes.

``python -m ... sglang_hicache TRANSPORT CASE ...`` prints the facts of each case by its name.
"""

from __future__ import annotations

import gc
import json
import mmap
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.blocks import BlockCache
from farpool.kv.header import HEADER_BYTES
from farpool.kv.journal import recorded
from tests.forking import in_forked_child
from tests.kv.connectors.cases import BLOCKS, CASES, OF_ENGINES
from tests.kv.connectors.programs.costs import costs
from tests.kv.connectors.programs.sglang_engine import (
    PAGE,
    PATIENCE,
    SETTINGS,
    backend,
    begin,
    engine,
    fill,
    hashes,
    mha,
    pages_of,
    settings,
)
from tests.nodes import eventually, stats

TOKENS = range(1000, 1000 + BLOCKS * PAGE)
DEADLINE = 0.5
Facts = dict[str, Any]


def round_trip(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        kept = one.save(TOKENS, 1)
        return {"saved": one.acked, **one.load(TOKENS, kept)}


def partial_batch(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        kept = one.save(TOKENS[: 8 * PAGE], 1)
        return {"saved": one.acked, **one.load(TOKENS, kept)}


def unknown_keys(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        return {"saved": 0, **one.load(TOKENS, [])}


def wrong_size(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        keys = _keys(one.storage)
        with BlockCache([node.address], one.storage._cache.namespace, timeout=PATIENCE) as blocks:
            nbytes = one.storage._pools["kv"].nbytes
            assert blocks.save(keys, [bytes(nbytes + (-64 if n % 2 else 64)) for n in range(BLOCKS)]) == [None] * BLOCKS
        return {**one.load(TOKENS, []), "completed": True}


def other_dtype(node: RunningNode) -> Facts:
    return _read_by_another(node, dtype=torch.float16)


def other_weights(node: RunningNode) -> Facts:
    return _read_by_another(node, weights_id="second")


def _read_by_another(node: RunningNode, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Facts:
    with engine(settings(node.address)) as one:
        kept = one.save(TOKENS, 1)
        saved = one.acked
    with engine(settings(node.address, **changes), pools=mha(dtype=dtype)) as other:
        return {"saved": saved, **other.load(TOKENS, kept)}


def node_killed_during_load(node: RunningNode) -> Facts:
    with engine(settings(node.address, timeout=DEADLINE)) as one:
        kept = one.save(TOKENS, 1)
        operation = one.query(TOKENS)
        found = operation.storage_hit_count // PAGE
        node.kill()
        loaded = one.fetch(operation)
        wrong = one.wrong(operation, loaded, kept)
        # The engine continues without the node: saves and lookups return, too.
        one.save(range(5000, 5000 + PAGE), 3)
        assert one.query(range(5000, 5000 + PAGE)).storage_hit_count == 0
        return {"saved": BLOCKS, "found": found, "wrong": wrong, "completed": True}


def deadline_passed(node: RunningNode) -> Facts:
    with engine(settings(node.address, timeout=DEADLINE)) as one:
        kept = one.save(TOKENS, 1)
        saved = one.acked
        operation = one.query(TOKENS)
        with node.suspended():
            loaded = one.fetch(operation)
            before = pages_of(one.pool, operation.host_indices)
        again: Facts = {}

        def is_back() -> bool:
            again.update(one.load(TOKENS, kept))
            return bool(again["loaded"] == BLOCKS)

        eventually(is_back)
        late = sum(one != other for one, other in zip(before, pages_of(one.pool, operation.host_indices), strict=True))
        facts = {"saved": saved, "loaded": loaded, "completed": True, "later": again["loaded"], "late_writes": late}
        return {**facts, "wrong": one.wrong(operation, loaded, kept) + again["wrong"]}


def all_loads_fail(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        kept = one.save(TOKENS, 1)
        saved = one.acked
        (path,) = node.folder.rglob("objects-*.data")
        parts = one.storage._pools["kv"].nbytes // 2  # keys, then values: damage both
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for page in kept:
                at = memory.find(page[parts - 32 : parts])
                assert at > 0
                memory[at] ^= 1
        return {"saved": saved, **one.load(TOKENS, kept), "completed": True}


def offered_again(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        one.save(TOKENS, 1)
        saved, before = one.acked, stats(node.address)
        one.save(TOKENS, 5)
        after = stats(node.address)
        # Bytes received in addition to payloads: one lookup of 16 keys.
        assert after["bytes_in"] - before["bytes_in"] < 4096
        assert after["puts"] == before["puts"]
        sent = one.storage._cache.stats()["save.bytes"]
        return {"saved": one.acked, "bytes_again": sent - saved * (one.storage._pools["kv"].nbytes + HEADER_BYTES)}


def shutdown_with_jobs_in_flight(node: RunningNode) -> Facts:
    before = set(threading.enumerate())
    with engine(settings(node.address, timeout=DEADLINE)) as one:
        one.save(TOKENS, 1)
        operation = one.query(TOKENS)
        with node.suspended():
            operation.host_indices = one.alloc(BLOCKS)
            one.controller.prefetch_buffer.put(operation)
            more = one.alloc(BLOCKS)
            one.controller.write_storage(more, list(TOKENS), hashes(range(9000, 9000 + len(TOKENS))))
            eventually(lambda: one.controller.prefetch_buffer.empty() and one.controller.backup_queue.empty())
            one.controller.detach_storage_backend()
        nbytes = one.pool.get_page_buffer_element_size()
        eventually(lambda: set(threading.enumerate()) <= before)
        gc.collect()
        views = [held for held in gc.get_objects() if type(held) is memoryview and held.nbytes == nbytes]
        return {"completed": True, "threads_left": len(set(threading.enumerate()) - before), "views_left": len(views)}


def fork(node: RunningNode) -> Facts:
    _, pool = mha()
    indices, names = torch.arange(BLOCKS * PAGE), hashes(TOKENS)
    fill(pool, indices, 1)
    kept = pages_of(pool, indices)
    with backend(pool, settings(node.address)) as storage, mmap.mmap(-1, 4096) as shared:
        saved = sum(storage.batch_set_v1(names, indices))
        fill(pool, indices, 2)

        def read() -> None:
            there = storage.batch_exists(names)
            loaded = storage.batch_get_v1(names, indices)
            wrong = sum(one != other for one, other in zip(kept, pages_of(pool, indices), strict=True))
            shared.write(json.dumps({"found": there, "loaded": sum(loaded), "wrong": wrong}).encode().ljust(512))

        in_forked_child(read, PATIENCE)
        assert all(storage.batch_get_v1(names, indices))  # the parent's connections are unchanged
        return {"saved": saved, **json.loads(shared[:512])}


def concurrent_threads(node: RunningNode) -> Facts:
    _, pool = mha()
    facts = {"saved": 0, "loaded": 0, "wrong": 0}
    with backend(pool, settings(node.address)) as storage, ThreadPoolExecutor(4) as threads:
        places = [torch.arange(n * BLOCKS * PAGE, (n + 1) * BLOCKS * PAGE) for n in range(8)]
        names = [hashes(range(n * 1000, n * 1000 + BLOCKS * PAGE)) for n in range(4)]
        for n in range(8):
            fill(pool, places[n], n)
        kept = [pages_of(pool, places[n]) for n in range(4)]

        def use(n: int) -> tuple[int, int]:
            saved = storage.batch_set_v1(names[n], places[n])
            return sum(saved), sum(storage.batch_get_v1(names[n], places[4 + n]))

        for saved, loaded in threads.map(use, range(4)):
            facts["saved"] += saved
            facts["loaded"] += loaded
        for n in range(4):
            now = pages_of(pool, places[4 + n])
            facts["wrong"] += sum(one != other for one, other in zip(kept[n], now, strict=True))
    return facts


def slow_link_is_bypassed(node: RunningNode, **changes: Any) -> Facts:
    with engine(settings(node.address, **changes)) as one:
        now = 0.0
        storage = one.storage
        storage._judge.clock = lambda: now
        fetch = storage._cache.load

        def load(keys: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal now
            now += 10 * len(keys)
            return fetch(keys, *arguments, **named)

        storage._cache.load = load
        facts: Facts = {"loaded": 0, "bypassed": 0, "told": 0, "wrong": 0, "completed": True}
        turns = [*((turn, sequence) for sequence in range(8) for turn in range(2)), *((2, n) for n in range(4))]
        for turn, sequence in turns:
            tokens = range(sequence * 1000, sequence * 1000 + BLOCKS * PAGE)
            fill(one.pool, torch.arange(BLOCKS * PAGE), sequence)
            before = len(recorded(hashes(tokens)[0]))
            found = one.load(tokens, pages_of(one.pool, torch.arange(BLOCKS * PAGE)))
            steps = recorded(hashes(tokens)[0])[before:]
            facts["told"] += any(entry.reasons == {"bypassed": BLOCKS} for entry in steps)
            if found["loaded"] < BLOCKS:
                now += BLOCKS
                one.save(tokens, sequence)
                facts["completed"] &= one.acked == BLOCKS
            facts["loaded"] += found["loaded"]
            facts["wrong"] += found["wrong"]
            facts["bypassed"] += BLOCKS - found["found"] if turn else 0
            assert facts["bypassed"] == storage._judge.stats().get("load.bypassed", 0)
        return facts


def nodes_are_told_the_cost(node: RunningNode) -> Facts:
    with engine(settings(node.address)) as one:
        now, told = 0.0, []
        one.storage._judge.clock = lambda: now
        for sequence in range(9):
            tokens, before = range(sequence * 1000, sequence * 1000 + BLOCKS * PAGE), costs(node)
            assert one.load(tokens, [])["found"] == 0
            now += BLOCKS
            one.save(tokens, sequence)
            told.append(sorted({round(cost, 3) for key, cost in costs(node).items() if key not in before}))
        return {"first": told[0], "last": told[-1]}


def hold_out_off(node: RunningNode) -> Facts:
    return slow_link_is_bypassed(node, hold_out=False)


def hash_seeds(node: RunningNode) -> Facts:
    _, pool = mha()
    with backend(pool, settings(node.address)) as storage:
        keys = [key.hex() for key in _keys(storage)[:2]]
    return {"keys": keys, "vectors": hashes(range(1000, 1064))}


def _keys(storage: Any) -> list[bytes]:
    keys: list[bytes] = storage._pools["kv"].keys(storage._cache, hashes(TOKENS))
    return keys


def main(transport: str, *cases: str) -> None:
    begin()
    SETTINGS["transport"] = transport
    facts: dict[str, Facts] = {}
    for name in cases or (*CASES, *OF_ENGINES):
        case: Callable[[RunningNode], Facts] = globals()[name]
        with running_node() as node:
            try:
                facts[name] = case(node)
            except Exception:
                facts[name] = {"error": traceback.format_exc()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
