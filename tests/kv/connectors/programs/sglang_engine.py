"""SGLang's own host pools, hashes and controllers on the CPU, over farpool's storage backend."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed

import tests.kv.connectors.programs.sglang_imports  # noqa: F401 # before SGLang

# isort: split
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.utils import get_hash_str, get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs

PAGE = 16
LAYERS = 2
PATIENCE = 30.0
SETTINGS: dict[str, Any] = {"weights_id": "first", "timeout": PATIENCE}
"""Settings of each backend of which a case says nothing else."""
_TOKENS = 2048


def begin() -> None:
    """Make this process SGLang's only rank."""
    torch.set_num_threads(1)
    folder = tempfile.mkdtemp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rank", rank=0, world_size=1)
    get_parallel().override_permanently(
        **dict.fromkeys(("tp_size", "pp_size", "attn_dcp_size", "attn_tp_size"), 1),
        **dict.fromkeys(("tp_rank", "pp_rank", "attn_dcp_rank", "attn_tp_rank", "attn_dp_rank"), 0),
    )


def mha(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16, *, heads: int = 2) -> tuple[Any, Any]:
    """A device pool with keys and values of heads, and its host pool."""
    device = MHATokenToKVPool(
        size=_TOKENS,
        page_size=PAGE,
        dtype=dtype,
        head_num=heads,
        head_dim=32,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return device, _host(MHATokenToKVPoolHost, device, layout)


def mla(layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """A device pool with latents, and its host pool."""
    device = MLATokenToKVPool(
        size=_TOKENS,
        page_size=PAGE,
        dtype=dtype,
        kv_lora_rank=64,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return device, _host(MLATokenToKVPoolHost, device, layout, target_layer_num=LAYERS)


def _host(kind: type, device: Any, layout: str, **more: Any) -> Any:
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=_TOKENS,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        **more,
    )


def mamba(*, side_state: bool = False) -> Any:
    """A host pool of recurrent states; one with side states has no addresses of pages."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 32, 2, 16, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 32, 24, dtype=torch.bfloat16),),
        extra_checkpoint_buffers=(torch.zeros(32, 8, dtype=torch.float32),) if side_state else (),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=32, pin_memory=False, device="cpu", layout="page_first")


def fill(pool: Any, indices: torch.Tensor, seed: int) -> None:
    """Write bytes into pages that say, by a seed, whose they are."""
    numbers = torch.Generator().manual_seed(seed)
    for first in indices[:: pool.page_size].tolist():
        page = pool.get_dummy_flat_data_page()
        raw = torch.randint(0, 256, (page.numel() * page.element_size(),), generator=numbers, dtype=torch.uint8)
        pool.set_from_flat_data_page(first, raw.view(page.dtype))


def pages_of(pool: Any, indices: torch.Tensor) -> list[bytes]:
    """The bytes of pages, as SGLang itself assembles them."""
    firsts = indices[:: pool.page_size].tolist()
    return [pool.get_data_page(first).contiguous().view(torch.uint8).numpy().tobytes() for first in firsts]


def hashes(tokens: Sequence[int]) -> list[str]:
    """SGLang's own hashes of pages."""
    found = get_storage_hash_str(list(tokens), None, page_size=PAGE)
    assert isinstance(found, list)
    return found


def settings(address: str | Sequence[str], **changes: Any) -> dict[str, Any]:
    """The user's value of --hicache-storage-backend-extra-config."""
    return {
        "backend_name": "farpool",
        "module_path": "farpool.kv.sglang",
        "class_name": "FarpoolHiCache",
        "interface_v1": 1,
        "nodes": [address] if isinstance(address, str) else list(address),
        **SETTINGS,
        **changes,
    }


@contextmanager
def backend(
    pool: Any, extra_config: dict[str, Any], more: dict[PoolName, Any] | None = None, **fields: Any
) -> Iterator[Any]:
    """A storage backend as SGLang's factory makes it, with its pool of KV (and `more`) registered."""
    given: dict[str, Any] = {
        **{"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1},
        **{"is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True},
        "model_name": "org/model",
        **fields,
    }
    config = HiCacheStorageConfig(**given, extra_config=extra_config)
    storage: HiCacheStorage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, PoolName.KV)
    for name, one in (more or {}).items():
        storage.register_mem_host_pool_v2(one, name)
    storage.on_host_pools_registered()
    try:
        yield storage
    finally:
        storage.close()


class _Allocator:
    def __init__(self, device: Any) -> None:
        self._device = device

    def get_kvcache(self) -> Any:
        return self._device


class Engine:
    """The storage side of an SGLang scheduler: its controller with all threads, over farpool.

    `hybrid` is the controller that SGLang 0.5.23 uses for its radix cache; the other one is its base.
    """

    def __init__(
        self,
        extra_config: dict[str, Any],
        *,
        pools: tuple[Any, Any] | None = None,
        more: dict[PoolName, Any] | None = None,
        hybrid: bool = True,
    ) -> None:
        self.device, self.pool = pools or mha()
        self.more = more or {}
        group: Any = self.pool
        if hybrid:
            entries = [PoolEntry(PoolName.KV, self.pool, self.device, int, is_primary_index_anchor=True)]
            entries += [PoolEntry(name, one, None, int) for name, one in self.more.items()]
            group = HostPoolGroup(entries)
        self.hybrid = hybrid
        self.controller = (HybridCacheController if hybrid else HiCacheController)(
            _Allocator(self.device),
            group,
            PAGE,
            torch.distributed.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="direct",
            storage_backend="dynamic",
            prefetch_threshold=PAGE,
            model_name="org/model",
            storage_backend_extra_config=dict(extra_config),
        )

    @property
    def storage(self) -> Any:
        return self.controller.storage_backend

    def alloc(self, pages: int) -> torch.Tensor:
        indices = self.pool.alloc(pages * PAGE)
        assert indices is not None
        return indices

    def save(self, tokens: Sequence[int], seed: int, extra_pools: list[PoolTransfer] | None = None) -> list[bytes]:
        """Fill pages, have them backed up, and forget them; return their bytes. `acked` counts the saved pages."""
        indices = self.alloc(len(tokens) // PAGE)
        fill(self.pool, indices, seed)
        kept = pages_of(self.pool, indices)
        more = {"extra_pools": extra_pools} if extra_pools else {}
        self.controller.write_storage(indices, list(tokens), hashes(tokens), **more)
        operation = self.controller.ack_backup_queue.get(timeout=PATIENCE)
        self.acked = operation.completed_tokens // PAGE
        fill(self.pool, indices, seed + 1)
        self.pool.free(indices)
        return kept

    def query(self, tokens: Sequence[int], extra_pools: list[PoolTransfer] | None = None) -> Any:
        """Begin a prefetch; return SGLang's operation after the backend has looked up the pages."""
        more = {"extra_pools": extra_pools} if extra_pools else {}
        name = f"request-{len(tokens)}"
        self.controller.prefetch(CacheRequestHandle(name, 0) if self.hybrid else name, list(tokens), **more)
        return self.controller.prefetch_hit_queue.get(timeout=PATIENCE)

    def fetch(self, operation: Any) -> int:
        """Go on with a prefetch until SGLang has its last acknowledgement; returns pages."""
        operation.host_indices = self.alloc(operation.storage_hit_count // PAGE)
        self.controller.prefetch_buffer.put(operation)
        loaded = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=PATIENCE)
            loaded = loaded if ack.completed_tokens is None else ack.completed_tokens // PAGE
            if ack.pool_hits is not None:
                self.pool_hits = ack.pool_hits
            if ack.completed_req:
                return loaded

    def load(self, tokens: Sequence[int], kept: Sequence[bytes]) -> dict[str, int]:
        """Prefetch pages and compare the loaded ones."""
        operation = self.query(tokens)
        found = operation.storage_hit_count // PAGE
        loaded = self.fetch(operation) if found else 0
        return {"found": found, "loaded": loaded, "wrong": self.wrong(operation, loaded, kept)}

    def wrong(self, operation: Any, loaded: int, kept: Sequence[bytes]) -> int:
        now = pages_of(self.pool, operation.host_indices[: loaded * PAGE]) if loaded else []
        return sum(one != other for one, other in zip(now, kept, strict=False)) + max(0, len(now) - len(kept))

    def close(self) -> None:
        self.controller.detach_storage_backend()


@contextmanager
def engine(*arguments: Any, **named: Any) -> Iterator[Engine]:
    made = Engine(*arguments, **named)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


__all__ = [
    "LAYERS",
    "PAGE",
    "PATIENCE",
    "SETTINGS",
    "Engine",
    "HiCacheFile",
    "HiCacheStorageConfig",
    "HybridCacheController",
    "LogicalHostPool",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "ServerArgs",
    "backend",
    "begin",
    "engine",
    "environment",
    "fill",
    "get_hash_str",
    "get_storage_hash_str",
    "hashes",
    "mamba",
    "mha",
    "mla",
    "pages_of",
    "settings",
]
