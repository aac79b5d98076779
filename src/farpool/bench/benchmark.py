"""What a benchmark module offers, and which ones there are."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, cast

from farpool.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["NAMES", "Benchmark", "Progress", "Settings", "check_device", "load", "title_of"]

NAMES = ("streaming", "training", "prefetch", "nvme", "overhead", "growth", "policies", "remote")
"""In the order in which reports show them. Each is a module of this package and a command."""

Progress = Callable[[str, int, int], None]
"""Told the name of a step, how much of it is done, and how much there is."""


class Settings(Protocol):
    """What the command line sets: a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def device(self) -> str:
        """``cpu`` or ``cuda``."""

    @classmethod
    def quick(cls) -> Self:
        """Sizes so small that a run takes seconds: to see that everything works, not to measure."""


class Benchmark(Protocol):
    """The names of a benchmark module."""

    Settings: type[Any]
    Outcome: type[Any]
    """A frozen dataclass that msgspec can encode and decode."""

    def run(self, settings: Any, progress: Progress) -> Any:
        """Measure; returns an ``Outcome``."""

    def table(self, outcome: Any) -> RenderableType:
        """For a person to read: a rich Table, or a Group of tables and texts."""

    def figures(self, outcome: Any) -> dict[str, Any]:
        """Matplotlib figures by caption; may be empty."""


def load(name: str) -> Benchmark:
    """The module of a benchmark.

    Raises
    ------
    ConfigError
        There is none of this name.
    """
    if name not in NAMES:
        raise ConfigError(f"benchmark {name!r} is not known; expected one of {', '.join(NAMES)}")
    return cast(Benchmark, importlib.import_module(f"farpool.bench.{name}"))


def title_of(benchmark: Benchmark) -> str:
    """The first line of its docstring."""
    return (benchmark.__doc__ or "").partition("\n")[0].rstrip(".")


def check_device(device: str) -> None:
    """Find out before a long run whether the device is there, and have it compute the same bits each time.

    Raises
    ------
    ConfigError
        It is not.
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
