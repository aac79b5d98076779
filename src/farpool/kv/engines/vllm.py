"""Keeps vLLM's KV blocks on nodes, in a secondary tier of vLLM's own offloading connector (docs/kv-vllm.md).

vLLM copies blocks from the accelerator into rows of host memory, which it calls the primary tier, and offers these rows
to secondary tiers. A row holds one block with the bytes of all ranks, so only the scheduler's process talks to nodes.
vLLM calls this tier in the scheduler's loop, between two steps of the model. So the calls return at once, and threads
of the block cache do the work. If a block cannot be moved, vLLM computes it again.
"""

from __future__ import annotations

import gc
import logging
import platform
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.parallel_state import model_parallel_is_initialized
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from farpool.errors import ConfigError
from farpool.kv.engine_judge import Run
from farpool.kv.engines.connector import Connector
from farpool.kv.journal import record
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from farpool.kv.blocks import BlockCache

    _Move = Callable[[TransferJob], Sequence[Reason | None]]
    _Ended = Callable[[Sequence[Reason | None]], None]

__all__ = ["FarpoolTier"]

_logger = logging.getLogger(__name__)

_BLOCKS = "vllm:kv_offload_farpool_blocks"
_BYTES = "vllm:kv_offload_farpool_bytes"
_MAPPED_LOOKUP_TIMEOUT_S = 0.005
"""Maximum time of a lookup on nodes whose memory is mapped into this process. The scheduler waits for the answer."""
_DRAIN_WARNING_S = 10.0
"""While vLLM waits for transfers to end, a log message reports the number of unfinished transfers at this interval."""
_USELESS = frozenset({Reason.FOREIGN, Reason.WRONG_SIZE})
"""Reasons that make a block unusable for every reader. Such a block is dropped. Otherwise the block would prevent a new
save under its write-once key. The cache itself drops corrupt blocks."""


