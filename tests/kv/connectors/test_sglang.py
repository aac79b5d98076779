"""SGLang keeps pages of its hierarchical cache in farpool: its real controllers, host pools and hashes, on the CPU."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest

from farpool.kv.keys import token_chain
from tests.kv.connectors.cases import BLOCKS, CASES, OF_ENGINES, OF_HOST_MEMORY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]

Facts = dict[str, Any]
Run = Callable[..., dict[str, Any]]

_CHECKS = (
    *("layouts", "hybrid", "hit_policies", "block_groups", "pools_never_meet", "ranks", "shared_by_other_sizes"),
    *("without_addresses", "logical_anchor", "chaos", "refused", "eight_bits", "metrics_and_clear", "vectors"),
    *("compressed", "quantized", "documented"),
)
_OF_THE_TREE = (
    "round_trip",
    "partial_batch",
    "unknown_keys",
    "other_weights",
    "node_killed_during_load",
    *OF_HOST_MEMORY,
)
# Importing SGLang takes longer than a check does: all are run by one process.
_PATIENCE = 600.0


@pytest.fixture(scope="module", params=["mapped", "tcp"])
def contract(request: pytest.FixtureRequest, run_program: Run) -> tuple[str, Facts]:
    """Facts of the contract's cases over one transport."""
    found = run_program("sglang", "sglang_hicache", request.param, timeout=_PATIENCE, PYTHONHASHSEED="1")
    return request.param, found


@pytest.fixture(scope="module")
def checks(run_program: Run) -> Facts:
    return run_program("sglang", "sglang_checks", *_CHECKS, timeout=_PATIENCE)


@pytest.fixture(scope="module")
def on_the_tree(run_program: Run) -> Facts:
    return run_program("sglang", "sglang_tree", *_OF_THE_TREE, timeout=_PATIENCE)


def _told(found: Facts, name: str) -> Facts:
    assert "error" not in found[name], found[name]["error"]
    told: Facts = found[name]
    return told


@pytest.mark.parametrize("case", [*CASES, *OF_ENGINES])
def test_the_contract_of_connectors_holds(contract: tuple[str, Facts], case: str) -> None:
    transport, facts = contract
    told, expected = _told(facts, case), {**CASES, **OF_ENGINES}[case].copy()
    if (transport, case) == ("mapped", "deadline_passed"):
        expected["loaded"] = 16  # memory of a node on this host is read without it
    assert {name: told[name] for name in expected} == expected


@pytest.mark.parametrize("case", _OF_THE_TREE)
def test_the_unified_radix_cache_keeps_the_contract(on_the_tree: Facts, case: str) -> None:
    told = _told(on_the_tree, case)
    assert told["before"] == 0  # nothing was on its device
    expected = {**CASES, **OF_HOST_MEMORY}[case]
    assert {name: told[name] for name in expected} == expected


def test_a_prefix_larger_than_sglangs_host_memory_is_loaded_once(on_the_tree: Facts) -> None:
    assert 0 < _told(on_the_tree, "memory_smaller_than_prefix")["asked"] <= BLOCKS


def test_processes_with_other_hash_seeds_make_the_same_keys(run_program: Run) -> None:
    first, second = (
        _told(run_program("sglang", "sglang_hicache", "auto", "hash_seeds", PYTHONHASHSEED=seed), "hash_seeds")
        for seed in ("1", "2")
    )
    assert first == second
    chain = token_chain(range(1000, 1064), 16)
    assert first["vectors"] == [one.hex() for one in chain]
    assert [key[40:104] for key in first["keys"]] == [one.hex() for one in chain[:2]]


def test_each_layout_reads_only_its_own_pages(checks: Facts) -> None:
    told = _told(checks, "layouts")
    addresses = {
        **{"mha layer_first": 4, "mha page_first": 2, "mha page_first_direct": 2, "mha page_head": 2},
        **{"mla layer_first": 2, "mla page_first": 1, "mla page_first_direct": 1},
    }
    whole = {"of_others": 0, "saved": 8, "found": 8, "loaded": 8, "wrong": 0}
    assert told == {
        f"{layout}, interface {interface}": {**whole, "buffers": buffers if interface else 1}
        for layout, buffers in addresses.items()
        for interface in (1, 0)
    }


