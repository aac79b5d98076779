"""Metrics of caches for Prometheus: their counters by reason, and the gain of loading."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

import farpool
from farpool.kv import BlockCache, KVCollector, PoolObjects, Reason
from farpool.kv.cache import PrefixCache
from farpool.kv.memory import Layer
from tests.kv.test_blocks import blocks, targets
from tests.kv.test_keys import NAMESPACE
from tests.kv.test_prefix import TOKENS, Made, save_steps, target, teach
from tests.nodes import PATIENCE

DOCS = Path(__file__).parents[2] / "docs" / "kv.md"
GIVEN: dict[str, Any] = {"model": "m", "weights_id": "1", "dtype": "float16", "block": 4, "timeout": PATIENCE}


def scraped(registry: CollectorRegistry) -> dict[str, float]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    return {name: float(number) for name, _, number in (line.rpartition(" ") for line in lines)}


def test_counters_are_scraped_by_cache_step_and_reason() -> None:
    layers = [Layer(8)]
    with (
        farpool.Pool(fast="1MiB") as pool,
        BlockCache(PoolObjects(pool, "256KiB"), NAMESPACE, timeout=PATIENCE) as raw,
        PrefixCache(PoolObjects(pool, "256KiB"), layers, **GIVEN) as cache,
    ):
        registry = CollectorRegistry()
        registry.register(KVCollector(raw=raw, chat=cache))
        assert scraped(registry)['farpool_kv_decisions_total{cache="chat",decision="load"}'] == 0
        keys, values = blocks(raw, 3)
        assert raw.save(keys[:2], values[:2]) == [None] * 2
        assert raw.load(keys, targets(3)) == [None, None, Reason.ABSENT]
        save_steps(cache, layers, TOKENS[:24])
        teach(cache, linear=100.0, seconds_a_byte=1e-9)
        matches = [cache.lookup(TOKENS) for _ in range(32)]
        (held_out,) = [match for match in matches if match.arm == "hold-out"]
        loading = next(match for match in matches if match.arm == "load")
        assert cache.load(loading, target(layers, TOKENS)) == 24
        cache.computed(24, 2400.0, match=held_out)
        teach(cache, linear=1e-9, seconds_a_byte=100.0)
        for _ in range(3):
            teach(cache, linear=1e-9, seconds_a_byte=100.0)
        assert cache.lookup(TOKENS).reason is Reason.BYPASSED
        found = scraped(registry)
        assert found['farpool_kv_blocks_total{cache="raw",outcome="done",step="save"}'] == 2
        assert found['farpool_kv_blocks_total{cache="raw",outcome="done",step="load"}'] == 2
        assert found['farpool_kv_blocks_total{cache="raw",outcome="absent",step="load"}'] == 1
        assert found['farpool_kv_bytes_total{cache="raw",step="load"}'] == raw.stats()["load.bytes"]
        assert found['farpool_kv_decisions_total{cache="chat",decision="load"}'] == 31
        assert found['farpool_kv_decisions_total{cache="chat",decision="hold-out"}'] == 1
        assert found['farpool_kv_decisions_total{cache="chat",decision="compute"}'] == 1
        assert found['farpool_kv_saved_seconds{cache="chat"}'] == pytest.approx(2400, rel=0.1)
        assert found['farpool_kv_gain_ratio{cache="chat"}'] == pytest.approx(1, abs=0.1)
        assert found['farpool_kv_stands_aside{cache="chat"}'] == 0
        assert found['farpool_kv_measured_requests{arm="load",cache="chat"}'] == 1
        assert found['farpool_kv_measured_requests{arm="hold-out",cache="chat"}'] == 1


def test_without_a_hold_out_there_is_no_gain_and_all_metrics_are_documented() -> None:
    with farpool.Pool(fast="1MiB") as pool:
        cache = PrefixCache(PoolObjects(pool, "256KiB"), [Layer(8)], hold_out=False, **GIVEN)
        cache.save(TOKENS[:8], Made([Layer(8)], TOKENS, 8).computed())
        collector = KVCollector(one=cache)
        registry = CollectorRegistry()
        registry.register(collector)
        assert not any(name.startswith("farpool_kv_gain_ratio") for name in scraped(registry))
        cache.close()
    documented = re.findall(r"^\| `(farpool_kv_\w+)\{", DOCS.read_text(), re.MULTILINE)
    made = [metric.name + ("_total" if metric.type == "counter" else "") for metric in collector.collect()]
    assert documented == made
