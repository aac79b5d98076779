"""Provenance of a result: machine, date, versions, command. Every result file begins with its provenance."""

from __future__ import annotations

import datetime
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

__all__ = ["Provenance", "provenance"]

_PACKAGES = ("farpool", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Provenance:
    """Facts that a reader needs to judge a result or to reproduce it."""

    command: str
    date: str
    processor: str
    cores: int
    memory_bytes: int
    system: str
    versions: dict[str, str]
    gpu: str = ""
    """Name of the GPU that the process has used; empty if the process has used no GPU."""


def _program() -> str:
    """Return the name of the running program. The name is ``farpool`` also for ``python -m farpool``."""
    name = os.path.basename(sys.argv[0])
    return "farpool" if name == "__main__.py" else name


def provenance() -> Provenance:
    """Return the provenance of a result that this process produces now."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return Provenance(
        command=shlex.join([_program(), *sys.argv[1:]]),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        processor=_processor(),
        cores=os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=platform.platform(),
        versions=versions,
        gpu=_gpu(),
    )


def _gpu() -> str:
    torch = sys.modules.get("torch")  # a process that has not imported torch has used no GPU
    return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_initialized() else ""


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
