"""``farpool bench NAME``: run a benchmark and show its result as a table, as JSON or as a page."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from farpool.bench.benchmark import NAMES, check_device, load, title_of
from farpool.cli.progress import progress_bars
from farpool.errors import ConfigError

__all__ = ["app"]

app = typer.Typer(
    help="Measure farpool beside the machine's limit and beside what one would use otherwise.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the fast tier is.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds: to see that it works, not to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with tables and figures, too.")]


@app.command()
def streaming(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Passes of each; default: 7.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """A model four times as large as the fast tier, against the machine's limit, demand fetching and accelerate."""
    _perform("streaming", {"rounds": rounds}, device, quick, json, report)


@app.command()
def training(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Steps of each; default: 5.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """AdamW steps with a sixth of their bytes resident, against the machine's limit and the usual alternatives."""
    _perform("training", {"rounds": rounds}, device, quick, json, report)


@app.command()
def nvme(
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="On the file system to measure; default: for temporary files.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of each; default: 7.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Reads and writes of the NVMe tier against fio with the same block size, depth and file system."""
    _perform("nvme", {"folder": folder, "rounds": rounds}, device, quick, json, report)


@app.command()
def prefetch(
    pairs: Annotated[int | None, typer.Option(metavar="N", min=1, help="Programs of each kind; default: 15.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Check that prefetching does not hurt where it cannot help: five kinds of programs, against demand fetching."""
    _perform("prefetch", {"pairs": pairs}, device, quick, json, report)


@app.command()
def overhead(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of each; default: 31.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Cost of paged tensors when everything is resident: per argument, and per transformer layer."""
    _perform("overhead", {"rounds": rounds}, device, quick, json, report)


@app.command()
def growth(
    most: Annotated[
        int | None, typer.Option(metavar="N", min=1000, help="Blocks of the largest pool; default: 1000000.")
    ] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Pager time per access and memory per block, from a thousand to a million blocks."""
    _perform("growth", {"most": most}, device, quick, json, report)


@app.command()
def policies(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="CSV (.csv) or oracleGeneral; default: a trace by Zipf's law is generated."),
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Of the cache, such as 128MiB; repeatable. Default: shares of all objects."),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Such as sieve; repeatable. Default: all of them.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Runs of each; default: 3.")] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Misses of nine eviction policies on a trace of requests, and how fast they decide."""
    given = {"trace": trace, "sizes": tuple(size or ()), "policies": tuple(policy or ()), "rounds": rounds}
    _perform("policies", given, "cpu", quick, json, report)


@app.command()
def remote(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of each; default: 7.")] = None,
    device: Device = "cpu",
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Memory of another process, over TCP and mapped: against sockets, memcpy, Redis and Mooncake Store."""
    _perform("remote", {"rounds": rounds}, device, quick, json, report)


@app.command("report")
def write_report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="What --json printed.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
) -> None:
    """Put results on one page, with their figures."""
    from farpool.bench import results
    from farpool.bench.page import page

    _check_writable(out)
    sections = [results.read(path) for path in files]
    sections.sort(key=lambda section: NAMES.index(section.name))
    out.write_text(page("farpool benchmarks" if len(sections) > 1 else title_of(sections[0].benchmark), sections))


def _perform(name: str, given: dict[str, Any], device: str, quick: bool, json: bool, report: Path | None) -> None:
    """Run one benchmark and show its result; options that are None keep the defaults of its settings."""
    from rich.console import Console

    from farpool.bench import results
    from farpool.bench.page import Section, page
    from farpool.observe.provenance import provenance

    check_device(device)
    if report is not None:
        _check_writable(report)
    try:
        benchmark = load(name)
        settings = benchmark.Settings.quick() if quick else benchmark.Settings()
        settings = replace(settings, device=device, **{key: value for key, value in given.items() if value is not None})
        with progress_bars() as progress:
            outcome = benchmark.run(settings, progress)
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    section = Section(name, benchmark, outcome, provenance())
    if report is not None:
        report.write_text(page(title_of(benchmark), [section]))
    if json:
        sys.stdout.write(results.encode(section) + "\n")
    else:
        Console().print(benchmark.table(outcome))


def _check_writable(path: Path) -> None:
    """Check before a long run that the page can be written."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{path} cannot be written; name a file in a folder that can be")


def _missing(error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"this benchmark needs the package {error.name!r}; pip install 'farpool[bench]'")
