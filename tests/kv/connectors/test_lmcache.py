"""LMCache's second level on the pool, against LMCache itself: the contract, its own check tool, its server."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import FarpoolError
from farpool.kv import Group, Namespace, block_key
from farpool.kv.blocks import namespaces
from farpool_bench.kv_peers import Tier, WorkerUser, lmcache_peer
from farpool_bench.users import Ring
from tests.kv.connectors.cases import BLOCKS, CASES, OF_ENGINES, OF_HOST_MEMORY
from tests.nodes import PATIENCE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

_START_SECONDS = 120.0
_CONTRACT = [name for name in (*CASES, *OF_ENGINES, *OF_HOST_MEMORY) if name != "hash_seeds"]
_OWN = [
    "every_field_of_a_key_counts",
    "results_and_events",
    "locks",
    "accounts",
    "quotas",
    "without_nodes",
    "serde",
    "compressed",
    "plain_bytes",
    "settings",
]
_PUBLISHED = [
    "7e3eff9ef7613a50340eb12677ee03b83ac759fcba9bb32705f07248d56d473b",
    "d526d88f0c387e4049f866a4c572cbf658276fcae250b069051fd1fff3ad0579",
    "8be5f115945ff3c4eb943172f8edfdcdf3432274c3d3dbd2436fed9a9fe494f5",
]
"""LMCache's chain of BLAKE3 hashes, computed from its definition: before the first chunk, and for the two chunks of the
tokens 1000 to 1511."""


@pytest.fixture(scope="module", params=["mapped", "tcp"])
def contract(request: pytest.FixtureRequest, run_program: Callable[..., dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Facts of the contract's cases over one transport; all run in one process, because the engine starts slowly."""
    return request.param, run_program("lmcache", "lmcache_l2", request.param, *_CONTRACT, timeout=280.0)


@pytest.fixture(scope="module")
def facts(run_program: Callable[..., dict[str, Any]]) -> Callable[[str], dict[str, Any]]:
    """Facts of a further case."""
    found = run_program("lmcache", "lmcache_l2", "auto", *_OWN, timeout=280.0)
    return lambda case: _told(found, case)


def _told(found: dict[str, Any], case: str) -> dict[str, Any]:
    assert "error" not in found[case], found[case]["error"]
    told: dict[str, Any] = found[case]
    return told


@pytest.mark.parametrize("case", _CONTRACT)
def test_the_contract_holds(contract: tuple[str, dict[str, Any]], case: str) -> None:
    transport, facts = contract
    expected = {**CASES, **OF_ENGINES, **OF_HOST_MEMORY}[case].copy()
    if (transport, case) == ("mapped", "deadline_passed"):
        expected["loaded"] = 16  # memory of a node on this host is read without it
    found = _told(facts, case)
    assert {name: found.get(name) for name in expected} == expected


def test_no_block_is_loaded_twice_if_lmcaches_memory_is_smaller_than_a_prefix(
    contract: tuple[str, dict[str, Any]],
) -> None:
    # LMCache 0.5.6 asks for none: it reserves memory for all of a prefix, or does not load.
    assert _told(contract[1], "memory_smaller_than_prefix")["asked"] <= BLOCKS


def test_an_adapter_whose_probe_has_failed_is_not_healthy(contract: tuple[str, dict[str, Any]]) -> None:
    assert _told(contract[1], "damaged_in_host_memory")["told"] == [False, "unproved"]


