"""Report of ``farpool demo --pool``, for people to read."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from farpool.demo.shared_pool import PoolOutcome
from farpool.observe.tables import Table

__all__ = ["report"]


def report(outcome: PoolOutcome) -> RenderableType:
    """Build the report: first the comparison, then the events in order, then the nodes before and after."""
    parts: list[RenderableType] = [_verdict(outcome), _moments(outcome), _nodes(outcome)]
    if outcome.picture:
        parts.append(Text.assemble("Picture: ", (outcome.picture, "bold")))
    return Group(*parts)


def _verdict(outcome: PoolOutcome) -> Panel:
    killed, drained = (
        next((one.name for one in outcome.nodes if one.fate.startswith(fate)), "?") for fate in ("killed", "drained")
    )
    target = next((one.name for one in outcome.nodes if one.leased_after), "no node")
    lines = [
        f"[bold green]equal[/]  {outcome.steps} training steps on leased memory gave the same losses, weights and "
        "moments as without farpool, bit for bit"
        if outcome.equal
        else f"[bold red]NOT EQUAL[/]  {outcome.steps} training steps on leased memory gave another model",
        f"[bold]budget[/]  {_mb(outcome.state_bytes)} of weights, gradients and moments; fast tier "
        f"{_mb(outcome.fast_bytes)}, the rest in a lease of {_mb(outcome.leased_bytes)}, which began on {drained}",
        f"[bold]moved[/]  {_mb(outcome.moved_bytes)} of leased memory from {drained}, which drained, to {target}, "
        "while the model trained",
        f"[bold]lost[/]  {outcome.lost_copies} copies of objects on {killed}, which was killed with its memory. It "
        "had no leased memory, of which a lease has one copy: with it the training would have lost its state",
        _objects(outcome),
    ]
    return Panel("\n".join(lines), expand=True)


def _objects(outcome: PoolOutcome) -> str:
    kept = outcome.objects - outcome.lost_objects
    if outcome.lost_objects or outcome.short_objects:
        head = (
            f"[bold red]NOT MADE AGAIN[/]  {outcome.lost_objects} of {outcome.objects} objects are lost, "
            f"{outcome.short_objects} have fewer than {outcome.copies} copies"
        )
    else:
        head = (
            f"[bold green]made again[/]  all {kept} objects have {outcome.copies} copies again, made by one node from "
            "another"
        )
    if outcome.wrong_reads:
        reads = (
            f"[bold red]{outcome.wrong_reads} of {outcome.reads} reads failed[/], first {escape(outcome.first_fault)}"
        )
    else:
        reads = f"all {outcome.reads} reads of the other tenant were right"
    return f"{head}; {reads}"


def _moments(outcome: PoolOutcome) -> Table:
    table = Table("Events while the model trained", expand=True)
    table.add_figures("seconds", "step")
    table.add_texts("node", "event")
    for one in outcome.moments:
        table.add_row(f"{one.seconds:.1f}", f"{one.step:,}", one.node, escape(one.text))
    return table


def _nodes(outcome: PoolOutcome) -> Table:
    table = Table("Nodes, before the first event and after the last", expand=True)
    table.add_texts("node", "fate")
    table.add_figures("leased before", "after", "copies of objects before", "after")
    for one in outcome.nodes:
        table.add_row(
            one.name, one.fate, _mb(one.leased_before), _mb(one.leased_after),
            str(one.copies_before), str(one.copies_after),
        )  # fmt: skip
    return table


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