class FarpoolTier(SecondaryTierManager):
    """Tier of vLLM's `TieringOffloadingSpec` that keeps blocks on nodes of farpool.

    vLLM makes this object from the entry for this tier in vLLM's JSON configuration.

    Parameters
    ----------
    offloading_spec : OffloadingSpec
        The engine's layout, on which the namespace of the blocks depends.
    primary_kv_view : memoryview
        The primary tier's memory, one row for each block.
    tier_type : str
        The engine's name for this tier.
    backpressure_detector : BackpressureDetector or None
        Object through which vLLM stops offering blocks to a slow tier.
    locality : {"LOCAL", "REMOTE"} or None
        Label for vLLM's tier filters, events and counts of hits. With None, the tier has no label, and its hits count
        as local if all nodes are on this host.
    prefix_caching_hash_algo : str
        Value of vLLM's option of this name, on which the engine's hashes depend.
    **settings
        Fields of `farpool.kv.CacheSettings`.

    Raises
    ------
    ConfigError
        A setting is missing, unknown or wrong.
    """

    medium: ClassVar[Medium] = Medium.CPU

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        prefix_caching_hash_algo: str = "sha256",
        **settings: Any,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if locality is not None and locality not in Locality.__members__:
            raise ConfigError(f"locality is {locality!r}, expected LOCAL or REMOTE", setting="locality")
        self.locality = None if locality is None else Locality[locality]
        ranks = self._offloading_spec.config.parallel.world_size
        if ranks > 1 and model_parallel_is_initialized():  # this scheduler's process is itself a rank
            raise ConfigError(
                f"each of {ranks} ranks has a scheduler (distributed_executor_backend is external_launcher), so one "
                "rank would load blocks that another computes; expected one scheduler for all ranks: use another "
                'backend, such as "mp"',
                setting="distributed_executor_backend",
            )
        self._hash_algorithm = prefix_caching_hash_algo
        self._settings = CacheSettings.of(settings, where="secondary tier FarpoolTier")
        self._cache: BlockCache | None = None
        namespace = self._namespace()
        # One dimension: vLLM's view has two, and Python cannot take a row out of such a view.
        self._memory = primary_kv_view.cast("B")
        # With several groups of layers, this tier cannot see which blocks a request needs.
        is_alike = len(namespace.groups) == 1 and namespace.groups[0].kind == "full"
        self._connector = Connector("vLLM", self._settings, namespace.tokens_per_block, decides=is_alike)
        self._judge = self._connector.judge
        # Refuse wrong settings and make the probe now. The cache for blocks is opened at the first request, because
        # vLLM has chosen the seed of its hashes by then.
        with closing(self._connector):
            self._connector.open(namespace)
            self._connector.probe.check(self._last_row(primary_kv_view))
        self._lookups = _AsyncLookups(self, tier_type)
        self._answers: dict[OffloadKey, bool] = {}  # answers from mapped memory in this step
        # Blocks that this tier has begun to load, by request, until the request ends or is preempted.
        self._loaded: dict[str, set[OffloadKey]] = {}
        self._asked: dict[str, float] = {}
        self._runs: dict[str, Run] = {}
        self._finished: list[JobResult] = []
        self._counts: Counter[str] = Counter()
        self._reported: Counter[str] = Counter()
        # Stores wait in this queue and leave a thread free for loads, because requests wait for loads.
        self._stores: deque[tuple[TransferJob, float]] = deque()  # each with the seconds that computing a block takes
        self._storing = 0
        self._unfinished = 0
        self._changed = threading.Condition()

    @property
    def cache_hit_source(self) -> CacheHitSource:
        """Return how vLLM counts hits in this tier: as hits in host memory, or as hits in an external store.

        `locality` decides. If it is None, hits count as hits in host memory if all nodes are on this host.
        """
        is_here = self._cache is not None and self._cache.is_mapped()
        if self.locality is not None:
            is_here = self.locality is Locality.LOCAL
        return CacheHitSource.HOST if is_here else CacheHitSource.EXTERNAL_UNSPECIFIED

    def _namespace(self) -> Namespace:
        """Return the namespace, which describes everything on which the bytes of a row depend."""
        config = self._offloading_spec.config
        parallel = config.parallel
        sizes = {"tp": parallel.tp_size, "pp": parallel.pp_size, "pcp": parallel.pcp_size, "dcp": parallel.dcp_size}
        # vLLM guarantees that these rows are equal under all topologies, or there is one copy of KV that all ranks
        # share.
        portable = parallel.is_parallelism_agnostic or config.replicated_layout
        return Namespace(
            engine="vllm",
            model=config.model.name,
            weights=self._settings.weights_id,
            dtype=config.model.dtype,
            layout=f"{'canonical' if config.canonical_layout else 'direct'}/{config.kv_cache_layout}",
            tokens_per_block=config.groups[0].tokens_per_block * config.cache.blocks_per_chunk,
            groups=tuple(_group(group, config, self.block_size_bytes) for group in config.groups),
            hash=self._hash_algorithm,
            seed=get_none_hash_seed(),
            tokens_per_hash=config.cache.tokens_per_hash,
            parallel=tuple((name, 1 if portable else size) for name, size in sizes.items()),
            tenant=self._settings.tenant,
            codec=self._settings.codec,
            extra=(
                ("blocks_per_chunk", config.cache.blocks_per_chunk),
                ("group_ids", " ".join(str(group.group_id) for group in config.groups)),
                ("group_tokens", " ".join(str(group.tokens_per_block) for group in config.groups)),
                ("replicated", int(config.replicated_layout)),
                # vLLM has no version number for the order of bytes in a row, so its releases do not share blocks.
                ("release", ".".join(vllm.__version__.split(".")[:2])),
                ("device", _device()),
            ),
        )

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._cache is None:
            (self._cache,) = self._connector.open(self._namespace())
        self._loaded[req_context.req_id] = set()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)
        self._loaded.pop(req_context.req_id, None)
        self._forget_run(req_context.req_id)

    def _forget_run(self, request: str) -> None:
        """Forget the time of a request's first lookup and the decision about its blocks."""
        self._asked.pop(request, None)
        if (run := self._runs.pop(request, None)) is not None:
            self._judge.finished(run)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        request = req_context.req_id
        if self._cache is None:
            return LookupResult.MISS
        if key in self._loaded.get(request, ()):
            # The load has failed, or vLLM has evicted the block from its primary tier to make room for another block of
            # this request. After HIT, vLLM would load it again, and evict it or fail again: the request might never
            # end.
            if (run := self._runs.get(request)) is not None:
                self._judge.asked_again(run)
            return LookupResult.MISS
        self._asked.setdefault(request, self._judge.clock())
        found = self._is_there(key, req_context)
        if found is None:
            return LookupResult.RETRY
        if self._judge.is_on:
            run = self._runs.get(request) or self._weighed(key, req_context)
            if run is None:
                return LookupResult.RETRY
            if run.is_bypassed or not found:
                self._judge.asked_again(run)
                return LookupResult.MISS
        return LookupResult.HIT if found else LookupResult.MISS

    def _is_there(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        """Return True if the nodes have a block, and False if not; None while the answer has not arrived."""
        assert self._cache is not None
        if key not in self._answers:
            if not self._cache.is_mapped():
                found: bool | None = self._lookups.lookup(key, req_context)
                return found
            # vLLM looks up one key at a time; ask for all keys of the request with the first one.
            keys = [key, *(other for other in _run_of(req_context) if other != key and other not in self._answers)]
            self._answers.update(zip(keys, self.find(keys, req_context, _MAPPED_LOOKUP_TIMEOUT_S), strict=True))
        return self._answers[key]

    def _weighed(self, key: OffloadKey, req_context: ReqContext) -> Run | None:
        """Decide whether vLLM loads the blocks of a request, or computes them.

        Parameters
        ----------
        key : OffloadKey
            The first block of the request that vLLM lacks. The decision is about this block and all blocks after it.

        Returns
        -------
        Run or None
            The blocks and the decision; None while the answers of the nodes have not arrived.
        """
        sequence = _run_of(req_context)
        before = sequence.index(key) if key in sequence else len(sequence)
        keys = sequence[before:]
        there = 0
        for other in keys:
            found = self._is_there(other, req_context)
            if found is None:
                return None
            if not found:
                break
            there += 1
        request = req_context.req_id
        run = self._judge.looked_up(
            keys, there, there * self.block_size_bytes, began=self._asked[request], request=request, before=before
        )
        self._runs[request] = run
        return run

    def find(self, keys: Sequence[OffloadKey], req_context: ReqContext, timeout: float | None = None) -> list[bool]:
        """Ask the nodes which blocks they have. Blocks without an answer within `timeout` seconds count as missing."""
        assert self._cache is not None
        found = self._cache.lookup(self._keys(keys), request=req_context.req_id, timeout=timeout)
        return found.found

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._answers.clear()
        self._lookups.flush()
        for request in context.preempted_req_ids:
            self._loaded.get(request, set()).clear()
            self._forget_run(request)

    def submit_load(self, job_metadata: TransferJob) -> None:
        with self._changed:
            self._unfinished += 1
        keys = list(job_metadata.keys)
        # Do not remember a request that ended before its loads were submitted.
        self._loaded.get(job_metadata.req_context.req_id, set()).update(keys)
        load_ended = self._judge.loading(keys, len(keys) * self.block_size_bytes)
        self._submit(self._load, job_metadata, load_ended)

    def submit_store(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        self._judge.saved(keys)
        sequence = _run_of(job_metadata.req_context)
        before = sequence.index(keys[0]) if keys and keys[0] in sequence else 0
        cost = self._judge.cost(len(keys), before, len(keys))
        with self._changed:
            self._unfinished += 1
            self._stores.append((job_metadata, cost))
        self._begin_stores()

    def _begin_stores(self) -> None:
        """Start waiting stores, but keep one thread free for loads if there are several threads."""
        while True:
            with self._changed:
                if not self._stores or self._storing >= max(1, self._settings.threads - 1):
                    return
                self._storing += 1
                job, cost = self._stores.popleft()
            # A closed cache ends the job at once. `done` lowers `_storing` only for work that has begun.
            if not self._submit(partial(self._store, cost), job):
                with self._changed:
                    self._storing -= 1

    def _submit(self, move: _Move, job: TransferJob, load_ended: _Ended | None = None) -> bool:
        """Move the blocks of a job on a thread of the cache. vLLM receives the job's result in every case.

        Returns
        -------
        bool
            False if the cache is closed.
        """
        assert self._cache is not None
        began: list[float] = []

        def work() -> Sequence[Reason | None]:
            began.append(time.monotonic())
            return move(job)

        def done(reasons: Sequence[Reason | None]) -> None:
            self._finish(job, reasons, time.monotonic() - began[0] if began else 0.0)
            if load_ended is not None:
                load_ended(reasons)
            elif began:
                with self._changed:
                    self._storing -= 1
                self._begin_stores()

        failed: Sequence[Reason | None] = [Reason.FAILED] * len(job.keys)
        closed = [Reason.CLOSED] * len(job.keys)
        return self._connector.submit(self._cache, work, done, failed=failed, closed=closed)

    def _load(self, job: TransferJob) -> Sequence[Reason | None]:
        waited = time.monotonic() - job.submit_time
        if waited > self._settings.timeout:
            # Earlier loads took so long that computing would have begun by now.
            late = len(job.keys)
            with self._changed:
                self._counts["load.late"] += late
            record(job.req_context.req_id, "load", late, 0, {str(Reason.LATE): late}, waited, "waited for other loads")
            return [Reason.LATE] * late
        assert self._cache is not None
        keys = self._keys(job.keys)
        reasons = self._cache.load(keys, self._rows(job), request=job.req_context.req_id)
        useless = [key for key, reason in zip(keys, reasons, strict=True) if reason in _USELESS]
        if useless:
            self._cache.drop(useless)
        return reasons

    def _store(self, cost: float, job: TransferJob) -> Sequence[Reason | None]:
        assert self._cache is not None
        return self._cache.save(self._keys(job.keys), self._rows(job), request=job.req_context.req_id, cost=cost)

    def _finish(self, job: TransferJob, reasons: Sequence[Reason | None], seconds: float) -> None:
        done = [key for key, reason in zip(job.keys, reasons, strict=True) if reason is None]
        is_whole = len(done) == len(job.keys)
        result = JobResult(
            job.job_id,
            success=is_whole,
            successful_keys=tuple(done) if job.is_promotion and done and not is_whole else None,
            transfer_time=seconds,
            transfer_bytes=len(done) * self.block_size_bytes,
        )
        with self._changed:
            self._finished.append(result)
            self._unfinished -= 1
            self._changed.notify_all()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def _give_up_stores(self) -> None:
        """End the stores that have not begun, because vLLM waits for all jobs to end."""
        with self._changed:
            waiting = list(self._stores)
            self._stores.clear()
        for job, _ in waiting:
            self._finish(job, [Reason.BYPASSED] * len(job.keys), 0.0)

    def drain_jobs(self) -> None:
        self._give_up_stores()
        with self._changed:
            while not self._changed.wait_for(lambda: not self._unfinished, _DRAIN_WARNING_S):
                # Each job ends by its own deadline; until then vLLM must not reuse its memory.
                _logger.warning("%d transfers from or to farpool's nodes have not ended yet", self._unfinished)

    def get_stats(self) -> OffloadingConnectorStats | None:
        if self._cache is None:
            return None
        with self._changed:
            counts = self._connector.stats() + self._counts
        stats = OffloadingConnectorStats()
        for name, number in (counts - self._reported).items():
            step, _, outcome = name.partition(".")
            if outcome == "bytes":
                stats.increase_counter(_BYTES, number, (step,))
            else:
                stats.increase_counter(_BLOCKS, number, (step, outcome))
        self._reported = counts
        return stats

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {
            _BLOCKS: OffloadingCounterMetadata(
                documentation=(
                    "Blocks that were looked up on, loaded from or saved to farpool's nodes, by step and outcome: "
                    "done, or the reason why a block was not found or moved."
                ),
                labelnames=("step", "outcome"),
            ),
            _BYTES: OffloadingCounterMetadata(
                documentation="Bytes that were loaded from or saved to farpool's nodes, including headers, by step.",
                labelnames=("step",),
            ),
        }

    def shutdown(self) -> None:
        self._give_up_stores()
        self._connector.close()  # waits for transfers under way; after that no thread touches the engine's memory
        self._lookups.shutdown()
        # vLLM unmaps its memory next, which fails while a view of the memory exists. Errors refer to the calls that
        # raised them, and these calls refer to rows; only a garbage collection frees such cycles.
        self._memory.release()
        gc.collect()

    def _keys(self, keys: Collection[OffloadKey]) -> list[bytes]:
        assert self._cache is not None
        return [self._cache.key(get_offload_block_hash(key), get_offload_group_idx(key)) for key in keys]

    def _rows(self, job: TransferJob) -> list[memoryview]:
        return [self._row(int(number)) for number in job.chunk_ids]

    def _row(self, number: int) -> memoryview:
        size = self.block_size_bytes
        return self._memory[number * size : (number + 1) * size]

    def _last_row(self, view: memoryview) -> EngineBlock:
        """Return the last row of the primary tier as the block of the probe.

        The engine does not use this row while it starts.
        """
        rows = np.asarray(view).view(np.uint8)  # vLLM's own view of its rows

        def write(data: bytes) -> None:
            rows[-1] = np.frombuffer(data, np.uint8)

        def own() -> list[memoryview]:
            return [self._row(len(rows) - 1)]

        return EngineBlock(rows.shape[1], write, lambda: rows[-1].tobytes(), own, own)


class _AsyncLookups(AsyncLookupManager):
    """Looks up blocks on nodes of other hosts. A thread of vLLM waits for the answers while the model computes."""

    def __init__(self, tier: FarpoolTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._tier.find(keys, req_context)


def _run_of(req_context: ReqContext) -> list[OffloadKey]:
    """Return the keys of a request's blocks in the order of the tokens; empty if vLLM does not report the keys."""
    return list(getattr(req_context, "_offload_key_positions", ()))


def _group(group: Any, config: OffloadingConfig, block_bytes: int) -> Group:
    chunks = getattr(group, "sliding_window_size_in_chunks", None)  # since vLLM 0.33
    if chunks is None:
        return Group(tuple(group.layer_names), block_bytes)
    window = chunks * group.tokens_per_block * config.cache.blocks_per_chunk
    return Group(tuple(group.layer_names), block_bytes, "sliding", window)


def _device() -> str:
    """Return the kind of device; for a CPU also its instruction set, which decides how vLLM's CPU kernels pack KV."""
    kind = str(current_platform.device_type)
    if kind != "cpu":
        return kind
    return f"cpu/{platform.machine()}/{'amx' if torch.cpu._is_amx_tile_supported() else 'vector'}"
