"""``farpool registry``: back up, check and restore the registry of names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote

import typer

if TYPE_CHECKING:
    from farpool.cluster.registry import Registry

__all__ = ["Timeout", "Where", "app", "open_existing"]

app = typer.Typer(
    help="Back up, check and restore the registry of names.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Where = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        envvar="FARPOOL_REGISTRY",
        show_envvar=True,
        help="A path, or etcd://HOST,HOST2/PREFIX. Default: your own file on this host.",
    ),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0, help="Time limit for a request.")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="The backup.", show_default=False)]


@app.command()
def backup(file: File, registry: Where = None, timeout: Timeout = 30.0) -> None:
    """Write a consistent snapshot of all names to a new file. Programs may keep using the registry."""
    from farpool.cluster.registry.backup import back_up

    with open_existing(registry, timeout) as opened:
        typer.echo(f"{back_up(opened, file)} entries of {opened.address} written to {file}")


@app.command()
def restore(
    file: File,
    registry: Where = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Replace the registry's file. No program may have it open.")
    ] = False,
    timeout: Timeout = 30.0,
) -> None:
    """Restore a backup into an empty registry: a file or etcd. Holds of programs on versions are not restored."""
    from farpool.cluster.registry import backup as backups
    from farpool.cluster.registry import default_registry, open_registry
    from farpool.errors import ConfigError

    where = registry or default_registry()
    if replace:
        if where.startswith("etcd://"):
            raise ConfigError("--replace is for a registry in a file; restore to an empty prefix of an etcd instead")
        count = backups.replace(file, _path(where))
    else:
        with open_registry(where, timeout=timeout) as opened:
            count = backups.restore(file, opened)
    typer.echo(f"{count} entries restored from {file}")


@app.command()
def check(registry: Where = None, timeout: Timeout = 30.0) -> None:
    """Check that no entry is damaged, and that no entry to which a name refers is missing. Exit code 1: damage."""
    from rich.markup import escape

    from farpool.cluster.names.check import check as checked_names
    from farpool.observe.tables import Table, show

    with open_existing(registry, timeout) as opened:
        found = checked_names(opened)
    table = Table()
    table.add_names("entries")
    table.add_figures("number", "bytes")
    for kind, (count, nbytes) in found.entries.items():
        table.add_row(escape(kind), str(count), str(nbytes))
    show(table)
    for one in found.damage:
        show(f"[red]damage:[/] {escape(one)}")
    if found.damage:
        raise typer.Exit(1)
    typer.echo("no damage")


def open_existing(where: str | None, timeout: float) -> Registry:
    """Open an existing registry; raise an error instead of creating a missing file."""
    from farpool.cluster.registry import default_registry, open_registry
    from farpool.errors import ConfigError

    address = where or default_registry()
    if not address.startswith("etcd://") and not _path(address).exists():
        raise ConfigError(f"there is no file {_path(address)}, expected a registry", setting="registry")
    return open_registry(address, timeout=timeout)


def _path(where: str) -> Path:
    return Path(unquote(where.removeprefix("sqlite://")) if where.startswith("sqlite://") else where).absolute()
