"""The contract's cases for `farpool.kv.vllm.FarpoolTier`, under vLLM's own `TieringOffloadingManager`.

``python -m tests.kv.connectors.programs.vllm_tier TRANSPORT [CASE ...]`` prints the facts by case.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import vllm
from vllm.utils.hashing import sha256, sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from farpool.kv import block_key
from farpool.kv.header import pack_header
from farpool.kv.journal import recorded
from tests.forking import in_forked_child
from tests.kv.connectors.cases import BLOCKS, CASES, MEMORY, OF_ENGINES, OF_HOST_MEMORY
from tests.kv.connectors.programs.costs import costs
from tests.kv.connectors.programs.faults import damaged_loads
from tests.nodes import eventually, stats

PATIENCE = 20.0
BLOCK = 65536
TOKENS = 16
PENDING = (LookupResult.HIT_PENDING, LookupResult.RETRY)
Facts = dict[str, Any]


def hashed(seed: int, number: int = BLOCKS) -> list[Any]:
    """Offload keys of the first blocks of a prompt, made by vLLM's own hash function."""
    parent, keys = None, []
    for block in range(number):
        tokens = [seed * 100_000 + block * TOKENS + token for token in range(TOKENS)]
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens)
        keys.append(make_offload_key(parent, 0))
    return keys


def values(seed: int, number: int = BLOCKS) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (number, BLOCK), dtype=np.uint8)


