"""Cases of the contract of connectors (cases.py) on SGLang's `UnifiedRadixCache`, from its insert to KV on the device.

Its tree, its controller and its storage threads are real. Only the copies between device and host are made here, as
SGLang has them as GPU kernels alone. A second tree, with its own pools, loads the saved pages.

``python -m ... sglang_tree CASE ...`` prints the facts of each case by its name.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv.keys import KEY_MAGIC
from tests.kv.connectors.cases import BLOCKS, MEMORY
from tests.kv.connectors.programs.faults import damaged_loads
from tests.kv.connectors.programs.sglang_engine import PAGE, PATIENCE, begin, mha, settings

# isort: split
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hybrid_cache import hybrid_pool_assembler
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context

from farpool.kv import sglang

TOKENS = range(1000, 1000 + BLOCKS * PAGE)
Facts = dict[str, Any]


class Tree:
    """A tree with a device pool and a host pool, which a scheduler's steps are made for by `until`."""

    def __init__(self, server_args: Any, pages: int | None = None) -> None:
        self._device, host = mha("layer_first")
        if pages is not None:
            host.alloc(host.available_size() - pages * PAGE)  # in use by others for good
        self._pairs = [(host.k_buffer, self._device.k_buffer), (host.v_buffer, self._device.v_buffer)]
        host.backup_from_device_all_layer = self._to_host
        host.load_to_device_per_layer = self._to_device
        self._allocator = PagedTokenToKVPoolAllocator(
            self._device.size, PAGE, torch.bfloat16, "cpu", self._device, need_sort=False
        )
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(4, 512, "cpu", False),
            token_to_kv_pool_allocator=self._allocator,
            page_size=PAGE,
            tp_cache_group=torch.distributed.group.WORLD,
            tree_components=(ComponentType.FULL,),
        )
        self.cache = UnifiedRadixCache(params)
        with mock.patch.object(hybrid_pool_assembler, "build_kv_host_pool", return_value=host):
            self.cache.init_hicache(server_args, params)

    @property
    def storage(self) -> Any:
        return self.cache.cache_controller.storage_backend

    def save(self, tokens: Sequence[int]) -> list[bytes]:
        """Insert KV of tokens as a request that has computed it; return its pages once all have been backed up."""
        indices = self._allocator.alloc(len(tokens))
        numbers = torch.Generator().manual_seed(1)
        for _, device in self._pairs:
            for layer in device:
                layer[indices] = torch.randn(layer[indices].shape, generator=numbers).to(layer.dtype)
        self.cache.insert(InsertParams(key=_key(tokens), value=indices))
        self.until(lambda: self._backed_up(tokens))
        return self._pages(indices)

    def load(self, tokens: Sequence[int], kept: Sequence[bytes]) -> Facts:
        """Prefetch tokens as for a waiting request, load them to the device, and compare them with the kept bytes."""
        before = self._match(tokens)
        anchor, ids = before.last_host_node, array("q", tokens)
        last = self.cache.get_last_hash_value(anchor)
        found = self.cache.query_storage_hit_length(anchor, ids, last) // PAGE
        request = CacheRequestHandle("request", 0)
        self.cache.prefetch_from_storage(request, anchor, ids, last)
        self.until(lambda: self.cache.check_prefetch_progress(request))
        there = self._match(tokens)
        if there.host_hit_length:
            assert self.cache.load_back(there.best_match_node)
            self.cache.ready_to_load_host_cache()
            self.until(lambda: not self.cache.ongoing_load_back)
        now = self._pages(self.cache.path_device_indices(self._match(tokens).last_device_node))
        wrong = sum(one != other for one, other in zip(now, kept, strict=False)) + max(0, len(now) - len(kept))
        return {"before": before.device_prefix_len, "found": found, "loaded": len(now), "wrong": wrong}

    def until(self, condition: Callable[[], bool]) -> None:
        """Do the work of a scheduler between its batches until the condition holds."""
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            self.cache.check_hicache_events()
            time.sleep(0.01)

    def _backed_up(self, tokens: Sequence[int]) -> bool:
        node = self._match(tokens).last_device_node
        return self.cache.is_backuped(node) and not (self.cache.ongoing_write_through or self.cache.ongoing_backup)

    def _match(self, tokens: Sequence[int]) -> Any:
        return self.cache.match_prefix(MatchPrefixParams(key=_key(tokens)))

    def _pages(self, indices: torch.Tensor) -> list[bytes]:
        pages = indices.view(-1, PAGE)
        parts = [layer[pages].view(torch.uint8).flatten(1) for _, device in self._pairs for layer in device]
        return [page.numpy().tobytes() for page in torch.cat(parts, dim=1)]

    def _to_host(self, pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str) -> None:
        for host, device in self._pairs:
            for number, layer in enumerate(device):
                host[number][host_indices] = layer[device_indices]

    def _to_device(
        self,
        pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        for host, device in self._pairs:
            device[layer_id][device_indices] = host[layer_id][host_indices]


def _key(tokens: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", tokens))


@contextmanager
def tree(node: RunningNode, pages: int | None = None, **changes: Any) -> Iterator[Tree]:
    """A tree as a server makes it with these settings of farpool, with a host pool that has room for `pages`."""
    extra = {**settings(node.address, **changes), "prefetch_threshold": PAGE}
    with get_context().override_server_args(
        device="cpu",
        page_size=PAGE,
        served_model_name="org/model",
        enable_hierarchical_cache=True,
        hicache_write_policy="write_through",
        hicache_io_backend="direct",
        hicache_mem_layout="layer_first",
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(extra),
    ) as server_args:
        made = Tree(server_args, pages)
        try:
            yield made
        finally:
            made.cache.shutdown()


def round_trip(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS)
    with tree(node) as other:
        return {"saved": len(kept), **other.load(TOKENS, kept)}


def partial_batch(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS[: 8 * PAGE])
    with tree(node) as other:
        return {"saved": len(kept), **other.load(TOKENS, kept)}


def unknown_keys(node: RunningNode) -> Facts:
    with tree(node) as one:
        return {"saved": 0, **one.load(TOKENS, [])}


def other_weights(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS)
    with tree(node, weights_id="second") as other:
        return {"saved": len(kept), **other.load(TOKENS, kept)}


def node_killed_during_load(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS)
    with tree(node, timeout=3.0) as other:
        load = other.storage._blocks.load

        def killed(*arguments: Any, **named: Any) -> Any:
            node.kill()
            return load(*arguments, **named)

        with mock.patch.object(other.storage._blocks, "load", killed):
            told = other.load(TOKENS, kept)
        return {"saved": len(kept), **told, "completed": True}


def memory_smaller_than_prefix(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS)
    with tree(node, pages=MEMORY) as other:
        load, asked = other.storage._blocks.load, 0

        def counted(keys: Sequence[bytes], *arguments: Any, **named: Any) -> Any:
            nonlocal asked
            asked += len(keys)
            return load(keys, *arguments, **named)

        with mock.patch.object(other.storage._blocks, "load", counted):
            told = other.load(TOKENS, kept)
        return {"saved": len(kept), **told, "asked": asked, "completed": True}


def other_release(node: RunningNode) -> Facts:
    with mock.patch.object(sglang, "version", return_value="0.1.0"), tree(node) as one:
        kept = one.save(TOKENS)
    with tree(node) as other:
        return {"saved": len(kept), **other.load(TOKENS, kept)}


def damaged_in_host_memory(node: RunningNode) -> Facts:
    with tree(node) as one:
        kept = one.save(TOKENS)
    with damaged_loads(), tree(node) as other:
        told = other.load(TOKENS, [])
        other.save(range(5000, 5000 + BLOCKS * PAGE))
    with Store(node.address, timeout=PATIENCE) as store:
        return {**told, "saved": sum(1 for _ in store.keys(KEY_MAGIC)), "kept": len(kept), "completed": True}


def main() -> None:
    begin()
    facts: dict[str, Facts] = {}
    for name in sys.argv[1:]:
        case: Callable[[RunningNode], Facts] = globals()[name]
        with running_node() as node:
            try:
                facts[name] = case(node)
            except Exception:
                facts[name] = {"error": traceback.format_exc()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
