"""Settings and outcome of the benchmark of paged tensors' overhead."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from farpool_bench.measure import median_ratio

__all__ = ["Layers", "Operation", "Outcome", "Rows", "Settings", "Training"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes of a run.

    Attributes
    ----------
    device : str
        Device to compute on.
    calls : int
        Calls of an operation in a row for one sample.
    rounds : int
        Samples of each kind: plain, bare and paged.
    layer_seconds : tuple of float
        Seconds that a layer should take with plain weights.
    layers, width : int
        Layers of the stack, and their width.
    table_rows : int
        Rows of the table, 16 KiB each, of which some are picked at random.
    picked : tuple of int
        Rows picked in a call.
    """

    device: str = "cpu"
    calls: int = 200
    rounds: int = 31
    layer_seconds: tuple[float, ...] = (0.001, 0.002, 0.005, 0.010)
    layers: int = 8
    width: int = 256
    table_rows: int = 32_768
    picked: tuple[int, ...] = (256, 1024)

    @classmethod
    def quick(cls) -> Settings:
        """Settings so small that a run takes seconds."""
        return cls(calls=5, rounds=3, layer_seconds=(0.0005,), layers=2, width=64, table_rows=512, picked=(16,))


@dataclass(frozen=True, slots=True)
class Operation:
    """Results for one operation: seconds of a call, one for each round.

    Attributes
    ----------
    paged_arguments : int
        Number of its arguments that are paged.
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
        """Make the results of an operation from its samples."""
        over_plain, over_bare = (
            statistics.median(theirs - ours for ours, theirs in zip(other, paged, strict=True)) / arguments
            for other in (plain, bare)
        )
        return cls(name, arguments, plain, bare, paged, over_plain, over_bare)


@dataclass(frozen=True, slots=True)
class Layers:
    """Results for a stack of layers: seconds of a pass, one for each round.

    Attributes
    ----------
    layer_seconds : float
        Seconds of one layer with plain weights: median.
    tokens : int
        Tokens in each pass.
    equal : bool
        True if paged gave the same bits as plain.
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
        """Make the results of a stack from its samples."""
        each = statistics.median(plain) / layers
        ratios = median_ratio(paged, plain), median_ratio(paged, bare)
        return cls(each, tokens, layers, width, equal, plain, bare, paged, *ratios)


@dataclass(frozen=True, slots=True)
class Rows:
    """Results for random rows of a table ten times as large as the budget, with one sample of each kind for each call.

    Attributes
    ----------
    row_bytes, table_bytes, budget_bytes, picked : int
        Bytes of a row, of the table and of the fast tier; number of rows in a call.
    seconds : tuple of float
        Seconds of a call of ``embedding`` on the paged table.
    thread_seconds : tuple of float
        Processor time of the calling thread in these calls.
    index_select : tuple of float
        Seconds of ``index_select`` from a plain table into a buffer.
    bytes_per_second, thread_seconds_per_row : float
        Medians over the calls.
    equal : bool
        True if both gave the same bits.
    """

    row_bytes: int
    table_bytes: int
    budget_bytes: int
    picked: int
    seconds: tuple[float, ...]
    thread_seconds: tuple[float, ...]
    index_select: tuple[float, ...]
    bytes_per_second: float
    thread_seconds_per_row: float
    equal: bool


@dataclass(frozen=True, slots=True)
class Training:
    """Results for training small linear layers with fused AdamW: seconds of a step, one for each round.

    Attributes
    ----------
    seconds_per_parameter : float
        Median over the rounds of paged less plain, over the number of parameters.
    equal : bool
        True if all losses had the same bits.
    """

    parameters: int
    plain: tuple[float, ...]
    paged: tuple[float, ...]
    seconds_per_parameter: float
    equal: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run.

    Attributes
    ----------
    threads : int
        Number of threads with which torch computes.
    """

    device: str
    threads: int
    operations: tuple[Operation, ...]
    layers: tuple[Layers, ...]
    training: Training | None = None
    """Results for training; None, as `rows` is empty, in older results, from before these were measured."""
    rows: tuple[Rows, ...] = ()
