"""``farpool tokens``: who may call the managers of a pool."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farpool.cli.registry import Timeout, Where
from farpool.errors import ConfigError

if TYPE_CHECKING:
    from farpool.cluster.manager.credentials import Stored
    from farpool.cluster.registry import Registry

__all__ = ["app"]

app = typer.Typer(
    help="Make and delete API tokens, and give rights to client certificates. Works without a manager.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Role(StrEnum):
    ADMIN = "admin"
    OPERATOR = "operator"
    TENANT = "tenant"


RoleOption = Annotated[_Role, typer.Option(help="Rights of the caller.", show_default=False)]
Tenant = Annotated[
    int | None, typer.Option(metavar="NUMBER", help="The tenant, for the role tenant.", show_default=False)
]
Identity = Annotated[
    str,
    typer.Argument(metavar="IDENTITY", help="SPIFFE URI of the certificate, else its common name.", show_default=False),
]


@app.callback()
def tokens(
    context: typer.Context,
    registry: Where = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """List who may call the managers, or change it."""
    context.obj = registry
    if context.invoked_subcommand is None:
        from farpool.cluster.manager.credentials import list_identities, list_tokens

        with _opened(registry, timeout) as opened:
            found = [("token", one) for one in list_tokens(opened)]
            found += [("certificate", one) for one in list_identities(opened)]
        _show(found, json=json)


@app.command()
def create(
    context: typer.Context,
    role: RoleOption,
    tenant: Tenant = None,
    name: Annotated[str, typer.Option(metavar="NAME", help="What the token is for, for people.")] = "",
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """Make a token and print it. The registry has only its SHA-256, so this is the only time."""
    from farpool.cluster.manager.credentials import create_token
    from farpool.cluster.manager.records import Role

    with _opened(registry or context.obj, timeout) as opened:
        token, stored = create_token(opened, Role(role.value), name=name, tenant=tenant, by="farpool tokens")
    typer.echo(f"token {stored.id} with the role {role.value}; it is shown only now:", err=True)
    typer.echo(token)


@app.command()
def delete(
    context: typer.Context,
    token: Annotated[str, typer.Argument(metavar="ID", help="The token's ID.", show_default=False)],
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """Delete a token: managers refuse it at once."""
    from farpool.cluster.manager.credentials import delete_token

    with _opened(registry or context.obj, timeout) as opened:
        if delete_token(opened, token) is None:
            raise ConfigError(f"there is no token {token!r}, expected an ID of 'farpool tokens'", setting="token")
    typer.echo(f"token {token} deleted")


@app.command()
def allow(
    context: typer.Context,
    identity: Identity,
    role: RoleOption,
    tenant: Tenant = None,
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """Give rights to the owners of certificates with an identity."""
    from farpool.cluster.manager.credentials import set_identity
    from farpool.cluster.manager.records import Role

    with _opened(registry or context.obj, timeout) as opened:
        set_identity(opened, identity, Role(role.value), tenant=tenant, by="farpool tokens")
    typer.echo(f"{identity} has the role {role.value}")


@app.command()
def forbid(context: typer.Context, identity: Identity, registry: Where = None, timeout: Timeout = 10.0) -> None:
    """Take all rights from an identity."""
    from farpool.cluster.manager.credentials import delete_identity

    with _opened(registry or context.obj, timeout) as opened:
        if not delete_identity(opened, identity):
            raise ConfigError(
                f"{identity!r} has no rights, expected an identity of 'farpool tokens'", setting="identity"
            )
    typer.echo(f"{identity} has no rights now")


def _opened(where: str | None, timeout: float) -> Registry:
    """Open the registry, which may be new: an administrator's token comes before the first manager."""
    from farpool.cluster.registry import open_registry

    return open_registry(where, timeout=timeout)


def _show(found: list[tuple[str, Stored]], *, json: bool) -> None:
    from rich.text import Text

    from farpool.observe.tables import Table, show

    rows: list[tuple[object, ...]] = []
    for kind, one in found:
        known = one.credential
        rights = ("damaged", None, "") if known is None else (known.role.value, known.tenant, known.name)
        rows.append((kind, one.id, *rights))
    if json:
        names = ("kind", "id", "role", "tenant", "name")
        typer.echo(msgspec.json.encode([dict(zip(names, row, strict=True)) for row in rows]).decode())
        return
    if not rows:
        typer.echo("no tokens and no identities; make a token with 'farpool tokens create --role admin'")
        return
    table = Table()
    table.add_names("kind", "id")
    table.add_texts("role", "tenant", "name")
    for row in rows:
        table.add_row(*(Text("" if cell is None else str(cell)) for cell in row))
    show(table)
