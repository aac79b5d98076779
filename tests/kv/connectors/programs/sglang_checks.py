"""Layouts, hybrid models, parallel ranks and SGLang's own chaos switches; each function prints its facts as JSON.

``python -m ... sglang_checks CHECK ...``
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import ConfigError
from tests.kv.connectors.programs.sglang_engine import (
    PAGE,
    HiCacheFile,
    HiCacheStorageConfig,
    HybridCacheController,
    LogicalHostPool,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    ServerArgs,
    backend,
    begin,
    engine,
    environment,
    fill,
    get_hash_str,
    get_storage_hash_str,
    hashes,
    mamba,
    mha,
    mla,
    pages_of,
    settings,
)

Facts = dict[str, Any]
TOKENS = range(1000, 1000 + 8 * PAGE)
LAYOUTS: dict[str, Callable[[], tuple[Any, Any]]] = {
    **{
        f"mha {layout}": lambda layout=layout: mha(layout)  # type: ignore[misc]
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head")
    },
    **{
        f"mla {layout}": lambda layout=layout: mla(layout)  # type: ignore[misc]
        for layout in ("layer_first", "page_first", "page_first_direct")
    },
}


_running = ""
"""Check that is run: weights of its own, so that all can use one node."""


def _settings(node: RunningNode, /, **changes: Any) -> dict[str, Any]:
    return settings(node.address, **{"weights_id": _running, **changes})


def layouts(node: RunningNode) -> Facts:
    """Each layout reads its own pages through SGLang's controller, by both interfaces, and none of the other
    layouts."""
    facts: Facts = {}
    for name, pools in LAYOUTS.items():
        for interface in (1, 0):
            given = {**_settings(node), "interface_v1": interface}
            with engine(given, pools=pools(), hybrid=False) as one:
                before = one.query(TOKENS).storage_hit_count // PAGE
                kept = one.save(TOKENS, seed=len(facts))
                buffers = one.storage._pools["kv"].values(torch.arange(PAGE))
                facts[f"{name}, interface {interface}"] = {
                    **{"of_others": before, "saved": one.acked, "buffers": len(buffers[0])},
                    **one.load(TOKENS, kept),
                }
    return facts


def hybrid(node: RunningNode) -> Facts:
    """SGLang's hybrid controller saves and prefetches KV, a draft model's KV and recurrent states together."""
    _, draft = mha()
    states = mamba()
    more = {PoolName.DRAFT: draft, PoolName.MAMBA: states}
    with engine(_settings(node), more=more) as one:
        slots = states.alloc(3)
        fill(states, slots, 7)
        kept_state = pages_of(states, slots[:1])

        def transfers(slot: torch.Tensor) -> list[PoolTransfer]:
            last = PoolTransfer(PoolName.MAMBA, host_indices=slot, keys=hashes(TOKENS)[-1:])
            last.hit_policy = PoolHitPolicy.TRAILING_PAGES
            return [PoolTransfer(PoolName.DRAFT, indices_from_pool=PoolName.KV), last]

        fill(draft, torch.arange(draft.size), 9)
        # The draft's pages have the same places as the KV pages.
        with mock.patch.object(one.pool, "free", lambda indices: one.__setattr__("places", indices)):
            kept = one.save(TOKENS, 1, transfers(slots[:1]))
        kept_draft = pages_of(draft, one.places)
        fill(states, slots, 8)
        fill(draft, torch.arange(draft.size), 10)
        operation = one.query(TOKENS, transfers(slots[1:2]))
        found = operation.storage_hit_count // PAGE
        loaded = one.fetch(operation)
        return {
            **{"saved": one.acked, "found": found, "loaded": loaded, "wrong": one.wrong(operation, loaded, kept)},
            "hits": {str(name): hits for name, hits in one.pool_hits.items() if hits},
            "state_is_equal": pages_of(states, slots[1:2]) == kept_state,
            "draft_is_equal": pages_of(draft, operation.host_indices) == kept_draft,
            "query_pool_hits": {str(name): hits for name, hits in operation.query_pool_hit_pages.items()},
        }


def hit_policies(node: RunningNode) -> Facts:
    """Random sets of pages in three pools: the same prefixes can be restored as SGLang's own file backend says."""
    _, kv = mha()
    _, draft = mha()
    _, window = mha()
    states = mamba()
    more = {PoolName.DRAFT: draft, PoolName.SWA: window, PoolName.MAMBA: states}
    pools = {PoolName.KV: kv, **more}
    numbers = random.Random(12)
    facts: Facts = {"rounds": 0, "restorable": 0, "holes": 0, "different": [], "requests": 0}
    with backend(kv, _settings(node), more) as storage, tempfile.TemporaryDirectory() as folder:
        config = HiCacheStorageConfig(0, 1, 0, 1, 0, 1, False, False, True, "org/model")
        file = HiCacheFile(config, folder)
        for name, pool in pools.items():
            file.register_mem_host_pool_v2(pool, name)
        lookup = storage._cache.lookup
        for turn in range(60):
            names = hashes(range(turn * 100_000, turn * 100_000 + 8 * PAGE))
            for name, pool in pools.items():
                share = numbers.choice((0.5, 0.9, 1.0))
                there = [one for one in names if numbers.random() < share]
                if there:
                    indices = torch.arange(len(there) * pool.page_size)
                    fill(pool, indices, turn)
                    (saved,) = storage.batch_set_v2([PoolTransfer(name, indices, keys=there)]).values()
                    (written,) = file.batch_set_v2([PoolTransfer(name, indices, keys=there)]).values()
                    assert saved == written == [True] * len(there)
            asked = [
                PoolTransfer(PoolName.DRAFT),
                PoolTransfer(PoolName.SWA, keys=names[-3:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
                PoolTransfer(PoolName.MAMBA, keys=names[-1:], hit_policy=PoolHitPolicy.TRAILING_PAGES),
            ]
            asked = numbers.sample(asked, numbers.randrange(4))
            with mock.patch.object(storage._cache, "lookup", side_effect=lookup) as calls:
                ours = storage.batch_exists_v2(names, asked)
                requests = calls.call_count
                assert storage.batch_exists(names) == ours.extra_pool_hit_pages[PoolName.KV]
            facts["requests"] = max(facts["requests"], requests, calls.call_count - requests)
            theirs = file.batch_exists_v2(names, asked)
            facts["rounds"] += 1
            facts["restorable"] += bool(theirs.restorable_prefix_pages)
            lengths = theirs.restorable_prefix_pages or []
            facts["holes"] += lengths != list(range(1, len(lengths) + 1))
            if not _agree(ours, theirs):
                facts["different"].append([turn, repr(ours), repr(theirs)])
    return facts


def _agree(ours: PoolTransferResult, theirs: PoolTransferResult) -> bool:
    """The same prefixes, and the same for each pool of which the other one says something."""
    told = theirs.extra_pool_hit_pages
    return (
        ours.kv_hit_pages == theirs.kv_hit_pages
        and ours.restorable_prefix_pages == theirs.restorable_prefix_pages
        and all(ours.extra_pool_hit_pages[name] == pages for name, pages in told.items())
    )


def block_groups(node: RunningNode) -> Facts:
    """Groups of 1 page at the ends of blocks of 2: the leading complete ones count, and KV does not wait for them."""
    _, kv = mha()
    _, blocks = mha()
    names, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    with backend(kv, _settings(node), {PoolName.AUXILIARY_SWA: blocks}) as storage:
        assert all(storage.batch_set_v1(names, indices))
        told = []
        for written in ([], [1, 3], [7], [5]):
            keys = [names[n] for n in written]
            storage.batch_set_v2([PoolTransfer(PoolName.AUXILIARY_SWA, torch.arange(len(keys) * PAGE), keys=keys)])
            asked = PoolTransfer(
                PoolName.AUXILIARY_SWA, hit_policy=PoolHitPolicy.BLOCK_GROUPS, block_pages=2, group_pages=1
            )
            result = storage.batch_exists_v2(names, [asked])
            told.append([result.kv_hit_pages, result.extra_pool_hit_pages[PoolName.AUXILIARY_SWA]])
        return {"told": told}


def pools_never_meet(node: RunningNode) -> Facts:
    """Pools of the same geometry under other names keep bytes of their own under SGLang's one hash."""
    _, kv = mha()
    names = (PoolName.DRAFT, PoolName.SWA, PoolName.DRAFT_SWA, PoolName.INDEXER)
    more = {name: mha()[1] for name in names}
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    with backend(kv, _settings(node), more) as storage:
        pools = {PoolName.KV: kv, **more}
        for number, pool in enumerate(pools.values()):
            fill(pool, indices, number)
        kept = {name: pages_of(pool, indices) for name, pool in pools.items()}
        transfers = [PoolTransfer(name, indices, keys=keys) for name in pools]
        alone = storage.batch_set_v2(transfers[:1])
        others = [storage.batch_exists_v2(keys, [PoolTransfer(name)]).kv_hit_pages for name in names]
        saved = storage.batch_set_v2(transfers)
        for pool in pools.values():
            fill(pool, indices, 99)
        loaded = storage.batch_get_v2(transfers)
        every = {key for pages in storage._pools.values() for key in pages.keys(storage._cache, keys)}
        groups = {
            name: int.from_bytes(pages.keys(storage._cache, keys)[0][52:56]) for name, pages in storage._pools.items()
        }
        others += [_seen(node, kv, mha(dtype=torch.float16)[1], keys), _seen(node, kv, mha("layer_first")[1], keys)]
        return {
            **{"alone": [sum(done) for done in alone.values()], "others": others},
            "same_draft": _seen(node, kv, mha()[1], keys),
            "saved": {str(name): sum(done) for name, done in saved.items()},
            "loaded": {str(name): sum(done) for name, done in loaded.items()},
            "equal": all(pages_of(pool, indices) == kept[name] for name, pool in pools.items()),
            "keys": len(every),
            "groups": groups,
        }


def _seen(node: RunningNode, kv: Any, draft: Any, keys: list[str]) -> int:
    """Pages of this draft's pool that another backend finds."""
    with backend(kv, _settings(node), {PoolName.DRAFT: draft}) as storage:
        found: PoolTransferResult = storage.batch_exists_v2(keys, [PoolTransfer(PoolName.DRAFT)])
        return found.kv_hit_pages


def ranks(node: RunningNode) -> Facts:
    """Latents are written by one rank and read by all; heads and recurrent states belong to one rank."""
    facts: Facts = {}
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    pools = [mla()[1] for _ in range(2)]
    states = [mamba() for _ in range(2)]
    slots = torch.arange(8)
    made = [
        backend(pool, _settings(node), {PoolName.MAMBA: state}, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, (pool, state) in enumerate(zip(pools, states, strict=True))
    ]
    with made[0] as first, made[1] as second:
        for rank in range(2):
            fill(pools[rank], indices, rank)
            fill(states[rank], slots, 10 + rank)
        kept, own = pages_of(pools[0], indices), pages_of(states[1], slots)
        facts["latents: second offers, then sees"] = [
            sum(second.batch_set_v1(keys, indices)),
            second.batch_exists(keys),
        ]
        facts["latents: first saves, second sees"] = [sum(first.batch_set_v1(keys, indices)), second.batch_exists(keys)]
        facts["latents: second loads"] = sum(second.batch_get_v1(keys, indices))
        facts["latents: equal"] = pages_of(pools[1], indices) == kept
        of_states = PoolTransfer(PoolName.MAMBA, slots, keys=keys)
        second.batch_set_v2([of_states])
        fill(states[1], slots, 12)
        facts["states: first loads"] = sum(first.batch_get_v2([of_states])[PoolName.MAMBA])
        facts["states: second loads"] = sum(second.batch_get_v2([of_states])[PoolName.MAMBA])
        facts["states: equal"] = pages_of(states[1], slots) == own
    _, pool = mha()
    heads = [backend(pool, _settings(node), tp_rank=rank, tp_size=2) for rank in range(2)]
    with heads[0] as first, heads[1] as second:
        facts["heads: first saves, second sees"] = [sum(first.batch_set_v1(keys, indices)), second.batch_exists(keys)]
        facts["heads: first sees"] = first.batch_exists(keys)
        facts["heads: decide"] = [first._judge.is_on, second._judge.is_on]
    other_parts = [dict(pp_rank=1, pp_size=2), dict(pp_rank=0, pp_size=2), dict(attn_cp_rank=1, attn_cp_size=2)]
    for number, fields in enumerate(other_parts):
        with backend(pool, _settings(node), **fields) as part:
            facts[f"part {number} sees"] = part.batch_exists(keys)
            facts[f"part {number} decides"] = part._judge.is_on
            part.batch_set_v1(keys, indices)
    with backend(pool, _settings(node), attn_cp_rank=0, attn_cp_size=2) as part:
        facts["part 3 sees"] = part.batch_exists(keys)
    return facts


def shared_by_other_sizes(node: RunningNode) -> Facts:
    """With tp_lcm_size, two ranks with one head each read the pages of one rank with two heads, and the reverse."""
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    split = {"tp_lcm_size": 2, "should_split_heads": True}
    _, whole = mha("page_head")
    halves = [mha("page_head", heads=1)[1] for _ in range(2)]
    with backend(whole, _settings(node), **split) as wide:
        fill(whole, indices, 1)
        saved = sum(wide.batch_set_v1(keys[:4], indices[: 4 * PAGE]))
        loaded = []
        for rank, half in enumerate(halves):
            with backend(half, _settings(node), tp_rank=rank, tp_size=2, tp_lcm_size=2) as narrow:
                loaded.append(sum(narrow.batch_get_v1(keys, indices)))
                fill(half, indices[4 * PAGE :], 5 + rank)
                narrow.batch_set_v1(keys[4:], indices[4 * PAGE :])
        fill(whole, indices[4 * PAGE :], 9)
        back = sum(wide.batch_get_v1(keys, indices))
    raw = [pool.kv_buffer[:, :8].view(torch.int16) for pool in (whole, *halves)]
    equal = [torch.equal(raw[0][:, :, rank : rank + 1], raw[1 + rank]) for rank in range(2)]
    return {"saved": saved, "loaded": loaded, "back": back, "equal": equal}


def without_addresses(node: RunningNode) -> Facts:
    """Recurrent states with side states have no addresses of pages; SGLang's flat copies are stored."""
    _, kv = mha()
    states = mamba(side_state=True)
    keys, slots = hashes(TOKENS), torch.arange(8)
    with backend(kv, _settings(node), {PoolName.MAMBA: states}) as storage:
        fill(states, slots, 1)
        kept = pages_of(states, slots)
        transfer = PoolTransfer(PoolName.MAMBA, slots, keys=keys)
        saved = sum(storage.batch_set_v2([PoolTransfer(PoolName.MAMBA, slots[:5], keys=keys[:5])])[PoolName.MAMBA])
        fill(states, slots, 2)
        others = pages_of(states, slots)
        loaded = storage.batch_get_v2([transfer])[PoolName.MAMBA]
        now = pages_of(states, slots)
        copied = storage._pools["mamba"].is_copied
        return {"copied": copied, "saved": saved, "loaded": sum(loaded), "equal": now == kept[:5] + others[5:]}


def logical_anchor(node: RunningNode) -> Facts:
    """A pool of KV that only numbers pages: the other pools alone decide how much can be restored."""
    _, side = mha()
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    anchor = LogicalHostPool(1024, PAGE)
    given = _settings(node, kv_dtype="fp8_e4m3")
    with backend(anchor, given, {PoolName.DEEPSEEK_V4_C4: side}) as storage:
        fill(side, indices, 1)
        kept = pages_of(side, indices)
        transfer = PoolTransfer(PoolName.DEEPSEEK_V4_C4, indices[: 5 * PAGE], keys=keys[:5])
        before = storage.batch_exists_v2(keys, [transfer]).kv_hit_pages
        saved = sum(storage.batch_set_v1(keys, indices)), sum(*storage.batch_set_v2([transfer]).values())
        fill(side, indices, 2)
        after = storage.batch_exists_v2(keys, [transfer]).kv_hit_pages
        loaded = sum(storage.batch_get_v1(keys, indices)), sum(*storage.batch_get_v2([transfer]).values())
        alone = storage.batch_exists(keys)
        return {
            **{"before": before, "saved": saved, "after": after, "loaded": loaded, "alone": alone},
            "equal": pages_of(side, indices)[:5] == kept[:5],
        }


def chaos(node: RunningNode) -> Facts:
    """SGLang's own injector of delays and failures: each request completes, and nothing that is loaded is wrong."""
    facts: Facts = {"requests": 0, "loaded": 0, "wrong": 0, "beyond": 0}
    failure = "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE"
    names = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.01"}
    names[failure] = "0.4"
    with environment(**names), engine(_settings(node)) as one:
        facts["injector"] = type(one.storage).__name__
        for number in range(40):
            tokens = range(number // 4 * 1000, number // 4 * 1000 + 8 * PAGE)
            kept = one.save(tokens, number // 4)
            told = one.load(tokens, kept)
            facts["requests"] += 1
            facts["loaded"] += told["loaded"]
            facts["wrong"] += told["wrong"]
            facts["beyond"] += told["loaded"] > told["found"]
    names[failure] = "1.0"
    with environment(**names), engine(_settings(node)) as one:
        kept = one.save(TOKENS, 1)
        facts["all_fail"] = {"saved": one.acked, **one.load(TOKENS, kept)}
    return facts


def refused(node: RunningNode) -> Facts:
    """Wrong settings are refused with a remedy; wrong calls are misses."""
    told = {}
    _, bytes_pool = mha(dtype=torch.float8_e5m2)
    _, pool = mha()
    cases: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
        "unknown setting": (pool, {"node": "tcp://127.0.0.1:1"}, {}),
        "empty weights id": (pool, {"weights_id": ""}, {}),
        "8-bit KV without its type": (bytes_pool, {}, {}),
        "wrong type of kv_dtype": (pool, {"kv_dtype": 8}, {}),
        "wrong node": (pool, {"nodes": ["7471"]}, {}),
        "decode context parallelism": (pool, {}, dict(is_mla_model=True, dcp_size=2, tp_size=2, logical_page_size=32)),
    }
    for name, (one, changes, fields) in cases.items():
        try:
            with backend(one, _settings(node, **changes), **fields):
                told[name] = "taken"
        except ConfigError as error:
            told[name] = str(error)
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    with backend(pool, _settings(node)) as storage:
        assert all(storage.batch_set_v1(keys, indices))
        calls = {
            "too few indices": storage.batch_get_v1(keys, indices[:PAGE]),
            "no indices": storage.batch_get_v2([PoolTransfer(PoolName.KV, keys=keys)])[PoolName.KV],
            "unknown pool": storage.batch_get_v2([PoolTransfer(PoolName.SWA, indices, keys=keys)])[PoolName.SWA],
            "nothing": storage.batch_get_v1([], indices[:0]),
            "no pools": storage.batch_get_v2([]),
        }
        needed = storage.batch_exists_v2(keys, [PoolTransfer(PoolName.SWA)])
        missing = [needed.kv_hit_pages, needed.restorable_prefix_pages]
        single = [storage.exists(keys[0]), storage.exists("00" * 32), storage.get(keys[0]), storage.set(keys[0])]
    return {"told": told, "calls": calls, "missing_pool": missing, "single": single}


def eight_bits(node: RunningNode) -> Facts:
    """Two 8-bit types are in the same kind of pool; each finds only its own pages."""
    _, pool = mha(dtype=torch.float8_e5m2)
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    fill(pool, indices, 1)
    with backend(pool, _settings(node, kv_dtype="fp8_e5m2")) as writer:
        assert all(writer.batch_set_v1(keys, indices))
        own = writer.batch_exists(keys)
    with backend(pool, _settings(node, kv_dtype="fp8_e4m3")) as other:
        return {"pool": str(pool.dtype), "own": own, "other": other.batch_exists(keys)}


def compressed(node: RunningNode) -> Facts:
    """With a lossless codec pages of KV take fewer bytes and are loaded unchanged, next to other pools."""
    _, kv = mha()
    _, draft = mha()
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    for number, pool in enumerate((kv, draft)):
        pool.kv_buffer.normal_(generator=torch.Generator().manual_seed(number))
    kept = [pages_of(pool, indices) for pool in (kv, draft)]
    transfers = [PoolTransfer(name, indices, keys=keys) for name in (PoolName.KV, PoolName.DRAFT)]
    with backend(kv, _settings(node, codec="zstd"), {PoolName.DRAFT: draft}) as storage:
        saved = [sum(storage.batch_set_v2([one])[one.name]) for one in transfers]
        fewer = storage._cache.stats()["save.bytes"] < 0.95 * 2 * sum(map(len, kept[0]))
        for pool in (kv, draft):
            fill(pool, indices, 5)
        loaded = [sum(done) for done in storage.batch_get_v2(transfers).values()]
        equal = [pages_of(pool, indices) for pool in (kv, draft)] == kept
    with backend(kv, _settings(node)) as plain:
        return {"saved": saved, "fewer": fewer, "loaded": loaded, "equal": equal, "plain": plain.batch_exists(keys)}


def quantized(node: RunningNode) -> Facts:
    """Pages of keys and values by the lossy codecs: the largest error as a share of the bound, and the refusals."""
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    # A wrong order of the axes would mix elements of very different sizes in a group.
    wide = torch.logspace(-3, 3, PAGE).reshape(1, PAGE, 1, 1), torch.logspace(-3, 3, 32)
    facts: Facts = {}
    for layout, axes in (
        *(("layer_first", "slthd"), ("page_first", "stlhd")),
        *(("page_first_direct", "slthd"), ("page_head", "shtld")),
    ):
        for interface, codec, bits in ((1, "int8", 8), (0, "int8", 8), (1, "int4", 4)):
            _, pool = mha(layout)

            def pages(pool: Any = pool, axes: str = axes) -> list[torch.Tensor]:
                """Views of the pages, as keys and values, layers, tokens, heads and channels."""
                own = [pool.get_data_page(first, flat=False) for first in indices[::PAGE].tolist()]
                own = [page.squeeze(1) if page.dim() == 6 else page for page in own]
                return [page.permute([axes.index(axis) for axis in "slthd"]) for page in own]

            numbers = torch.Generator().manual_seed(1)
            for page in pages():
                values = torch.randn(page.shape, generator=numbers)
                page.copy_(torch.stack([values[0] * wide[1], values[1] * wide[0]]))
            kept = [page.float().clone() for page in pages()]
            with backend(pool, _settings(node, codec=codec, interface_v1=interface, weights_id=codec)) as storage:
                if interface:
                    saved = sum(storage.batch_set_v1(keys, indices))
                    fill(pool, indices, 5)
                    loaded = sum(storage.batch_get_v1(keys, indices))
                else:
                    flat = [pool.get_data_page(first) for first in indices[::PAGE].tolist()]
                    saved = 8 * storage.batch_set(keys, flat)
                    fill(pool, indices, 5)
                    loaded = 0
                    for first, page in zip(indices[::PAGE].tolist(), storage.batch_get(keys), strict=True):
                        if page is not None:
                            pool.set_from_flat_data_page(first, page)
                            loaded += 1
                share = storage._cache.stats()["save.bytes"] / (8 * storage._pools["kv"].nbytes)
            worst = 0.0
            for page, before in zip(pages(), kept, strict=True):
                for half, axis in ((0, 1), (1, 3)):  # keys: tokens of a channel, values: channels of a token
                    was = before[half]
                    step = (was.amax(axis, keepdim=True) - was.amin(axis, keepdim=True)) / (2**bits - 1)
                    rounding = was.abs().amax(axis, keepdim=True) * 2**-8
                    worst = max(worst, float(((page[half].float() - was).abs() / (step / 2 + rounding)).max()))
            facts[f"{layout}, interface {interface}, {codec}"] = {
                **{
                    "saved": saved,
                    "loaded": loaded,
                    "within": 0 < worst <= 1,
                    "fewer": share < (0.75 if bits == 8 else 0.5),
                }
            }
    told = []
    for pool in (mla()[1], mha(dtype=torch.float8_e4m3fn)[1]):
        try:
            with backend(pool, _settings(node, codec="int8", kv_dtype="fp8_e4m3")):
                told.append("")
        except ConfigError as error:
            told.append(str(error))
    return {"facts": facts, "refused": told}


def metrics_and_clear(node: RunningNode) -> Facts:
    """SGLang's storage metrics have pages and speeds of each batch; clear removes this namespace only."""
    _, pool = mha()
    keys, indices = hashes(TOKENS), torch.arange(8 * PAGE)
    with (
        backend(pool, _settings(node, weights_id="other")) as other,
        backend(pool, _settings(node), enable_storage_metrics=True) as storage,
    ):
        assert all(other.batch_set_v1(keys, indices))
        assert all(storage.batch_set_v1(keys, indices))
        storage.batch_get_v1(keys[:3], indices[: 3 * PAGE])
        told, again = storage.get_stats(), storage.get_stats()
        before = storage.batch_exists(keys)
        storage.clear()
        return {
            **{"backup": told.backup_pgs, "prefetch": told.prefetch_pgs, "again": again.prefetch_pgs},
            "speeds": [speed > 0 for speed in told.backup_bandwidth + told.prefetch_bandwidth],
            **{"unmeasured": other.get_stats(), "before": before},
            **{"after": storage.batch_exists(keys), "others": other.batch_exists(keys)},
        }


def vectors(node: RunningNode) -> Facts:
    """SGLang's native hasher."""
    tokens = list(range(1000, 1064))
    salted = type("Key", (list,), {"extra_key": None, "cache_salt": "alice"})(tokens)
    both = type("Key", (list,), {"extra_key": "", "cache_salt": "alice"})(tokens)
    large = [7, 2**32, 2**40, 5]
    first = get_hash_str(tokens[:32], None, page_size=16)
    return {
        "plain": get_hash_str(tokens, None, page_size=16),
        "salted": get_storage_hash_str(salted, None, page_size=16),
        "extra_key": get_storage_hash_str(both, None, page_size=16),
        "large": get_hash_str(large, None, page_size=2),
        "continued": get_hash_str(tokens[32:], first[-1], page_size=16),
    }


def documented(node: RunningNode) -> Facts:
    """The command in the guide goes through SGLang's own parsers to a backend that keeps pages."""
    guide = (Path(__file__).parents[4] / "docs/kv-sglang.md").read_text()
    (command,) = re.findall(r"^```sh\n(python -m sglang.*?)^```", guide, re.MULTILINE | re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    program, arguments = words[:3], words[3:]
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    told = vars(parser.parse_args(arguments))
    extra_config = told.pop("hicache_storage_backend_extra_config").replace("tcp://127.0.0.1:7471", node.address)
    parsed, *_ = HybridCacheController.parse_storage_backend_extra_config(extra_config)
    with engine(parsed, pools=mha(told["hicache_mem_layout"])) as one:
        kept = one.save(TOKENS, 1)
        found = one.load(TOKENS, kept)
        own = type(one.storage).__name__
    names = ("enable_hierarchical_cache", "hicache_storage_backend")
    return {"program": program[1:], "set": [told[name] for name in names], "backend": own, **found}


def main() -> None:
    global _running
    begin()
    facts: dict[str, Facts] = {}
    known = {name: one for name, one in globals().items() if getattr(one, "__module__", None) == __name__}
    with running_node("256MiB") as node:
        for _running in sys.argv[1:]:
            try:
                facts[_running] = known[_running](node)
            except Exception:
                facts[_running] = {"error": traceback.format_exc()}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
