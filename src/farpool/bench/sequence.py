"""The fewest bytes that a pool of some budget must move for what a program does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from farpool import Pool
from farpool.pager.belady import BlockAccess, Moved, Operand, belady_bytes
from farpool.tape_file import Content, Create, Free, TapeFile

__all__ = ["fewest_bytes", "recorded_accesses"]

_STEPS, _LEFT_OUT = 6, 2
"""Steps that are recorded, and how many of them only lead to the steady state."""


def fewest_bytes(pool: Pool, step: Callable[[], object]) -> Moved:
    """Bytes that one step of a loop moves if what is needed last leaves first (Belady), in steady state.

    Parameters
    ----------
    pool : Pool
        Where the step's tensors are; the step has run before.
    step : callable
        Does one step. It makes the same accesses each time.

    Raises
    ------
    ValueError
        It does not.
    """
    with tempfile.TemporaryDirectory(prefix="farpool-") as folder:
        path = Path(folder, "steps.tape")
        with pool.record(path):
            for _ in range(_STEPS):
                step()
        accesses = recorded_accesses(path)
    count, rest = divmod(len(accesses), _STEPS)
    if rest:
        raise ValueError(f"{len(accesses)} accesses in {_STEPS} steps: they are not alike")
    whole = belady_bytes(accesses, pool.fast)
    lead = belady_bytes(accesses[: count * _LEFT_OUT], pool.fast)
    steps = _STEPS - _LEFT_OUT
    return Moved((whole.fetched - lead.fetched) // steps, (whole.written - lead.written) // steps)


def recorded_accesses(path: Path) -> list[BlockAccess]:
    """The accesses in a tape file, block by block."""
    sizes: dict[int, int] = {}
    created: list[int] = []
    accesses: list[BlockAccess] = []
    for record in TapeFile(path):
        if isinstance(record, Create):
            members = range(record.first, record.first + record.count)
            sizes.update(zip(members, record.sizes(), strict=True))
            if record.content == Content.NONE:
                created.extend(members)
        elif isinstance(record, Free):
            if accesses:
                members = range(record.first, record.first + record.count)
                accesses[-1] = accesses[-1]._replace(freed=(*accesses[-1].freed, *members))
        else:
            operands = [
                Operand(block, sizes[block], run.mode)
                for run in record.runs
                for block in range(run.first, run.first + run.count)
            ]
            accesses.append(BlockAccess(operands, tuple(created)))
            created = []
    return accesses
