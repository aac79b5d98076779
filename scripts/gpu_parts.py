"""The parts of gpu_check.py: ``gpu_parts.py cuda|cpu full|quick PART FILE`` does one and appends what it finds to FILE.

On the CPU, host memory stands in for the GPU's, and ``quick`` takes sizes of seconds; the code is the same.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_check import Report
from gpu_run import PEERS, Run, copy_rate, fetched, machine, version_of

ROOT = Path(__file__).resolve().parent.parent
DEVICE_TESTS = (
    "tests/gpu",
    "tests/pool/test_device_pool.py",
    "tests/tiers/test_page_locks.py",
)
QUICK_TESTS = ("tests/gpu", "tests/pool/test_device_pool.py")
CAPTURE = "graph"
"""Tests of this name run last and in a process of their own, because a broken capture may hang the device."""
CAPTURE_SECONDS = 90
BILLION_LAYERS, BILLION_WIDTH = 26, 2048
"""Of the stack with 1.3 billion weights."""


def build(run: Run) -> None:
    """Install the wheels that were brought, and farpool, into a folder that the parts import from."""
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
    run.add("installed", wheels=[Path(wheel).name for wheel in brought], compiler=shutil.which("c++"))


def tests(run: Run) -> None:
    """Training bit for bit against plain torch, then the tests on a GPU, and of the same code with host memory."""
    smoke(run)
    enter(run)
    if run.device == "cpu":
        _pytest(run, "tests", *(QUICK_TESTS if run.quick else DEVICE_TESTS))
        return
    _pytest(run, "tests", *DEVICE_TESTS, "-k", f"not {CAPTURE}")
    _pytest(run, "tests of CUDA graphs", "tests/gpu", "-k", CAPTURE, seconds=CAPTURE_SECONDS)


def smoke(run: Run) -> None:
    """Three steps of AdamW in a pool that holds half of the weights, bit for bit against plain torch."""
    import torch

    import farpool

    torch.use_deterministic_algorithms(True)

    def trained(pool: farpool.Pool | None) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)]).to(run.device)
        if pool is not None:
            farpool.offload(model, pool)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses = []
        for step in range(3):
            inputs = torch.randn(64, 256, generator=torch.Generator().manual_seed(step)).to(run.device)
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + [p.detach() if pool is None else pool.materialize(p) for p in model.parameters()]

    expected = trained(None)
    with farpool.Pool("1MiB", dram="64MiB", device=run.device) as pool:
        found = trained(pool)
        stats = pool.stats()
        print(pool.explain())
    differing = sum(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    run.add("training in a small pool", tensors=len(expected), differing=differing, evictions=stats.evictions)
    if differing or not stats.evictions:
        raise SystemExit(f"{differing} of {len(expected)} tensors differ, after {stats.evictions} evictions")


def enter(run: Run) -> None:
    """Move a module four times as large as the budget from host memory into a pool, then load it from a file.

    Both must give the same bits. The figures have GB/s: of the move, and of the first pass over the file's tensors.
    """
    import torch

    import farpool

    layers, width = (8, 256) if run.quick else (16, 4096)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(layers)])
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    total = sum(tensor.nbytes for tensor in plain.values())
    differing = 0
    with farpool.Pool(total // 4, dram=2 * total, device=run.device) as pool, torch.no_grad():
        start = time.perf_counter()
        farpool.offload(model, pool)
        seconds = time.perf_counter() - start
        peak = pool.stats().fast.peak
        differing += sum(not torch.equal(pool.materialize(t).cpu(), plain[n]) for n, t in model.state_dict().items())
        farpool.restore(model, device="cpu")
        differing += sum(not torch.equal(tensor, plain[name]) for name, tensor in model.state_dict().items())
    rate = total / seconds / 1e9
    run.add("module from host memory", nbytes=total, gb_per_second=rate, fast_peak=peak, differing=differing)
    path = run.file("weights.safetensors")
    try:
        _save(path, plain)
        with farpool.Pool(total // 4, device=run.device) as pool, torch.no_grad():
            start = time.perf_counter()
            tensors = farpool.load_safetensors(path, pool)
            for tensor in tensors.values():
                tensor.view(-1)[:1].clone()
            run.synchronize()
            rate = total / (time.perf_counter() - start) / 1e9
            unlike = sum(not torch.equal(pool.materialize(t).cpu(), plain[name]) for name, t in tensors.items())
    finally:
        path.unlink(missing_ok=True)
    run.add("weights from a file", nbytes=total, gb_per_second=rate, differing=unlike)
    if differing or unlike or (run.device == "cuda" and peak):
        raise SystemExit(f"{differing} and {unlike} tensors differ, and {peak} bytes passed the fast tier")


def _save(path: Path, tensors: dict[str, Any]) -> None:
    """Write a safetensors file of float32 tensors."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            file.write(tensor.numpy().data)


