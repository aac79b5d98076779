"""``farpool demo``: search real text with a model that has a quarter of its bytes resident."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farpool.checks import missing_package
from farpool.cli.progress import progress_bars
from farpool.demo.settings import Settings
from farpool.observe.provenance import provenance

__all__ = ["demo"]

DEFAULTS = Settings()
SIZE = "a size such as '20 MiB', or a percentage of the model's weights"


def demo(
    budget: Annotated[str, typer.Option(metavar="SIZE", help=f"Fast tier: {SIZE}.")] = DEFAULTS.budget,
    question: Annotated[str, typer.Option(metavar="TEXT", help="What to look for.")] = DEFAULTS.question,
    docs: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Search the .txt and .md files of this folder instead of the Python standard library's documentation.",
        ),
    ] = None,
    texts: Annotated[
        int, typer.Option(metavar="N", min=1, help="Passages at most, spread over all there are.")
    ] = DEFAULTS.texts,
    dram: Annotated[str, typer.Option(metavar="SIZE", help=f"DRAM tier: {SIZE}.")] = DEFAULTS.dram,
    nvme: Annotated[str, typer.Option(metavar="SIZE", help=f"NVMe tier, a temporary file: {SIZE}.")] = DEFAULTS.nvme,
    timeline: Annotated[
        Path, typer.Option(metavar="FILE", help="Where to draw what the pool did (.png, .svg or .pdf).")
    ] = Path("farpool-timeline.png"),
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="Have two nodes, started for it, lend as much memory as both lower tiers together, in their place; "
            "then start processes with weights that another process has published.",
        ),
    ] = False,
    starts: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --remote: processes that start in either way.")
    ] = DEFAULTS.starts,
    kv: Annotated[
        bool,
        typer.Option(
            "--kv",
            help="Instead: answer questions over one long context in two processes, of which the second loads the KV "
            "that the first has saved on a node.",
        ),
    ] = False,
    context: Annotated[
        int, typer.Option(metavar="TOKENS", min=16, max=65000, help="With --kv: length of the context.")
    ] = 1024,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no report.")] = False,
) -> None:
    """Search real text with a model that has a quarter of its bytes resident.

    A sentence-embedding model (all-MiniLM-L6-v2) embeds a text collection all resident and, in turn, with its weights
    in a pool with a small byte budget, the rest of them in DRAM and in a file. Both must give the same bits. With
    --remote the rest is on two nodes, reached over TCP; and new processes start with weights that one process has
    published and the others map, compared with reading them from their file.

    With --kv a small language model, built from a configuration, answers questions over one long context in two
    processes: the second one's first token comes from KV that the first has saved on a node. Both must give the same
    tokens, and the second must have loaded all whole blocks of the context.

    Exit code 0: equal. 1: not equal, or not loaded. 2: an error.
    """
    if kv:
        _shared_context(context, json=json)
        return
    from farpool.observe.tables import show

    try:
        from farpool.demo.job import run
        from farpool.demo.report import report
    except ModuleNotFoundError as error:
        raise missing_package(error, "demo", "the demo") from error

    settings = Settings(budget, dram, nvme, question, docs, texts, timeline, remote, starts)
    with progress_bars() as progress:
        outcome = run(settings, progress)
    if json:
        result = {"provenance": provenance(), "result": outcome}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    else:
        show(report(outcome))
    start_up = outcome.start_up
    if not outcome.equal or (start_up is not None and not (start_up.equal and start_up.followed)):
        raise typer.Exit(1)


def _shared_context(tokens: int, *, json: bool) -> None:
    """Run the part of the demo that shares KV between processes."""
    from farpool.observe.tables import show

    try:
        from farpool.demo.shared_context import report, run
    except ModuleNotFoundError as error:
        raise missing_package(error, "demo", "the demo") from error
    with progress_bars() as progress:
        outcome = run(tokens, 16, progress)
    if json:
        result = {"provenance": provenance(), "result": outcome}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    else:
        show(report(outcome))
    if not outcome.passed:
        raise typer.Exit(1)
