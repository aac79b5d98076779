"""The contract of connectors on the caches of transformers, with a tiny model that generates, in this environment.

Accelerate's hooks are served by `farpool.kv.PooledWeights`, a mapping from names to weights, tested in
tests/kv/test_accelerate.py. No case of the contract applies to it: it has no blocks, keys or hashes, looks nothing up
and saves nothing while a model runs, and its weights are in a pool of this process before the first module asks for
them. So no node can be late, dead or wrong then; and a weight that cannot be read when the mapping is made is an error,
since weights, unlike KV, cannot be computed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tests.kv.connectors.cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module", params=["mapped", "tcp"])
def found(request: pytest.FixtureRequest, run_program: Callable[..., dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Facts of all cases over one transport, by case."""
    return request.param, run_program("transformers", "transformers_cache", request.param, timeout=200)


@pytest.mark.parametrize("case", [case for case in CASES if case != "hash_seeds"])
def test_the_cache_keeps_the_contract(found: tuple[str, dict[str, Any]], case: str) -> None:
    transport, facts = found
    expected = dict(CASES[case])
    if (transport, case) == ("mapped", "deadline_passed"):
        expected["loaded"] = 16  # memory of a node on this host is read without it
    assert "error" not in facts[case], facts[case]["error"]
    assert {name: facts[case].get(name) for name in expected} == expected


def test_every_request_generates_the_tokens_of_a_dynamic_cache(found: tuple[str, dict[str, Any]]) -> None:
    _, facts = found
    assert {name for name, own in facts.items() if not own.get("completed", True)} == set()
    assert facts["node_killed_during_load"]["without_node"]["completed"]


def test_damaged_blocks_are_replaced(found: tuple[str, dict[str, Any]]) -> None:
    _, facts = found
    assert facts["all_loads_fail"]["damaged"] == facts["all_loads_fail"]["mended"] == 16


def test_jobs_were_under_way_when_it_was_shut_down(found: tuple[str, dict[str, Any]]) -> None:
    transport, facts = found
    assert facts["shutdown_with_jobs_in_flight"]["busy"] or transport == "mapped"


def test_keys_and_hashes_are_the_same_in_all_processes(run_program: Callable[..., dict[str, Any]]) -> None:
    one, other = (
        run_program("transformers", "transformers_cache", "tcp", "hash_seeds", PYTHONHASHSEED=seed)["hash_seeds"]
        for seed in ("1", "2")
    )
    assert (one["keys"], one["vectors"]) == (other["keys"], other["vectors"])
    chain = b""
    for page, said in enumerate(one["vectors"]):
        tokens = range(1000 + 16 * page, 1016 + 16 * page)
        chain = hashlib.sha256(chain + struct.pack("<16I", *tokens)).digest()
        assert said == chain.hex()
    assert len(one["keys"]) == len(one["vectors"]) == 2
