"""The cases of the contract with LMCache's own storage manager, or an adapter alone, over real nodes.

``python -m tests.kv.connectors.programs.lmcache_l2 TRANSPORT CASE ...`` prints the facts of all cases as one line of
JSON; a case that fails has its traceback in their place.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import lmcache
from farpool.kv.engines.lmcache import FarpoolL2
from farpool.kv.header import pack_header
from farpool.kv.journal import recorded
from farpool.kv.keys import KEY_MAGIC
from tests.forking import in_forked_child
from tests.kv.connectors.cases import BLOCKS, MEMORY
from tests.kv.connectors.programs.costs import costs
from tests.kv.connectors.programs.faults import damaged_loads
from tests.nodes import PATIENCE, eventually, stats

CHUNK = 256
SHAPE = torch.Size([2, 2, CHUNK, 32])
NBYTES = SHAPE.numel() * 2
RANK = ObjectKey.ComputeKVRank(1, 0, 1, 0)
HASHER = TokenHasher(CHUNK)
SHORT = 0.5
"""Deadline of cases in which nothing arrives."""
LONG = PATIENCE
"""Deadline of all others, so that a slow machine does not count as a node that is late."""
PARAMS: dict[str, Any] = {"weights_id": "one", "timeout": LONG}
"""Settings of each adapter of which a case says nothing else; `main` adds the transport."""


def chunks(count: int = BLOCKS, first: int = 0) -> list[bytes]:
    """Return the hashes of chunks of a sequence that LMCache's server makes."""
    hashes: list[bytes] = HASHER.compute_chunk_hashes(list(range(first, first + CHUNK * count)))
    return hashes


def object_keys(count: int = BLOCKS, first: int = 0, **fields: Any) -> list[ObjectKey]:
    return [
        ObjectKey(**{"chunk_hash": one, "model_name": "tiny", "kv_rank": RANK, **fields})
        for one in chunks(count, first)
    ]


def content(key: ObjectKey, nbytes: int = NBYTES) -> bytes:
    """Bytes that only this key has."""
    return hashlib.shake_128(repr(key).encode()).digest(nbytes)


def layout(dtype: torch.dtype = torch.bfloat16, shape: torch.Size = SHAPE) -> MemoryLayoutDesc:
    return MemoryLayoutDesc([shape], [dtype])


def spec_of(node: RunningNode | str, *, adapter: dict[str, Any] | None = None, **params: Any) -> str:
    address = node if isinstance(node, str) else node.address
    given = {"nodes": [address], **PARAMS, **params}
    plugin = {"type": "plugin", "module_path": "farpool.kv.lmcache", "class_name": "FarpoolL2"}
    return json.dumps({**plugin, "adapter_params": given, **(adapter or {})})


def config_of(spec: str) -> Any:
    return parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[spec]))


def objects_on(node: RunningNode) -> list[bytes]:
    """Keys of the blocks on a node; the descriptions of namespaces are not among them."""
    with Store(node.address, timeout=PATIENCE) as store:
        return list(store.keys(KEY_MAGIC))


def written(obj: Any, data: bytes) -> None:
    memoryview(obj.byte_array).cast("B")[:] = data


def read(obj: Any) -> bytes:
    return bytes(memoryview(obj.byte_array).cast("B"))


