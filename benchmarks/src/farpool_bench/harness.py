"""The harness of all benchmarks: a benchmark measures its cases and gives rows; files, tables and pages come from rows.

The method is the same everywhere. Memory is warmed first; contenders run in turn, in one run; the median of the ratios
of each round is quoted, and the samples stay in the result.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias, dataclass_transform, final

import msgspec

from farpool.decoding import prepared
from farpool.errors import ConfigError
from farpool.observe.provenance import Provenance

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MEMORY = ("streaming", "training", "saved", "prefetch", "nvme", "overhead", "growth", "policies", "device", "region")
_CLUSTER = ("remote", "turns", "cluster")
_KV = ("kv", "kv-blocks", "kv-ttft", "kv-codecs", "kv-generate")
# In the order of reports. Each is a command and, with ``_`` for ``-``, a module here.
NAMES = (*_MEMORY, *_CLUSTER, *_KV)

Progress = Callable[[str, int, int], None]
"""Callback that receives the name of a step, the amount done, and the whole amount."""
Figures: TypeAlias = "dict[str, Figure]"


class Row(dict[str, Any]):
    """A row of results: a JSON object whose fields are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"a row of results has no field {name!r}", name=name) from None


def rows_of(value: Any) -> Any:
    """Turn the objects and lists of decoded JSON into rows and tuples."""
    if isinstance(value, dict):
        return Row({name: rows_of(one) for name, one in value.items()})
    return tuple(map(rows_of, value)) if isinstance(value, list) else value


class Option(NamedTuple):
    """Description of a field that the command line can change; the flag is its name unless given."""

    text: str
    metavar: str = "N"
    flag: str = ""
    least: float | None = None
    positional: bool = False
    """True for words of the command line without a flag."""


@dataclass_transform(kw_only_default=True, field_specifiers=(field,))
class _Fields:
    """A class whose subclasses are data classes."""

    def __init_subclass__(cls) -> None:
        dataclass(kw_only=True, eq=False)(cls)


class Benchmark(_Fields, ABC):
    """A run of a benchmark. Each benchmark is a subclass, and its fields are the sizes and choices of a run.

    The docstring of its module describes the method: the first line is the title, and the paragraphs behind it are
    shown on pages.
    """

    name: ClassVar[str]
    limit: ClassVar[str]
    """The bound that the machine itself sets."""
    rivals: ClassVar[tuple[str, ...]] = ()
    """Other ways to do the same task."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Fields of the result that `measure_PART` measures, if the cases are no rows of one table."""
    rows: ClassVar[str] = "cases"
    """Field of the result with the rows of all cases, if there are no `parts`."""
    over: ClassVar[str] = ""
    """Field whose values are the cases, if there are no `parts`."""
    measured_in: ClassVar[str] = ""
    """Module of which `measure_case` measures a case: one that imports torch, which the command's help does without."""
    picture: ClassVar[bool] = False
    """True if the command can draw its figure into a file."""
    QUICK: ClassVar[dict[str, Any]] = {}
    """Fields so small that a run takes seconds: to see that everything works, not to measure."""
    device: str = "cpu"
    progress: Progress = field(init=False, repr=False)
    stack: ExitStack = field(init=False, repr=False)
    """Everything that the run has opened; it is closed at the end of the run."""

    def open(self) -> None:
        """Start all that the cases share; `self.stack` closes it."""

    def cases(self) -> Iterable[Any]:
        """List the cases, one after the other."""
        return getattr(self, self.over) if self.over else self.parts

    def measure(self, case: Any) -> Any:
        """Measure one case; returns its row, or several."""
        if self.measured_in:
            return importlib.import_module(f"farpool_bench.{self.measured_in}").measure_case(self, case)
        return getattr(self, f"measure_{case}")()

    def facts(self) -> dict[str, Any]:
        """Fields of the result in addition to the rows, at the end of the run."""
        return {}

    def outcome(self, found: list[Any]) -> Row:
        """Put together the whole result from the rows that `measure` returned for each case."""
        rows = dict(zip(self.parts, found, strict=True)) if self.parts else {self.rows: tuple(found)}
        return Row(self.facts(), **rows)

    @staticmethod
    @abstractmethod
    def tables(outcome: Any) -> Iterable[Any]:
        """Tables (`farpool_bench.render.Grid`) and lines of text that show the result."""

    @staticmethod
    def figures(outcome: Any) -> Figures:
        """Figures of the result, by caption."""
        return {}

    @final
    def run(self, progress: Progress) -> Row:
        """Measure all cases and return the result.

        Raises
        ------
        ConfigError
            A setting is wrong, or the device does not exist.
        FarpoolError, RuntimeError
            Something failed, or two that are compared do not have the same bytes or bits.
        """
        check_device(self.device)
        self.progress = progress
        with ExitStack() as self.stack:
            self.open()
            return self.outcome([self.measure(case) for case in self.cases()])

    @final
    @classmethod
    def title(cls) -> str:
        """Title for pages."""
        return cls._about()[0].rstrip(".")

    @final
    @classmethod
    def paragraphs(cls) -> list[str]:
        """Paragraphs that describe how it measures."""
        return cls._about()[1:]

    @final
    @classmethod
    def _about(cls) -> list[str]:
        return (sys.modules[cls.__module__].__doc__ or "").strip().split("\n\n")


