"""Storage backend for SGLang's hierarchical cache: nodes keep its pages (docs/kv-sglang.md).

SGLang keeps pages in *host pools*: one pool in the host's memory for KV, and further pools, for example for sliding
windows. Three threads of SGLang call this backend at the same time: one looks up pages, one loads pages, and one saves
pages. Each call sends one request to the nodes and ends by the cache's deadline. A page that cannot be moved counts as
missing.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKOnlyPoolHost, MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics

from farpool.errors import ConfigError
from farpool.kv.blocks import BlockCache
from farpool.kv.engine_judge import EngineJudge
from farpool.kv.engines.connector import Connector
from farpool.kv.keys import block_key
from farpool.kv.namespace import Group, Namespace
from farpool.kv.probe import EngineBlock
from farpool.kv.reasons import Reason
from farpool.kv.settings import CacheSettings

__all__ = ["FarpoolHiCache"]

_WHERE = "--hicache-storage-backend-extra-config"
_OF_SGLANG = frozenset({"backend_name", "module_path", "class_name", "interface_v1", "file_storage_path"})
"""Settings of SGLang itself in the value of the option `_WHERE`. The value also contains the fields of `_Settings`."""
_KV = str(PoolName.KV)
_BYTES_PER_GB = 1e9
_GEOMETRY = (
    *("layer_num", "target_layer_num", "head_dim", "v_head_dim", "head_group_num", "kv_lora_rank"),
    *("qk_rope_head_dim", "kv_cache_dim", "num_mamba_layers", "temporal_state_elem_size", "item_bytes", "ring_size"),
    *("state_page_bytes", "indexer_page_stride_size", "storage_format_tag"),
)
"""Names of the attributes of host pools that, together with the number of heads, describe how values are arranged in
the bytes of a page. No pool has all of these attributes."""
_AXES = {"layer_first": "lsthd", "page_first": "stlhd", "page_first_direct": "slthd", "page_head": "shtld"}
"""Axes of a page that has keys and values for each head, by SGLang's name of the layout. The lossy codecs need the
axes; `farpool.kv.quantization.Axes` explains the letters. In SGLang's flat copy of a page with the layout
``layer_first``, keys and values are separated as in ``page_first_direct``."""
_NOT_REGISTERED = (
    "the pool of KV is not registered; SGLang registers it when it attaches the backend, so attach the backend first"
)
_READ_WRITE = 0x200
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)

_log = logging.getLogger(__name__)

Parts = tuple[memoryview, ...]


class _Settings(CacheSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings that all connectors have, and ``kv_dtype``: the data type of KV that SGLang keeps as plain bytes."""

    kv_dtype: str = ""