def test_the_hybrid_controller_restores_kv_draft_and_states_together(checks: Facts) -> None:
    told = _told(checks, "hybrid")
    assert (told["saved"], told["found"], told["loaded"], told["wrong"]) == (8, 8, 8, 0)
    assert told["hits"] == {"mamba": 1}
    assert told["query_pool_hits"] == {"kv": 8, "draft": 8, "mamba": 8}
    assert told["state_is_equal"]
    assert told["draft_is_equal"]


def test_hit_policies_agree_with_the_file_backend_of_sglang(checks: Facts) -> None:
    told = _told(checks, "hit_policies")
    assert told["different"] == []
    assert told["rounds"] == 60
    assert told["restorable"] >= 20  # there was something to agree on,
    assert told["holes"] >= 5  # also with lengths between that cannot be restored


def test_a_query_is_one_request_for_all_pools(checks: Facts) -> None:
    assert _told(checks, "hit_policies")["requests"] == 1


def test_block_groups_never_hold_back_kv(checks: Facts) -> None:
    assert _told(checks, "block_groups") == {"told": [[8, 0], [8, 4], [8, 4], [8, 8]]}


def test_pools_under_one_hash_keep_their_own_bytes(checks: Facts) -> None:
    told = _told(checks, "pools_never_meet")
    every = dict.fromkeys(("kv", "draft", "swa", "draft_swa", "indexer"), 8)
    assert (told["alone"], told["saved"], told["loaded"]) == ([8], every, every)
    assert told["equal"]
    assert told["keys"] == 40
    assert told["groups"] == {
        "kv": 0,
        "draft": 1_182_570_132,
        "swa": 4_080_906_724,
        "draft_swa": 1_776_273_648,
        "indexer": 764_795_076,
    }  # for good
    # Neither pools of other names, nor a draft of another type or layout; but the same one.
    assert told["others"] == [0] * 6
    assert told["same_draft"] == 8


def test_latents_are_shared_by_ranks_and_all_else_is_not(checks: Facts) -> None:
    assert _told(checks, "ranks") == {
        "latents: second offers, then sees": [8, 0],  # it is the first rank's to save
        "latents: first saves, second sees": [8, 8],
        "latents: second loads": 8,
        "latents: equal": True,
        "states: first loads": 0,
        "states: second loads": 8,
        "states: equal": True,
        "heads: first saves, second sees": [8, 0],
        "heads: first sees": 8,
        "heads: decide": [True, False],  # SGLang takes the least of all ranks, so one decision counts for all
        **{f"part {number} decides": number == 1 for number in range(3)},
        **{f"part {number} sees": 0 for number in range(4)},
    }


def test_ranks_of_other_sizes_share_heads(checks: Facts) -> None:
    told = _told(checks, "shared_by_other_sizes")
    assert told == {"saved": 4, "loaded": [4, 4], "back": 8, "equal": [True, True]}


def test_pools_without_addresses_are_copied(checks: Facts) -> None:
    assert _told(checks, "without_addresses") == {"copied": True, "saved": 5, "loaded": 5, "equal": True}


def test_a_pool_that_only_numbers_pages_leaves_the_answer_to_others(checks: Facts) -> None:
    told = _told(checks, "logical_anchor")
    assert told == {"before": 0, "saved": [8, 5], "after": 5, "loaded": [8, 5], "alone": 0, "equal": True}


def test_delays_and_failures_end_no_request_and_no_page_is_wrong(checks: Facts) -> None:
    told = _told(checks, "chaos")
    assert told["injector"] == "HiCacheStorageFailureInjector"
    assert (told["requests"], told["wrong"], told["beyond"]) == (40, 0, 0)
    assert told["loaded"] > 0
    assert told["all_fail"] == {"saved": 0, "found": 0, "loaded": 0, "wrong": 0}


