"""``farpool bench NAME``: run a benchmark and show its result as a table, as JSON or as a page."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from farpool.cli.progress import progress_bars
from farpool.errors import ConfigError
from farpool_bench.benchmark import NAMES, check_device, load, title_of

__all__ = ["app"]

app = typer.Typer(
    help="Measure farpool, the machine's limit, and other tools for the same task.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[str, typer.Option(metavar="cpu|cuda", help="Where the fast tier is.")]
Quick = Annotated[bool, typer.Option("--quick", help="Small sizes, in seconds: to see that it works, not to measure.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and no table.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with tables and figures, too.")]
LMCache = Annotated[
    str | None, typer.Option("--lmcache", metavar="PYTHON", help="Has farpool and LMCache; default: this Python.")
]


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
def turns(
    seconds: Annotated[
        float | None, typer.Option(metavar="S", min=0.05, help="Seconds of each measurement; default: 1.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Measurements of each; default: 3.")] = None,
    connections: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Connections of the larger floods; default: 64.")
    ] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Times of one tenant's gets while another tenant floods the node, and the shares of both in its bytes."""
    _perform("turns", {"seconds": seconds, "rounds": rounds, "connections": connections}, "cpu", quick, json, report)


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
def kv(
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Mooncake's or vLLM's trace, or token ids; default: generated."),
    ] = None,
    dry_run: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The same files: only the hits that nodes would have.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Of the cache, such as 64GiB; repeatable. Default: 1/64 to 1/4 of all blocks."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="node, pool, or one to use alone, such as lru; repeatable. Default: node, pool, lru, expected-reuse.",
        ),
    ] = None,
    nodes: Annotated[
        list[int] | None, typer.Option(metavar="N", min=1, help="Repeatable; default: 1, 2, 4, 8.")
    ] = None,
    block_tokens: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens of a block, if FILE does not say it.")
    ] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Geometry, such as llama-3.1-8b.")] = None,
    bytes_per_token: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="KV of a token; default: 131072.")
    ] = None,
    prefill_tokens_per_second: Annotated[
        float | None, typer.Option(metavar="RATE", help="Rate of your engine; default: 8000.")
    ] = None,
    link: Annotated[str | None, typer.Option(metavar="RATE", help="Rate to the nodes; default: 10GB/s.")] = None,
    real: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Move bytes of the first N requests, too.")
    ] = None,
    scale: Annotated[str | None, typer.Option(metavar="SIZE", help="Real bytes of a block; default: 64KiB.")] = None,
    label_hash_ids: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field with a prompt's blocks; default: hash_ids.")
    ] = None,
    label_input_length: Annotated[
        str | None, typer.Option(metavar="NAME", help="Field with a prompt's length; default: input_length.")
    ] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the hits into a .png, .svg or .pdf file.")
    ] = None,
) -> None:
    """Prefix hits of a KV cache on a trace of requests: saved prefill and bytes moved, by size, policy and nodes."""
    if trace is not None and dry_run is not None:
        raise ConfigError("--trace and --dry-run both name a file; pass one of them")
    given = {
        "trace": trace or dry_run,
        "dry_run": dry_run is not None or None,
        "sizes": tuple(size) if size else None,
        "policies": tuple(policy) if policy else ("node",) if dry_run is not None else None,
        "nodes": tuple(nodes) if nodes else (1,) if dry_run is not None else None,
        "block_tokens": block_tokens,
        "model": model,
        "bytes_per_token": bytes_per_token,
        "prefill_tokens_per_second": prefill_tokens_per_second,
        "link": link,
        "real": real,
        "scale": scale,
        "label_hash_ids": label_hash_ids,
        "label_input_length": label_input_length,
    }
    _perform("kv", given, "cpu", quick, json, report, picture)


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


@app.command("kv-blocks")
def kv_blocks(
    lmcache: LMCache = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of each; default: 7.")] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """KV blocks looked up, saved and loaded: farpool, the store's own calls, sockets, Mooncake, Redis and LMCache."""
    _perform("kv-blocks", {"lmcache": lmcache, "rounds": rounds}, "cpu", quick, json, report)


@app.command("kv-ttft")
def kv_ttft(
    lmcache: LMCache = None,
    rounds: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Samples behind a long prefix; default: 28.")
    ] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Time to first token with a reused prefix: computed again, or loaded by farpool, Mooncake, Redis and LMCache."""
    _perform("kv-ttft", {"lmcache": lmcache, "rounds": rounds}, "cpu", quick, json, report)


@app.command("kv-codecs")
def kv_codecs(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Samples of each; default: 9.")] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Codecs of KV blocks on real keys and values: how much smaller, and how fast, compared with memcpy."""
    _perform("kv-codecs", {"rounds": rounds}, "cpu", quick, json, report)


@app.command("kv-generate")
def kv_generate(
    rounds: Annotated[int | None, typer.Option(metavar="N", min=1, help="Tokens of each cache; default: 15.")] = None,
    quick: Quick = False,
    json: Json = False,
    report: Report = None,
) -> None:
    """Generation with keys and values four times the fast budget, against the machine's limit and demand fetching."""
    _perform("kv-generate", {"rounds": rounds}, "cpu", quick, json, report)


@app.command("report")
def write_report(
    files: Annotated[list[Path], typer.Argument(metavar="RESULT.json...", help="Files with the output of --json.")],
    out: Annotated[Path, typer.Option(metavar="FILE.html", help="The page to write.")],
) -> None:
    """Put results on one page, with their figures."""
    from farpool_bench import results
    from farpool_bench.page import page

    _check_writable(out)
    sections = [results.read(path) for path in files]
    sections.sort(key=lambda section: NAMES.index(section.name))
    out.write_text(page("farpool benchmarks" if len(sections) > 1 else title_of(sections[0].benchmark), sections))


def _perform(
    name: str,
    given: dict[str, Any],
    device: str,
    quick: bool,
    json: bool,
    report: Path | None,
    picture: Path | None = None,
) -> None:
    """Run one benchmark and show its result; options that are None keep the defaults of its settings."""
    from farpool.observe.provenance import provenance
    from farpool.observe.tables import show
    from farpool_bench import results
    from farpool_bench.page import Section, page

    check_device(device)
    for file in filter(None, (report, picture)):
        _check_writable(file)
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(f"picture {picture} has no known form; name a .png, .svg or .pdf file")
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
    if picture is not None:
        [figure] = benchmark.figures(outcome).values()
        figure.savefig(picture, dpi=200, transparent=False)
    if json:
        sys.stdout.write(results.encode(section) + "\n")
    else:
        show(benchmark.table(outcome))


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
