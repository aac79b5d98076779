"""``farpool bench NAME``: run a benchmark and show its result as a table, as JSON or as a page."""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from farpool.checks import missing_package
from farpool.cli.progress import progress_bars
from farpool.errors import ConfigError
from farpool_bench.harness import NAMES, Benchmark, Result, check_device, load

_QUICK = typer.Option("--quick", help="Small sizes, in seconds: to see that it works, not to measure.")
_JSON = typer.Option("--json", help="Print one JSON object and no table.")
_REPORT = typer.Option("--report", metavar="FILE.html", help="Write a page with tables and figures, too.")
_PICTURE = typer.Option("--picture", metavar="FILE", help="Draw the figure into a .png, .svg or .pdf file.")


def _command(benchmark: type[Benchmark]) -> Callable[..., None]:
    """Make the command of a benchmark: its own options are its fields."""

    def perform(quick: bool, json: bool, report: Path | None, picture: Path | None = None, **given: Any) -> None:
        _perform(benchmark, given, quick, json, report, picture)

    options: dict[str, tuple[Any, Any]] = {}
    defaults = {field.name: field.default for field in dataclasses.fields(benchmark)}
    for name, annotation in typing.get_type_hints(benchmark, include_extras=True).items():
        for one in getattr(annotation, "__metadata__", ()):
            flag = f"--{(one.flag or name).replace('_', '-')}"
            text = f"{one.text}; default: {defaults[name]}." if defaults[name] else one.text
            option: Any = typer.Option(flag, metavar=one.metavar, min=one.least, help=text)
            if one.positional:
                option = typer.Argument(metavar=one.metavar, help=text, show_default=False)
            options[name] = Annotated[_given(annotation.__origin__), option], None
    options |= {"quick": (Annotated[bool, _QUICK], False), "json": (Annotated[bool, _JSON], False)}
    options["report"] = Annotated[Path | None, _REPORT], None
    if benchmark.picture:
        options["picture"] = Annotated[Path | None, _PICTURE], None
    perform.__doc__ = f"{benchmark.title()}. Limit: {benchmark.limit}."
    perform.__annotations__ = {name: annotation for name, (annotation, _) in options.items()}
    perform.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, (annotation, default) in options.items()
        ]
    )
    return perform


def _given(kind: Any) -> Any:
    """Type of an optional option, from the type of its field; a tuple becomes an option that may be repeated."""
    if typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]]  # type: ignore[misc]
    return kind if isinstance(kind, types.UnionType) else kind | None


class _Commands(TyperGroup):
    """One command for each benchmark. A module is imported when its command is asked for: others may lack a package."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*NAMES, *super().list_commands(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in NAMES:
            return super().get_command(ctx, cmd_name)
        alone = typer.Typer(add_completion=False)
        try:
            alone.command(cmd_name)(_command(load(cmd_name)))
        except ModuleNotFoundError as error:
            raise missing_package(error, "bench", f"farpool bench {cmd_name}") from error
        return get_command(alone)


app = typer.Typer(cls=_Commands, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def measure() -> None:
    """Measure farpool, the machine's limit, and other tools for the same task."""


@app.command("report")
def write_report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="Files with the output of --json.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
) -> None:
    """Put results on one page, with their figures."""
    from farpool_bench.render import page

    _check_writable(out)
    results = sorted(map(Result.read, files), key=lambda result: NAMES.index(result.benchmark.name))
    out.write_text(page("farpool benchmarks" if len(results) > 1 else results[0].benchmark.title(), results))


def _perform(
    benchmark: type[Benchmark],
    given: dict[str, Any],
    quick: bool,
    json: bool,
    report: Path | None,
    picture: Path | None,
) -> None:
    """Run one benchmark and show its result; options that are not given keep their defaults."""
    from farpool.observe.provenance import provenance
    from farpool.observe.tables import show
    from farpool_bench.render import page, table_of

    check_device(given.get("device") or "cpu")
    for file in filter(None, (report, picture)):
        _check_writable(file)
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"picture {picture} has no known form; name a .png, .svg or .pdf file")
    changes = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    changes = {name: value for name, value in changes.items() if value not in (None, ())}
    try:
        with progress_bars() as progress:
            outcome = benchmark(**(benchmark.QUICK if quick else {}) | changes).run(progress)
    except ModuleNotFoundError as error:
        raise missing_package(error, "bench", "this benchmark") from error
    result = Result(benchmark, outcome, provenance())
    if report is not None:
        report.write_text(page(benchmark.title(), [result]))
    if picture is not None:
        [figure] = benchmark.figures(outcome).values()
        figure.savefig(picture, dpi=200, transparent=False)
    if json:
        sys.stdout.write(result.encode() + "\n")
    else:
        show(table_of(benchmark, outcome))


def _check_writable(path: Path) -> None:
    """Check before a long run that the page can be written."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_package(error, "bench", "this benchmark") from error
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written; name a file in a folder that can be")