def test_wrong_settings_are_refused_with_a_remedy(checks: Facts) -> None:
    told = _told(checks, "refused")["told"]
    assert "unknown field `node`" in told["unknown setting"]
    assert "weights_id" in told["unknown setting"]
    assert "kv_dtype" in told["unknown setting"]
    assert "give the exact name of the weights" in told["empty weights id"]
    assert '"kv_dtype": "fp8_e4m3"' in told["8-bit KV without its type"]
    assert "$.kv_dtype" in told["wrong type of kv_dtype"]
    assert "'7471'" in told["wrong node"]
    assert "dcp_size is 2" in told["decode context parallelism"]


def test_wrong_calls_are_misses_and_never_none(checks: Facts) -> None:
    told = _told(checks, "refused")
    missing = [False] * 8
    assert told["calls"] == {
        "too few indices": missing,
        "no indices": missing,
        "unknown pool": missing,
        "nothing": [],
        "no pools": {},
    }
    assert told["missing_pool"] == [0, []]
    assert told["single"] == [True, False, None, False]


def test_8_bit_types_in_the_same_bytes_are_distinguished(checks: Facts) -> None:
    assert _told(checks, "eight_bits") == {"pool": "torch.uint8", "own": 8, "other": 0}


def test_compressed_pages_are_loaded_unchanged(checks: Facts) -> None:
    told = _told(checks, "compressed")
    assert told == {"saved": [8, 8], "fewer": True, "loaded": [8, 8], "equal": True, "plain": 0}


def test_lossy_codecs_keep_their_bound_in_all_layouts_of_heads(checks: Facts) -> None:
    told = _told(checks, "quantized")
    layouts = ("layer_first", "page_first", "page_first_direct", "page_head")
    ways = ("interface 1, int8", "interface 0, int8", "interface 1, int4")
    right = {"saved": 8, "loaded": 8, "within": True, "fewer": True}
    assert told["facts"] == {f"{layout}, {way}": right for layout in layouts for way in ways}
    assert "need the order of the axes" in told["refused"][0]
    assert "int8 is for float32, float16, bfloat16, not for 'fp8_e4m3'" in told["refused"][1]


def test_metrics_report_each_batch_and_clear_leaves_other_pages_alone(checks: Facts) -> None:
    told = _told(checks, "metrics_and_clear")
    assert (told["backup"], told["prefetch"], told["again"]) == ([8], [3], [])
    assert told["speeds"] == [True, True]
    assert told["unmeasured"] is None
    assert (told["before"], told["after"], told["others"]) == (8, 0, 8)


def test_the_command_in_the_guide_works(checks: Facts) -> None:
    assert _told(checks, "documented") == {
        **{"program": ["-m", "sglang.launch_server"], "set": [True, "dynamic"], "backend": "FarpoolHiCache"},
        **{"found": 8, "loaded": 8, "wrong": 0},
    }


def test_native_hashes_equal_the_published_ones_and_our_chain(checks: Facts) -> None:
    told = _told(checks, "vectors")
    plain = [one.hex() for one in token_chain(range(1000, 1064), 16)]
    assert told["plain"] == plain
    assert told["plain"][:2] == [
        "4faa8bd53eda3d89d365baa1cce7abcbe618600132b7664d8cccf18db778a47c",
        "fc228fb55a288afeb5f7d93117caa44931dc430d6ecf7fcfa3c029ac60e0c6b6",
    ]
    assert told["continued"] == plain[2:]
    assert told["salted"] == [one.hex() for one in token_chain(range(1000, 1064), 16, _seed(None, "alice"))]
    assert told["salted"][0] == "ee20eb16560950bbce92cd9ba9b70146693ad6647c27428ff9f0979f503f34c3"
    assert told["extra_key"] == [one.hex() for one in token_chain(range(1000, 1064), 16, _seed("", "alice"))]
    assert told["large"] == [one.hex() for one in token_chain([7, 2**32, 2**40, 5], 2)]


def _seed(extra_key: str | None, cache_salt: str | None) -> bytes:
    """SGLang's seed of a chain whose requests have a key or a salt of their own."""
    seed = b"sglang-cache-namespace-v1"
    for part in (extra_key, cache_salt):
        seed += b"\0" if part is None else b"\1" + struct.pack("<Q", len(part)) + part.encode()
    return hashlib.sha256(seed).digest()