class Engine:
    """The steps of vLLM's scheduler and worker around a manager."""

    def __init__(
        self,
        running: Sequence[RunningNode],
        transport: str,
        *,
        dtype: str = "bfloat16",
        weights: str = "1",
        ranks: int = 1,
        rows: int = 80,
        **other: Any,
    ) -> None:
        tier = {"type": "FarpoolTier", "module_path": "farpool.kv.vllm", "nodes": [node.address for node in running]}
        tier |= {"weights_id": weights, "transport": transport, "timeout": PATIENCE, **other}
        extra = {"spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": rows * BLOCK, "secondary_tiers": [tier]}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(TOKENS, ("layer.0", "layer.1"), 0),),
            worker_kv_bytes_per_block=BLOCK,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=f"farpool-test-{uuid.uuid4().hex[:12]}",
            model=OffloadingModelConfig("model", dtype),
            cache=OffloadingCacheConfig(TOKENS, 1),
            parallel=OffloadingParallelConfig(0, ranks, ranks, 1, 1, 1, 0, 1, None, True),
        )
        self.manager = OffloadingSpecFactory.create_spec(config).get_manager()
        self.region = self.manager.primary_tier._mmap_region
        self.tier = self.manager.secondary_tiers[0]
        self.memory = np.asarray(self.manager.primary_tier.get_kv_memoryview()).view(np.uint8)
        self.lock = self.manager.lock  # vLLM's rule: held for each call
        self.asked = 0
        self._submit_load, self.tier.submit_load = self.tier.submit_load, self._counted

    def _counted(self, job: Any) -> None:
        """Count the blocks that vLLM asks the tier to load."""
        self.asked += len(job.keys)
        self._submit_load(job)

    def close(self) -> None:
        self.memory = np.empty((0, BLOCK), np.uint8)
        self.manager.shutdown()

    def step(self, new: Sequence[str] = (), preempted: Sequence[str] = ()) -> None:
        with self.lock:
            self.manager.on_schedule_end(ScheduleEndContext(set(new), set(preempted)))

    def settle(self) -> None:
        """Step until no transfer is under way."""

        def idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        eventually(idle)

    def begin(self, keys: Sequence[Any], name: str = "") -> ReqContext:
        request = ReqContext(name or uuid.uuid4().hex)
        for number, key in enumerate(keys):
            request.set_offload_key_position(key, (number + 1) * TOKENS)
        with self.lock:
            self.manager.on_new_request(request)
        return request

    def end(self, request: ReqContext) -> None:
        with self.lock:
            self.manager.on_request_finished(request)

    def compute(self, keys: Sequence[Any], bytes_of: np.ndarray) -> None:
        """Do as if the model had computed blocks, and offload them."""
        request = self.begin(keys)
        self.offer(keys, bytes_of, request)
        self.end(request)

    def offer(self, keys: Sequence[Any], bytes_of: np.ndarray, request: ReqContext) -> None:
        with self.lock:
            offered = self.manager.prepare_store(keys, request)
            assert offered is not None
            for key, row in zip(offered.keys_to_store, offered.store_spec.block_ids, strict=True):
                self.memory[row] = bytes_of[list(keys).index(key)]
            if offered.keys_to_store:
                self.manager.complete_store(offered.keys_to_store, request)

    def save(self, keys: Sequence[Any], bytes_of: np.ndarray) -> None:
        self.compute(keys, bytes_of)
        self.settle()

    def forget(self) -> None:
        """Empty the primary tier, and overwrite its memory."""
        with self.lock:
            self.manager.reset_cache()
            self.manager.on_reset_flushed()
        self.memory[:] = 0xEE

    def ask(
        self,
        keys: Sequence[Any],
        bytes_of: np.ndarray,
        meanwhile: Callable[[], None] = lambda: None,
        computing: Callable[[int], None] | None = None,
        name: str = "",
    ) -> Facts:
        """Run a request as the scheduler does: look its prefix up until nothing is pending, then load the found blocks.

        `meanwhile` runs once, after the lookup that has found something and before the load begins; `computing`, if it
        is given, with the number of blocks that are missing, which are offered then.
        """
        request = self.begin(keys, name)
        facts = self.follow(request, keys, bytes_of, meanwhile)
        if computing is not None and facts["loaded"] < len(keys):
            computing(len(keys) - facts["loaded"])
            self.offer(keys[facts["loaded"] :], bytes_of[facts["loaded"] :], request)
        self.end(request)
        self.step()
        return facts

    def follow(
        self,
        request: ReqContext,
        keys: Sequence[Any],
        bytes_of: np.ndarray,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Facts:
        """Look a request's prefix up until nothing is pending, and load the found blocks."""
        deadline = time.monotonic() + PATIENCE
        found, retries, completed = 0, 0, False
        while not completed and time.monotonic() < deadline:
            answers: list[LookupResult] = []
            with self.lock:
                for key in keys:
                    answers.append(self.manager.lookup(key, request))
                    if answers[-1] is LookupResult.MISS:
                        break
            retries = max(retries, answers.count(LookupResult.RETRY))
            there = sum(answer in (LookupResult.HIT, LookupResult.HIT_PENDING) for answer in answers)
            if there and not found:
                meanwhile()
            found = max(found, there)
            completed = not any(answer in PENDING for answer in answers)
            if not completed:
                self.step([request.req_id])
                time.sleep(0.001)
        loaded = wrong = 0
        sources: set[str] = set()
        if completed:
            loaded = sum(answer is LookupResult.HIT for answer in answers)
            with self.lock:
                sources = {self.manager.get_load_source(key, request).value for key in keys[:loaded]}
                rows = self.manager.prepare_load(keys[:loaded], request).block_ids
                wrong = sum(not np.array_equal(self.memory[row], bytes_of[n]) for n, row in enumerate(rows))
                self.manager.complete_load(keys[:loaded], request)
        return {
            "found": found,
            "loaded": loaded,
            "wrong": wrong,
            "completed": completed,
            "retries": retries,
            "sources": sorted(sources),
        }


class Clock:
    """The clock of a tier's judge, which only computing and loading move: a load takes ten times as long."""

    def __init__(self, tier: Any) -> None:
        self.now = 0.0
        self._tier = tier
        tier._judge.clock = lambda: self.now
        self._load, tier._load = tier._load, self.load

    def compute(self, number: int) -> None:
        self.now += number

    def load(self, job: Any) -> Any:
        self.now += 10 * len(job.keys)
        return self._load(job)


@contextlib.contextmanager
def running(transport: str, nodes: Sequence[RunningNode], **settings: Any) -> Iterator[Engine]:
    engine = Engine(nodes, transport, **settings)
    try:
        yield engine
    finally:
        engine.close()


def saved(node: RunningNode) -> int:
    """Blocks that are on a node."""
    with Store(node.address, timeout=PATIENCE) as store:
        return sum(1 for _ in store.keys(b"fpk1"))


def round_trip(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(1), values(1)
        engine.save(keys, bytes_of)
        engine.forget()
        facts = engine.ask(keys, bytes_of)
        counted = engine.tier.get_stats()
        defined = engine.tier.build_metric_definitions({})
        undefined = [name for name in counted.metric_sections()[1] if name not in defined]
        return {"saved": saved(node), "counters": counted.reduce(), "undefined": undefined, **facts}


def stated_localities(transport: str) -> Facts:
    """How vLLM counts hits if the user sets the locality of the nodes."""
    told = {}
    with running_node() as node:
        for locality in ("LOCAL", "REMOTE"):
            with running(transport, [node], locality=locality) as engine:
                engine.save(hashed(1), values(1))
                engine.forget()
                told[locality] = engine.ask(hashed(1), values(1))["sources"]
    return told


def compressed(transport: str) -> Facts:
    """A round trip of payloads that a codec makes smaller."""
    with running_node() as node, running(transport, [node], codec="zstd") as engine:
        numbers = np.random.default_rng(17).normal(0, 1, (BLOCKS, BLOCK // 4)).astype(np.float32)
        keys, bytes_of = hashed(17), np.ascontiguousarray(numbers.view(np.uint16)[:, 1::2]).view(np.uint8)
        bytes_of = np.concatenate([bytes_of, bytes_of], axis=1)  # bfloat16, truncated
        engine.save(keys, bytes_of)
        engine.forget()
        return {"saved": saved(node), "sent": engine.tier._cache.stats()["save.bytes"], **engine.ask(keys, bytes_of)}


def partial_batch(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(2), values(2)
        engine.save(keys[: BLOCKS // 2], bytes_of)
        engine.forget()
        return {"saved": saved(node), **engine.ask(keys, bytes_of)}


def memory_smaller_than_prefix(transport: str) -> Facts:
    with running_node() as node:
        keys, bytes_of = hashed(18), values(18)
        with running(transport, [node]) as engine:
            engine.save(keys, bytes_of)
        with running(transport, [node], rows=MEMORY) as engine:
            return {"saved": saved(node), **engine.ask(keys, bytes_of), "asked": engine.asked}


def other_release(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        with mock.patch.object(vllm, "__version__", "0.1.0"), running(transport, [node]) as other:
            other.save(hashed(26), values(26))
        return {"saved": saved(node), **engine.ask(hashed(26), values(26))}


def damaged_in_host_memory(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        engine.save(hashed(24), values(24))
        with damaged_loads(), running(transport, [node]) as other:
            facts = other.ask(hashed(24), values(24))
            other.save(hashed(25), values(25))
            return {"saved": saved(node), **facts}


def preempted(transport: str) -> Facts:
    """One request that is looked up again after a load: its blocks are missing, until it is preempted."""
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(19), values(19)
        engine.save(keys, bytes_of)
        request = engine.begin(keys)
        loaded = []
        for names in ((), (), [request.req_id]):
            engine.forget()
            engine.step(preempted=names)
            loaded.append(engine.follow(request, keys, bytes_of)["loaded"])
        engine.end(request)
        return {"loaded": loaded}


def unknown_keys(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        return {"saved": saved(node), **engine.ask(hashed(3), values(3))}


def wrong_size(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(4), values(4)
        engine.ask(keys, bytes_of)  # the tier has its namespace
        with Store(node.address, timeout=PATIENCE) as store:
            for number, key in enumerate(engine.tier._keys(keys)):
                nbytes = BLOCK + (-64 if number % 2 else 64)
                store.put(key, pack_header(key, nbytes, nbytes) + bytes(nbytes))
        facts = engine.ask(keys, bytes_of)
        engine.save(keys, bytes_of)
        engine.forget()
        return {**facts, "mended": engine.ask(keys, bytes_of)["loaded"]}


def other_dtype(transport: str) -> Facts:
    with running_node() as node, running(transport, [node], dtype="float16") as other:
        other.save(hashed(5), values(5))
        with running(transport, [node]) as engine:
            return {"saved": saved(node), **engine.ask(hashed(5), values(5))}


def other_weights(transport: str) -> Facts:
    with running_node() as node, running(transport, [node], weights="2") as other:
        other.save(hashed(6), values(6))
        with running(transport, [node]) as engine:
            return {"saved": saved(node), **engine.ask(hashed(6), values(6))}


def node_killed_during_load(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(7), values(7)
        engine.save(keys, bytes_of)
        engine.forget()
        number = saved(node)
        facts = engine.ask(keys, bytes_of, meanwhile=node.kill)
        engine.compute(keys, bytes_of)  # the engine continues without the node
        engine.settle()
        return {"saved": number, "without_node": engine.ask(keys, bytes_of)["loaded"], **facts}


def deadline_passed(transport: str) -> Facts:
    with running_node() as node, running(transport, [node], timeout=0.4) as engine:
        keys, bytes_of = hashed(8), values(8)
        engine.save(keys, bytes_of)
        engine.forget()
        number = saved(node)
        facts = engine.ask(keys, bytes_of, meanwhile=node.stop)
        reported = engine.memory.copy()
        node.cont()
        stats(node.address)  # it answers again; it sends its answers to earlier requests first
        time.sleep(0.2)
        late = int((engine.memory != reported).any(axis=1).sum())
        again: Facts = {}

        def back() -> bool:
            engine.forget()
            again.update(engine.ask(keys, bytes_of))
            return again["loaded"] == BLOCKS

        eventually(back)
        wrong = facts["wrong"] + again["wrong"]
        return {"saved": number, **facts, "wrong": wrong, "later": again["loaded"], "late_writes": late}


def all_loads_fail(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(9), values(9)
        engine.save(keys, bytes_of)
        engine.forget()
        number = saved(node)
        damaged = 0
        with open(node.folder / "objects-0.data", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            for value in bytes_of:
                at = memory.find(value.tobytes())
                damaged += at >= 0
                memory[at + BLOCK // 2] ^= 1
        facts = engine.ask(keys, bytes_of)
        # Another request that needs the same blocks ends, too; the blocks that were computed again are saved and
        # loaded.
        second = engine.ask(keys, bytes_of)
        engine.save(keys, bytes_of)
        engine.forget()
        mended = engine.ask(keys, bytes_of)
        wrong = facts["wrong"] + second["wrong"] + mended["wrong"]
        completed = facts["completed"] and second["completed"] and mended["completed"]
        told = {"damaged": damaged, "mended": mended["loaded"]}
        return {"saved": number, **facts, "wrong": wrong, "completed": completed, **told}


def offered_again(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        keys, bytes_of = hashed(10), values(10)
        engine.save(keys, bytes_of)
        before = stats(node.address)
        engine.forget()
        engine.save(keys, bytes_of)
        after = stats(node.address)
        # Requests are bytes, too: of payloads there are whole blocks or none.
        again = (after["bytes_in"] - before["bytes_in"]) // BLOCK * BLOCK
        return {"saved": saved(node), "bytes_again": again, "puts_again": after["puts"] - before["puts"]}


def shutdown_with_jobs_in_flight(transport: str) -> Facts:
    with running_node() as node:
        with running(transport, [node]) as engine:
            engine.save(hashed(11), values(11))
        before = {thread.ident for thread in threading.enumerate()}
        engine = Engine([node], transport, timeout=1.0)
        engine.ask(hashed(11), values(11))
        engine.forget()
        request = engine.begin(hashed(11))
        with node.suspended():
            with engine.lock:
                for key in hashed(11):
                    engine.manager.lookup(key, request)
            engine.step([request.req_id])
            for seed in range(12, 15):
                engine.compute(hashed(seed), values(seed))
            pending = engine.manager.has_pending_work()
            engine.close()
        left = [thread for thread in threading.enumerate() if thread.ident not in before and thread.is_alive()]
        return {
            "pending": pending,
            "completed": True,
            "threads_left": len(left),
            "views_left": int(engine.region.mmap_obj is not None),
        }


def fork(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine, tempfile.TemporaryDirectory() as folder:
        keys, bytes_of = hashed(15), values(15)
        engine.save(keys, bytes_of)
        told = Path(folder) / "facts"

        def child() -> None:
            with running(transport, [node]) as own:
                told.write_text(json.dumps(own.ask(keys, bytes_of)))

        in_forked_child(child)
        number = saved(node)
        engine.forget()
        mine, theirs = engine.ask(keys, bytes_of), json.loads(told.read_text())
        return {"saved": number, **theirs, "wrong": mine["wrong"] + theirs["wrong"], "parent": mine["loaded"]}


def concurrent_threads(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        found: list[Facts] = []

        def use(seed: int) -> None:
            keys, bytes_of = hashed(seed), values(seed)
            engine.save(keys, bytes_of)
            saving.wait(PATIENCE)
            if seed == 20:
                engine.forget()
            saving.wait(PATIENCE)
            found.append(engine.ask(keys, bytes_of))

        saving = threading.Barrier(4)
        threads = [threading.Thread(target=use, args=(seed,)) for seed in range(20, 24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        return {"saved": saved(node), **{name: sum(one[name] for one in found) for name in ("loaded", "wrong")}}


def slow_link_is_bypassed(transport: str, **settings: Any) -> Facts:
    with running_node() as node, running(transport, [node], **settings) as engine:
        clock = Clock(engine.tier)
        facts: Facts = {"loaded": 0, "wrong": 0, "told": 0, "completed": True}
        for turn, seed in [
            *((turn, seed) for seed in range(8) for turn in range(2)),
            *((2, seed) for seed in range(4)),
        ]:
            name = f"slow link {uuid.uuid4().hex}"
            told = engine.ask(hashed(seed), values(seed), computing=clock.compute, name=name)
            engine.settle()
            engine.forget()
            facts["loaded"] += told["loaded"]
            facts["wrong"] += told["wrong"]
            facts["completed"] &= told["completed"] and (turn > 0 or not told["found"])
            facts["told"] += any(entry.reasons == {"bypassed": BLOCKS} for entry in recorded(name))
        counted = engine.tier.get_stats().reduce()
        return {**facts, "bypassed": counted.get("vllm:kv_offload_farpool_blocks:('load', 'bypassed')", 0)}


def nodes_are_told_the_cost(transport: str) -> Facts:
    with running_node() as node, running(transport, [node]) as engine:
        clock, told = Clock(engine.tier), []
        for seed in range(9):
            before = costs(node)
            engine.ask(hashed(seed), values(seed), computing=clock.compute)
            engine.settle()
            engine.forget()
            told.append(sorted({round(cost, 3) for key, cost in costs(node).items() if key not in before}))
        return {"first": told[0], "last": told[-1]}


def hold_out_off(transport: str) -> Facts:
    return slow_link_is_bypassed(transport, hold_out=False)


def hash_seeds(transport: str) -> Facts:
    """Hashes and keys, most of which must not depend on PYTHONHASHSEED."""
    tokens = list(range(1000, 1000 + TOKENS))
    facts: Facts = {"vectors": {}, "own": {}}
    for function in (sha256_cbor, sha256):
        # The engine's own root, which PYTHONHASHSEED changes; and blocks after the published one, which it must not.
        kv_cache_utils.init_none_hash(function)
        facts["own"][function.__name__] = kv_cache_utils.NONE_HASH.hex()
        root = function(kv_cache_utils.DEFAULT_NONE_HASH_SEED)
        first = kv_cache_utils.hash_block_tokens(function, root, tokens)
        salted = kv_cache_utils.hash_block_tokens(function, first, [5] * TOKENS, (("cache_salt", "alice"),))
        facts["vectors"][function.__name__] = [root.hex(), first.hex(), salted.hex()]
    chains = [bytes.fromhex(chain) for chain in facts["vectors"]["sha256"][1:]]
    facts["keys"] = [block_key(bytes(range(16)), chain, 1, 2).hex() for chain in chains]
    with running_node() as node, running(transport, [node]) as engine:
        request = engine.begin([])  # the tier takes the seed when vLLM has chosen it
        engine.end(request)
        facts["namespace"] = engine.tier._cache.namespace.seed, engine.tier._cache.digest.hex()
    return facts


def settings(transport: str) -> Facts:
    """Error messages for wrong settings, before any node is asked."""
    wrong: dict[str, dict[str, Any]] = {
        "unknown": {"node": "tcp://127.0.0.1:1"},
        "timeout": {"timeout": -1},
        "type": {"replicas": "two"},
        "locality": {"locality": "far"},
        "weights": {"weights": ""},
        "codec": {"codec": "rar"},
        "lossy": {"codec": "int8"},
        "transport": {"transport": "carrier pigeon"},
        "nodes": {"nodes": []},
    }
    said = {}
    for name, given in wrong.items():
        try:
            Engine([], **{"transport": transport, "nodes": ["tcp://127.0.0.1:1"], **given}).close()
        except ConfigError as error:
            said[name] = str(error)
    with mock.patch("farpool.kv.engines.vllm.model_parallel_is_initialized", return_value=True):
        Engine([], transport, nodes=["tcp://127.0.0.1:1"]).close()  # a single rank may be its own scheduler
        try:
            Engine([], transport, nodes=["tcp://127.0.0.1:1"], ranks=2).close()
        except ConfigError as error:
            said["schedulers"] = str(error)
    return said


def main(transport: str, *cases: str) -> None:
    kv_cache_utils.init_none_hash(sha256)
    found: dict[str, Any] = {}
    for name in cases or (
        *(name for name in (*CASES, *OF_ENGINES, *OF_HOST_MEMORY) if name != "hash_seeds"),
        "compressed",
        "preempted",
        "stated_localities",
        "settings",
    ):
        began = time.monotonic()
        try:
            found[name] = globals()[name](transport)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
        found[name]["seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
