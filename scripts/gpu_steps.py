"""The steps of gpu_check.py: ``gpu_steps.py cpu|cuda STEP RESULT`` does one and writes what it found as JSON."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEVICE_TESTS = (
    "tests/gpu",
    "tests/pager/test_capture.py",
    "tests/pager/test_page_locks.py",
)
CAPTURE = "graph"
"""Tests of this name are a step of their own, because a broken capture may hang the device."""


def _said(*command: str) -> str:
    """The first line that a program prints; why not, if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return done.stdout.strip()


def versions(device: str) -> dict[str, Any]:
    """What the machine is and has, and how the GPU is linked to it."""
    import torch

    packages = ("torch", "numpy", "msgspec", "nanobind", "scikit-build-core", "cmake", "ninja", "pytest", "hypothesis")
    found = {
        "python": sys.version,
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "compiler": _said(os.environ.get("CXX", "c++"), "--version").partition("\n")[0],
        "packages": {
            name: importlib.metadata.version(name) for name in packages if importlib.util.find_spec(_module(name))
        },
        "cuda": torch.version.cuda,
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(f"torch {torch.__version__} finds no CUDA device; --cpu does what can be done without one")
        query = (
            "--query-gpu=name,driver_version,memory.total,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.max"
        )
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = torch.cuda.get_device_capability()
        found["link"] = _said("nvidia-smi", query, "--format=csv")
        found["topology"] = _said("nvidia-smi", "topo", "-m")
    return found


def _module(package: str) -> str:
    return package.replace("-", "_")


def build(device: str) -> dict[str, Any]:
    """Install the wheels that were brought, and farpool, into a folder that the later steps import from."""
    if device == "cpu":
        import farpool

        return {"farpool": importlib.metadata.version("farpool"), "used as it is installed": farpool.__path__[0]}
    wheels, work = Path(os.environ["GPU_CHECK_WHEELS"]), Path(os.environ["GPU_CHECK_WORK"])
    # Without dependencies: the torch that is there may be another than the one that farpool asks for.
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    pip += ["--upgrade", "--target", str(work / "site")]
    brought = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
    if brought:
        subprocess.run([*pip, *brought], check=True)
    subprocess.run(
        [*pip, "--no-build-isolation", "--verbose", "-C", f"build-dir={work / 'cmake'}", str(ROOT)], check=True
    )
    subprocess.run([*pip, "--no-build-isolation", str(ROOT / "benchmarks")], check=True)
    return {"wheels": [Path(wheel).name for wheel in brought], "compilers": shutil.which("c++")}


def rates(device: str) -> dict[str, Any]:
    """GB/s between host memory and device, by size, direction and kind of host memory; medians."""
    import torch

    from farpool import _native
    from farpool.memory.pager.executor.cuda import CudaHost

    sizes = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
    largest = sizes[-1]
    host = CudaHost(torch.device("cuda", torch.cuda.current_device()))
    memory = _native.Memory(largest)
    memory.touch(0, largest)
    host.lock(memory.address, largest)
    kinds = {
        "pinned": torch.empty(largest, dtype=torch.uint8, pin_memory=True),
        "registered": host.tensor(memory.address, largest),
        "pageable": torch.zeros(largest, dtype=torch.uint8),
    }
    there = torch.zeros(largest, dtype=torch.uint8, device="cuda")
    found: dict[str, dict[str, dict[int, float]]] = {}
    for kind, here in kinds.items():
        ends = {"to device": (there, here), "to host": (here, there)}
        found[kind] = {
            direction: {nbytes: _rate(target[:nbytes], source[:nbytes]) for nbytes in sizes}
            for direction, (target, source) in ends.items()
        }
    torch.cuda.synchronize()
    del kinds["registered"]
    host.unlock(memory.address)
    return {"GB/s": found}


def _rate(target: Any, source: Any) -> float:
    """Median of nine samples, each of several copies in a row."""
    import torch

    copies = max(2, min(64, (64 << 20) // target.numel()))
    found = []
    for _ in range(10):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(copies):
            target.copy_(source, non_blocking=True)
        stop.record()
        stop.synchronize()
        found.append(copies * target.numel() / start.elapsed_time(stop) / 1e6)
    return round(statistics.median(found[1:]), 3)


def smoke(device: str) -> dict[str, Any]:
    """Three steps of AdamW in a pool that holds half of the weights, bit for bit against plain torch."""
    import torch

    import farpool

    torch.use_deterministic_algorithms(True)

    def trained(pool: farpool.Pool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(device)
        if pool is not None:
            farpool.offload(model, pool)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(device)
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + [p.detach() if pool is None else pool.materialize(p) for p in model.parameters()]

    expected = trained(None)
    with farpool.Pool("1MiB", dram="64MiB", device=device) as pool:
        found = trained(pool)
        stats = pool.stats()
        print(pool.explain())
    differing = [n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.equal(a, b)]
    if differing or not stats.evictions:
        raise SystemExit(f"{len(differing)} of {len(expected)} tensors differ, after {stats.evictions} evictions")
    return {"tensors": len(expected), "evictions": stats.evictions, "write-backs": stats.write_backs}


def tests(device: str) -> dict[str, Any]:
    """The tests on a GPU, and those of the same code with host memory in its place."""
    return _pytest(*DEVICE_TESTS, "-k", f"not {CAPTURE}") if device == "cuda" else _pytest(*DEVICE_TESTS)


def capture(device: str) -> dict[str, Any]:
    """A CUDA graph beside a pool that transfers, and one that is refused."""
    return _pytest("tests/gpu", "-k", CAPTURE)


def _pytest(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--durations=10",
            *arguments,
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    if done.returncode:
        raise SystemExit(done.returncode)
    return {"pytest": done.stdout.strip().rpartition("\n")[2]}


def streaming(device: str) -> dict[str, Any]:
    """A model four times as large as the pool, where transfers take 0.5, 1 and 2 times as long as computing."""
    settings = {} if device == "cpu" else {"rounds": 9, "layers": 16, "layer_seconds": 0.002, "gpu_share": 64}
    names = "wanted ratio efficiency first_efficiency weight_bytes budget_bytes fewest_bytes moved_bytes stall_seconds"
    return _measure("streaming", device, settings, f"{names} prefetches_used prefetches_wasted equal")


def training(device: str) -> dict[str, Any]:
    """AdamW with a sixth of its state resident."""
    settings = {} if device == "cpu" else {"ratios": (0.5, 2.0), "rounds": 5, "gpu_share": 256}
    names = "wanted ratio efficiency first_efficiency state_bytes budget_bytes moved_read moved_written stall_seconds"
    return _measure("training", device, settings, f"{names} equal")


def _measure(name: str, device: str, settings: dict[str, Any], names: str) -> dict[str, Any]:
    """Run a benchmark, small without settings; keep the whole result next to the log, and return these of each case."""
    from farpool.observe.provenance import provenance
    from farpool_bench.harness import Result, load

    benchmark = load(name)

    def told(what: str, done: int, total: int) -> None:
        print(f"{what}: {done} of {total}")

    outcome = benchmark(device=device, **(settings or benchmark.QUICK)).run(told)
    made = replace(provenance(), command=f"scripts/gpu-check {name}")
    whole = Path(sys.argv[3]).with_name(f"{name}-{device}.json")
    whole.write_text(Result(benchmark, outcome, made).encode() + "\n")
    cases = [
        {**{key: getattr(case, key) for key in names.split()}, "peers": {p.name: p.efficiency for p in case.peers}}
        for case in outcome.cases
    ]
    return {"cases": cases, "whole": whole.name}


STEPS: dict[str, Callable[[str], dict[str, Any]]] = {
    step.__name__: step for step in (versions, build, rates, smoke, tests, capture, streaming, training)
}


if __name__ == "__main__":
    found = STEPS[sys.argv[2]](sys.argv[1])
    print(json.dumps(found, indent=1))
    Path(sys.argv[3]).write_text(json.dumps(found))