class Engine:
    """LMCache's storage manager with farpool as its only second level."""

    def __init__(self, spec: str, dtype: torch.dtype = torch.bfloat16, memory_bytes: int = 64 << 20) -> None:
        memory = L1MemoryManagerConfig(size_in_bytes=memory_bytes, use_lazy=False, shm_name="")
        self.manager = StorageManager(
            StorageManagerConfig(L1ManagerConfig(memory), EvictionConfig("LRU"), config_of(spec))
        )
        ((_, self.adapter),) = self.manager.l2_adapters()
        self.layout = layout(dtype)
        self.found = self.asked = 0
        query = self.adapter.query_lookup_and_lock_result

        def counted(task: int) -> Bitmap | None:
            bitmap = query(task)
            self.found += 0 if bitmap is None else bitmap.popcount()
            return bitmap

        self.adapter.query_lookup_and_lock_result = counted
        load = self.adapter.submit_load_task

        def asked(keys: list[ObjectKey], objects: list[Any]) -> int:
            self.asked += len(keys)
            return int(load(keys, objects))

        self.adapter.submit_load_task = asked
        self._offered = 0
        self._ended = 0
        submit, pop = self.adapter.submit_store_task, self.adapter.pop_completed_store_tasks
        sizes: dict[int, int] = {}

        def submitted(keys: list[ObjectKey], objects: list[Any]) -> int:
            task = int(submit(keys, objects))
            sizes[task] = len(keys)
            return task

        def popped() -> dict[int, Any]:
            done: dict[int, Any] = pop()
            self._ended += sum(sizes.pop(task) for task in done)
            return done

        self.adapter.submit_store_task, self.adapter.pop_completed_store_tasks = submitted, popped

    def save(self, keys: list[ObjectKey]) -> None:
        """Write chunks to L1, wait until they are in L2 as well (or could not be), and empty L1."""
        reserved = self.manager.reserve_write(keys, self.layout)
        for key in keys:
            written(reserved[key], content(key))
        self.manager.finish_write(keys)
        self._offered += len(keys)
        eventually(lambda: self._ended == self._offered and self._stores_idle())
        self.manager.clear(force=True)

    def _stores_idle(self) -> bool:
        told = self.manager.report_status()["store_controller"]
        return told["pending_keys_count"] == 0 and told["in_flight_task_count"] == 0

    def load(self, keys: list[ObjectKey]) -> tuple[int, int, bool]:
        """Prefetch chunks: how many were loaded from L2, how many of these are wrong, and whether the request ended."""
        self.found = 0
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, self.layout)])
        handle = self.manager.submit_prefetch_task(spec)
        if not self.manager.wait_prefetch_status(handle, PATIENCE):
            return 0, 0, False
        result = self.manager.query_prefetch_status(handle)
        loaded = result.hit_cells[0].gather(keys)
        assert result.l1_hit_count == 0
        wrong = 0
        if loaded:
            with self.manager.read_prefetched_results(loaded) as objects:
                wrong = sum(read(one) != content(key) for key, one in zip(loaded, objects, strict=True))
            self.manager.finish_read_prefetched(loaded)
        self.manager.clear(force=True)
        return result.l2_hit_count, wrong, True

    def close(self) -> None:
        self.manager.close()


@contextmanager
def engine(node: RunningNode, dtype: torch.dtype = torch.bfloat16, **params: Any) -> Iterator[Engine]:
    own = Engine(spec_of(node, **params), dtype)
    try:
        yield own
    finally:
        own.close()


class Adapter:
    """An adapter alone, as LMCache's factory makes it, with calls that wait for their results."""

    def __init__(self, spec: str) -> None:
        self.l2: FarpoolL2 = create_l2_adapter(config_of(spec).adapters[0])
        self._stored: dict[int, Any] = {}
        self._lock = threading.Lock()

    def objects(
        self, keys: list[ObjectKey], *, filled: bool, dtype: torch.dtype = torch.bfloat16
    ) -> list[TensorMemoryObj]:
        made = [memory_object(dtype) for _ in keys]
        for key, one in zip(keys, made, strict=True):
            written(one, content(key, one.get_size()) if filled else bytes(one.get_size()))
        return made

    def store(self, keys: list[ObjectKey], objects: list[Any] | None = None) -> Any:
        task = self.l2.submit_store_task(keys, objects or self.objects(keys, filled=True))

        def popped() -> bool:
            with self._lock:
                self._stored.update(self.l2.pop_completed_store_tasks())
                return task in self._stored

        eventually(popped)
        return self._stored[task]

    def lookup(self, keys: list[ObjectKey], described: MemoryLayoutDesc | None = None) -> int:
        hints = {key.object_group_id: described or layout() for key in keys}
        task = self.l2.submit_lookup_and_lock_task(keys, hints)
        return awaited(lambda: self.l2.query_lookup_and_lock_result(task)).popcount()

    def load(self, keys: list[ObjectKey]) -> tuple[int, int]:
        """How many were loaded, and how many of these are wrong."""
        into = self.objects(keys, filled=False)
        task = self.l2.submit_load_task(keys, into)
        bitmap = awaited(lambda: self.l2.query_load_result(task))
        loaded = bitmap.get_indices_list()
        return len(loaded), sum(read(into[n]) != content(keys[n]) for n in loaded)