def test_every_field_of_lmcaches_key_distinguishes_objects(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("every_field_of_a_key_counts") == {"saved": 10, "found": 10, "loaded": 10, "wrong": 0}


def test_each_result_is_returned_once_and_there_are_three_events(facts: Callable[[str], dict[str, Any]]) -> None:
    found = facts("results_and_events")
    assert found["fds"] == 3
    assert found["bytes"] == 2 * 2 * 2 * 256 * 32 * 2
    assert found["bytes_again"] == 0
    assert found["twice"] == [{}, None, None]
    assert found["unknown"] is None
    assert found["nothing"] is True
    assert found["without_hint"] == 2


def test_locks_are_pins_that_end_with_as_many_unlocks_or_by_themselves(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("locks") == {"locked": 1, "still": 1, "remembered": 1, "at_once": True}


def test_stored_and_evicted_objects_are_reported_to_quotas(facts: Callable[[str], dict[str, Any]]) -> None:
    found = facts("accounts")
    assert found["by_salt"] == {"alice": 4, "bob": 2}
    assert found["fraction"] == 0.06
    assert found["left"] == 3
    assert found["again"] == 3  # one of alice's, because no lookup has been made yet, and bob's two, which count once
    assert found["found"] == 0
    assert found["at_last"] == 2
    assert found["events"] == [["stored", 6], ["accessed", 4], ["deleted", 3], ["deleted", 1]]


def test_lmcaches_quotas_take_objects_from_the_nodes(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("quotas") == {"saved": 4, "loaded": 4, "wrong": 0}


def test_without_any_node_requests_end_and_lmcache_stays_healthy(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("without_nodes") == {"loaded": 0, "completed": True, "healthy": True}


def test_lmcaches_own_conversion_works_if_the_layout_is_named(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("serde") == {"loaded": 4, "values": [1.0, 2.0, 3.0, 4.0]}


def test_a_lossless_codec_stores_fewer_bytes_and_gives_the_same_back(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("compressed") == {"smaller": 4, "found": 4, "loaded": 4, "equal": 4, "without": 0}


def test_plain_bytes_move_only_with_a_stated_type(facts: Callable[[str], dict[str, Any]]) -> None:
    assert facts("plain_bytes") == {
        "saved": [False, 0],
        "found": 0,
        "counted": {"save.failed": 2, "lookup.failed": 2},
        "told": [["save", {"failed": 2}], ["lookup", {"failed": 2}]],
        "mixed": [False, 1, [1]],
        "own": 2,
        "others": [0, 0],
    }


def test_wrong_settings_are_refused_by_name(facts: Callable[[str], dict[str, Any]]) -> None:
    told = facts("settings")["told"]
    names = ["weights_id", "noddes", "kv_dtype", "lock_ttl", "capacity_bytes", "timeout", "nodes", "kv_dtype", "int8"]
    assert all(one.startswith("ConfigError") and name in one for one, name in zip(told, names, strict=True)), told


def test_keys_are_the_same_in_all_processes_and_hold_the_published_hashes(
    run_program: Callable[..., dict[str, Any]],
) -> None:
    one, other = (run_program("lmcache", "lmcache_l2", "auto", "hash_seeds", PYTHONHASHSEED=seed) for seed in "12")
    assert one == other
    assert one["hash_seeds"]["vectors"] == _PUBLISHED
    assert sorted(one["hash_seeds"]["keys"]) == one["hash_seeds"]["keys"]
    # Later releases of farpool find the objects on nodes, because the namespace is part of the format; those of LMCache
    # do not.
    space = Namespace(
        engine="lmcache",
        model="tiny",
        weights="one",
        dtype="bfloat16",
        layout="lmcache 2x2x256x32 bfloat16",
        tokens_per_block=256,
        groups=(Group(("object group 0",), 0),),
        hash="blake3",
        parallel=(("world", 1),),
        extra=(("cache_salt", ""), ("release", "0.5.6")),
    )
    chains = [
        "084547b6c40ed5b05ba8cd0305db5bf74d5617673948d9ed193ab7d6cbc484d4",
        "e5ffee45c2b9db326814c9692dc594369887ba3b0df5761817820b60f864c8e0",
    ]
    expected = [block_key(space.digest, bytes.fromhex(one), 0, 1 << 24 | 1 << 8).hex() for one in chains]
    assert one["hash_seeds"]["keys"] == sorted(expected)


def _spec(node: RunningNode, **params: Any) -> str:
    plugin = {"type": "plugin", "module_path": "farpool.kv.lmcache", "class_name": "FarpoolL2"}
    return json.dumps({**plugin, "adapter_params": {"nodes": [node.address], "weights_id": "one", **params}})


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_lmcaches_own_check_passes_in_full(engine_python: Callable[[str], str], transport: str) -> None:
    with running_node("256MiB") as node:
        spec = _spec(node, transport=transport, timeout=PATIENCE)
        arguments = ["--mode", "test_l2_adapter", "--num-keys", "8", "--obj-size", "524288", "--l2-adapter", spec]
        done = subprocess.run(
            [engine_python("lmcache"), "-m", "lmcache.v1.basic_check", *arguments],
            capture_output=True, text=True, timeout=120, env=_environment(), check=True,
        )  # fmt: skip
        described = _described(node)
    # It says how it went, and ends with 0 in any case.
    rows = re.findall(r"\| (LOOKUP \(absent\)|STORE|LOOKUP \(exist\)|LOAD) +\|.*\| +(\S+) \| +(\S+) \|", done.stdout)
    assert rows == [(name, "8/8", "100.0%") for name in ("LOOKUP (absent)", "STORE", "LOOKUP (exist)", "LOAD")], done
    assert "Validation (content): 8/8" in done.stdout
    assert [(one.engine, one.weights, one.dtype, one.layout) for one in described] == [
        ("lmcache", "one", "bfloat16", "lmcache 524288 bfloat16")
    ]


def _described(node: RunningNode) -> list[Namespace]:
    with Store(node.address, timeout=PATIENCE) as store:
        return list(namespaces(store).values())


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@contextlib.contextmanager
def _server(python: str, log: Path, *options: str) -> Iterator[tuple[str, str]]:
    """A ready server of LMCache: its address for requests, and the address of its HTTP interface."""
    port, http = _free_port(), _free_port()
    command = [str(Path(python).parent / "lmcache"), "server", "--port", str(port), "--http-port", str(http)]
    command += ["--supported-transfer-mode", "engine_driven", "--l1-size-gb", "0.5", "--no-l1-use-lazy"]
    command += ["--eviction-policy", "LRU", "--disable-observability", *options]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out, env=_environment()) as process:
        try:
            deadline = time.monotonic() + _START_SECONDS
            while not _is_healthy(http):
                assert process.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < deadline, log.read_text()[-4000:]
                time.sleep(0.2)
            yield f"tcp://127.0.0.1:{port}", f"http://127.0.0.1:{http}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(PATIENCE)
            finally:
                process.kill()


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
            return bool(json.load(answer)["is_healthy"])
    except OSError:
        return False


@pytest.mark.parametrize("fault", ["", "node killed"])
def test_the_server_returns_the_bytes_that_it_received(
    engine_python: Callable[[str], str], tmp_path: Path, fault: str
) -> None:
    python, log = engine_python("lmcache"), tmp_path / "server.log"
    # Nothing stays in the server's memory, so all bytes are read from the node.
    with (
        running_node("256MiB") as node,
        _server(python, log, "--l2-store-policy", "skip_l1", "--l2-adapter", _spec(node)) as (rpc, http),
    ):
        if fault:
            node.kill()
        command = [
            str(Path(python).parent / "lmcache"),
            "bench",
            "server",
            "--mode",
            "cpu",
            "--rpc-url",
            rpc,
            "--url",
            http,
        ]
        command += ["--num-tokens", "1024", "--kvcache-shape-spec", "(2,256,16,2,64):float16:4"]
        done = subprocess.run(
            [*command, "--start", "0", "--end", "5", "--interval", "1"],
            capture_output=True, text=True, timeout=150, env=_environment(), check=False,
        )  # fmt: skip
        with urllib.request.urlopen(f"{http}/status", timeout=PATIENCE) as answer:
            status = json.load(answer)
    (adapter,) = status["storage_manager"]["l2_adapters"]
    assert status["is_healthy"]
    if fault:  # nothing is stored, and the objects that LMCache still has are right
        assert adapter.get("load.done", 0) == 0
        assert "MISMATCH" not in done.stdout
        assert done.stdout.count("STORE: stored") == 5, done.stdout
    else:
        assert done.stdout.count("CHECKSUM MATCH OK") == 5, done.stdout + log.read_text()[-4000:]
        assert done.returncode == 0
        assert (adapter["save.done"], adapter["load.done"]) == (20, 20)


@pytest.mark.parametrize("tier", ["fs", "L1"])
def test_the_benchmarks_use_its_tiers_and_check_the_bytes(engine_python: Callable[[str], str], tier: Tier) -> None:
    with lmcache_peer(engine_python("lmcache"), tier, 64 << 20) as worker:
        user = WorkerUser(worker, Ring(100_000, 7))
        for batch in (1, 7):
            assert user.seconds_each(True, batch, 1e-9) > 0
            assert user.seconds_each(False, batch, 1e-9) > 0
        assert user.lookup_seconds(1e-9) > 0
        if tier == "L1":
            with pytest.raises(FarpoolError, match=r"lmcache_worker ended: .*OUT_OF_MEMORY"):
                WorkerUser(worker, Ring(40 << 20, 2)).seconds_each(True, 2, 1e-9)
