"""The interface of benchmark modules, and the list of them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from farpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["NAMES", "Benchmark", "Progress", "Settings", "check_device", "load", "title_of"]

NAMES = (
    "streaming",
    "training",
    "prefetch",
    "nvme",
    "overhead",
    "growth",
    "policies",
    "remote",
    "turns",
    "kv",
    "kv-blocks",
    "kv-ttft",
    "kv-codecs",
    "kv-generate",
)
"""Names of the benchmarks in the order of reports; each is a command, and with ``_`` for ``-`` a module here."""

Progress = Callable[[str, int, int], None]
"""Callback that is told the name of a step, how much of it is done, and how much there is."""


class Settings(Protocol):
    """Settings of a benchmark, a frozen dataclass whose fields the command line sets."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str:
        """Device to measure on, ``cpu`` or ``cuda``."""

    @classmethod
    def quick(cls) -> Self:
        """Settings so small that a run takes seconds: to see that everything works, not to measure."""


class Benchmark(Protocol):
    """Interface of a benchmark module."""

    Settings: type[Any]
    Outcome: type[Any]
    """Type of the results, a frozen dataclass that msgspec can encode and decode."""

    def run(self, settings: Any, progress: Progress) -> Any:
        """Run the measurements and return an ``Outcome``."""

    def table(self, outcome: Any) -> RenderableType:
        """Format the outcome for people to read, as a rich Table or a Group of tables and texts."""

    def figures(self, outcome: Any) -> dict[str, Any]:
        """Draw the outcome as Matplotlib figures, by caption; may be empty."""


def load(name: str) -> Benchmark:
    """Import the module of a benchmark.

    Raises
    ------
    ConfigError
        There is no benchmark of this name.
    """
    if name not in NAMES:
        raise ConfigError(f"benchmark {name!r} is not known; expected one of {', '.join(NAMES)}")
    return cast(Benchmark, importlib.import_module(f"farpool_bench.{name.replace('-', '_')}"))


def title_of(benchmark: Benchmark) -> str:
    """Title of a benchmark, which is the first line of its docstring."""
    return (benchmark.__doc__ or "").partition("\n")[0].rstrip(".")


def check_device(device: str) -> None:
    """Check before a long run that the device exists, and make it compute the same bits each time.

    Raises
    ------
    ConfigError
        The device is unknown or does not exist.
    """
    if device not in ("cpu", "cuda"):
        raise ConfigError(f"device: {device!r} is not known; expected cpu or cuda")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use --device cpu")
        # What is compared must be computed in one way: by default cuBLAS and the gradient of attention choose freely.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
