"""The fewest bytes that a pool of a given budget must move for a program's accesses."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path

from farpool import Pool
from farpool.memory.pager.belady import BlockAccess, Moved, Operand, belady_moves, total_of
from farpool.memory.pool.events import Event
from farpool.memory.tape import Content, Create, Free, TapeFile

__all__ = ["fewest_by_phase", "fewest_bytes", "recorded_accesses"]

_STEPS, _LEAD, _TAIL = 7, 2, 1
"""Numbers of steps: all that are recorded, the first ones before the steady state, the last ones after what counts."""


def fewest_bytes(pool: Pool, step: Callable[[], object]) -> Moved:
    """Bytes that one step of a loop moves in steady state under Belady's rule (what is needed last leaves first).

    Parameters
    ----------
    pool : Pool
        The pool of the step's tensors; the step has run before.
    step : callable
        Does one step. It makes the same accesses each time.

    Raises
    ------
    ValueError
        The step does not make the same accesses each time.
    """
    (fewest,) = fewest_by_phase(pool, lambda between: step())
    return fewest


def fewest_by_phase(pool: Pool, step: Callable[[Callable[[], None]], object]) -> tuple[Moved, ...]:
    """Bytes that each phase of a step moves, as for `fewest_bytes`; the step calls its argument between phases.

    Raises
    ------
    ValueError
        The step does not make the same accesses each time.
    """
    events: list[Event] = []
    ends = [0]
    """Number of accesses before the first phase and at the end of each."""

    def note_end() -> None:
        ends.append(sum(event.kind == "compute" for event in events))

    end_subscription = pool.subscribe(events.append)
    with tempfile.TemporaryDirectory(prefix="farpool-") as folder:
        path = Path(folder, "steps.tape")
        with pool.record(path):
            for _ in range(_STEPS):
                step(note_end)
                note_end()
        accesses = recorded_accesses(path)
    end_subscription()
    lengths = [end - start for start, end in pairwise(ends)]
    phases = len(lengths) // _STEPS
    if sum(lengths) != len(accesses) or lengths != lengths[:phases] * _STEPS:
        raise ValueError(f"{len(accesses)} accesses in {_STEPS} steps, in phases of {lengths}: they are not alike")
    moves = iter(belady_moves(accesses, pool.fast))
    moved = [total_of(list(islice(moves, length))) for length in lengths]
    steady = moved[_LEAD * phases : -_TAIL * phases]
    steps = len(steady) // phases
    totals = [total_of(steady[phase::phases]) for phase in range(phases)]
    return tuple(Moved(total.fetched // steps, total.written // steps) for total in totals)


def recorded_accesses(path: Path) -> list[BlockAccess]:
    """Read the accesses in a tape file, with their blocks."""
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
