"""LMCache's second level (L2) on nodes. It keeps objects that do not fit into an LMCache server's own memory.

All LMCache servers share these objects. LMCache loads this adapter as a plug-in (docs/kv-lmcache.md). Two threads of
LMCache submit tasks. These threads must not wait, so the adapter signals an event for each result, and LMCache then
collects the result. LMCache sets no deadline for tasks, so the adapter sets one. If an object has not arrived by the
deadline, the adapter reports that it was not found, and the engine computes its KV.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from itertools import count
from typing import Any, Generic, Self, TypeVar

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.memory_management import MemoryFormat, MemoryObj, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import create_event_notifier

from farpool.checks import require_seconds, require_whole
from farpool.cluster.members.named import named_nodes
from farpool.errors import ConfigError, StoreClosedError
from farpool.kv.blocks import BlockCache
from farpool.kv.engines.connector import Connector
from farpool.kv.keys import block_key
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings

__all__ = ["FarpoolL2", "FarpoolL2Config", "L2Settings"]

_LOG = logging.getLogger(__name__)

_RELEASE = version("lmcache")
_DESCRIBED = ("nodes", "weights_id")
_CHAIN_BYTES = 32
_NAMESPACES_MAX = 4096
"""Maximum number of namespaces that are kept in memory. If there are more, the least recently used ones are made again
when they are needed."""
_CODED_GROUPS_MAX = 64
"""Number of object groups of a model whose objects a codec encodes. Objects of further groups are stored unencoded."""
_ACCOUNTED_KEYS_MAX = 1 << 20
"""Maximum number of keys that LMCache counts as stored here. If there are more, the adapter reports the oldest keys to
LMCache as deleted."""
_PLACED_CHUNKS_MAX = 1 << 16
"""Maximum number of chunks whose positions the adapter remembers from their lookup until they are stored. If there are
more, it forgets the oldest positions, and their chunks count as chunks at position 0."""
_UNKNOWN_TYPE = (
    "LMCache's objects are plain bytes, which may be fp8_e4m3 or fp8_e5m2, so no object is stored or found; "
    'name the type in adapter_params, such as "kv_dtype": "fp8_e4m3"'
)

T = TypeVar("T")


class L2Settings(CacheSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings in ``adapter_params``: the fields of `CacheSettings`, and facts that LMCache does not report.

    Attributes
    ----------
    kv_dtype : str
        Logical data type of the KV, such as ``fp8_e4m3``; empty for the data type of LMCache's objects. This setting is
        required with a codec. It is also required if the objects are plain bytes, as vLLM's fp8 objects are; without
        it, such objects are neither stored nor found.
    layout : str
        Name of the order of bytes in an object. If it is empty, the name is made from the shapes and data types of
        LMCache's objects. An adapter with ``serde`` requires `layout` and `kv_dtype`, because its objects are bytes
        without a shape.
    chunk_size : int
        Number of tokens in a chunk; the same number as the server's ``--chunk-size``.
    hash_algorithm : str
        Hash of the tokens; the same name as the server's ``--hash-algorithm``.
    lock_ttl : float
        Seconds after which a lock on an object ends even if LMCache has not unlocked the object.
    capacity_bytes : int
        Number of stored bytes at which LMCache begins to evict objects from the nodes, if it is configured to evict.
        With 0, only the nodes evict objects.
    """

    kv_dtype: str = ""
    layout: str = ""
    chunk_size: int = 256
    hash_algorithm: str = "blake3"
    lock_ttl: float = 60.0
    capacity_bytes: int = 0

    def __post_init__(self) -> None:
        if (self.layout or self.codec) and not self.kv_dtype:
            raise ConfigError(
                f"layout is {self.layout!r}, codec is {self.codec!r}, and kv_dtype is empty: with a layout of your own "
                "or a codec, also name the data type of the KV",
                setting="kv_dtype",
            )
        require_seconds(self.lock_ttl, "lock_ttl", 0.001, 1e6)
        require_whole(self.capacity_bytes, "capacity_bytes", 0, hint=", which means no limit")


