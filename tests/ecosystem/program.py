"""Programs of other libraries, run plain and run in a pool.

A program is a function that builds what it needs from configurations and yields the tensors by which two runs of it are
compared. It says where a module is to live by calling its place; everything else it does as if farpool did not exist.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch

import farpool
from farpool import BudgetError, FarpoolError
from farpool.tensors.factories import materialize

__all__ = ["Place", "Program", "Refusal", "run_in_pool", "run_plain"]

_SEED = 11
_ROOM_BELOW = "64MiB"


class Place:
    """Where a program's modules live: in a pool if there is one, else where torch put them."""

    def __init__(self, pool: farpool.Pool | None = None) -> None:
        self._pool = pool
        self._sizes: dict[int, int] = {}

    def __call__(self, module: torch.nn.Module) -> Any:
        for tensor in (*module.parameters(), *module.buffers()):
            self._sizes[id(tensor)] = tensor.nbytes
        if self._pool is not None:
            farpool.offload(module, self._pool)
        return module

    @property
    def nbytes(self) -> int:
        """Bytes of the distinct weights and buffers that were placed here."""
        return sum(self._sizes.values())


@dataclass(frozen=True)
class Refusal:
    """The typed error that a program ends with, and the words of its message that say what to do instead."""

    error: type[FarpoolError]
    remedy: str


@dataclass(frozen=True)
class Program:
    """Something that users run.

    Parameters
    ----------
    name : str
        The library and what is done with it, for example ``transformers/bert/train``.
    run : callable
        Given a place, runs the program and returns the tensors to compare.
    copies : int
        Bytes in the pool for each byte of weights: 1 where nothing is trained, else weights, gradients and state.
    refused : Refusal, optional
        How the program ends where it is not supported.
    """

    name: str
    run: Callable[[Place], Iterable[torch.Tensor]]
    copies: int = 1
    refused: Refusal | None = None


def _seeded(program: Program, place: Place) -> list[torch.Tensor]:
    random.seed(_SEED)
    numpy.random.seed(_SEED)
    torch.manual_seed(_SEED)
    return [
        materialize(tensor) if isinstance(tensor, farpool.PagedTensor) else tensor.detach().clone()
        for tensor in program.run(place)
    ]


def run_plain(program: Program) -> tuple[list[torch.Tensor], int]:
    """Results without farpool, and the bytes that a pool would have to hold."""
    place = Place()
    return _seeded(program, place), place.nbytes * program.copies


def run_in_pool(program: Program, nbytes: int) -> tuple[list[torch.Tensor], int, int]:
    """Results with a quarter of `nbytes` as the fast tier, or what the largest operation needs where that is more.

    Returns
    -------
    tuple
        The results, the budget, and how many blocks had to leave the fast tier.
    """
    fast = nbytes // 4
    while True:
        try:
            with farpool.Pool(fast, dram=_ROOM_BELOW) as pool:
                results = _seeded(program, Place(pool))
                stats = pool.stats()
        except BudgetError as error:
            if error.needed <= fast:
                raise
            fast = error.needed
        else:
            assert stats.fast.peak <= fast
            return results, fast, stats.evictions
