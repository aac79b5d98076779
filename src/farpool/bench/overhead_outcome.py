"""Settings and outcome of the benchmark of paged tensors' overhead."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from farpool.bench.measure import median_ratio

__all__ = ["Layers", "Operation", "Outcome", "Settings"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Where it computes.
    calls : int
        Calls of an operation in a row for one sample.
    rounds : int
        Samples of each, of plain, bare and paged.
    layer_seconds : tuple of float
        How long a layer is to take with plain weights.
    layers, width : int
        Of the stack.
    """

    device: str = "cpu"
    calls: int = 200
    rounds: int = 31
    layer_seconds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.010)
    layers: int = 8
    width: int = 256

    @classmethod
    def quick(cls) -> Settings:
        """Sizes so small that a run takes seconds."""
        return cls(calls=5, rounds=3, layer_seconds=(0.0005,), layers=2, width=64)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation. Seconds of a call, one for each round.

    Attributes
    ----------
    paged_arguments : int
        How many of its arguments are paged.
    seconds_per_argument : float
        Median over the rounds of paged less plain, over the number of paged arguments.
    seconds_over_bare : float
        The same of paged less bare.
    """

    name: str
    paged_arguments: int
    plain: tuple[float, ...]
    bare: tuple[float, ...]
    paged: tuple[float, ...]
    seconds_per_argument: float
    seconds_over_bare: float

    @classmethod
    def of(
        cls, name: str, arguments: int, plain: tuple[float, ...], bare: tuple[float, ...], paged: tuple[float, ...]
    ) -> Operation:
        """An operation from its samples."""
        over_plain, over_bare = (
            statistics.median(theirs - ours for ours, theirs in zip(other, paged, strict=True)) / arguments
            for other in (plain, bare)
        )
        return cls(name, arguments, plain, bare, paged, over_plain, over_bare)


@dataclass(frozen=True, slots=True)
class Layers:
    """A stack of layers. Seconds of a pass, one for each round.

    Attributes
    ----------
    layer_seconds : float
        Seconds of one layer with plain weights: median.
    tokens : int
        In each pass.
    equal : bool
        Whether paged gave the same bits as plain.
    ratio : float
        Paged over plain: median over the rounds.
    ratio_to_bare : float
        Paged over bare, likewise.
    """

    layer_seconds: float
    tokens: int
    layers: int
    width: int
    equal: bool
    plain: tuple[float, ...]
    bare: tuple[float, ...]
    paged: tuple[float, ...]
    ratio: float
    ratio_to_bare: float

    @classmethod
    def of(
        cls,
        tokens: int,
        layers: int,
        width: int,
        equal: bool,
        plain: tuple[float, ...],
        bare: tuple[float, ...],
        paged: tuple[float, ...],
    ) -> Layers:
        """A stack from its samples."""
        each = statistics.median(plain) / layers
        ratios = median_ratio(paged, plain), median_ratio(paged, bare)
        return cls(each, tokens, layers, width, equal, plain, bare, paged, *ratios)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    threads : int
        With which torch computes.
    """

    device: str
    threads: int
    operations: tuple[Operation, ...]
    layers: tuple[Layers, ...]