class FarpoolL2Config(L2AdapterConfigBase):  # type: ignore[misc]
    """Configuration of `FarpoolL2`, which LMCache reads from ``adapter_params``.

    Parameters
    ----------
    settings : L2Settings
        The settings.
    """

    def __init__(self, settings: L2Settings) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: Mapping[str, Any]) -> Self:
        """Check the settings that a user has written, and make the configuration from them.

        Raises
        ------
        ConfigError
            A setting is missing, unknown, or wrong.
        """
        return cls(L2Settings.of(d, where="--l2-adapter, adapter_params"))

    @classmethod
    def help(cls) -> str:
        """Return the text with which LMCache describes the settings to users."""
        return (
            "farpool L2 adapter config fields (docs/kv-lmcache.md):\n"
            "- nodes (list of str): addresses of the nodes, such as tcp://10.0.0.7:7471, or of their registry, such as "
            "etcd://10.0.0.1:2379 (required, unless FARPOOL_POOL names them)\n"
            "- weights_id (str): exact name of the weights that make the KV (required)\n"
            f"- optional: {', '.join(name for name in L2Settings.__struct_fields__ if name not in _DESCRIBED)}"
        )


class _Results(Generic[T]):
    """Keeps the results of one kind of task until LMCache takes the results, and signals an event for each result."""

    def __init__(self) -> None:
        self._event = create_event_notifier()
        self._ready: dict[int, T] = {}
        self._lock = threading.Lock()
        self._closed = False

    def fileno(self) -> int:
        return int(self._event.fileno())

    def put(self, task: int, result: T) -> None:
        with self._lock:
            self._ready[task] = result
            # The file descriptor of a closed event may belong to another file by now.
            if not self._closed:
                self._event.notify()

    def take(self, task: int) -> T | None:
        with self._lock:
            return self._ready.pop(task, None)

    def take_all(self) -> dict[int, T]:
        with self._lock:
            taken, self._ready = self._ready, {}
        return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._event.close()


