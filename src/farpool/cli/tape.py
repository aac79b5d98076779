"""``farpool tape``: show recordings made by ``pool.record(path)``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

__all__ = ["app"]

app = typer.Typer(
    help="Look at tape files, which `pool.record(path)` writes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _tape() -> None:
    """Look at tape files: recordings of accesses that `pool.record(path)` writes."""


@app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The tape file.", show_default=False)],
    accesses: Annotated[int, typer.Option(metavar="N", min=0, help="Show the first N accesses, one per line.")] = 0,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw accesses and reuse distances (.png, .svg or .pdf)."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object and no report.")] = False,
) -> None:
    """Show a tape: sizes, times, the loop of accesses, reuse distances, and the minimum bytes to move by budget.

    If the program was killed during the recording, the file is shown up to its last whole chunk.
    """
    from rich.console import Console
    from rich.markup import escape

    from farpool.memory.tape import TapeFile
    from farpool.observe.tables import show
    from farpool.observe.tape_figure import draw_tape
    from farpool.observe.tape_report import access_lines, report
    from farpool.observe.tape_summary import summarize
    from farpool.observe.tape_trace import read_trace

    tape = TapeFile(file)
    trace = read_trace(tape)
    summary = summarize(trace)
    if figure is not None:
        draw_tape(trace, figure)
    first = trace.accesses[:accesses]
    if json:
        result = {"metadata": tape.metadata, "summary": summary, "accesses": first}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result)).decode() + "\n")
        return
    if trace.cut_off:
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"[yellow]incomplete:[/] {escape(trace.cut_off)}", highlight=False
        )
    show(report(tape.metadata, summary))
    for line in access_lines(first) if first else []:
        typer.echo(line)
