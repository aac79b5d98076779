"""The connector for vLLM, under the manager of vLLM's newest release, and in a whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kv.connectors.cases import BLOCKS, CASES, OF_ENGINES, OF_HOST_MEMORY
from tests.kv.pairs import Comparison, significant

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# tokens 1000 to 1015, then 16 times token 5 with the salt "alice"
PUBLISHED = {
    "sha256_cbor": [
        "15528b726efb88cb4d9efc583657a821bceb1f67307c6e813417567050a24fdc",
        "d51a363ec933e1197d0351a5804545ec4c08106b12699bf8993da6407a5601a8",
    ],
    "sha256": ["9d9c413731095d0ee811a14814414907cafccd751ce2052f659e8e1f547aeb68"],
}


@pytest.fixture(scope="module", params=["mapped", "tcp"])
def found(request: pytest.FixtureRequest, run_program: Callable[..., dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Facts of all cases over one transport, by case."""
    return request.param, run_program("vllm", "vllm_tier", request.param, timeout=500)


@pytest.mark.parametrize("case", [case for case in (*CASES, *OF_ENGINES, *OF_HOST_MEMORY) if case != "hash_seeds"])
def test_the_tier_keeps_the_contract(found: tuple[str, dict[str, Any]], case: str) -> None:
    transport, facts = found
    expected = {**CASES, **OF_ENGINES, **OF_HOST_MEMORY}[case].copy()
    if (transport, case) == ("mapped", "deadline_passed"):
        expected["loaded"] = 16  # memory of a node on this host is read without it
    assert "error" not in facts[case], facts[case]["error"]
    assert {name: facts[case].get(name) for name in expected} == expected


def test_a_mapped_node_answers_in_the_step_that_asks(found: tuple[str, dict[str, Any]]) -> None:
    transport, facts = found
    assert facts["round_trip"]["retries"] == (0 if transport == "mapped" else 16)


def test_a_prefix_larger_than_the_engines_memory_is_loaded_once(found: tuple[str, dict[str, Any]]) -> None:
    assert 0 < found[1]["memory_smaller_than_prefix"]["asked"] <= BLOCKS


def test_a_request_loads_its_blocks_again_only_after_a_preemption(found: tuple[str, dict[str, Any]]) -> None:
    assert found[1]["preempted"]["loaded"] == [BLOCKS, 0, BLOCKS]


def test_hits_count_as_the_hosts_only_if_the_nodes_are_on_it(found: tuple[str, dict[str, Any]]) -> None:
    transport, facts = found
    assert facts["round_trip"]["sources"] == (["host"] if transport == "mapped" else ["external_unspecified"])
    told = {name: facts["stated_localities"][name] for name in ("LOCAL", "REMOTE")}
    assert told == {"LOCAL": ["host"], "REMOTE": ["external_unspecified"]}


def test_useless_blocks_are_replaced(found: tuple[str, dict[str, Any]]) -> None:
    _, facts = found
    assert facts["all_loads_fail"]["damaged"] == facts["all_loads_fail"]["mended"] == 16
    assert facts["wrong_size"]["mended"] == 16


def test_blocks_may_travel_compressed(found: tuple[str, dict[str, Any]]) -> None:
    facts = found[1]["compressed"]
    assert {name: facts[name] for name in ("saved", "loaded", "wrong")} == {"saved": 16, "loaded": 16, "wrong": 0}
    assert facts["sent"] < 0.8 * 16 * 65536


def test_an_engine_whose_node_has_died_continues_with_its_own_memory(found: tuple[str, dict[str, Any]]) -> None:
    assert found[1]["node_killed_during_load"]["without_node"] == 16


def test_outcomes_of_blocks_are_counted_in_the_engines_metrics(found: tuple[str, dict[str, Any]]) -> None:
    counters = found[1]["round_trip"]["counters"]
    for step in ("save", "lookup", "load"):
        assert counters[f"vllm:kv_offload_farpool_blocks:('{step}', 'done')"] == 16
    assert counters["vllm:kv_offload_farpool_bytes:('load',)"] == 16 * (65536 + 64)
    assert not found[1]["round_trip"]["undefined"]


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("unknown", "unknown field `node`"),
        ("timeout", "timeout is -1.0, expected seconds"),
        ("type", "Expected `int`, got `str` - at `$.replicas`"),
        ("locality", "locality is 'far', expected LOCAL or REMOTE"),
        ("weights", "weights is '', expected a text"),
        ("codec", "codec: 'rar' is not known"),
        ("lossy", "use the codec zstd"),
        ("transport", "transport is 'carrier pigeon', expected"),
        ("nodes", "an address is missing"),
        ("schedulers", "each of 2 ranks has a scheduler"),
    ],
)
def test_wrong_settings_are_refused_when_the_engine_starts(
    found: tuple[str, dict[str, Any]], setting: str, says: str
) -> None:
    assert says in found[1]["settings"][setting]


def test_hashes_and_keys_are_the_published_ones_in_every_process(run_program: Callable[..., dict[str, Any]]) -> None:
    runs = {
        seed: run_program("vllm", "vllm_tier", "tcp", "hash_seeds", PYTHONHASHSEED=seed)["hash_seeds"]
        for seed in ("0", "1")
    }
    first, second = runs.values()
    for name, hashes in PUBLISHED.items():
        assert first["vectors"][name][1 : 1 + len(hashes)] == hashes
    assert first["vectors"] == second["vectors"]
    assert first["keys"] == second["keys"]
    # vLLM itself begins its chains with PYTHONHASHSEED if it is set: then nothing is shared, and nothing confused.
    assert first["own"] != second["own"]
    assert [one["namespace"][0] for one in (first, second)] == ["0", "1"]
    assert first["namespace"][1] != second["namespace"][1]


def test_a_tenants_salt_reaches_the_nodes_and_times_reveal_nothing(run_program: Callable[..., dict[str, Any]]) -> None:
    facts = run_program("vllm", "vllm_salt", timeout=500)
    assert {name: one["hits"] for name, one in facts.items()} == {"apart": 0, "apart again": 0, "lost": 200}
    times = {name: Comparison(**one["times"]) for name, one in facts.items()}
    assert [times[name].pairs for name in ("apart", "apart again")] == [2000, 2000]
    said = "; ".join(f"{name}: {one}" for name, one in times.items())
    assert significant({"lost": times["lost"]}, 0.01), f"the machine is too noisy to find the difference; {said}"
    # A false alarm needs two comparisons with other prompts that both differ: one run in 10,000.
    assert not all(significant({name: times[name]}, 0.01) for name in ("apart", "apart again")), said


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("transport", ["mapped", "tcp"])
def test_a_whole_engine_gives_the_same_tokens_when_blocks_are_lost_or_damaged(
    run_program: Callable[..., dict[str, Any]], tmp_path: Path, transport: str
) -> None:
    facts = run_program("vllm-engine", "vllm_engine", transport, str(tmp_path), timeout=900)
    blocks = 4 * 1024 // 32
    for state in ("cold", "warm", "damaged", "mended", "killed"):
        assert facts[state]["tokens"] == facts["expected"], state
    counts = {state: (facts[state]["asked"], facts[state]["loaded"]) for state in ("cold", "warm", "damaged", "mended")}
    assert counts == {"cold": (0, 0), "warm": (blocks, blocks), "damaged": (blocks, 0), "mended": (blocks, blocks)}
    assert facts["damaged"]["changed"] == blocks
    assert facts["killed"]["loaded"] < blocks