class _Pages:
    """Pages of one host pool: their places in memory, and the keys under which nodes store them.

    Each page is stored as one value, with one exception: if engines with different sizes of tensor parallelism share
    pages (``tp_lcm_size``), the heads of a page are divided into parts, and each part is stored as one value. A value
    may consist of several buffers of the pool, which are sent one after the other without a copy. If a pool cannot give
    the addresses of its pages, SGLang's own flat copy of the page is stored.
    """

    def __init__(
        self, pool: Any, name: str, config: HiCacheStorageConfig, settings: _Settings, *, copied: bool
    ) -> None:
        self.pool = pool
        self.name = name
        self.page_size: int = getattr(pool, "page_size", 1) or 1
        heads = (MHATokenToKVPoolHost, MHATokenToKOnlyPoolHost, MambaPoolHost)
        # Latents are equal on all ranks of tensor parallelism, so one rank writes one value.
        own = not config.is_mla_model or isinstance(pool, heads)
        self.is_writer = own or config.is_storage_writer
        tp, rank, self._split = (config.tp_size, config.tp_rank, 1) if own else (1, 0, 1)
        if config.should_split_heads and not copied and isinstance(pool, MHATokenToKVPoolHost):
            self._split = config.tp_lcm_size // tp
            tp, rank = config.tp_lcm_size, rank * self._split
        first = (config.pp_rank * config.attn_cp_size + config.attn_cp_rank) * tp + rank
        self._shards = range(first, first + self._split)

        self.is_copied = copied
        page = torch.arange(self.page_size, dtype=torch.int64)
        try:
            _, sizes = self._addresses(page) or ((), ())
        except (NotImplementedError, ValueError):  # this layout has no addresses of pages
            self.is_copied = True
        if self.is_copied:
            flat = pool.get_dummy_flat_data_page()
            sizes = [flat.numel() * flat.element_size()]
        self.nbytes = sum(sizes)
        order = "flat" if self.is_copied else "+".join(map(str, sizes[: len(sizes) // self._split]))
        layout = f"{pool.layout}:{order}"
        if settings.codec.startswith("int") and type(pool) is MHATokenToKVPoolHost:
            flat = self.is_copied and pool.layout == "layer_first"
            layout = _AXES.get("page_first_direct" if flat else pool.layout, layout)
        geometry: dict[str, str | int] = {
            name: value for name in _GEOMETRY if isinstance(value := getattr(pool, name, None), str | int)
        }
        types = {name: str(value) for name, value in vars(pool).items() if isinstance(value, torch.dtype)}
        self.namespace = Namespace(
            engine="sglang",
            model=config.model_name or settings.weights_id,
            weights=settings.weights_id,
            dtype=_logical_dtype(getattr(pool, "dtype", None), settings.kv_dtype),
            layout=layout,
            tokens_per_block=self.page_size,
            groups=(
                Group(
                    layers=(f"{getattr(pool, 'start_layer', 0)}..{getattr(pool, 'end_layer', 0)}",),
                    block_bytes=self.nbytes // self._split,
                    kind=_kind(pool, name, own),
                ),
            ),
            heads=getattr(pool, "head_num", 0) // self._split,
            head_dim=getattr(pool, "head_dim", 0),
            parallel=(("tp", tp), ("pp", config.pp_size), ("cp", config.attn_cp_size)),
            tenant=settings.tenant,
            codec=settings.codec,
            extra=tuple(sorted({**geometry, **types, **_of_release(pool, name)}.items())),
        )

    @property
    def is_logical(self) -> bool:
        """True if this pool has no bytes, only page numbers for other pools, which have the bytes."""
        return not self.nbytes

    def keys(self, cache: BlockCache, hashes: Sequence[str]) -> list[bytes]:
        """Compose the keys of pages, one key for each part of each page."""
        chains = [bytes.fromhex(one) for one in hashes]
        group = 0
        if self.name != _KV:
            # SGLang has one hash for the pages of all pools, and pools may be added or removed (draft models) while the
            # namespace of KV stays the same. So this pool's namespace becomes part of the chain.
            chains = [hashlib.sha256(self.namespace.digest + chain).digest() for chain in chains]
            group = zlib.crc32(self.name.encode()) or 1
        return [block_key(cache.digest, chain, group, shard) for chain in chains for shard in self._shards]

    def values(self, indices: torch.Tensor) -> Sequence[Parts]:
        """Return the bytes of pages, one entry for each key, in the order of `keys`."""
        if self.is_copied:
            return [(_bytes_of(self.pool.get_data_page(first, flat=True)),) for first in self._firsts(indices)]
        return self._where(indices)

    def targets(self, indices: torch.Tensor) -> Sequence[Parts]:
        """Return writable memory for pages, one entry for each key, in the order of `keys`.

        Call `land` after the load.
        """
        if self.is_copied:
            return [(_bytes_of(self.pool.get_dummy_flat_data_page()),) for _ in self._firsts(indices)]
        return self._where(indices)

    def land(self, indices: torch.Tensor, targets: Sequence[Parts], loaded: Sequence[bool]) -> None:
        """Copy loaded pages from `targets` to the pool; do nothing if the load wrote directly into the pool."""
        if self.is_copied:
            for first, (copy,), is_whole in zip(self._firsts(indices), targets, loaded, strict=True):
                # If a page did not arrive whole, the bytes in its copy are unspecified and must not reach the pool.
                if is_whole:
                    like = self.pool.get_dummy_flat_data_page().dtype
                    self.pool.set_from_flat_data_page(first, torch.frombuffer(copy, dtype=like))

    def of_pages(self, answers: Sequence[bool]) -> list[bool]:
        """Return one answer for each page: True if the answers for all parts of the page are True."""
        return [all(answers[at : at + self._split]) for at in range(0, len(answers), self._split)]

    def reasons_of_pages(self, reasons: Sequence[Reason | None]) -> list[Reason | None]:
        """Return for each page the first reason among its parts; None if no part has a reason."""
        parts = [reasons[at : at + self._split] for at in range(0, len(reasons), self._split)]
        return [next((reason for reason in own if reason is not None), None) for own in parts]

    @contextmanager
    def free_page(self) -> Iterator[EngineBlock]:
        """Allocate a page of the pool for the probe, and free the page afterwards.

        The probe moves a known page through the allocated page. If the pool has no free pages, or if a flat copy does
        not have all bytes of a page, the probe gets new memory instead.
        """
        flat = self.pool.get_dummy_flat_data_page()
        is_whole = flat.numel() * flat.element_size() == self.nbytes
        two = self.pool.alloc(2 * self.page_size) if is_whole else None
        if two is None:
            yield EngineBlock.private(self.nbytes)
            return
        page = two[self.page_size :]  # the second page, because the first one would not reveal a wrong page size
        (first,) = self._firsts(page)

        def write(data: bytes) -> None:
            self.pool.set_from_flat_data_page(first, torch.frombuffer(bytearray(data), dtype=flat.dtype))

        def read() -> bytes:
            return bytes(_bytes_of(self.pool.get_data_page(first, flat=True).contiguous()))

        try:
            yield EngineBlock(
                self.nbytes,
                write,
                read,
                lambda: self.values(page),
                lambda: self.targets(page),
                lambda targets: self.land(page, targets, [True]),
            )
        finally:
            self.pool.free(two)

    def _firsts(self, indices: torch.Tensor) -> list[int]:
        return [int(index) for index in indices[:: self.page_size].tolist()]

    def _addresses(self, indices: torch.Tensor) -> tuple[Sequence[int], Sequence[int]] | None:
        if self._split > 1:
            found = self.pool.get_split_heads_page_buffer_meta(indices, self._split)
        else:
            found = self.pool.get_page_buffer_meta(indices)
        return found  # type: ignore[no-any-return]

    def _where(self, indices: torch.Tensor) -> list[Parts]:
        addresses, sizes = self._addresses(indices) or ((), ())
        views = [_memory_at(address, size, _READ_WRITE) for address, size in zip(addresses, sizes, strict=True)]
        parts = len(views) * self.page_size // (indices.numel() * self._split)
        return [tuple(views[at : at + parts]) for at in range(0, len(views), parts)]


class FarpoolHiCache(HiCacheStorage):  # type: ignore[misc] # SGLang is not installed when types are checked
    """Storage backend for SGLang's option ``dynamic``. It keeps pages of the hierarchical cache on nodes.

    Parameters
    ----------
    storage_config : HiCacheStorageConfig
        Ranks, model and settings. The settings are the fields of `CacheSettings`, and ``kv_dtype``. If SGLang keeps the
        KV as plain bytes, ``kv_dtype`` is the logical type of the KV (``fp8_e4m3``, ``fp8_e5m2``, ...).
    kwargs : mapping, optional
        Further arguments of SGLang; not used.

    Raises
    ------
    ConfigError
        A setting is wrong.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any] | None = None) -> None:
        if storage_config.dcp_size > 1:
            raise ConfigError(
                f"dcp_size is {storage_config.dcp_size}, expected 1: the parts of a page on several ranks have one "
                "name; run the engine without decode context parallelism"
            )
        given = storage_config.extra_config or {}
        self._copied = not given.get("interface_v1")
        self._settings = _Settings.of({name: given[name] for name in given.keys() - _OF_SGLANG}, where=_WHERE)
        self._config = storage_config
        self._pools: dict[str, _Pages] = {}
        self._cache: BlockCache | None = None
        self._connector: Connector | None = None
        self._metrics = StorageMetrics() if storage_config.enable_storage_metrics else None
        if self._copied:
            _log.warning('each page is copied one more time; set "interface_v1": 1 in %s to avoid that', _WHERE)

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Register the pool of KV, make the namespace from it, and open the cache."""
        super().register_mem_pool_host(mem_pool_host)
        pages = self._pages(mem_pool_host, _KV)
        self.close()
        self._pools[_KV] = pages
        # All ranks load as many pages as the rank that finds the fewest, so one rank decides for all.
        config = self._config
        decides = not (config.tp_rank or config.pp_rank or config.attn_cp_rank)
        self._connector = Connector("SGLang", self._settings, pages.page_size, decides=decides)
        (self._cache,) = self._connector.open(pages.namespace)
        self._check(pages)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: PoolName | str) -> None:
        """Register another pool, such as the pool of a sliding window, of recurrent states or of a draft model."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != _KV:
            self._pools[name] = pages = self._pages(host_pool, name)
            self._check(pages)

    def _check(self, pages: _Pages) -> None:
        """Move a known page through a pool. If other bytes come back, pages of all pools are no longer moved."""
        if self._connector is not None and not pages.is_logical:
            with pages.free_page() as block:
                self._connector.probe.check(block)

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return the number of leading pages on the nodes; 0 if computing is expected to be faster than loading."""
        kv = self._pools[_KV]
        if kv.is_logical or not keys:
            return 0
        began = self._judge.clock()
        found = self._blocks.lookup(kv.keys(self._blocks, keys), request=_request(keys, extra_info)).found
        there = _leading(kv.of_pages(found))
        return 0 if self._bypasses(keys, there, there * kv.nbytes, began, extra_info) else there

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find out, with one request, how many leading pages can be restored if all pools are taken together.

        Parameters
        ----------
        keys : list of str
            Hashes of the pages of a sequence, in hex.
        pool_transfers : list of PoolTransfer, optional
            Pools that are needed in addition to KV. The policy of each pool determines the pages of the pool that a
            prefix needs.
        extra_info : HiCacheStorageExtraInfo, optional
            SGLang's information about the request.

        Returns
        -------
        PoolTransferResult
            In pages: the length of the longest prefix that can be restored, the longest prefix of each pool alone, and
            all lengths of prefixes that can be restored. If computing is expected to be faster than loading, all
            numbers are 0 and the list of lengths is empty.
        """
        began = self._judge.clock()
        transfers = pool_transfers or []
        asked: list[tuple[_Pages, Sequence[str]]] = [(self._pools[_KV], keys)]
        asked += [
            (self._pools[name], _hashes_for(one, keys)) for one in transfers if (name := str(one.name)) in self._pools
        ]
        there = self._found(asked, keys, extra_info)
        kv = there[_KV]
        kv_pages = len(keys) if self._pools[_KV].is_logical and transfers else _leading(kv)
        pool_pages = {_KV: kv_pages}
        restorable = set(range(1, kv_pages + 1))
        for one in transfers:
            pages = there.get(str(one.name), [])
            if (
                one.hit_policy == PoolHitPolicy.BLOCK_GROUPS
            ):  # another form of the KV pages; they can be used without it
                groups = _leading(pages) // one.group_pages if one.group_pages else 0
                pool_pages[one.name] = min(groups * one.block_pages, len(keys))
                continue
            usable = _usable_lengths(one, pages[:kv_pages])
            pool_pages[one.name] = max(usable, default=0)
            restorable &= usable
        best = max(restorable, default=0)
        whole = [str(one.name) for one in transfers if one.hit_policy != PoolHitPolicy.TRAILING_PAGES]
        nbytes = best * sum(self._pools[name].nbytes for name in {_KV, *whole} if name in self._pools)
        if self._bypasses(keys, best, nbytes, began, extra_info):
            return PoolTransferResult(0, dict.fromkeys(pool_pages, 0), [])
        return PoolTransferResult(best, pool_pages, sorted(restorable))

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Load pages of KV into the host pool. Return True for each page that was loaded whole and verified."""
        return self._move([(_KV, keys, host_indices)], extra_info, saving=False)[0]

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        """Save the pages of KV that the nodes do not have. Return True for each page that the nodes have now."""
        return self._move([(_KV, keys, host_indices)], extra_info, saving=True)[0]

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Load pages of several pools with one request. Return for each pool a list as `batch_get_v1` returns it."""
        return self._move_pools(transfers, extra_info, saving=False)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Save pages of several pools with one request. Return for each pool a list as `batch_set_v1` returns it."""
        return self._move_pools(transfers, extra_info, saving=True)

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Load flat copies of pages into tensors; return the tensors, with None for each missing page.

        SGLang calls this method if it does not use the addresses of pages (``interface_v1`` is off).
        """
        kv = self._pools[_KV]
        if not kv.is_copied:
            return [None] * len(keys)
        tensors = target_locations or [kv.pool.get_dummy_flat_data_page() for _ in keys]
        targets = [(_bytes_of(tensor),) for tensor in tensors]
        reasons = self._load(kv, keys, kv.keys(self._blocks, keys), targets, len(keys) * kv.nbytes, _request(keys))
        return [tensor if reason is None else None for tensor, reason in zip(tensors, reasons, strict=True)]

    def batch_set(
        self,
        keys: list[str],
        values: list[torch.Tensor] | None = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Save flat copies of pages; return True if the nodes have all of them now.

        SGLang calls this method if it does not use the addresses of pages (``interface_v1`` is off).
        """
        kv = self._pools[_KV]
        if not kv.is_copied or values is None:
            return False
        self._judge.saved(keys)
        own = kv.keys(self._blocks, keys)
        cost = self._judge.cost(len(keys), 0, len(own))
        saved = self._blocks.save(own, [_bytes_of(value) for value in values], request=_request(keys), cost=cost)
        return not any(saved)

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: object = None
    ) -> torch.Tensor | None:
        """Load the flat copy of one page as `batch_get` does; return None if the page is missing."""
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def set(
        self,
        key: str,
        value: torch.Tensor | None = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool:
        """Save the flat copy of one page as `batch_set` does; return True if the nodes have it now."""
        return self.batch_set([key], None if value is None else [value])

    def exists(self, key: str) -> bool:
        """Return True if the nodes have a page of KV."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Delete all pages of this namespace from the nodes, including pages of other pools and other ranks.

        Raises
        ------
        NodeError
            Nodes that may have such pages cannot be reached.
        """
        self._blocks.purge()

    def get_stats(self) -> StorageMetrics | None:
        """Return the number of pages and the speed in GB/s of each batch since the last call of this method.

        Return None if SGLang's storage metrics are off.
        """
        if self._metrics is None:
            return None
        metrics, self._metrics = self._metrics, StorageMetrics()
        return metrics

    def close(self) -> None:
        """Close the connections. Idempotent."""
        if self._connector is not None:
            self._connector.close()

    @property
    def _blocks(self) -> BlockCache:
        if self._cache is None:
            raise ConfigError(_NOT_REGISTERED)
        return self._cache

    @property
    def _judge(self) -> EngineJudge:
        if self._connector is None:
            raise ConfigError(_NOT_REGISTERED)
        return self._connector.judge

    def _bypasses(
        self, keys: list[str], there: int, nbytes: int, began: float, extra_info: HiCacheStorageExtraInfo | None
    ) -> bool:
        """Return True if computing is expected to be faster than loading the pages that a lookup has found."""
        before, request = _before(extra_info), _request(keys, extra_info)
        return self._judge.looked_up(keys, there, nbytes, began=began, request=request, before=before).is_bypassed

    def _load(
        self,
        pages: _Pages,
        hashes: Sequence[str],
        keys: Sequence[bytes],
        parts: Sequence[Parts],
        nbytes: int,
        request: str,
    ) -> list[Reason | None]:
        """Load pages of one or several pools with one request.

        The judge, which decides whether loading is faster than computing, measures the time of the load. A request may
        have pages of several pools for the same tokens, and the judge must count these tokens once. So the judge
        receives only the outcomes of the pages of the first pool.

        Parameters
        ----------
        pages : _Pages
            The first pool.
        hashes : sequence of str
            Hashes of the pages of the first pool.
        keys, parts : sequence
            Keys and memory of all pages. The pages of the first pool come first.
        nbytes : int
            Bytes of all pages.
        request : str
            Name of the request.
        """
        load_ended = self._judge.loading(hashes, nbytes)
        reasons: list[Reason | None] = [Reason.FAILED] * len(keys)
        try:
            reasons = self._blocks.load(keys, parts, request=request)
        finally:
            load_ended(pages.reasons_of_pages(reasons)[: len(hashes)])
        return reasons

    def _pages(self, pool: Any, name: str) -> _Pages:
        copied = self._copied and name == _KV
        return _Pages(pool, name, self._config, self._settings, copied=copied)

    def _found(
        self,
        asked: Sequence[tuple[_Pages, Sequence[str]]],
        hashes: Sequence[str],
        extra_info: HiCacheStorageExtraInfo | None,
    ) -> dict[str, list[bool]]:
        """Look up pages of several pools with one request.

        Return, for each pool, a list with one bool per page: True if the page was found.
        """
        batches = [[] if pages.is_logical else pages.keys(self._blocks, wanted) for pages, wanted in asked]
        found = self._blocks.lookup([key for batch in batches for key in batch], request=_request(hashes, extra_info))
        answers = iter(found.found)
        return {
            pages.name: pages.of_pages([next(answers) for _ in batch])
            for (pages, _), batch in zip(asked, batches, strict=True)
        }

    def _move_pools(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None, *, saving: bool
    ) -> dict[str, list[bool]]:
        """Save or load pages of several pools.

        Return, for each pool, a list with one bool per page: True if the page was moved.
        """
        wanted = [(str(one.name), one.keys or [], one.host_indices) for one in transfers]
        moved = self._move(wanted, extra_info, saving=saving)
        return {one.name: pages for one, pages in zip(transfers, moved, strict=True)}

    def _move(
        self,
        wanted: Sequence[tuple[str, Sequence[str], torch.Tensor | None]],
        extra_info: HiCacheStorageExtraInfo | None,
        *,
        saving: bool,
    ) -> list[list[bool]]:
        """Save or load pages of several pools with one request.

        Return, for each pool, a list with one bool per page: True if the page was moved. Pages that have no
        bytes of their own count as moved, and so do pages that another rank saves.
        """
        began = time.perf_counter()
        batches = [self._batch(name, hashes, indices, saving) for name, hashes, indices in wanted]
        keys = [key for batch in batches for key in batch.keys]
        parts = [part for batch in batches for part in batch.parts]
        request = _request(wanted[0][1] if wanted else (), extra_info)
        reasons: Iterator[Reason | None] = iter(())
        if saving:
            self._judge.saved([one for _, hashes, _ in wanted for one in hashes])
            if keys:
                pages = max(len(hashes) for _, hashes, _ in wanted)
                cost = self._judge.cost(pages, _before(extra_info), len(keys))
                reasons = iter(self._blocks.save(keys, parts, request=request, cost=cost))
        elif keys:
            first = next(batch for batch in batches if batch.keys)
            total = sum(len(batch.done) * batch.pages.nbytes for batch in batches if batch.keys)
            reasons = iter(self._load(first.pages, first.hashes, keys, parts, total, request))
        count = nbytes = 0
        for batch in batches:
            if batch.keys:
                batch.done = batch.pages.of_pages([next(reasons) is None for _ in batch.keys])
                if not saving:
                    batch.pages.land(batch.indices, batch.parts, batch.done)
                count += sum(batch.done)
                nbytes += sum(batch.done) * batch.pages.nbytes
        if self._metrics is not None and count:
            speed = nbytes / _BYTES_PER_GB / (time.perf_counter() - began)
            (self._metrics.backup_pgs if saving else self._metrics.prefetch_pgs).append(count)
            (self._metrics.backup_bandwidth if saving else self._metrics.prefetch_bandwidth).append(speed)
        return [batch.done for batch in batches]

    def _batch(self, name: str, hashes: Sequence[str], indices: torch.Tensor | None, saving: bool) -> _Batch:
        pages = self._pools.get(name)
        if pages is None:
            _log.error("pool %s was not registered", name)
        elif pages.is_logical or (saving and not pages.is_writer):
            return _Batch([True] * len(hashes))  # there are no bytes, or another rank saves the same bytes
        elif indices is None or indices.numel() != len(hashes) * pages.page_size:
            count = 0 if indices is None else indices.numel()
            _log.error("pool %s: %d indices for %d pages of %d", name, count, len(hashes), pages.page_size)
        elif hashes:
            parts = pages.values(indices) if saving else pages.targets(indices)
            return _Batch([False] * len(hashes), pages.keys(self._blocks, hashes), parts, pages, indices, hashes)
        return _Batch([False] * len(hashes))


@dataclass(slots=True)
class _Batch:
    """Pages of one pool within a request. The batch has no keys if nothing has to be sent for these pages."""

    done: list[bool]
    keys: Sequence[bytes] = ()
    parts: Sequence[Parts] = ()
    pages: _Pages = None  # type: ignore[assignment] # a batch with keys has pages and indices
    indices: torch.Tensor = None  # type: ignore[assignment]
    hashes: Sequence[str] = ()


def _logical_dtype(dtype: torch.dtype | None, setting: str) -> str:
    name = "mixed" if dtype is None else str(dtype).removeprefix("torch.")
    if name != "uint8":
        return name
    if not setting:
        raise ConfigError(
            "SGLang keeps this KV as plain bytes, which may be fp8_e4m3 or fp8_e5m2; expected the type as "
            f'"kv_dtype" in {_WHERE}, such as "kv_dtype": "fp8_e4m3"',
            setting="kv_dtype",
        )
    return setting


def _of_release(pool: Any, name: str) -> dict[str, str]:
    """Return the names of the pool and of SGLang's release, for the namespace.

    Another release may order the bytes of a page of the same size differently.
    """
    return {"pool": name, "class": type(pool).__name__, "release": version("sglang")}


def _kind(pool: Any, name: str, is_own: bool) -> Literal["full", "sliding", "mla", "recurrent"]:
    if isinstance(pool, MambaPoolHost):
        return "recurrent"
    if name.endswith(str(PoolName.SWA)):
        return "sliding"
    return "full" if is_own else "mla"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _request(hashes: Sequence[str], extra_info: HiCacheStorageExtraInfo | None = None) -> str:
    """Return a request's name for ``farpool why``: SGLang's session id if there is one, else the first page's hash."""
    known = (extra_info.extra_info if extra_info else None) or {}
    return str(known.get("session_id") or (hashes[0] if hashes else ""))


def _before(extra_info: HiCacheStorageExtraInfo | None) -> int:
    """Return the number of pages in the sequence before the pages of a call; 0 if SGLang does not give the number."""
    return len(extra_info.prefix_keys or ()) if extra_info else 0


def _leading(answers: Sequence[bool]) -> int:
    return next((number for number, is_there in enumerate(answers) if not is_there), len(answers))


def _usable_lengths(transfer: PoolTransfer, pages: Sequence[bool]) -> set[int]:
    """Return all prefix lengths, in pages, at which a pool has the pages that its policy needs."""
    match transfer.hit_policy:
        case PoolHitPolicy.TRAILING_PAGES:
            return _ends_of_windows(pages, max(1, len(transfer.keys or ())))
        case PoolHitPolicy.ALL_PAGES:
            return set(range(1, _leading(pages) + 1))
    _log.error("pool %s: the policy %s is not known", transfer.name, transfer.hit_policy)
    return set()


def _ends_of_windows(pages: Sequence[bool], window: int) -> set[int]:
    """Return all prefix lengths, in pages, at which the last `window` pages of the prefix were found.

    A prefix that is shorter than the window needs all of its pages.
    """
    ends, run = set(), 0
    for length, is_there in enumerate(pages, 1):
        run = run + 1 if is_there else 0
        if run >= min(window, length):
            ends.add(length)
    return ends


def _hashes_for(transfer: PoolTransfer, hashes: Sequence[str]) -> Sequence[str]:
    """Return the hashes of the pages that a pool needs for a sequence.

    With `BLOCK_GROUPS`, these are the last `group_pages` of every `block_pages` pages; otherwise all pages.
    """
    if transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS:
        return hashes
    block, group = transfer.block_pages, transfer.group_pages
    if not 0 < group <= block:
        return ()
    return [one for end in range(block, len(hashes) + 1, block) for one in hashes[end - group : end]]