def load(name: str) -> type[Benchmark]:
    """Import a benchmark.

    Raises
    ------
    ConfigError
        There is no benchmark of this name.
    """
    check_known("benchmark", name, NAMES)
    found: type[Benchmark] = importlib.import_module(f"farpool_bench.{name.replace('-', '_')}").Bench
    return found


def check_known(what: str, name: str, names: Collection[str]) -> None:
    """Raise ConfigError unless a name is one of these."""
    if name not in names:
        raise ConfigError(f"{what} {name!r} is not known; expected one of {', '.join(names)}")


def check_device(device: str) -> None:
    """Check before a long run that the device exists, and make it compute the same bits each time.

    Raises
    ------
    ConfigError
        The device is unknown or does not exist.
    """
    check_known("device", device, ("cpu", "cuda"))
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("device: 'cuda' was asked for, but torch finds no CUDA device; use --device cpu")
        # Compared results must be computed in one way; by default cuBLAS and the gradient of attention choose freely.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run, with the place and time of the run."""

    benchmark: type[Benchmark]
    outcome: Row
    provenance: Provenance

    def encode(self) -> str:
        """Encode as indented JSON."""
        parts = {"benchmark": self.benchmark.name, "provenance": self.provenance, "result": self.outcome}
        return msgspec.json.format(msgspec.json.encode(parts)).decode()

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a result file that ``farpool bench NAME --json`` wrote.

        Raises
        ------
        ConfigError
            The file cannot be read or is not a result file of this version.
        """
        try:
            file = msgspec.json.decode(path.read_bytes(), type=prepared(_File))
            result = cls(load(file.benchmark), rows_of(file.result), file.provenance)
            for _ in result.benchmark.tables(result.outcome):
                pass  # a field that is missing is noticed now
        except OSError as error:
            raise ConfigError(f"result {path} cannot be read: {error.strerror}") from error
        except (msgspec.DecodeError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"result {path} is not in the format that 'farpool bench NAME --json' writes in this version: {error}; "
                "run it again"
            ) from error
        return result


class _File(msgspec.Struct, forbid_unknown_fields=True):
    benchmark: str
    provenance: Provenance
    result: dict[str, Any]


def told(progress: Progress, step: str, items: Sequence[Any]) -> Iterable[Any]:
    """Go through the items of a step and report how many are done."""
    for number, item in enumerate(items):
        progress(step, number, len(items))
        yield item
    progress(step, len(items), len(items))
