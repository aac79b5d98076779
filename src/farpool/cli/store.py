"""``farpool store``: published objects on nodes."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, BinaryIO

import msgspec
import typer

from farpool.cli.progress import progress_bars
from farpool.errors import ConfigError
from farpool.sizes import format_size
from farpool.store import ObjectInfo, Store

__all__ = ["app"]

_CHUNK = 8 << 20
_Progress = Callable[[str, int, int], None]

app = typer.Typer(
    help="Put, get and look at published objects on nodes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Node = Annotated[
    list[str] | None,
    typer.Option("--node", metavar="ADDRESS", help="A node; once for each. Default: those in FARPOOL_NODES."),
]
Replicas = Annotated[int, typer.Option(metavar="N", min=1, help="Copies, as the programs that use the store have it.")]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", help="How long a call may take.")]
Key = Annotated[str, typer.Argument(metavar="KEY", show_default=False)]


def _store(node: list[str] | None, replicas: int, timeout: float) -> Store:
    nodes = node or os.environ.get("FARPOOL_NODES", "").replace(",", " ").split()
    if not nodes:
        raise ConfigError("no node is named; expected --node tcp://HOST:PORT, or FARPOOL_NODES", setting="node")
    return Store(*nodes, replicas=replicas, timeout=timeout)


def _missing(key: str) -> typer.Exit:
    from rich.console import Console
    from rich.markup import escape

    shown = escape(_shown(os.fsencode(key)))
    Console(stderr=True, soft_wrap=True).print(f"[yellow]missing:[/] {shown}", highlight=False)
    return typer.Exit(1)


@app.command()
def put(
    key: Key,
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="What to publish; - for stdin.", show_default=False)],
    ttl: Annotated[float | None, typer.Option(metavar="SECONDS", help="When it expires.")] = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Publish a file under a key."""
    with _store(node, replicas, timeout) as store, progress_bars() as progress:
        value = bytearray()
        try:
            with open(sys.stdin.fileno() if file == "-" else file, "rb", closefd=file != "-") as source:
                total = os.fstat(source.fileno()).st_size
                while chunk := source.read(_CHUNK):
                    value += chunk
                    progress("read", len(value) >> 20, max(total, len(value)) >> 20)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}", setting="file") from error
        progress("publish", 0, 1)
        store.put(os.fsencode(key), value, ttl=ttl)
        progress("publish", 1, 1)


@app.command()
def get(
    key: Key,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Where to write it. Default: stdout.")
    ] = None,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Write an object to a file or to stdout; exit code 1 if there is none. A file is there whole or not at all."""
    with _store(node, replicas, timeout) as store, progress_bars() as progress:
        progress("get", 0, 1)
        value = store.get(os.fsencode(key))
        progress("get", 1, 1)
        if value is None:
            raise _missing(key)
        if output is None:
            sys.stdout.buffer.write(value)
            sys.stdout.buffer.flush()
            return
        try:
            _write(output, value, progress)
        except OSError as error:
            raise ConfigError(f"{output} cannot be written: {error.strerror}", setting="output") from error


def _write(path: Path, value: bytes, progress: _Progress) -> None:
    if _is_special(path):
        with open(path, "wb") as file:
            _fill(file, value, progress)
        return
    path = Path(os.path.realpath(path))  # a link stays one
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "wb") as file:
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(descriptor, 0o666 & ~umask)
            _fill(file, value, progress)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def _is_special(path: Path) -> bool:
    """Whether there is something that no file may take the place of: a device, a FIFO, a folder."""
    try:
        return not S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def _fill(file: BinaryIO, value: bytes, progress: _Progress) -> None:
    for offset in range(0, len(value), _CHUNK):
        file.write(memoryview(value)[offset : offset + _CHUNK])
        progress("write", min(offset + _CHUNK, len(value)) >> 20, len(value) >> 20)


@app.command()
def ls(
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Only keys that begin with this.")] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")] = False,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """List objects: key, size, expiry; in no order."""
    with _store(node, replicas, timeout) as store:
        for info in store.objects(os.fsencode(prefix)):
            if json:
                typer.echo(_encoded(info))
            else:
                expires = "" if info.expires is None else f"  until {_time(info.expires)}"
                typer.echo(f"{format_size(info.nbytes):>10}  {_shown(info.key)}{expires}")


@app.command()
def stat(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="Without one: the nodes.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    node: Node = None,
    replicas: Replicas = 1,
    timeout: Timeout = 30.0,
) -> None:
    """Show what is known about an object (exit code 1 if there is none), or how the nodes are."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    with _store(node, replicas, timeout) as store:
        if key is None:
            statuses = store.nodes()
            if json:
                typer.echo(msgspec.json.encode(statuses).decode())
                return
            table = Table("node", "state", "objects", "bytes", "capacity", box=None, pad_edge=False)
            for status in statuses:
                stats = status.stats or {}
                sizes = [
                    format_size(int(stats[name])) if name in stats else "" for name in ("object_bytes", "capacity")
                ]
                state = escape(status.error) if status.error else "mapped" if status.mapped else "reachable"
                table.add_row(escape(status.node), state, str(stats.get("objects", "")), *sizes)
            Console(soft_wrap=True).print(table, highlight=False)
            return
        info = store.stat(os.fsencode(key))
        if info is None:
            raise _missing(key)
        if json:
            typer.echo(_encoded(info))
            return
        expires = "never" if info.expires is None else _time(info.expires)
        typer.echo(
            f"key         {_shown(info.key)}\nbytes       {info.nbytes} ({format_size(info.nbytes)})\n"
            f"generation  {info.generation}\nexpires     {expires}\npins        {info.pins}"
        )


@app.command()
def rm(key: Key, node: Node = None, replicas: Replicas = 1, timeout: Timeout = 30.0) -> None:
    """Delete an object; exit code 1 if there was none."""
    with _store(node, replicas, timeout) as store:
        if not store.delete(os.fsencode(key)):
            raise _missing(key)


def _encoded(info: ObjectInfo) -> str:
    fields = {
        "key": info.key.decode(errors="backslashreplace"),
        "generation": info.generation,
        "bytes": info.nbytes,
        "expires": info.expires,
        "pins": info.pins,
    }
    return msgspec.json.encode(fields).decode()


def _shown(key: bytes) -> str:
    """A key as text that a terminal shows and does not obey."""
    text = key.decode(errors="backslashreplace")
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _time(seconds: float) -> str:
    try:
        return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return f"{seconds:.0f} seconds after 1970"
