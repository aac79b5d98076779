"""What the parts of gpu_check.py share: where their figures go, what the machine is, and how fast it copies."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_check import Report

PEERS = ("accelerate", "deepspeed", "torchao", "bitsandbytes")
PACKAGES = ("farpool", "torch", "numpy", "transformers", "triton", *PEERS)


@dataclass(frozen=True)
class Run:
    """A run of a part.

    Attributes
    ----------
    device : str
        ``cuda`` or ``cpu``.
    quick : bool
        True for sizes of seconds.
    report : Report
        The part's file.
    """

    device: str
    quick: bool
    report: Report

    def add(self, figure: str, **values: Any) -> None:
        """Append a figure to the part's file, and print it."""
        self.report.add(figure=figure, **values)
        texts = [
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
        ]
        print(f"  {figure}: {', '.join(texts)}"[:600], flush=True)

    def synchronize(self) -> None:
        """Wait until the device has done what is queued."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def file(self, name: str) -> Path:
        """Path of another file of the part, beside its results."""
        return self.report.path.with_name(f"{self.report.path.stem}-{name}")


def said(*command: str) -> str:
    """What a program prints; why not, if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known: {error}"
    return done.stdout.strip()


def machine(device: str) -> dict[str, Any]:
    """What the machine is and has, and how the GPU is linked to it."""
    import torch

    found: dict[str, Any] = {
        "card": platform.processor() or platform.machine(),
        "driver": "",
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "cuda": torch.version.cuda,
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}},
    }
    if device == "cuda":
        if not torch.cuda.is_available():
            raise SystemExit(
                f"torch {torch.__version__} finds no CUDA device; --device cpu does what can be done without one"
            )
        query = "--query-gpu=driver_version,memory.total,pcie.link.gen.max,pcie.link.gen.current,pcie.link.width.max"
        found["card"] = torch.cuda.get_device_name()
        found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]
        found["link"] = said("nvidia-smi", query, "--format=csv")
    return found


def version_of(package: str) -> str | None:
    """Version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def copy_rate(run: Run, target: Any, source: Any) -> float:
    """GB/s: the median of nine samples, each of several copies in a row."""
    number = max(2, min(64, (64 << 20) // target.numel()))
    found = []
    for _ in range(10):
        run.synchronize()
        start = time.perf_counter()
        for _ in range(number):
            target.copy_(source, non_blocking=True)
        run.synchronize()
        found.append(number * target.numel() / (time.perf_counter() - start) / 1e9)
    return float(round(statistics.median(found[1:]), 3))


def link_rate(run: Run) -> float:
    """Bytes per second from page-locked host memory to the device, in large copies."""
    import torch

    nbytes = 4 << 20 if run.quick else 64 << 20
    here = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=run.device == "cuda")
    return 1e9 * copy_rate(run, torch.zeros(nbytes, dtype=torch.uint8, device=run.device), here)


def fetched(pool: Any) -> int:
    """Bytes that have come into the fast tier of a pool."""
    stats = pool.stats()
    return sum(link.nbytes for link in stats.links if link.target == stats.fast.name)
