"""``farpool store``: put, get, list, repair and drop objects on nodes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from farpool.checks import require_package
from farpool.cli.files import as_shown, open_source, read_parts, write_whole
from farpool.cli.progress import Told, progress_bars
from farpool.cluster.members.named import default_nodes
from farpool.cluster.store import ObjectInfo, Store
from farpool.cluster.store.arguments import ttl_of
from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_rate

__all__ = ["Node", "Replicas", "Timeout", "app", "open_store"]

_CHUNK_BYTES = 8 << 20

app = typer.Typer(
    help="Put, get and look at objects on nodes. A key is written once: its first value stays until it is dropped.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Node = Annotated[
    list[str] | None,
    typer.Option(
        "--node",
        metavar="ADDRESS",
        help="A node, tcp://HOST:PORT; repeatable. Or the registry of the nodes, etcd://HOST:PORT. Default: those in "
        "FARPOOL_NODES, or else FARPOOL_POOL.",
    ),
]
Replicas = Annotated[
    int, typer.Option(metavar="N", min=1, help="Copies of each object; use the same number as your programs.")
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="Time limit for a call, including connecting.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="1 to 256 bytes of text.", show_default=False)]


def open_store(node: list[str] | None, replicas: int, timeout: float) -> Store:
    """Open the store on the nodes from the options; without any, on the nodes that the environment names."""
    if not (node or default_nodes()):
        raise ConfigError(
            "no node is named; expected --node tcp://HOST:PORT, or FARPOOL_NODES or FARPOOL_POOL", setting="node"
        )
    return Store(*(node or ()), replicas=replicas, timeout=timeout)


def _missing(key: str) -> typer.Exit:
    from rich.console import Console
    from rich.markup import escape

    shown = escape(as_shown(os.fsencode(key)))
    Console(stderr=True, soft_wrap=True, emoji=False).print(f"[yellow]missing:[/] {shown}", highlight=False)
    return typer.Exit(1)


@app.command()
def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The file to store; - for stdin.", show_default=False)],
    ttl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Time after which it expires. Default: it stays until it is dropped or evicted."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Fail if the key has a value of another size or checksum.")
    ] = False,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """Store a file under a key. If the key already has a value, that value stays. Prints "stored" or "present"."""
    ttl_of(ttl)  # raises an error for a wrong time to live before we read the file
    with progress_bars() as progress, open_source(file) as source, open_store(node, replicas, timeout) as store:
        # Asked before we read, because a pipe may have no end.
        largest = store.largest()
        total = os.fstat(source.fileno()).st_size
        value = bytearray()
        for chunk in read_parts(source, file, _CHUNK_BYTES):
            value += chunk
            if len(value) > largest:
                raise ConfigError(
                    f"{file} has more than {largest} bytes ({format_size(largest)}), and the largest node cannot hold "
                    "more; give a smaller file",
                    setting="file",
                )
            progress("read", len(value) >> 20, max(total, len(value)) >> 20)
        progress("put", 0, 1)
        # The bytes of the command line, even if they are not UTF-8.
        outcome = store.put(os.fsencode(key), value, ttl=ttl, check=check)
        progress("put", 1, 1)
    typer.echo(f"{outcome}: {as_shown(os.fsencode(key))}", err=True)


@app.command()
def get(
    key: Key,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File to write. Default: stdout.")
    ] = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """Write an object to a file or to stdout. Exit code 1: no node has the object.

    A file is written completely or not at all.
    """
    with open_store(node, replicas, timeout) as store, progress_bars() as progress:
        progress("get", 0, 1)
        value = store.get(os.fsencode(key))
        progress("get", 1, 1)
        if value is None:
            raise _missing(key)
        if output is None:
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
            return
        write_whole(output, _written(value, progress))


def _written(value: bytes, progress: Told) -> Iterator[memoryview]:
    for offset in range(0, len(value), _CHUNK_BYTES):
        yield memoryview(value)[offset : offset + _CHUNK_BYTES]
        progress("write", min(offset + _CHUNK_BYTES, len(value)) >> 20, len(value) >> 20)


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with this.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """List objects with size, key and remaining time to live, in no particular order."""
    with open_store(node, replicas, timeout) as store:
        for info in store.objects(os.fsencode(prefix)):
            if json:
                typer.echo(_encoded(info))
            else:
                ttl = "" if info.ttl is None else f"  for {_span(info.ttl)}"
                typer.echo(f"{format_size(info.nbytes):>10}  {as_shown(info.key)}{ttl}")


@app.command()
def stat(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Without one: the nodes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """Show the properties of an object. Exit code 1: no node has the object.

    Without a key, show the state of the nodes.
    """
    from rich.text import Text

    from farpool.observe.tables import Table, show

    with open_store(node, replicas, timeout) as store:
        if key is None:
            statuses = store.nodes()
            if json:
                typer.echo(msgspec.json.encode(statuses).decode())
                return
            table = Table()
            table.add_names("node")
            table.add_texts("state")
            table.add_figures("objects", "bytes", "capacity")
            for status in statuses:
                stats = status.stats or {}
                sizes = [
                    format_size(int(stats[name])) if name in stats else "" for name in ("object_bytes", "capacity")
                ]
                state = status.error or ("mapped" if status.mapped else "reachable")
                objects = f"{stats['objects']:,}" if "objects" in stats else ""
                table.add_row(Text(status.node), Text(state), objects, *sizes)
            show(table)
            return
        info = store.stat(os.fsencode(key))
        if info is None:
            raise _missing(key)
        if json:
            typer.echo(_encoded(info))
            return
        expires = "never" if info.ttl is None else f"in {_span(info.ttl)}"
        typer.echo(
            f"key         {as_shown(info.key)}\nbytes       {info.nbytes} ({format_size(info.nbytes)})\n"
            f"copies      {info.copies}\nexpires     {expires}\npins        {info.pins}\n"
            f"kept        {'yes' if info.kept else 'no'}"
        )


@app.command()
def rm(key: Key, node: Node = None, replicas: Replicas = 1, timeout: Timeout = 10.0) -> None:
    """Drop an object, so that its key is free again. Exit code 1: no node had it."""
    with open_store(node, replicas, timeout) as store:
        if not store.drop(os.fsencode(key)):
            raise _missing(key)


@app.command()
def repair(
    bandwidth: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Limit of bytes copied per second, for example 100MB.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    metrics: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also write the numbers there, for Prometheus' textfile collector."),
    ] = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 10.0,
) -> None:
    """Make new copies of objects that have too few. Objects with the fewest copies are repaired first.

    Prints each object that still has too few copies, with the reasons. Exit code 1: there are such objects. Objects
    that were dropped, evicted or expired while the command ran are counted as gone and do not change the exit code.
    """
    rate = None if bandwidth is None else parse_rate(bandwidth, "bandwidth")
    if metrics is not None:
        require_package("prometheus_client", "metrics", "--metrics")
    with open_store(node, replicas, timeout) as store, progress_bars() as progress:
        repaired = store.repair(bandwidth=rate, progress=lambda done, whole: progress("repair", done, whole))
    if metrics is not None:
        from farpool.cluster.store.metrics import repair_metrics

        write_whole(metrics, [repair_metrics(repaired)])
    if json:
        fields = asdict(repaired)
        fields["left"] = [{**one, "key": one["key"].decode(errors="backslashreplace")} for one in fields["left"]]
        typer.echo(msgspec.json.encode(fields).decode())
    else:
        gone = f", {repaired.gone} gone during the sweep" if repaired.gone else ""
        typer.echo(
            f"{repaired.objects} objects, {repaired.endangered} with too few copies, {repaired.mended} mended "
            f"({format_size(repaired.nbytes)} copied){gone}"
        )
        for one in repaired.left:
            why = as_shown("; ".join(one.reasons) or "no other node can be reached")
            typer.echo(f"{as_shown(one.key)}: lacks {one.lacking} of its copies: {why}")
    if repaired.left:
        raise typer.Exit(1)


@app.command("rotate-tenant")
def rotate_tenant(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    node: Node = None,
    timeout: Timeout = 10.0,
) -> None:
    """Make unreadable all objects that the access key's tenant has stored so far. Exit code 1: a node was not reached.

    No program can read these objects again, on any node or after any restart. Pinned objects stay in memory until they
    are unpinned. The key needs the rights "admin" and "publish". A node that was not reached may still return its
    objects. Such a node learns of the rotation when a program with the right "publish" connects both to it and to a
    node that was reached, for example "farpool store ls". Opening a name whose objects are gone raises an error.
    """
    with open_store(node, 1, timeout) as store:
        rotation = store.rotate_tenant()
    if json:
        typer.echo(msgspec.json.encode(rotation).decode())
    else:
        for one in rotation.nodes:
            gone = f"{one.objects} objects ({format_size(one.nbytes)}) can no longer be read"
            typer.echo(
                f"{one.node}: " + (f"epoch {rotation.epoch}, {gone}" if one.rotated else f"NOT REACHED: {one.error}")
            )
    if not rotation.complete:
        typer.echo(
            "A node was not reached and may still return its old objects. When it is back, run "
            '"farpool store ls" with all nodes and the same key: that passes the rotation on to it.',
            err=True,
        )
        raise typer.Exit(1)


def _encoded(info: ObjectInfo) -> str:
    fields = {
        "key": info.key.decode(errors="backslashreplace"),
        "bytes": info.nbytes,
        "ttl": info.ttl,
        "copies": info.copies,
        "pins": info.pins,
        "kept": info.kept,
    }
    return msgspec.json.encode(fields).decode()


def _span(seconds: float) -> str:
    """Format a time to live in readable units, such as ``90 s``, ``5 min`` or ``3 days``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 3600 * 48:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