def memory_object(dtype: torch.dtype = torch.bfloat16, shape: torch.Size = SHAPE) -> TensorMemoryObj:
    raw = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    meta = MemoryObjMetadata(shape, dtype, raw.data_ptr(), raw.numel(), 1, fmt=MemoryFormat.KV_2LTD)
    return TensorMemoryObj(raw, meta, None)


def awaited(query: Callable[[], Bitmap | None]) -> Bitmap:
    found: list[Bitmap] = []

    def came() -> bool:
        result = query()
        if result is not None:
            found.append(result)
        return bool(found)

    eventually(came)
    return found[0]


@contextmanager
def adapter(node: RunningNode, **params: Any) -> Iterator[Adapter]:
    own = Adapter(spec_of(node, **params))
    try:
        yield own
    finally:
        own.l2.close()


def moved_through(keys: list[ObjectKey], saved: list[ObjectKey]) -> dict[str, Any]:
    """Save and load by a storage manager that has forgotten in between which objects it saved."""
    with running_node("256MiB") as node, engine(node) as one:
        if saved:
            one.save(saved)
        loaded, wrong, _ = one.load(keys)
        return {"saved": len(objects_on(node)), "found": one.found, "loaded": loaded, "wrong": wrong}


def round_trip() -> dict[str, Any]:
    return moved_through(object_keys(), object_keys())


