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
    """Build the report: first the results, then the events in order, then the nodes before and after."""
    parts: list[RenderableType] = [_verdict(outcome), _moments(outcome), _nodes(outcome)]
    if outcome.picture:
        parts.append(Text.assemble("Picture: ", (outcome.picture, "bold")))
    return Group(*parts)


def _verdict(outcome: PoolOutcome) -> Panel:
    killed, drained = (
        next((one.name for one in outcome.nodes if one.fate.startswith(fate)), "?") for fate in ("killed", "drained")
    )
    holders = " and ".join(one.name for one in outcome.nodes if one.leased_before)
    trained = f"{outcome.steps} training steps on leased memory gave"
    lines = [
        ("[bold green]equal", f"{trained} the same losses, weights and moments as without farpool, bit for bit")
        if outcome.equal
        else ("[bold red]NOT EQUAL", f"{trained} another model"),
        (
            "[bold]memory",
            f"{_mb(outcome.state_bytes)} of weights, gradients and moments: at most {_mb(outcome.fast_bytes)} of them "
            f"in the fast tier, the rest in a lease of {_mb(outcome.leased_bytes)} with a copy each on {holders}",
        ),
        (
            "[bold]killed",
            f"{killed}, with its memory: a copy of {_mb(outcome.lost_bytes)} of leased memory and copies of "
            f"{outcome.lost_copies} objects were lost; the training and the reads went on with the other copies",
        ),
        _objects(outcome),
        (
            "[bold]drained",
            f"{drained}: {_mb(outcome.moved_bytes)} of leased memory moved to {killed} while the model trained",
        ),
        _reads(outcome),
    ]
    return Panel("\n".join(f"{label}[/]  {text}" for label, text in lines), expand=True)


def _objects(outcome: PoolOutcome) -> tuple[str, str]:
    if outcome.lost_objects or outcome.short_objects:
        return (
            "[bold red]NOT MADE AGAIN",
            f"{outcome.lost_objects} of {outcome.objects} objects are lost, {outcome.short_objects} have fewer than "
            f"{outcome.copies} copies",
        )
    return (
        "[bold green]made again",
        f"the leased memory and all {outcome.objects} objects have {outcome.copies} copies again",
    )


def _reads(outcome: PoolOutcome) -> tuple[str, str]:
    if outcome.wrong_reads:
        return (
            "[bold red]FAILED READS",
            f"{outcome.wrong_reads} of {outcome.reads} reads of the other tenant failed, first "
            f"{escape(outcome.first_fault)}",
        )
    return "[bold green]right reads", f"all {outcome.reads} reads of the other tenant gave the right bytes all the time"


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