def _pytest(run: Run, figure: str, *arguments: str, seconds: float | None = None) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=10"]
    try:
        done = subprocess.run([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        run.add(figure, outcome=f"not done after {seconds:g} s")
        raise SystemExit(f"{figure}: not done after {seconds:g} s") from error
    print(done.stdout)
    run.add(figure, outcome=done.stdout.strip().rpartition("\n")[2])
    if done.returncode:
        raise SystemExit(done.returncode)


def copies(run: Run) -> None:
    """GB/s between host memory and device, by kind of host memory, size and direction; medians. Then of a pool."""
    import torch

    exponents = (16, 20, 22) if run.quick else (16, 18, 20, 22, 24, 26, 28)
    largest = 1 << exponents[-1]
    there = torch.zeros(largest, dtype=torch.uint8, device=run.device)
    kinds = {"pageable": torch.zeros(largest, dtype=torch.uint8)}
    if run.device == "cuda":
        kinds["pinned"] = torch.empty(largest, dtype=torch.uint8, pin_memory=True)
    for kind, here in kinds.items():
        for direction, (target, source) in {"to device": (there, here), "to host": (here, there)}.items():
            for nbytes in (1 << exponent for exponent in exponents):
                rate = copy_rate(run, target[:nbytes], source[:nbytes])
                run.add("copies", memory=kind, direction=direction, nbytes=nbytes, gb_per_second=rate)
    if run.device == "cuda":
        _registered(run, there)
    _pooled(run)


def _registered(run: Run, there: Any) -> None:
    """GB/s with host memory that is page-locked in place, as the memory of a pool's tiers is."""
    import torch

    from farpool import _native

    memory, runtime = _native.Memory(there.numel()), torch.cuda.cudart()
    memory.touch(0, there.numel())
    if int(status := runtime.cudaHostRegister(memory.address, there.numel(), 0)) != 0:
        raise SystemExit(f"{there.numel()} bytes of host memory cannot be page-locked: CUDA error {int(status)}")
    here = torch.frombuffer((ctypes.c_uint8 * there.numel()).from_address(memory.address), dtype=torch.uint8)
    for direction, (target, source) in {"to device": (there, here), "to host": (here, there)}.items():
        rate = copy_rate(run, target, source)
        run.add("copies", memory="registered", direction=direction, nbytes=there.numel(), gb_per_second=rate)
    torch.cuda.synchronize()
    del here
    runtime.cudaHostUnregister(memory.address)


def _pooled(run: Run) -> None:
    """GB/s at which a pool brings in tensors that are read in turn and are twice as large as its fast tier."""
    import torch

    from farpool import Pool

    fast = 8 << 20 if run.quick else 1 << 30
    with Pool(fast, dram=4 * fast, device=run.device) as pool, torch.no_grad():
        tensors = [pool.ones(fast // 64 // 4) for _ in range(128)]
        for _ in range(6):  # the tape learns the round, and the tier's memory is page-locked
            total = sum(tensor.sum() for tensor in tensors)
        before = fetched(pool)
        run.synchronize()
        start = time.perf_counter()
        total = sum(tensor.sum() for tensor in tensors)
        run.synchronize()
        seconds, moved = time.perf_counter() - start, fetched(pool) - before
        if int(total) != sum(tensor.numel() for tensor in tensors):
            raise SystemExit(f"the tensors' sum is {total}, expected {sum(tensor.numel() for tensor in tensors)}")
        run.add("pool", direction="to device", nbytes=moved, gb_per_second=round(moved / seconds / 1e9, 3))
        del tensors


STREAMED = (
    *("wanted", "ratio", "efficiency", "first_efficiency", "weight_bytes", "budget_bytes", "fewest_bytes"),
    *("moved_bytes", "stall_seconds", "prefetches_used", "prefetches_wasted", "equal"),
)
TRAINED = (
    *("wanted", "ratio", "efficiency", "efficiency_by_phases", "first_efficiency", "state_bytes", "budget_bytes"),
    *("moved_read", "moved_written", "stall_seconds", "equal"),
)


def streaming(run: Run) -> None:
    """Models four times as large as the pool: each ratio of transfer to compute, with short and with long layers."""
    lengths, ratios = ((0.001,), (1.0,)) if run.quick else ((0.003, 0.001, 0.010), (0.5, 1.0, 2.0))
    for length in lengths:
        for ratio in ratios:
            settings = {"rounds": 5, "layers": 16, "gpu_share": 32}
            for case in benchmark(run, "streaming", ratios=(ratio,), layer_seconds=length, **settings):
                run.add("forward pass", layer_seconds=length, **_picked(case, STREAMED))


def training(run: Run) -> None:
    """AdamW with a sixth of its state resident, after the backward pass and inside it."""
    for case in benchmark(run, "training", ratios=(1.0,), rounds=3, gpu_share=_billion_share(run)):
        run.add("training step", **_picked(case, TRAINED))
        inside = case.in_backward
        seconds = statistics.median(inside.paged_seconds)
        run.add("step_in_backward", efficiency=inside.efficiency, paged_median=seconds, moved_read=inside.moved_read)


def _billion_share(run: Run) -> int:
    """The fraction of the GPU's memory that 1.3 billion fp32 weights take."""
    import torch

    from farpool_bench.stack import block_bytes

    if run.device == "cpu":
        return 1
    memory = torch.cuda.get_device_properties(0).total_memory
    return max(16, memory // (BILLION_LAYERS * block_bytes(BILLION_WIDTH)))


def peers(run: Run) -> None:
    """The rivals that can be imported, side by side with farpool; the reason for the others."""
    for package in PEERS:
        try:
            importlib.import_module(package)
            run.add("package", name=package, version=version_of(package))
        except Exception as error:  # one that is broken in any way is no rival here
            run.add("package", name=package, version=None, why=f"{type(error).__name__}: {error}")
    settings: dict[str, dict[str, Any]] = {
        "streaming": {"layer_seconds": 0.003, "layers": 16, "gpu_share": 64},
        "training": {"gpu_share": 64},
    }
    for name, more in settings.items():
        for case in benchmark(run, name, ratios=(1.0,), rounds=5, **more):
            run.add(name, **_picked(case, ("wanted", "ratio", "efficiency", "equal")))
            for peer in case.peers:
                values = {key: peer[key] for key in ("name", "speedup", "efficiency", "remark")}
                run.add(f"{name} peer", **values)


def benchmark(run: Run, name: str, **settings: Any) -> Any:
    """Cases of a benchmark of farpool-bench; where `run` is quick, with its own small sizes."""
    from farpool_bench.harness import load

    found = load(name)

    def told(what: str, done: int, total: int) -> None:
        print(f"  {what}: {done} of {total}", flush=True)

    return found(device=run.device, **(found.QUICK if run.quick else settings)).run(told).cases


def _picked(case: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Some values of a case, with its medians in seconds."""
    medians = {f"{way}_median": statistics.median(case[f"{way}_seconds"]) for way in ("resident", "paged")}
    return {name: case[name] for name in names} | medians


IN_OTHERS = {"decode": "gpu_models", "experts": "gpu_models", "cache": "gpu_models", "profile": "gpu_profile"}
"""Modules of the parts that are not here."""


def main() -> None:
    """Do the part that the command line names."""
    device, size, name, file = sys.argv[1:]
    run = Run(device, size == "quick", Report(Path(file)))
    command = " ".join(["scripts/gpu-check", name, os.environ.get("GPU_CHECK_FLAGS", "")]).strip()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    run.report.add(part=name, command=command, date=date, device=device, quick=run.quick, **machine(device))
    part = getattr(importlib.import_module(IN_OTHERS[name]), name) if name in IN_OTHERS else globals()[name]
    part(run)


if __name__ == "__main__":
    main()
