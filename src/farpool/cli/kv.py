"""``farpool kv`` shows and removes KV on nodes; ``farpool why`` shows what happened to requests."""

from __future__ import annotations

import importlib
import sys
import time
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from farpool.checks import missing_package
from farpool.cli.store import Node, Timeout, open_store
from farpool.errors import ConfigError
from farpool.sizes import format_size

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["app", "why"]

app = typer.Typer(
    help="Look at the KV that language models keep on nodes, and remove it.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Replicas = Annotated[
    int, typer.Option(metavar="N", min=1, help="Copies of each block; use the same number as your engines.")
]


def _module(name: str) -> ModuleType:
    """Import a module of ``farpool.kv``. These modules need packages that the extra ``kv`` installs."""
    try:
        return importlib.import_module(f"farpool.kv.{name}")
    except ModuleNotFoundError as error:
        raise missing_package(error, "kv", "this command") from error


def why(
    request: Annotated[
        str, typer.Argument(metavar="[REQUEST]", help="A request's name or a part of it. Default: the latest requests.")
    ] = "",
    last: Annotated[int, typer.Option(metavar="N", min=1, help="Show at most this many steps, the latest ones.")] = 40,
    json: Json = False,
) -> None:
    """Show why a request's KV was loaded, computed or missed.

    Asks all engines that this user runs on this host with farpool's KV cache. Exit code 1: no engine knows the request.
    """
    from farpool.observe.tables import show

    steps = [(process, entry) for process, entries in _module("journal").runs(request) for entry in entries]
    steps = sorted(steps, key=lambda step: step[1].when)[-last:]
    if json:
        shown = [{"process": process, **msgspec.to_builtins(entry)} for process, entry in steps]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n")
    elif steps:
        show(_steps_by_request(steps))
    if not steps:
        if not json:
            typer.echo(f"no engine of this user on this host knows a request like {request!r}", err=True)
        raise typer.Exit(1)


def _steps_by_request(steps: list[tuple[int, Any]]) -> RenderableType:
    """Make a table of steps for each request. The request's whole name, for use with `why`, is its heading."""
    from rich.console import Group
    from rich.text import Text

    from farpool.observe.tables import Table

    requests: dict[tuple[str, int], Table] = {}
    for process, entry in steps:
        table = requests.get((entry.request, process))
        if table is None:
            table = requests[entry.request, process] = Table()
            table.add_names("when", "step")
            table.add_figures("done", "blocks", "time")
            table.add_texts("why")
        reasons = ", ".join(f"{count} {reason}" for reason, count in entry.reasons.items())
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(entry.when)),
            Text(entry.step),
            str(entry.done),
            str(entry.blocks),
            f"{entry.seconds * 1e3:.1f} ms",
            Text("; ".join(filter(None, (reasons, entry.note)))),
        )
    parts: list[RenderableType] = []
    for (request, process), table in requests.items():
        parts += [Text(request, no_wrap=True, overflow="ignore"), Text(f"in process {process}"), table]
    return Group(*parts)


@app.command("ls")
def list_namespaces(node: Node = None, replicas: Replicas = 1, timeout: Timeout = 10.0, json: Json = False) -> None:
    """List models, weights and tenants that have KV on the nodes, and how many bytes the KV takes.

    Question marks show that the description of a namespace is lost, but that its blocks still exist. The command
    "farpool kv purge --namespace" removes the blocks.
    """
    from farpool.observe.tables import show

    blocks, keys = _module("blocks"), _module("keys")
    with open_store(node, replicas, timeout) as store:
        found = blocks.namespaces(store)
        counts: Counter[bytes] = Counter()
        nbytes: Counter[bytes] = Counter()
        # A key begins with 4 bytes of magic and 16 bytes that identify the namespace.
        for info in store.objects(keys.KEY_MAGIC):
            counts[info.key[4:20]] += 1
            nbytes[info.key[4:20]] += info.nbytes
    rows = [(digest, found.get(digest)) for digest in sorted({*found, *counts})]
    if json:
        shown = [
            {
                "namespace": digest.hex(),
                "blocks": counts[digest],
                "nbytes": nbytes[digest],
                "about": None if about is None else msgspec.to_builtins(about),
            }
            for digest, about in rows
        ]
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(shown)).decode() + "\n")
        return
    show(_namespaces_table([(digest, about, counts[digest], nbytes[digest]) for digest, about in rows]))
    for digest, about in rows:
        if about is None:
            typer.echo(_left_over(digest, counts[digest]), err=True)


def _namespaces_table(rows: Iterable[tuple[bytes, Any, int, int]]) -> RenderableType:
    """Make a table of namespaces: the digest, the description, the number of blocks and the bytes of each."""
    from rich.text import Text

    from farpool.observe.tables import Table

    table = Table()
    # "purge" takes the namespace, the weights and the tenant as they are shown here.
    table.add_names("namespace", "engine", "model", "weights", "type", "tenant")
    table.add_figures("blocks", "bytes")
    for digest, about, count, size in rows:
        named = ("?",) * 5 if about is None else (about.engine, about.model, about.weights, about.dtype, about.tenant)
        table.add_row(digest.hex(), *map(Text, named), f"{count:,}", format_size(size))
    return table


@app.command("purge")
def purge(
    weights: Annotated[str | None, typer.Option(metavar="ID", help="All KV of these weights.")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="All KV of this tenant.")] = None,
    namespace: Annotated[str | None, typer.Option(metavar="HEX", help="One namespace, as ls shows it.")] = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """Remove the KV of some weights, a tenant or a namespace from all nodes.

    With several options, only KV that matches all of them is removed. Exit code 1: nothing matched, or some blocks have
    an unknown owner because the description of their namespace is lost.
    """
    if weights is None and tenant is None and namespace is None:
        raise ConfigError("no KV is selected; expected --weights, --tenant or --namespace", setting="weights")
    wanted = None if namespace is None else _digest(namespace)
    blocks, keys = _module("blocks"), _module("keys")
    gone = 0
    with open_store(node, replicas, timeout) as store:
        unknown: Counter[bytes] = Counter()
        if weights is None and tenant is None:
            chosen = [wanted]
        else:
            described = blocks.namespaces(store)
            chosen = [
                digest
                for digest, about in described.items()
                if wanted in (None, digest) and weights in (None, about.weights) and tenant in (None, about.tenant)
            ]
            there = (key[4:20] for key in store.keys(keys.KEY_MAGIC))
            unknown.update(one for one in there if one not in described and wanted in (None, one))
        for digest in chosen:
            gone += blocks.purge(store, digest)
    typer.echo(f"{gone} blocks removed", err=True)
    for digest, count in unknown.items():
        typer.echo(_left_over(digest, count), err=True)
    if not gone or unknown:
        raise typer.Exit(1)


def _left_over(digest: bytes, count: int) -> str:
    """Return a message about blocks whose namespace has no description, with the command that removes them."""
    return f"{count} blocks of unknown namespace {digest.hex()}: farpool kv purge --namespace {digest.hex()}"


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 16:
        raise ConfigError(f"namespace is {text!r}, expected 32 hexadecimal digits as ls shows", setting="namespace")
    return digest
