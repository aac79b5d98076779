"""``farpool store publish`` and the other verbs on names: versioned pointers to objects, kept in a registry."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec
import typer

from farpool.cli.files import as_shown, open_source, read_parts, write_whole
from farpool.cli.progress import Told, progress_bars
from farpool.cli.store import Node, Replicas, Timeout, app, open_store
from farpool.cluster.names import NameInfo, Names
from farpool.errors import ConfigError
from farpool.sizes import format_size

__all__: list[str] = []

_PART_BYTES = 16 << 20
_WAIT_SLICE_S = 5.0
"""Maximum seconds of one wait. `watch` divides a longer wait, because Python handles signals only between waits."""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", show_default=False)]
RegistryOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        envvar="FARPOOL_REGISTRY",
        show_envvar=True,
        help="The registry of names: a path, or etcd://HOST,HOST2/PREFIX. Default: the registry of the nodes, or your "
        "own file on this host.",
    ),
]
Expect = Annotated[
    int | None,
    typer.Option(metavar="VERSION", min=0, help="Fail unless this is the current version; 0: the name must not exist."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Hold = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time for which the previous version stays.")]


@app.command()
def publish(
    name: NameArgument,
    file: Annotated[
        str, typer.Argument(metavar="FILE|-", help="The file to publish; - for stdin.", show_default=False)
    ],
    expect: Expect = None,
    hold: Hold = 60.0,
    json: Json = False,
    registry: RegistryOption = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Publish a file as the next version of a name. The file is sent in parts and is never completely in memory."""
    with open_store(node, replicas, timeout) as store, _names(store, registry, timeout, hold=hold) as names:
        with progress_bars() as progress, open_source(file) as source:
            info = names.publish(name, _parts(source, file, progress), expect=expect)
        _tell([info], json)


def _parts(source: BinaryIO, file: str, progress: Told) -> Iterator[bytes]:
    total, done = os.fstat(source.fileno()).st_size, 0
    for part in read_parts(source, file, _PART_BYTES):
        done += len(part)
        yield part
        progress("publish", done >> 20, max(total, done) >> 20)


@app.command("open")
def open_name(
    name: NameArgument,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
    version: Annotated[
        int | None, typer.Option(metavar="VERSION", min=1, help="An older version that is still held.")
    ] = None,
    registry: RegistryOption = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Write a name's value to a file or to stdout. If the name has tensors, list the tensors instead.

    A file is written completely or not at all.
    """
    with (
        open_store(node, replicas, timeout) as store,
        _names(store, registry, timeout) as names,
        names.open(name, version) as opened,
    ):
        if opened.info.tensors:
            if output is not None:
                raise ConfigError(
                    f"the name {name!r} holds tensors, which cannot be written to one file; omit --output to list them"
                )
            for entry in opened.tensors():
                typer.echo(
                    f"{format_size(entry.nbytes):>10}  {entry.dtype:<8}  {list(entry.shape)}  {as_shown(entry.name)}"
                )
        elif output is None:
            sys.stdout.buffer.writelines(opened.parts())
            sys.stdout.buffer.flush()
        else:
            write_whole(output, opened.parts())


@app.command("names")
def names_(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only names that begin with this.")] = "",
    json: Json = False,
    registry: RegistryOption = None,
    timeout: Timeout = 30.0,
) -> None:
    """List names with their current versions."""
    with _names(None, registry, timeout) as names:
        _tell(names.list_names(prefix), json)


@app.command()
def history(name: NameArgument, json: Json = False, registry: RegistryOption = None, timeout: Timeout = 30.0) -> None:
    """List the versions of a name, oldest first. Exit code 1: the name was never published."""
    with _names(None, registry, timeout) as names:
        versions = names.history(name)
        _tell(versions, json)
        if not versions:
            raise typer.Exit(1)


@app.command()
def unpublish(
    name: NameArgument,
    expect: Expect = None,
    hold: Hold = 60.0,
    json: Json = False,
    registry: RegistryOption = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Unpublish a name. Programs that have the last version open can still read that version."""
    with open_store(node, replicas, timeout) as store, _names(store, registry, timeout, hold=hold) as names:
        _tell([names.unpublish(name, expect=expect)], json)


@app.command()
def watch(
    name: NameArgument,
    after: Annotated[int, typer.Option(metavar="VERSION", min=0, help="Only versions above this one.")] = 0,
    count: Annotated[int | None, typer.Option(metavar="N", min=1, help="End after this many versions.")] = None,
    seconds: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0, help="End after this time. Exit code 1: no version came.")
    ] = None,
    json: Json = False,
    registry: RegistryOption = None,
    timeout: Timeout = 30.0,
) -> None:
    """Print the current version of a name, and then each new version when it is published."""
    deadline = None if seconds is None else time.monotonic() + seconds
    told = 0
    with _names(None, registry, timeout) as names, names.watch(name, after) as watching:
        while count is None or told < count:
            left = _WAIT_SLICE_S if deadline is None else deadline - time.monotonic()
            info = watching.next(max(0.0, min(_WAIT_SLICE_S, left)))
            if info is not None:
                _tell([info], json)
                told += 1
            elif deadline is not None and time.monotonic() >= deadline:
                break
    if not told:
        raise typer.Exit(1)


@app.command()
def sweep(registry: RegistryOption = None, node: Node = None, replicas: Replicas = 1, timeout: Timeout = 30.0) -> None:
    """Release the objects of old versions that no program holds. Each publish releases such objects, too."""
    with open_store(node, replicas, timeout) as store, _names(store, registry, timeout) as names:
        typer.echo(f"{names.sweep()} objects released")


def _names(store: Any, registry: str | None, timeout: float, *, hold: float = 60.0) -> Names:
    """Open the names in a registry. `store` may be None for commands that need no objects."""
    # Without an option, names are in the registry of the nodes, if that is how the nodes were named.
    return Names(store, registry or (None if store is None else store.registry), hold=hold, timeout=timeout)


def _tell(versions: list[NameInfo], json: bool) -> None:
    for info in versions:
        if json:
            typer.echo(msgspec.json.encode(info).decode())
        else:
            state = f"{format_size(info.nbytes):>10}" if info.published else "unpublished"
            when = datetime.fromtimestamp(info.time).astimezone().isoformat(timespec="seconds")
            kind = "  tensors" if info.tensors else ""
            typer.echo(
                f"{as_shown(info.name)}  version {info.version}  {state}  {when}  by {as_shown(info.writer)}{kind}"
            )
    # A program at the other end of a pipe needs each version of a watch at once.
    sys.stdout.flush()
