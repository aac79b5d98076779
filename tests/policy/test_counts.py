"""Misses are those that libCacheSim counts (tests/policy/counts.json, made by scripts/policy-counts)."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from farpool._native import CacheSimulation, RequestTrace, policy_names
from farpool_bench import request_traces

ROOT = Path(__file__).parents[2]
COUNTED: dict[str, Any] = json.loads((Path(__file__).parent / "counts.json").read_text())
PAGE = 4096
# What counts may differ by, and why, is in docs/policies.md. Everything else is exact.
SHARES = {
    ("lirs", "bytes"): 0.002,
    ("gdsf", "objects"): 0.002,
    ("gdsf", "pages"): 0.002,
    ("gdsf", "bytes"): 0.003,
    ("w-tiny-lfu", "objects"): 0.07,
    ("w-tiny-lfu", "pages"): 0.001,
    ("w-tiny-lfu", "bytes"): 0.007,
}


def requests(kind: str, unit: str) -> RequestTrace:
    ids = request_traces.generate(kind, COUNTED["requests"], COUNTED["seed"])
    sizes = {"objects": [1] * len(ids), "pages": [PAGE] * len(ids), "bytes": request_traces.object_sizes(ids)}
    return RequestTrace(ids, sizes[unit])


@functools.cache
def differences(number: int) -> dict[str, tuple[float, float]]:
    """Largest difference of misses and of bytes missed in one trace, over all sizes, as shares; by policy."""
    one = GENERATED[number]
    trace = requests(one["trace"], one["unit"])
    found = {}
    for policy, counts in one["misses"].items():
        worst = [0.0, 0.0]
        for size, theirs in zip(one["sizes"], counts, strict=True):
            cache = CacheSimulation(policy, size)
            cache.run(trace, 0, len(trace))
            for place, ours in enumerate((cache.misses, cache.bytes_missed)):
                worst[place] = max(worst[place], abs(ours - theirs[place]) / theirs[place])
        found[policy] = worst[0], worst[1]
    return found


GENERATED = [one for one in COUNTED["traces"] if one["trace"] in request_traces.KINDS]


@pytest.mark.parametrize(
    "number", range(len(GENERATED)), ids=lambda n: f"{GENERATED[n]['trace']}-{GENERATED[n]['unit']}"
)
def test_misses_are_those_of_libcachesim(number: int) -> None:
    found = differences(number)
    assert set(found) == set(policy_names())
    for policy, (misses, nbytes) in found.items():
        share = SHARES.get((policy, GENERATED[number]["unit"]), 0.0)
        assert misses <= share, policy
        # Bytes missed vary more than misses do: one large object is many small ones.
        assert nbytes <= 1.5 * share, policy


def test_the_page_of_policies_says_how_far_counts_agree() -> None:
    page = (ROOT / "docs/policies.md").read_text()
    for policy in policy_names():
        cells = []
        for unit in ("objects", "pages", "bytes"):
            worst = max(differences(n)[policy][0] for n, one in enumerate(GENERATED) if one["unit"] == unit)
            cells.append("equal" if worst == 0 else f"{worst:.2%}")
        assert f"| `{policy}` | {' | '.join(cells)} |" in page, (policy, cells)


def test_every_pattern_and_unit_was_counted() -> None:
    assert {(one["trace"], one["unit"]) for one in GENERATED} == {
        (kind, unit) for kind in request_traces.KINDS for unit in ("objects", "pages", "bytes")
    }


def test_the_committed_benchmark_on_a_public_trace_has_the_counts_of_libcachesim() -> None:
    result = json.loads((ROOT / "benchmarks/results/policies.json").read_text())["result"]
    [counted] = [one for one in COUNTED["traces"] if one["trace"] == result["trace"]]
    theirs = {
        (policy, size): count
        for policy, counts in counted["misses"].items()
        for size, count in zip(counted["sizes"], counts, strict=True)
    }
    assert {(run["policy"], run["size"]) for run in result["runs"]} == set(theirs)
    for run in result["runs"]:
        misses, nbytes = theirs[run["policy"], run["size"]]
        if run["policy"] in ("gdsf", "w-tiny-lfu"):
            assert run["misses"] == pytest.approx(misses, rel=0.001)
            assert run["bytes_missed"] == pytest.approx(nbytes, rel=0.001)
        else:
            assert (run["misses"], run["bytes_missed"]) == (misses, nbytes)


def test_generated_traces_depend_on_their_seed_alone() -> None:
    for kind in request_traces.KINDS:
        first = request_traces.generate(kind, 3000, 1)
        assert first == request_traces.generate(kind, 3000, 1)
        assert first != request_traces.generate(kind, 3000, 2)
        assert len(first) == 3000


def test_no_policy_has_fewer_misses_than_belady_nor_a_larger_cache_more_with_lru() -> None:
    trace = requests("shifting", "objects")
    before = len(trace) + 1
    for size in range(100, 3000, 290):
        misses = {}
        for policy in policy_names():
            cache = CacheSimulation(policy, size)
            cache.run(trace, 0, len(trace))
            misses[policy] = cache.misses
        assert min(misses.values()) == misses["belady"] >= trace.objects()
        assert misses["lru"] <= before
        before = misses["lru"]


def test_a_simulation_goes_on_where_it_stopped() -> None:
    trace = requests("zipf", "bytes")
    for policy in policy_names():
        whole, pieces = CacheSimulation(policy, 4 << 20), CacheSimulation(policy, 4 << 20)
        whole.run(trace, 0, len(trace))
        for first in range(0, len(trace), 7001):
            pieces.run(trace, first, first + 7001)
        assert (whole.misses, whole.bytes_missed) == (pieces.misses, pieces.bytes_missed)
        assert whole.requests == pieces.requests == len(trace)
        assert whole.bytes == pieces.bytes
