"""Report of a tape's figures, for people to read."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from farpool.memory.pager import Mode
from farpool.memory.tape import Access, Metadata
from farpool.observe.tables import Table
from farpool.observe.tape_summary import TapeSummary
from farpool.sizes import format_size

__all__ = ["access_lines", "report"]

_OPERATIONS_MAX = 10
_SIGNS = {Mode.READ: "", Mode.WRITE: "+", Mode.OVERWRITE: "="}


def report(metadata: Metadata, summary: TapeSummary) -> RenderableType:
    """Build the report: origin and contents of the tape, and the bytes that Belady's rule moves at several budgets."""
    tiers = ", ".join(f"{tier.name} {format_size(tier.capacity)}" for tier in metadata.tiers) or "none"
    loop = summary.loop
    parts: list[RenderableType] = [
        Text(
            f"Recorded {metadata.date} by farpool {metadata.farpool}: fast tier {format_size(metadata.budget)} "
            f"({metadata.device}), below it {tiers}."
        ),
        Text(
            f"{summary.accesses} accesses by {summary.threads} thread{'s' if summary.threads != 1 else ''}, "
            f"{len(summary.ops)} different operations, {format_size(summary.touched_bytes)} touched; "
            f"the largest access has {format_size(summary.largest_access)}."
        ),
        Text(
            f"compute {summary.compute_seconds:.3f} s, think {summary.think_seconds:.3f} s, "
            f"stall {summary.stall_seconds:.3f} s"
        ),
        Text(
            f"Loop: {loop.period} accesses, {loop.turns} turns; {loop.repeated:.1%} of the accesses repeat the turn "
            "before."
            if loop
            else "Loop: none found."
        ),
        _classes(summary),
        _ops(summary),
        _reuse(summary),
        _least_moved(metadata, summary),
    ]
    return Group(*parts)


def access_lines(accesses: Iterable[Access]) -> list[str]:
    """Format one line for each access: number, thread, microseconds, operation, and runs of blocks.

    A run of blocks is ``first`` or ``first-last``. It has a ``+`` if the access changes it, a ``=`` if the access
    overwrites it, and a ``*`` if it consists of rows of a table.
    """
    lines = ["     access thread    think us    stall us  compute us  operation: blocks"]
    for number, access in enumerate(accesses):
        runs = " ".join(
            f"{run.first}"
            + (f"-{run.first + run.count - 1}" if run.count > 1 else "")
            + _SIGNS[run.mode]
            + ("*" if run.table >= 0 else "")
            for run in access.runs
        )
        times = "".join(f"{seconds * 1e6:>12.1f}" for seconds in (access.think, access.stall, access.compute))
        lines.append(f"{number:>11} {access.thread:>6}{times}  {access.op or 'access'}: {runs}")
    return lines


def _table(title: str, first: str, *others: str) -> Table:
    table = Table(title)
    table.add_texts(first)
    table.add_figures(*others)
    return table


def _classes(summary: TapeSummary) -> Table:
    table = _table("Blocks", "class", "made", "bytes at once, at most")
    for cls in summary.classes:
        table.add_row(cls.name, str(cls.blocks), format_size(cls.peak_bytes))
    table.add_section()
    table.add_row("together", str(sum(cls.blocks for cls in summary.classes)), format_size(summary.peak_bytes))
    return table


def _ops(summary: TapeSummary) -> Table:
    table = _table("Operations with most compute", "operation", "accesses", "compute")
    for op in summary.ops[:_OPERATIONS_MAX]:
        table.add_row(escape(op.name or "access"), str(op.accesses), f"{op.compute_seconds:.3f} s")
    return table


def _reuse(summary: TapeSummary) -> Table:
    table = _table("Bytes between two uses of a block", "of the bytes used again", "lie within")
    for reuse in summary.reuse:
        table.add_row(f"{reuse.share:.0%}", format_size(reuse.distance))
    return table


def _least_moved(metadata: Metadata, summary: TapeSummary) -> Table:
    table = _table("Bytes that Belady's rule would move", "fast tier", "fetched", "written", "of touched bytes")
    for moved in summary.least_moved:
        recorded = " (as recorded)" if moved.budget == metadata.budget else ""
        share = (moved.fetched + moved.written) / summary.touched_bytes if summary.touched_bytes else 0.0
        table.add_row(
            format_size(moved.budget) + recorded, format_size(moved.fetched), format_size(moved.written), f"{share:.1%}"
        )
    return table
