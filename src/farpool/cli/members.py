"""``farpool members``: list, drain and remove the members of a pool, as its registry has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farpool.cli.registry import Timeout, Where, open_existing
from farpool.sizes import format_size

if TYPE_CHECKING:
    from farpool.cluster.members.administration import RegisteredMember
    from farpool.cluster.members.records import MemberRecord
    from farpool.cluster.registry import Registry

__all__ = ["app"]

app = typer.Typer(
    help="List, drain and remove the members of a pool: the nodes that were started with the same --registry.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Member = Annotated[
    str,
    typer.Argument(metavar="NODE", help="Name, address or first digits of the identity.", show_default=False),
]
_DIGITS_MIN = 8
"""Fewest digits of an identity that a list shows."""


@app.callback()
def members(
    context: typer.Context,
    registry: Where = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """List the members of a pool, or drain or remove one of them."""
    context.obj = registry
    if context.invoked_subcommand is None:
        with open_existing(registry, timeout) as opened:
            _list(opened, json=json)


def _list(registry: Registry, *, json: bool) -> None:
    from rich.markup import escape
    from rich.text import Text

    from farpool.cluster.members.administration import list_members
    from farpool.observe.tables import Table, show

    found = list_members(registry)
    if json:
        typer.echo(msgspec.json.encode([_fields(one) for one in found]).decode())
        return
    if not found:
        typer.echo(f"no members in {registry.address}; start one with 'farpool node --registry URL'")
        return
    digits = _digits([one.identity for one in found])
    table = Table()
    table.add_names("name", "identity")
    table.add_texts("state")
    table.add_figures("weight")
    table.add_names("addresses", "lends")
    table.add_texts("labels", "version")
    for one in found:
        table.add_row(*(Text(cell) for cell in _cells(one, digits)))
    show(table)
    for one in found:
        if one.damage:
            show(f"[red]damage:[/] {escape(one.damage)}")


def _digits(identities: list[str]) -> int:
    """Return the number of digits that tell the identities apart."""
    digits = _DIGITS_MIN
    while len({identity[:digits] for identity in identities}) < len(identities):
        digits += 1
    return digits


def _cells(member: RegisteredMember, digits: int) -> list[str]:
    record = member.record
    if record is None or member.state is None:
        return ["", member.identity[:digits], "damaged", "", "", "", "", ""]
    slow = "" if record.weight == record.full_weight else f" of {record.full_weight:g}"
    return [
        record.name,
        member.identity[:digits],
        str(member.state),
        f"{record.weight:.3g}{slow}",
        "\n".join(record.addresses),
        "\n".join(_lent(record, medium) for medium in record.media),
        " ".join(f"{name}={value}" for name, value in sorted(record.labels.items())),
        record.version,
    ]


def _lent(record: MemberRecord, medium: str) -> str:
    rate = record.bandwidth.get(medium)
    return f"{medium} {format_size(record.media[medium])}" + (f", {rate / 1e9:.1f} GB/s" if rate else "")


def _fields(member: RegisteredMember) -> dict[str, object]:
    record = member.record
    fields: dict[str, object] = {"identity": member.identity, "state": None if record is None else str(member.state)}
    if record is None:
        return {**fields, "damage": member.damage}
    known = msgspec.to_builtins(record)
    names = ("name", "addresses", "weight", "full_weight", "labels", "media", "bandwidth")
    return {**fields, **{name: known[name] for name in (*names, "version", "draining", "joined")}}


@app.command()
def drain(context: typer.Context, node: Member, registry: Where = None, timeout: Timeout = 10.0) -> None:
    """Let a member get no new objects from now on, also after restarts. Programs still read the objects that it has."""
    from farpool.cluster.members.administration import drain as begin

    with open_existing(registry or context.obj, timeout) as opened:
        member, changed = begin(opened, node)
    typer.echo(f"{member.short} {'drains now' if changed else 'was draining already'}")


@app.command()
def undrain(context: typer.Context, node: Member, registry: Where = None, timeout: Timeout = 10.0) -> None:
    """Let a member that drains get new objects again."""
    from farpool.cluster.members.administration import undrain as end

    with open_existing(registry or context.obj, timeout) as opened:
        member, changed = end(opened, node)
    typer.echo(f"{member.short} {'gets new objects again' if changed else 'was not draining'}")


@app.command()
def remove(
    context: typer.Context,
    node: Member,
    force: Annotated[
        bool, typer.Option("--force", help="Even if it is up, or the last member that takes objects.")
    ] = False,
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """Delete a member from the list: programs then no longer ask its node. The node joins again at its next start."""
    from farpool.cluster.members.administration import remove as delete

    with open_existing(registry or context.obj, timeout) as opened:
        member = delete(opened, node, force=force)
    typer.echo(f"{member.short} removed")