class _Locks:
    """Counts the locks of each object. A lookup adds one lock, and an unlock ends one lock. Not thread-safe.

    All locks of an object share one pin on a node, and each new lock renews this pin.

    Parameters
    ----------
    ttl : float
        Seconds after which a lock ends by itself.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._ends: OrderedDict[bytes, deque[float]] = (
            OrderedDict()
        )  # by key; the key that was locked last is at the end

    def __contains__(self, key: bytes) -> bool:
        return key in self._ends

    def add(self, key: bytes, now: float) -> None:
        """Add a lock that begins `now` to an object, and remove locks whose time is over."""
        ends = self._ends.setdefault(key, deque())
        ends.append(now + self._ttl)
        self._ends.move_to_end(key)
        while ends[0] <= now:  # never empty, because `ttl` is above 0
            ends.popleft()
        while self._ends[first := next(iter(self._ends))][-1] <= now:
            del self._ends[first]

    def release(self, key: bytes, now: float) -> bool:
        """End one lock of an object; return True if the object has no more locks."""
        ends = self._ends[key]
        ends.popleft()  # the oldest, even if its time is over: this may be its unlock
        while ends and ends[0] <= now:
            ends.popleft()
        if not ends:
            del self._ends[key]
        return not ends


class FarpoolL2(L2AdapterInterface):  # type: ignore[misc]
    """L2 adapter of LMCache that keeps objects on nodes. Thread-safe.

    If a node or a transfer fails, the adapter reports the objects as not found. The constructor connects to the nodes
    and runs the probe (see `Connector`). If no node can be reached, the adapter tries again later.

    Parameters
    ----------
    params : FarpoolL2Config or mapping
        The configuration, or the value of ``adapter_params``.
    l1_memory_desc : object, optional
        LMCache's description of its memory; not used.

    Raises
    ------
    ConfigError
        A setting is missing, unknown, or wrong.
    """

    def __init__(self, params: FarpoolL2Config | Mapping[str, Any], l1_memory_desc: object = None) -> None:
        config = params if isinstance(params, FarpoolL2Config) else FarpoolL2Config.from_dict(params)
        self._settings = settings = config.settings
        super().__init__(max_capacity_bytes=settings.capacity_bytes)
        self._namespace = lru_cache(_NAMESPACES_MAX)(self._make_namespace)
        # The caches need a namespace, because it determines one codec of the stated type for each object group. No key
        # is made with this namespace.
        groups = tuple(Group((f"object group {group}",), 0) for group in range(_CODED_GROUPS_MAX))
        own = replace(self._namespace("any", "", 0, 0, "any"), groups=groups)
        self._connector = Connector("LMCache", settings, settings.chunk_size)
        self._judge = self._connector.judge
        # Each kind of task has its own threads and connections, so that lookups never wait for loads, nor loads for
        # stores.
        self._stores, self._loads, self._lookups = self._connector.open(own, 1, settings.threads, 1)
        self._connector.probe.check(_object_for_probe(settings.chunk_size))
        self._tasks = count()
        self._found: _Results[Bitmap] = _Results()
        self._loaded: _Results[Bitmap] = _Results()
        self._stored: _Results[L2StoreResult] = _Results()
        self._lock = threading.Lock()
        self._layouts: dict[tuple[str, int], tuple[str, ...]] = {}  # by model and group; the latest layout is last
        self._accounted: OrderedDict[ObjectKey, int] = OrderedDict()
        self._places: OrderedDict[Hashable, int] = OrderedDict()  # positions of chunks in the looked-up sequences
        self._locks = _Locks(settings.lock_ttl)  # only the one thread of `_lookups` uses it
        self._has_warned = False
        self._closed = False

    def get_store_event_fd(self) -> int:
        return self._stored.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._found.fileno()

    def get_load_event_fd(self) -> int:
        return self._loaded.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        self._judge.saved(_chunks(keys))
        return self._start(self._stores, self._stored, L2StoreResult(False, 0), self._store, keys, objects)

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return self._stored.take_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: Mapping[int, MemoryLayoutDesc]
    ) -> int:
        return self._start(self._lookups, self._found, Bitmap(len(keys)), self._look_up, keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        return self._found.take(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        # LMCache does not repeat an unlock. If it does not reach a node, the lock ends after `lock_ttl`.
        with contextlib.suppress(StoreClosedError):  # all locks have ended with the connections
            self._lookups.submit(self._unlock, keys)

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        load_ended = self._judge.loading(_chunks(keys), sum(one.get_size() for one in objects))
        outcomes: list[Reason | None] = [Reason.LATE] * len(keys)

        def work(keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
            outcomes[:] = self._load(keys, objects)
            bitmap = Bitmap(len(keys))
            for number, reason in enumerate(outcomes):
                if reason is None:
                    bitmap.set(number)
            return bitmap

        def ended() -> None:
            load_ended(_outcomes_of_chunks(keys, outcomes))

        return self._start(self._loads, self._loaded, Bitmap(len(keys)), work, keys, objects, ended)

    def query_load_result(self, task_id: int) -> Bitmap | None:
        return self._loaded.take(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects from the nodes. LMCache calls this method for its quotas and its eviction."""
        self._stores.drop([data for key in keys for data in self._known_keys(key)])
        self._forget(keys)

    def report_status(self) -> dict[str, Any]:
        """Return the state of this adapter: counters by step and outcome, and the bytes moved.

        The adapter is unhealthy if it is closed or its probe has failed. It stays healthy without reachable nodes,
        because LMCache continues without them. ``probe`` is the reason why the adapter moves no objects, or an empty
        string if it moves objects.
        """
        probe = self._connector.probe
        return {
            "is_healthy": not self._closed and probe.error is None,
            "probe": str(probe.reason or ""),
            "type": type(self).__name__,
            "nodes": list(named_nodes(self._settings.nodes).shown),
            "weights_id": self._settings.weights_id,
            **self._connector.stats(),
        }

    def close(self) -> None:
        """End all tasks. Afterwards no thread of the adapter reads or writes LMCache's memory. Idempotent.

        Tasks that have not begun fail at once, and tasks that have begun end by their deadline.
        """
        with self._lock:
            closed, self._closed = self._closed, True
        if not closed:
            self._connector.close()
            for results in (self._found, self._loaded, self._stored):
                results.close()

    def _start(
        self,
        cache: BlockCache,
        results: _Results[T],
        nothing: T,
        work: Callable[[list[ObjectKey], Any], T],
        keys: list[ObjectKey],
        argument: Any,
        ended: Callable[[], None] = lambda: None,
    ) -> int:
        """Begin a task, and return its number. The task's result is `nothing` if it fails or begins too late."""
        task = next(self._tasks)
        # LMCache does not wait for stores. A store that has not begun holds memory of LMCache, and this memory limits
        # the number of such stores.
        until = math.inf if cache is self._stores else time.monotonic() + self._settings.timeout

        def run() -> T:
            if time.monotonic() < until:
                return work(keys, argument)
            _LOG.warning("%d keys: earlier tasks took all of the time of this task", len(keys))
            return nothing

        def done(result: T) -> None:
            results.put(task, result)
            ended()

        self._connector.submit(cache, run, done, failed=nothing, closed=nothing)
        return task

    def _store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        """Store the objects that the nodes do not have.

        The result is a failure if at least one object could not be stored.
        """
        blocks = self._blocks_of("save", self._stores, keys, self._layouts_of(keys, objects))
        there = self._stores.lookup([key for _, key in blocks.values()]).found
        by_space: dict[Namespace, list[int]] = {}
        for (number, (space, _)), is_there in zip(blocks.items(), there, strict=True):
            if not is_there:
                by_space.setdefault(space, []).append(number)
        chunks = _chunks(keys)
        with self._lock:
            before = min((self._places.pop(chunk, 0) for chunk in chunks), default=0)
        cost = self._judge.cost(len(chunks), before, len(keys))
        stored: list[int] = []
        failed: Counter[Reason] = Counter([Reason.FAILED] * (len(keys) - len(blocks)))
        for space, numbers in by_space.items():
            outcomes = self._stores.save(
                [blocks[number][1] for number in numbers],
                [_bytes_of(objects[number]) for number in numbers],
                cost=cost,
                namespace=space,
            )
            stored += [number for number, reason in zip(numbers, outcomes, strict=True) if reason is None]
            failed.update(reason for reason in outcomes if reason is not None)
        sizes = [objects[number].get_size() for number in stored]
        self._account([keys[number] for number in stored], sizes)
        if failed:
            _warn_of(failed, len(keys), "stored")
        return L2StoreResult(not failed, sum(sizes))

    def _look_up(self, keys: list[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        bitmap = Bitmap(len(keys))
        with self._lock:
            self._places.update((chunk, place) for place, chunk in enumerate(_chunks(keys)))
            while len(self._places) > _PLACED_CHUNKS_MAX:
                self._places.popitem(last=False)
        known: dict[int, str] = {}
        for number, key in enumerate(keys):
            described = layouts.get(key.object_group_id)
            if described is not None and described.shapes:
                known[number] = self._layout_of(zip(described.shapes, described.dtypes, strict=True), key)
            elif others := self._known_layouts(key):
                # LMCache's tools give no description of the layout, because they look for objects that they have just
                # stored.
                known[number] = others[-1]
        blocks = self._blocks_of("lookup", self._lookups, keys, known)
        began = self._judge.clock()
        looked_up = self._lookups.lookup([key for _, key in blocks.values()])
        sizes = dict(zip(blocks, looked_up.sizes, strict=True))
        there = {number: nbytes for number, nbytes in sizes.items() if nbytes is not None}
        if self._bypasses(keys, there, began):
            there = {}
        now = time.monotonic()
        own = [blocks[number][1] for number in there]
        pinned = self._lookups.pin(own, self._settings.lock_ttl) if own else []
        for number, key, reason in zip(there, own, pinned, strict=True):
            if reason is None:
                bitmap.set(number)
                self._locks.add(key, now)
        reasons = zip(blocks, looked_up.reasons, strict=True)
        self._forget([keys[number] for number, reason in reasons if reason is Reason.ABSENT])
        return bitmap

    def _unlock(self, keys: list[ObjectKey]) -> None:
        now = time.monotonic()
        own = [next((data for data in self._known_keys(key) if data in self._locks), None) for key in keys]
        self._lookups.unpin([data for data in own if data is not None and self._locks.release(data, now)])

    def _bypasses(self, keys: list[ObjectKey], nbytes: Mapping[int, int], began: float) -> bool:
        """Record a lookup; return True if computing is expected to be faster than loading the objects that were found.

        Parameters
        ----------
        nbytes : mapping of int to int
            Bytes of each object that was found, by its index among the keys.
        """
        if len({key.object_group_id for key in keys}) != 1:
            return False  # with several groups of layers, this adapter cannot see which objects a request needs
        chunks = _chunks(keys)
        missing = {_chunk(key) for number, key in enumerate(keys) if number not in nbytes}
        there = next((number for number, chunk in enumerate(chunks) if chunk in missing), len(chunks))
        # If objects are found after a missing one, they are useful if another level or another request has the missing
        # one.
        if any(chunk not in missing for chunk in chunks[there:]):
            there = 0
        request = keys[0].chunk_hash.hex()
        run = self._judge.looked_up(chunks, there, sum(nbytes.values()), began=began, request=request)
        return run.is_bypassed

    def _load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> list[Reason | None]:
        blocks = self._blocks_of("load", self._loads, keys, self._layouts_of(keys, objects))
        outcomes: list[Reason | None] = [Reason.FAILED] * len(keys)
        own, targets = [key for _, key in blocks.values()], [_bytes_of(objects[number]) for number in blocks]
        for number, reason in zip(blocks, self._loads.load(own, targets), strict=True):
            outcomes[number] = reason
        loaded = [key for key, reason in zip(keys, outcomes, strict=True) if reason is None]
        if loaded:
            self._notify_keys_accessed(loaded)
        if len(loaded) < len(keys):
            _warn_of(Counter(reason for reason in outcomes if reason is not None), len(keys), "loaded")
        return outcomes

    def _layouts_of(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> dict[int, str]:
        """Return the name of each object's layout, by the object's index."""
        each = enumerate(zip(keys, objects, strict=True))
        return {number: self._layout_of(_meta_shapes(one), key) for number, (key, one) in each}

    def _layout_of(self, pairs: Iterable[tuple[Sequence[int], object]], key: ObjectKey) -> str:
        """Return the name of an object's layout, and remember it for calls that receive only the object's key."""
        layout = self._settings.layout or ", ".join(
            f"{'x'.join(map(str, shape))} {str(dtype).removeprefix('torch.')}" for shape, dtype in pairs
        )
        if self._known_layouts(key)[-1:] != (layout,):
            with self._lock:
                # The tuple is replaced as a whole, because lookups and unlocks read it without the lock.
                others = [one for one in self._known_layouts(key) if one != layout]
                self._layouts[key.model_name, key.object_group_id] = (*others, layout)
        return layout

    def _blocks_of(
        self, step: str, cache: BlockCache, keys: list[ObjectKey], layouts: Mapping[int, str]
    ) -> dict[int, tuple[Namespace, bytes]]:
        """Return the namespace and the key of each object's block, by the object's index.

        If the setting `kv_dtype` is missing, objects of plain bytes are left out and count as failed. Their type may be
        fp8_e4m3 or fp8_e5m2, and an engine that uses one of these types must not load KV of the other.
        """
        blocks: dict[int, tuple[Namespace, bytes]] = {}
        for number, layout in layouts.items():
            if self._settings.kv_dtype or "uint8" not in _dtypes_of(layout):
                space = self._space(keys[number], layout)
                blocks[number] = space, _key(space, keys[number])
        if len(blocks) < len(layouts):
            if not self._has_warned:
                self._has_warned = True
                _LOG.error("%s", _UNKNOWN_TYPE)
            cache.missed(step, "", len(layouts) - len(blocks), Reason.FAILED, _UNKNOWN_TYPE)
        return blocks

    def _known_layouts(self, key: ObjectKey) -> tuple[str, ...]:
        return self._layouts.get((key.model_name, key.object_group_id), ())

    def _known_keys(self, key: ObjectKey) -> list[bytes]:
        """Return all keys under which an object may be stored: one for each layout that this adapter has seen."""
        return [_key(self._space(key, layout), key) for layout in self._known_layouts(key)]

    def _space(self, key: ObjectKey, layout: str) -> Namespace:
        return self._namespace(key.model_name, key.cache_salt, key.kv_rank >> 24, key.object_group_id, layout)

    def _make_namespace(self, model: str, salt: str, world: int, group: int, layout: str) -> Namespace:
        settings = self._settings
        return Namespace(
            engine="lmcache",
            model=model,
            weights=settings.weights_id,
            dtype=settings.kv_dtype or "+".join(sorted(_dtypes_of(layout))),
            layout=f"lmcache {layout}",
            tokens_per_block=settings.chunk_size,
            # The layout determines the number of bytes, which is compared when an object is loaded.
            groups=(Group((f"object group {group}",), 0),),
            hash=settings.hash_algorithm,
            parallel=(("world", world),),
            tenant=settings.tenant,
            codec=settings.codec,
            # Another release of LMCache may order the bytes of an object of the same shape differently.
            extra=(("cache_salt", salt), ("release", _RELEASE)),
        )

    def _account(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        """Report stored objects to LMCache.

        An object that was reported before, evicted by the nodes and stored again is not reported a second time.
        """
        with self._lock:
            new = [(key, size) for key, size in zip(keys, sizes, strict=True) if key not in self._accounted]
            self._accounted.update(new)
            over = [self._accounted.popitem(last=False) for _ in range(len(self._accounted) - _ACCOUNTED_KEYS_MAX)]
        # LMCache's listeners are called without our lock, because they are code that we do not know.
        if new:
            self._notify_keys_stored([key for key, _ in new], [size for _, size in new])
        if over:
            self._notify_keys_deleted([key for key, _ in over], [size for _, size in over])

    def _forget(self, keys: list[ObjectKey]) -> None:
        """Report objects to LMCache as deleted, if they were reported as stored before."""
        with self._lock:
            gone = [(key, self._accounted.pop(key)) for key in keys if key in self._accounted]
        if gone:
            self._notify_keys_deleted([key for key, _ in gone], [size for _, size in gone])


def _meta_shapes(one: MemoryObj) -> list[tuple[Sequence[int], object]]:
    meta = one.metadata
    if meta.shapes and meta.dtypes:
        return list(zip(meta.shapes, meta.dtypes, strict=True))
    return [(meta.shape, meta.dtype)]


def _dtypes_of(layout: str) -> set[str]:
    return {part.rpartition(" ")[2] for part in layout.split(", ")}


def _object_for_probe(tokens: int) -> EngineBlock:
    """Make an LMCache object for the probe, with keys and values of one layer.

    The probe writes and reads the values through the object's tensor, as LMCache does.
    """
    shape, dtype = torch.Size([2, 1, tokens, 2]), torch.bfloat16
    memory = torch.zeros(shape.numel() * dtype.itemsize, dtype=torch.uint8)
    meta = MemoryObjMetadata(shape, dtype, memory.data_ptr(), memory.numel(), 1, fmt=MemoryFormat.KV_2LTD)
    one = TensorMemoryObj(memory, meta, None)

    def write(data: bytes) -> None:
        one.tensor.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(shape))

    def read() -> bytes:
        return bytes(one.tensor.contiguous().view(torch.uint8).numpy().tobytes())

    return EngineBlock(memory.numel(), write, read, lambda: [_bytes_of(one)], lambda: [_bytes_of(one)])


def _bytes_of(one: MemoryObj) -> memoryview:
    return memoryview(one.byte_array).cast("B")


def _chunk(key: ObjectKey) -> Hashable:
    """Return the identity of an object's chunk of tokens. A chunk has one object per rank and object group."""
    return key.model_name, key.cache_salt, key.chunk_hash


def _chunks(keys: Iterable[ObjectKey]) -> list[Hashable]:
    return list(dict.fromkeys(map(_chunk, keys)))


def _outcomes_of_chunks(keys: Iterable[ObjectKey], outcomes: Iterable[Reason | None]) -> list[Reason | None]:
    """Return one outcome for each chunk: the first failure among the chunk's objects, or None for success."""
    folded: dict[Hashable, Reason | None] = {}
    for key, reason in zip(keys, outcomes, strict=True):
        folded[_chunk(key)] = folded.get(_chunk(key)) or reason
    return list(folded.values())


def _key(space: Namespace, key: ObjectKey) -> bytes:
    chain = key.chunk_hash
    if len(chain) > _CHAIN_BYTES:
        chain = hashlib.sha256(chain).digest()
    return block_key(space.digest, chain, key.object_group_id, key.kv_rank & 0xFFFFFFFF)


def _warn_of(failed: Counter[Reason], objects: int, done: str) -> None:
    reasons = ", ".join(f"{number} {reason}" for reason, number in failed.most_common())
    _LOG.warning("%d of %d objects were not %s: %s", failed.total(), objects, done, reasons)
