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


Budget = Annotated[str, typer.Option(metavar="SIZE", help=f"Fast tier: {SIZE}.")]
Question = Annotated[str, typer.Option(metavar="TEXT", help="Question to search the text for.")]
Docs = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Search the .txt and .md files of this folder instead of the Python standard library's documentation.",
    ),
]
Texts = Annotated[int, typer.Option(metavar="N", min=1, help="At most this many passages, evenly spaced over all.")]
DramSize = Annotated[str, typer.Option(metavar="SIZE", help=f"DRAM tier: {SIZE}.")]
NvmeSize = Annotated[str, typer.Option(metavar="SIZE", help=f"NVMe tier, a temporary file: {SIZE}.")]
Timeline = Annotated[Path, typer.Option(metavar="FILE", help="Picture of the pool's work (.png, .svg or .pdf).")]
OnNodes = Annotated[
    bool,
    typer.Option(
        "--remote",
        help="Start two nodes that lend as much memory as both lower tiers together, and use them instead; then start "
        "processes with weights that another process has published.",
    ),
]
Starts = Annotated[int, typer.Option(metavar="N", min=1, help="With --remote: processes that start in each way.")]
Kv = Annotated[
    bool,
    typer.Option(
        "--kv",
        help="Instead: answer questions over one long context in two processes; the second loads the KV that the first "
        "has saved on a node.",
    ),
]
SharedPool = Annotated[
    bool,
    typer.Option(
        "--pool",
        help="Instead: train a small model on leased memory of three nodes with two tenants, while one node is killed "
        "and one drained; needs farpool[manager], too.",
    ),
]
Context = Annotated[int, typer.Option(metavar="TOKENS", min=16, max=65000, help="With --kv: length of the context.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and no report.")]


def demo(
    budget: Budget = DEFAULTS.budget,
    question: Question = DEFAULTS.question,
    docs: Docs = None,
    texts: Texts = DEFAULTS.texts,
    dram: DramSize = DEFAULTS.dram,
    nvme: NvmeSize = DEFAULTS.nvme,
    timeline: Timeline = Path("farpool-timeline.png"),
    remote: OnNodes = False,
    starts: Starts = DEFAULTS.starts,
    kv: Kv = False,
    context: Context = 1024,
    shared_pool: SharedPool = False,
    json: Json = False,
) -> None:
    """Search real text with a model that has a quarter of its bytes resident.

    A sentence-embedding model (all-MiniLM-L6-v2) embeds a text collection twice: with all weights resident, and with
    its weights in a pool that has a small byte budget and keeps the rest in DRAM and in a file. Both runs must give the
    same bits. With --remote two nodes keep the rest, and the pool reaches them over TCP. Then one process publishes
    weights, and new processes map them or read the weights from a file; the demo compares how fast they start.

    With --kv a small language model, built from a configuration, answers questions over one long context in two
    processes: the second process loads the KV that the first has saved on a node. Both processes must give the same
    tokens, and the second must have loaded all whole blocks of the context.

    With --pool a model trains on leased memory of a shared pool while one node is killed and one drained. The trained
    model must have the same bits as without farpool, and no object of the other tenant may be lost. --timeline names
    the picture of the memory that moved.

    Exit code 0: results are equal. 1: they are not equal, KV was not loaded, or objects were lost. 2: an error.
    """
    if shared_pool:
        _shared_pool(timeline, json=json)
        return
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
    """Run the demo of ``--kv``, in which two processes share KV, and show the report."""
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


def _shared_pool(picture: Path, *, json: bool) -> None:
    """Run the demo of ``--pool``, in which a node is killed and one drained, and show the report."""
    from farpool.cli.manager import require_manager
    from farpool.observe.tables import show

    require_manager("farpool demo --pool")
    try:
        from farpool.demo.shared_pool import run
        from farpool.demo.shared_pool_report import report
    except ModuleNotFoundError as error:
        raise missing_package(error, "demo", "the demo") from error
    with progress_bars() as progress:
        outcome = run(picture, progress)
    if json:
        result = {"provenance": provenance(), "result": outcome}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
    else:
        show(report(outcome))
    if not outcome.passed:
        raise typer.Exit(1)
