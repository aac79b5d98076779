"""The commands in the guides are understood by the engines that they are for (SGLang's: `test_sglang`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.node.process import running_node
from tests.kv.connectors.conftest import ROOT
from tests.kv.connectors.programs.guides import commands

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def of_vllm(run_program: Callable[..., dict[str, Any]]) -> dict[str, Any]:
    return run_program("vllm", "vllm_guides", timeout=200)


def test_the_options_for_vllm_make_the_tier(of_vllm: dict[str, Any]) -> None:
    assert of_vllm["tier"] == {
        **{"connector": "OffloadingConnector", "role": "kv_both", "room": 16 << 30},
        **{"tier": "FarpoolTier", "weights": "my-model@3f9a77b", "named": True, "hashes": ["sha256", "sha256"]},
    }


def test_the_command_for_lmcaches_server_makes_the_level(run_program: Callable[..., dict[str, Any]]) -> None:
    told = run_program("lmcache", "lmcache_guides")
    assert told == {"adapter": "FarpoolL2", "healthy": True, "policy": "LRU", "gigabytes": 20, "port": 5555}


def test_vllm_finds_lmcaches_server_by_the_options_in_the_guide(
    of_vllm: dict[str, Any], engine_python: Callable[[str], str]
) -> None:
    told = of_vllm["to_lmcache"]
    assert (told["known"], told["role"]) == (True, "kv_both")
    assert told["extra"] == {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": 5555}
    # vLLM prefers the connector that LMCache itself brings, which has to know these settings.
    library = Path(engine_python("lmcache")).parents[1]
    (connector,) = library.glob("lib/*/site-packages/lmcache/integration/vllm/lmcache_mp_connector.py")
    assert all(f'"{name}"' in connector.read_text() for name in told["extra"])


def test_lmcaches_check_as_the_guide_runs_it_passes(engine_python: Callable[[str], str]) -> None:
    (arguments,) = commands("kv-lmcache.md", "python -m lmcache.v1.basic_check")
    with running_node("256MiB") as node:
        done = subprocess.run(
            [
                *(engine_python("lmcache"), "-m", "lmcache.v1.basic_check"),
                *(one.replace("tcp://127.0.0.1:7471", node.address) for one in arguments),
            ],
            capture_output=True, text=True, timeout=200, env={**os.environ, "NO_COLOR": "1"}, check=True,
        )  # fmt: skip
    rates = re.findall(r"\| (?:LOOKUP \(absent\)|STORE|LOOKUP \(exist\)|LOAD) +\|.*\| +\S+ \| +(\S+) \|", done.stdout)
    assert rates == ["100.0%"] * 4, done.stdout


def test_lmcaches_benchmark_compares_levels_and_their_bytes(engine_python: Callable[[str], str]) -> None:
    engine_python("lmcache")
    done = subprocess.run(
        [ROOT / "scripts/kv-results", "lmcache-bench", "--passes", "1"],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHON": sys.executable}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    levels = json.loads(done.stdout)["result"]["levels"]
    assert [one["name"] for one in levels] == ["farpool, mapped", "farpool, TCP", "fs"]
    assert all(set(one["milliseconds"]) == {"store", "lookup", "load"} for one in levels)
