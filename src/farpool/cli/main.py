"""Entry point of the ``farpool`` command: its verbs, its version, and the display of errors.

This module imports the modules of all verbs. The verbs' modules import large packages only inside functions, so that a
node starts fast.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from farpool.cli import (
    bench,
    certs,
    demo,
    kv,
    manager,
    members,
    names,
    node,
    registry,
    sim,
    status,
    store,
    tape,
    tenants,
    tokens,
    up,
)
from farpool.errors import FarpoolError

__all__ = ["app", "main"]

assert names  # importing this module has added its verbs to ``farpool store``

app = typer.Typer(
    name="farpool",
    help="One big memory for GPU and AI programs: DRAM and NVMe behind a byte budget, with bit-exact results.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(name="demo")(demo.demo)
app.command(name="manager")(manager.manager)
app.command(name="node")(node.node)
app.command(name="sim")(sim.sim)
app.command(name="status")(status.status)
app.command(name="up")(up.up)
app.command(name="why")(kv.why)
app.add_typer(bench.app, name="bench")
app.add_typer(certs.app, name="certs")
app.add_typer(kv.app, name="kv")
app.add_typer(members.app, name="members")
app.add_typer(registry.app, name="registry")
app.add_typer(store.app, name="store")
app.add_typer(tape.app, name="tape")
app.add_typer(tenants.app, name="tenants")
app.add_typer(tokens.app, name="tokens")


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"farpool {version('farpool')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """One big memory for GPU and AI programs: DRAM and NVMe behind a byte budget, with bit-exact results."""


def main() -> None:
    """Run the command. A `FarpoolError` becomes one line on stderr and exit code 2."""
    try:
        app(prog_name="farpool")
    except FarpoolError as error:
        from rich.console import Console
        from rich.markup import escape

        message = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True, emoji=False).print(
            f"[bold red]error:[/] [red]{escape(message)}", highlight=False
        )
        sys.exit(2)