def partial_batch() -> dict[str, Any]:
    return moved_through(object_keys(), object_keys()[: BLOCKS // 2])


def memory_smaller_than_prefix() -> dict[str, Any]:
    keys = object_keys()
    with running_node() as node:
        with engine(node) as one:
            one.save(keys)
        other = Engine(spec_of(node), memory_bytes=MEMORY * NBYTES)
        try:
            _, wrong, completed = other.load(keys)
            return {"saved": len(objects_on(node)), "wrong": wrong, "completed": completed, "asked": other.asked}
        finally:
            other.close()


def other_release() -> dict[str, Any]:
    keys = object_keys()
    with running_node() as node:
        with mock.patch.object(lmcache, "_RELEASE", "0.1.0"), engine(node) as one:
            one.save(keys)
        with engine(node) as other:
            loaded, wrong, _ = other.load(keys)
            return {"saved": len(objects_on(node)), "found": other.found, "loaded": loaded, "wrong": wrong}


def damaged_in_host_memory() -> dict[str, Any]:
    keys = object_keys()
    with running_node() as node:
        with engine(node) as one:
            one.save(keys)
        with damaged_loads(), engine(node) as other:
            loaded, wrong, completed = other.load(keys)
            other.save(object_keys(first=50_000))
            told = other.adapter.report_status()
            return {
                "saved": len(objects_on(node)),
                "found": other.found,
                "loaded": loaded,
                "wrong": wrong,
                "completed": completed,
                "told": [told["is_healthy"], told["probe"]],
            }


def unknown_keys() -> dict[str, Any]:
    return moved_through(object_keys(), [])


def saved_on(node: RunningNode) -> list[ObjectKey]:
    """Save all blocks by an adapter that stands for another program."""
    keys = object_keys()
    with adapter(node) as writer:
        assert writer.store(keys).is_successful()
    return keys


def _replaced(value: Callable[[bytes], bytes]) -> dict[str, Any]:
    """Load after other values have been put under the keys of the saved blocks."""
    with running_node("256MiB") as node, engine(node) as one:
        one.save(object_keys())
        with Store(node.address, timeout=PATIENCE) as store:
            for key in (saved := objects_on(node)):
                store.drop(key)
                store.put(key, value(key))
        loaded, wrong, completed = one.load(object_keys())
        return {"saved": len(saved), "found": one.found, "loaded": loaded, "wrong": wrong, "completed": completed}


def wrong_size() -> dict[str, Any]:
    smaller = _replaced(lambda key: pack_header(key, NBYTES - 2, NBYTES - 2) + bytes(NBYTES - 2))
    larger = _replaced(lambda key: pack_header(key, NBYTES + 2, NBYTES + 2) + bytes(NBYTES + 2))
    assert smaller == larger
    return {name: smaller[name] for name in ("loaded", "wrong", "completed")}


def all_loads_fail() -> dict[str, Any]:
    foreign = pack_header(bytes(64), NBYTES, NBYTES)
    return _replaced(lambda key: foreign + bytes(NBYTES))


def _disagreeing(dtype: torch.dtype = torch.bfloat16, **params: Any) -> dict[str, Any]:
    with running_node("256MiB") as node:
        keys = saved_on(node)
        with engine(node, dtype, **params) as reader:
            loaded, wrong, _ = reader.load(keys)
            return {"saved": len(objects_on(node)), "found": reader.found, "loaded": loaded, "wrong": wrong}


def other_dtype() -> dict[str, Any]:
    return _disagreeing(torch.float16)


def other_weights() -> dict[str, Any]:
    return _disagreeing(weights_id="another")


def before_load(one: Engine, act: Callable[[], None]) -> None:
    """Do something between the lookup and the load of the next request."""
    submit = one.adapter.submit_load_task

    def acting(keys: list[ObjectKey], objects: list[Any]) -> int:
        one.adapter.submit_load_task = submit
        act()
        return int(submit(keys, objects))

    one.adapter.submit_load_task = acting


def node_killed_during_load() -> dict[str, Any]:
    with running_node("256MiB") as node, engine(node, timeout=SHORT * 4) as one:
        keys = saved_on(node)
        saved = len(objects_on(node))
        before_load(one, node.kill)
        _, wrong, completed = one.load(keys)
        return {"saved": saved, "found": one.found, "wrong": wrong, "completed": completed}


def deadline_passed() -> dict[str, Any]:
    with running_node("256MiB") as node, engine(node, timeout=SHORT) as one:
        keys = saved_on(node)
        saved = len(objects_on(node))
        eventually(lambda: one.load(keys)[0] == BLOCKS)  # connections are there
        targets: list[tuple[memoryview, bytes]] = []
        submit, query = one.adapter.submit_load_task, one.adapter.query_load_result
        given: list[Any] = []

        def submitted(own: list[ObjectKey], objects: list[Any]) -> int:
            given.extend(memoryview(obj.byte_array).cast("B") for obj in objects)
            return int(submit(own, objects))

        def queried(task: int) -> Bitmap | None:
            bitmap = query(task)
            if bitmap is not None and not targets:
                targets.extend((view, bytes(view)) for view in given)
            return bitmap

        one.adapter.submit_load_task, one.adapter.query_load_result = submitted, queried
        before_load(one, node.stop)
        loaded, wrong, completed = one.load(keys)
        node.cont()
        stats(node.address)  # it answers again
        time.sleep(0.3)
        late = sum(bytes(view) != then for view, then in targets)
        assert len(targets) == BLOCKS
        one.adapter.submit_load_task, one.adapter.query_load_result = submit, query
        later = 0

        def again() -> bool:
            nonlocal later
            later, fault, _ = one.load(keys)
            assert fault == 0
            return later == BLOCKS

        eventually(again)
        del targets[:], given[:]
        return {
            "saved": saved,
            "loaded": loaded,
            "wrong": wrong,
            "completed": completed,
            "later": later,
            "late_writes": late,
        }


def offered_again() -> dict[str, Any]:
    with running_node("256MiB") as node:
        keys = saved_on(node)
        before = stats(node.address)["bytes_in"]
        with engine(node) as second:
            second.save(keys)
            again = second.adapter.report_status().get("save.bytes", 0)
        requests = stats(node.address)["bytes_in"] - before
        assert requests < NBYTES  # lookups, not one payload
        return {"saved": len(objects_on(node)), "bytes_again": again}


def slow_link_is_bypassed(**params: Any) -> dict[str, Any]:
    with running_node("256MiB") as node, engine(node, **params) as one:
        now = 0.0
        one.adapter._judge.clock = lambda: now
        fetch = one.adapter._loads.load

        def load(keys: Any, *arguments: Any, **named: Any) -> Any:
            nonlocal now
            now += 10 * len(keys)
            return fetch(keys, *arguments, **named)

        one.adapter._loads.load = load
        facts: dict[str, Any] = {"loaded": 0, "told": 0, "wrong": 0, "completed": True}
        for sequence in [*(turn // 2 for turn in range(16)), *range(4)]:
            keys = object_keys(first=sequence * 10_000)
            before = len(recorded(keys[0].chunk_hash.hex()))
            loaded, wrong, completed = one.load(keys)
            steps = recorded(keys[0].chunk_hash.hex())[before:]
            if loaded < BLOCKS:
                now += BLOCKS
                one.save(keys)
            facts["loaded"] += loaded
            facts["wrong"] += wrong
            facts["told"] += any(entry.reasons == {"bypassed": BLOCKS} for entry in steps)
            facts["completed"] &= completed
        eventually(lambda: not one.adapter._lookups._pins)  # nothing stays locked
        return {**facts, "bypassed": one.adapter.report_status().get("load.bypassed", 0)}


def nodes_are_told_the_cost() -> dict[str, Any]:
    with running_node("256MiB") as node, engine(node) as one:
        now, told = 0.0, []
        one.adapter._judge.clock = lambda: now
        for sequence in range(9):
            before = costs(node)
            keys = object_keys(first=sequence * 10_000)
            assert one.load(keys) == (0, 0, True)
            now += BLOCKS
            one.save(keys)
            told.append(sorted({round(cost, 3) for key, cost in costs(node).items() if key not in before}))
        assert not one.adapter._places
        return {"first": told[0], "last": told[-1]}


def hold_out_off() -> dict[str, Any]:
    return slow_link_is_bypassed(hold_out=False)


def own_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("farpool-kv_")]


def shutdown_with_jobs_in_flight() -> dict[str, Any]:
    with running_node("256MiB") as node:
        one = Adapter(spec_of(node, timeout=SHORT))
        keys = object_keys()
        assert one.store(keys).is_successful()
        assert one.lookup(keys) == BLOCKS
        assert one.load(keys) == (BLOCKS, 0)
        node.stop()
        given = [one.objects(object_keys(first=n), filled=True) for n in range(1, 9)]
        for number, objects in enumerate(given, 1):
            one.l2.submit_store_task(object_keys(first=number), objects)
            one.l2.submit_load_task(keys, objects)
            one.l2.submit_lookup_and_lock_task(keys, {0: layout()})
            one.l2.submit_unlock(keys)
        held = [weakref.ref(obj) for objects in given for obj in objects]
        assert own_threads()
        closing = threading.Thread(target=one.l2.close, daemon=True)
        closing.start()
        closing.join(PATIENCE)
        completed = not closing.is_alive()
        one.l2.submit_unlock(keys)  # must not fail
        assert one.load(keys) == (0, 0) if completed else True
        del given, objects
        gc.collect()
        left = own_threads()
        node.cont()
        return {
            "completed": completed,
            "threads_left": len(left),
            "views_left": sum(ref() is not None for ref in held),
        }


def fork() -> dict[str, Any]:
    with running_node("256MiB") as node, adapter(node) as one, adapter(node) as unused:
        keys, more = object_keys(), object_keys(first=7)
        assert one.store(keys).is_successful()
        assert one.load(keys) == (BLOCKS, 0)

        def child() -> None:
            for own in (one, unused):
                assert own.lookup(keys) == BLOCKS
                assert own.load(keys) == (BLOCKS, 0)
            assert one.store(more).is_successful()
            fresh = Adapter(spec_of(node))
            assert fresh.lookup(more) == BLOCKS
            assert fresh.load(more) == (BLOCKS, 0)

        in_forked_child(child, PATIENCE)
        loaded, wrong = one.load(keys)
        assert one.load(more) == (BLOCKS, 0)
        return {"saved": len(objects_on(node)) - len(more), "loaded": loaded, "wrong": wrong}


def concurrent_threads() -> dict[str, Any]:
    with running_node("256MiB") as node, adapter(node) as one:
        facts = {"loaded": 0, "wrong": 0}
        lock = threading.Lock()
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                keys = object_keys(first=1000 * number)
                assert one.store(keys).is_successful()
                assert one.lookup(keys) == BLOCKS
                loaded, wrong = one.load(keys)
                one.l2.submit_unlock(keys)
                with lock:
                    facts["loaded"] += loaded
                    facts["wrong"] += wrong
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        if errors:
            raise errors[0]
        return {"saved": len(objects_on(node)), **facts}


def hash_seeds() -> dict[str, Any]:
    with running_node("256MiB") as node, adapter(node) as one:
        assert one.store(object_keys(2)).is_successful()
        return {
            "keys": sorted(key.hex() for key in objects_on(node)),
            "vectors": [HASHER.none_hash.hex(), *(one.hex() for one in chunks(2, 1000))],
        }


def every_field_of_a_key_counts() -> dict[str, Any]:
    """Keys that differ in one field, each stored with bytes of its own: how many objects, and how many wrong."""
    fields: list[dict[str, Any]] = [
        {}, {"model_name": "other"}, {"cache_salt": "alice"}, {"cache_salt": "bob"}, {"object_group_id": 1},
        {"kv_rank": ObjectKey.ComputeKVRank(2, 0, 2, 0)}, {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
        {"kv_rank": ObjectKey.ComputeKVRank(258, 0, 1, 0)}, {"chunk_hash": b"\1" * 64}, {"chunk_hash": b"\1" * 32},
    ]  # fmt: skip
    keys = [object_keys(1, **one)[0] for one in fields]
    with running_node("256MiB") as node, adapter(node) as one:
        assert one.store(keys).is_successful()
        loaded, wrong = one.load(keys)
        return {"saved": len(objects_on(node)), "found": one.lookup(keys), "loaded": loaded, "wrong": wrong}


def results_and_events() -> dict[str, Any]:
    with running_node("256MiB") as node, adapter(node) as one:
        keys = object_keys(2)
        fds = [
            one.l2.get_store_event_fd(), one.l2.get_lookup_and_lock_event_fd(), one.l2.get_load_event_fd()
        ]  # fmt: skip
        task = one.l2.submit_store_task(keys, one.objects(keys, filled=True))
        popped: dict[int, Any] = {}

        def stored() -> bool:
            popped.update(one.l2.pop_completed_store_tasks())
            return task in popped

        eventually(stored)
        look = one.l2.submit_lookup_and_lock_task(keys, {0: layout()})
        awaited(lambda: one.l2.query_lookup_and_lock_result(look))
        load = one.l2.submit_load_task(keys, one.objects(keys, filled=False))
        awaited(lambda: one.l2.query_load_result(load))
        plain = one.l2.submit_lookup_and_lock_task(keys, {})
        return {
            "fds": len(set(fds)),
            "bytes": popped[task].bytes_transferred(),
            "bytes_again": one.store(keys).bytes_transferred(),
            "twice": [
                one.l2.pop_completed_store_tasks(),
                one.l2.query_lookup_and_lock_result(look),
                one.l2.query_load_result(load),
            ],
            "unknown": one.l2.query_load_result(10**9),
            "nothing": one.store([]).is_successful(),
            "without_hint": awaited(lambda: one.l2.query_lookup_and_lock_result(plain)).popcount(),
        }


def locks() -> dict[str, Any]:
    """Pins of an object on the node: after lookups, after unlocks, when the time is over; and who waits."""

    def pins() -> int:
        with Store(node.address, timeout=PATIENCE) as store:
            told = store.stat(objects_on(node)[0])
            assert told is not None
            return told.pins

    with running_node("256MiB") as node, adapter(node, lock_ttl=100.0) as one, adapter(node, lock_ttl=0.2) as short:
        keys = object_keys(1)
        assert one.store(keys).is_successful()
        assert one.lookup(keys) == 1
        locked = pins()
        assert one.lookup(keys) == 1  # of a second request, which the first one's unlock leaves locked
        one.l2.submit_unlock(keys)
        assert one.l2._lookups.drain(PATIENCE)
        still = pins()
        one.l2.submit_unlock(keys)
        eventually(lambda: pins() == 0)
        assert short.lookup(keys) == 1
        eventually(lambda: pins() == 0)
        other = object_keys(1, first=7)
        assert short.store(other).is_successful()
        assert short.lookup(other) == 1
        remembered = len(short.l2._locks._ends)  # without the one that has ended by itself
        one.l2.submit_unlock(object_keys(3))  # of which none is locked
        with node.suspended():
            began = time.monotonic()
            one.l2.submit_unlock(keys)
            at_once = time.monotonic() - began < LONG / 2
        return {"locked": locked, "still": still, "remembered": remembered, "at_once": at_once}


class Told(L2AdapterListener):  # type: ignore[misc]
    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.events.append(("stored", len(keys)))

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.events.append(("accessed", len(keys)))

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.events.append(("deleted", len(keys)))


def accounts() -> dict[str, Any]:
    """Reports to LMCache's quotas and eviction, also about objects that disappeared without them."""
    with running_node("256MiB") as node, adapter(node, capacity_bytes=100 * NBYTES) as one:
        told = Told()
        one.l2.register_listener(told)
        alice, bob = object_keys(4, cache_salt="alice"), object_keys(2, cache_salt="bob")
        one.store(alice + bob)
        one.store(alice)
        one.load(alice)
        usage = one.l2.get_usage()
        by_salt = {salt: used // NBYTES for salt, used in usage.bytes_by_cache_salt.items()}
        one.l2.delete(alice[:3])
        left = len(objects_on(node))
        with Store(node.address, timeout=PATIENCE) as store:
            for key in objects_on(node):
                store.drop(key)  # as an eviction in the node
        one.store(bob)  # a second time: counted once
        again = one.l2.get_usage().total_bytes_used // NBYTES
        found = one.lookup(alice)
        return {
            "by_salt": by_salt,
            "fraction": usage.usage_fraction,
            "left": left,
            "again": again,
            "found": found,
            "at_last": one.l2.get_usage().total_bytes_used // NBYTES,
            "events": told.events,
        }


def quotas() -> dict[str, Any]:
    """LMCache's own eviction by salt: objects without a quota are deleted from the nodes, the others stay."""
    isolated = {"eviction": {"eviction_policy": "IsolatedLRU"}}
    with running_node("256MiB") as node:
        own = Engine(spec_of(node, adapter=isolated))
        try:
            own.manager.quota_manager.set_quota("alice", 1 << 30)
            own.save(object_keys(4, cache_salt="alice"))
            own.save(object_keys(4, cache_salt="bob"))
            eventually(lambda: "bob" not in own.adapter.get_usage().bytes_by_cache_salt)
            loaded, wrong, _ = own.load(object_keys(4, cache_salt="alice"))
            return {"saved": len(objects_on(node)), "loaded": loaded, "wrong": wrong}
        finally:
            own.close()


def without_nodes() -> dict[str, Any]:
    """No node at all: each request ends, and finds nothing."""
    own = Engine(spec_of("tcp://127.0.0.1:9", timeout=SHORT))
    try:
        own.save(object_keys())
        loaded, _, completed = own.load(object_keys())
        return {"loaded": loaded, "completed": completed, "healthy": own.adapter.report_status()["is_healthy"]}
    finally:
        own.close()


def serde() -> dict[str, Any]:
    """LMCache's own fp8 conversion in front of the adapter: values that fp8 can represent are unchanged."""
    fp8 = {"serde": {"type": "fp8"}}
    keys = object_keys(4)
    with running_node("256MiB") as node:
        facts: dict[str, Any] = {}
        for name in ("writer", "reader"):
            own = Engine(spec_of(node, adapter=fp8, layout="fp8 of 2x2x256x32 bfloat16", kv_dtype="fp8_e4m3"))
            try:
                if name == "writer":
                    for number, (_, obj) in enumerate(own.manager.reserve_write(keys, own.layout).items()):
                        obj.tensor.fill_(float(number + 1))
                    own.manager.finish_write(keys)
                    eventually(lambda: len(objects_on(node)) == len(keys))
                    eventually(own._stores_idle)
                    continue
                handle = own.manager.submit_prefetch_task(PrefetchTaskSpec([GroupedObjectKeys(keys, 0, own.layout)]))
                assert own.manager.wait_prefetch_status(handle, PATIENCE)
                facts["loaded"] = own.manager.query_prefetch_status(handle).l2_hit_count
                with own.manager.read_prefetched_results(keys) as objects:
                    facts["values"] = [float(one.tensor.flatten()[-1]) for one in objects]
                own.manager.finish_read_prefetched(keys)
            finally:
                own.close()
        return facts


def compressed() -> dict[str, Any]:
    """A lossless codec: fewer bytes on the node, the same bytes back, also of a second group of objects."""
    keys = object_keys(2) + object_keys(2, object_group_id=1)
    with running_node("256MiB") as node:
        values = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(n)).to(torch.bfloat16) for n in range(4)]
        with adapter(node, codec="zstd", kv_dtype="bfloat16") as one:
            given, into = one.objects(keys, filled=False), one.objects(keys, filled=False)
            for value, obj in zip(values, given, strict=True):
                obj.tensor.copy_(value)
            assert one.store(keys, given).is_successful()
            with Store(node.address, timeout=PATIENCE) as store:
                sizes = [store.lookup([key]).sizes[0] or 0 for key in objects_on(node)]
        with adapter(node, codec="zstd", kv_dtype="bfloat16") as other:
            found = other.lookup(keys)
            task = other.l2.submit_load_task(keys, into)
            loaded = awaited(lambda: other.l2.query_load_result(task)).popcount()
        equal = sum(read(one) == read(other) for one, other in zip(given, into, strict=True))
        with adapter(node) as plain:
            without = plain.lookup(keys)
        return {
            "smaller": sum(0 < size < 0.9 * NBYTES for size in sizes),
            "found": found,
            "loaded": loaded,
            "equal": equal,
            "without": without,
        }


def plain_bytes() -> dict[str, Any]:
    """Objects in plain bytes: without a stated type none moves; of two types none is found as the other one."""
    keys = object_keys(2)
    # As objects of two groups may be, of which only one is in bytes.
    mixed = [memory_object(torch.uint8), memory_object()]
    both = [*object_keys(1), *object_keys(1, object_group_id=1)]
    with running_node("256MiB") as node, adapter(node) as one:
        saved = one.store(keys, one.objects(keys, filled=True, dtype=torch.uint8)).is_successful()
        facts = {"saved": [saved, len(objects_on(node))], "found": one.lookup(keys, layout(torch.uint8))}
        counted = {name: one.l2.report_status()[name] for name in ("save.failed", "lookup.failed")}
        told = [(entry.step, dict(entry.reasons)) for entry in recorded("") if '"kv_dtype": "fp8_e4m3"' in entry.note]
        mixed_saved = one.store(both, mixed).is_successful()
        task = one.l2.submit_load_task(both, mixed)
        bitmap = awaited(lambda: one.l2.query_load_result(task))
        facts["mixed"] = [mixed_saved, len(objects_on(node)), bitmap.get_indices_list()]
    with running_node("256MiB") as node, adapter(node, kv_dtype="fp8_e4m3") as e4m3:
        assert e4m3.store(keys, e4m3.objects(keys, filled=True, dtype=torch.uint8)).is_successful()
        facts["own"] = e4m3.lookup(keys, layout(torch.uint8))
        with adapter(node, kv_dtype="fp8_e5m2") as e5m2, adapter(node) as untold:
            facts["others"] = [own.lookup(keys, layout(torch.uint8)) for own in (e5m2, untold)]
    return {**facts, "counted": counted, "told": told}


def settings() -> dict[str, Any]:
    """Error messages for wrong settings."""
    wrong: list[dict[str, Any]] = [
        {"weights_id": None}, {"noddes": []}, {"layout": "mine"}, {"lock_ttl": 0}, {"capacity_bytes": -1},
        {"timeout": 0}, {"nodes": []}, {"codec": "zstd"}, {"codec": "int8", "kv_dtype": "bfloat16"},
    ]  # fmt: skip
    told = []
    for one in wrong:
        spec = json.loads(spec_of("tcp://127.0.0.1:9", **one))
        spec["adapter_params"] = {key: value for key, value in spec["adapter_params"].items() if value is not None}
        try:
            create_l2_adapter(config_of(json.dumps(spec)).adapters[0]).close()
            told.append("")
        except ValueError as error:
            told.append(f"{type(error).__name__}: {error}")
    return {"told": told}


def main(transport: str, *cases: str) -> None:
    logging.disable(logging.WARNING)
    PARAMS["transport"] = transport
    facts: dict[str, Any] = {}
    for case in cases:
        try:
            facts[case] = globals()[case]()
        except BaseException:
            facts[case] = {"error": traceback.format_exc()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
