"""Report of the demo's outcome, for people to read."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from farpool.demo.figures import Counts
from farpool.demo.job import Outcome
from farpool.demo.start_up import Start, StartUp
from farpool.observe.tables import Table

__all__ = ["report"]


def report(outcome: Outcome) -> RenderableType:
    """Build the report: first the answers, then a comparison of both runs' results, then times and transfers."""
    parts: list[RenderableType] = [_answers(outcome), _verdict(outcome), _run(outcome), _traffic(outcome)]
    if outcome.start_up:
        parts += [_start_up_verdict(outcome.start_up), _start_up(outcome.start_up)]
    if outcome.timeline:
        parts.append(Text.assemble("Timeline: ", (outcome.timeline, "bold")))
    return Group(*parts)


def _answers(outcome: Outcome) -> Table:
    table = Table(f"[bold]{escape(outcome.question)}", expand=True)
    table.add_figures("score")
    table.add_texts("where", "passage")
    for answer in outcome.answers:
        text = answer.text if len(answer.text) <= 160 else answer.text[:157].rstrip() + "..."
        table.add_row(f"{answer.score:.3f}", escape(answer.source), escape(text))
    return table


def _verdict(outcome: Outcome) -> Panel:
    share = outcome.budget_bytes / outcome.weight_bytes
    inside = outcome.peak_bytes <= outcome.budget_bytes
    lines = [
        f"[bold green]equal[/]  all {outcome.passages} embeddings are the same bit for bit, paged and all resident"
        if outcome.equal
        else f"[bold red]NOT EQUAL[/]  the paged run gave other embeddings ({outcome.passages} passages)",
        f"[bold {'green' if inside else 'red'}]{'inside' if inside else 'OVER'}[/] "
        f"peak {_mb(outcome.peak_bytes)} of a budget of {_mb(outcome.budget_bytes)}, "
        f"{share:.0%} of {outcome.model}'s {_mb(outcome.weight_bytes)} of weights and buffers",
        f"[bold]speed[/]  {outcome.relative_throughput:.0%} of the all-resident throughput",
    ]
    return Panel("\n".join(lines), expand=True)


def _run(outcome: Outcome) -> Table:
    table = Table("Time", expand=True)
    table.add_texts("")
    table.add_figures("first batch", f"other {outcome.batches - 1} batches", "texts per second")
    for name, timing in (("all resident", outcome.plain), ("inside the budget", outcome.paged)):
        table.add_row(
            name, f"{timing.first_seconds:.2f} s", f"{timing.rest_seconds:.2f} s", f"{timing.texts_per_second:.1f}"
        )
    return table


def _traffic(outcome: Outcome) -> Table:
    tiers = ", ".join(f"{name} {_mb(nbytes)}" for name, nbytes in outcome.tiers.items())
    if outcome.nodes:
        tiers += f" on {' and '.join(outcome.nodes)}, over TCP"
    table = Table(
        "Work of the pool",
        caption=f"Tiers below the fast one: {tiers}. The pool prefetches by its recording of the first batch."
        + (
            f" Memory outside the pool (activations, the interpreter): at most {_mb(outcome.unpaged_peak)}."
            if outcome.unpaged_peak
            else ""
        ),
        expand=True,
    )
    table.add_texts("")
    table.add_figures("first batch", f"other {outcome.batches - 1} batches")
    rows: list[tuple[str, Callable[[Counts], str]]] = [
        ("accesses", lambda counts: f"{counts.accesses:,}"),
        ("bytes were resident", lambda counts: _share(counts.hit_rate)),
        ("bytes were being fetched", lambda counts: f"{counts.late:,}"),
        ("fetches on demand", lambda counts: f"{counts.demand_fetches:,}"),
        ("prefetches", lambda counts: f"{counts.prefetches:,}"),
        ("prefetches that were used", lambda counts: _share(counts.prefetch_accuracy)),
        ("waited for bytes", lambda counts: f"{counts.stall_seconds:.2f} s"),
    ]
    for name, show in rows:
        table.add_row(name, show(outcome.first), show(outcome.rest))
    first = {(link.source, link.target): link.nbytes for link in outcome.first.links}
    for link in outcome.rest.links:
        before = first.get((link.source, link.target), 0)
        table.add_row(f"{link.source} → {link.target}", _mb(before), _mb(link.nbytes))
    return table


def _start_up_verdict(start_up: StartUp) -> Panel:
    lines = [
        f"[bold green]equal[/]  {start_up.processes} new processes on mapped weights gave the same embeddings, bit for "
        "bit"
        if start_up.equal
        else "[bold red]NOT EQUAL[/]  a process on mapped weights gave other embeddings",
        f"[bold]moved[/]  {start_up.tensors} tensors, {_mb(start_up.nbytes)}, once, which took "
        f"{start_up.publish_seconds:.2f} s; then {start_up.sent_bytes:,} bytes to each process that mapped them",
        f"[bold]start[/]  weights ready in {start_up.relative_weights:.0%} of the time that the file takes",
        "[bold green]next[/]   a process on mapped weights waited for a second version, mapped it and gave its "
        f"embeddings, bit for bit; {start_up.changed_tensors} tensors of it, {start_up.changed_bytes:,} bytes, were new"
        if start_up.followed
        else "[bold red]NOT EQUAL[/]  a process that mapped the second version gave other embeddings",
    ]
    return Panel("\n".join(lines), title="Weights published by one process, mapped by others", expand=True)


def _start_up(start_up: StartUp) -> Table:
    table = Table(
        "Starting",
        caption=f"Medians of {start_up.processes} new processes each. From the file: as transformers loads it, mapped "
        "from the page cache and not verified. From the node: mapped and verified. The publisher, which "
        f"built the model, read the file and copied the weights, took {start_up.load_seconds * 1e3:,.1f} ms.",
        expand=True,
    )
    table.add_texts("")
    table.add_figures("weights from the file", "weights from the node")
    rows: list[tuple[str, Callable[[Start], float]]] = [
        ("importing packages", lambda start: start.importing),
        ("weights", lambda start: start.weights),
        ("  of that, mapping and verifying", lambda start: start.mapping),
        ("process begun to weights ready", lambda start: start.whole),
        ("process begun to texts embedded", lambda start: start.answered),
    ]
    for name, seconds in rows:
        table.add_row(name, *(f"{seconds(start) * 1e3:,.1f} ms" for start in (start_up.file, start_up.mapped)))
    return table


def _mb(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"
