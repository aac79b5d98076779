"""``farpool certs``: make certificates for nodes and programs, with a private authority."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from farpool.checks import require_package

if TYPE_CHECKING:
    from farpool.cluster.wire.authority import Authority

__all__ = ["app"]

app = typer.Typer(
    help="Make the certificates with which nodes and programs prove their identity (TLS).",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Ca = Annotated[Path, typer.Option("--ca", metavar="DIR", help="The authority's folder.")]
Days = Annotated[int, typer.Option(metavar="N", min=1, max=36500, help="Days for which it is valid.")]


class _Role(StrEnum):
    NODE = "node"
    CLIENT = "client"


@app.command()
def init(
    ca: Ca = Path("farpool-ca"),
    name: Annotated[str, typer.Option(metavar="NAME", help="The authority's name.")] = "farpool",
    days: Days = 3650,
) -> None:
    """Make an authority. Keep its ca.key off the nodes: with it, anyone can make certificates that all nodes accept."""
    authority = _authority_class()
    authority.create(ca, name, days)
    typer.echo(f"{ca}: an authority, valid for {days} days; keep {ca / 'ca.key'} to yourself")


@app.command()
def issue(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Name in the certificate; for a client, the name of its access key.",
            show_default=False,
        ),
    ],
    role: Annotated[_Role, typer.Option(help="Who uses the certificate.", show_default=False)],
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="For a node: a name or IP address by which programs reach it; repeatable."),
    ] = None,
    ca: Ca = Path("farpool-ca"),
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; NAME by default.", show_default=False)
    ] = None,
    days: Days = 90,
) -> None:
    """Make a folder with a key and a certificate, to be used with `farpool node --tls` or FARPOOL_TLS."""
    authority = _authority_class()
    folder = Path(name) if out is None else out
    end = authority(ca).issue(folder, name, role.value, host or [], days=days)
    use = f"farpool node --tls {folder}" if role is _Role.NODE else f"FARPOOL_TLS={folder}"
    typer.echo(f"{folder}: the {role.value} {name}, valid until {end:%Y-%m-%d}; to be used with {use}")


@app.command()
def rotate(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of 'issue'.", show_default=False)],
    ca: Ca = Path("farpool-ca"),
    days: Days = 90,
) -> None:
    """Replace the key and certificate in a folder by new ones with the same name, role and hosts.

    A node uses the new files after SIGHUP, and a program uses them from its next connection on. Open connections stay
    open.
    """
    authority = _authority_class()
    name, end = authority(ca).rotate(folder, days=days)
    typer.echo(f"{folder}: a new certificate of {name}, valid until {end:%Y-%m-%d}; send SIGHUP to a node that uses it")


def _authority_class() -> type[Authority]:
    """Import the class `Authority`. It needs a package that only the commands of ``farpool certs`` use."""
    require_package("cryptography", "tls", "farpool certs")
    from farpool.cluster.wire.authority import Authority

    return Authority
