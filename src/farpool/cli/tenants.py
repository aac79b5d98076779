"""``farpool tenants``: list and set what a pool gives its tenants, as its registry has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec
import typer

from farpool.cli.registry import Timeout, Where, open_existing
from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_rate, parse_size

if TYPE_CHECKING:
    from farpool.cluster.registry import Registry
    from farpool.cluster.tenants.administration import RegisteredTenants
    from farpool.cluster.tenants.records import TenantPolicy

__all__ = ["app"]

app = typer.Typer(
    help="List and set what the tenants of a pool get: guaranteed and burst bytes, bandwidth, priority.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Number = TypeVar("_Number", int, float)
Name = Annotated[str, typer.Argument(metavar="NAME", help="The tenant's name.", show_default=False)]
Number = Annotated[
    int | None,
    typer.Option(metavar="N", help="The tenant's number in access keys; needed for a new one.", show_default=False),
]
Guarantee = Annotated[
    list[str],
    typer.Option(
        metavar="MEDIUM=SIZE",
        help="Bytes that no other tenant's use evicts, in all members together, for example dram=10GiB; 0 for none.",
        show_default=False,
    ),
]
Burst = Annotated[
    list[str],
    typer.Option(
        metavar="MEDIUM=SIZE",
        help="Most bytes that the tenant may use, in all members together, for example dram=20GiB; 0 for no limit.",
        show_default=False,
    ),
]
BandwidthShare = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER", help="Share of each node's bandwidth, relative to other tenants.", show_default=False
    ),
]
BandwidthGuarantee = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Bandwidth guaranteed on each node, for example 1GB/s; 0 for none.", show_default=False
    ),
]
BandwidthCap = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Most bandwidth on each node, for example 4GB/s; 0 for none.", show_default=False
    ),
]
Priority = Annotated[
    int | None,
    typer.Option(
        metavar="NUMBER",
        help="Borrowed bytes of the lowest priority are evicted first; 0 by default.",
        show_default=False,
    ),
]


@app.callback()
def tenants(
    context: typer.Context,
    registry: Where = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    timeout: Timeout = 10.0,
) -> None:
    """List the tenants that have a policy, or set or remove one."""
    context.obj = registry
    if context.invoked_subcommand is None:
        with open_existing(registry, timeout) as opened:
            _list(opened, json=json)


def _list(registry: Registry, *, json: bool) -> None:
    from rich.markup import escape
    from rich.text import Text

    from farpool.cluster.tenants.administration import list_tenants
    from farpool.observe.tables import Table, show

    found = list_tenants(registry)
    if json:
        typer.echo(msgspec.json.encode(_fields(found)).decode())
        return
    if not found.fleet.tenants:
        typer.echo(
            f"no tenant in {registry.address} has a policy; write one with 'farpool tenants set NAME --number N'"
        )
        return
    table = Table()
    table.add_names("name")
    table.add_figures("number")
    table.add_names("guaranteed", "burst")
    table.add_texts("bandwidth")
    table.add_figures("priority")
    for number in found.fleet.tenants:
        policy = found.tenants.get(number)
        cells = ["", str(number), "damaged", "", "", ""] if policy is None else _cells(number, policy)
        table.add_row(*(Text(cell) for cell in cells))
    show(table)
    for medium in sorted({*found.media, *found.fleet.oversubscription}):
        guaranteed = found.guaranteed(medium)
        if guaranteed or medium in found.fleet.oversubscription:
            pool = found.media.get(medium, 0)
            typer.echo(
                f"{medium}: {format_size(guaranteed)} guaranteed of {format_size(pool)} "
                f"(members: {found.members}), oversubscription {found.fleet.factor(medium):g}"
            )
    typer.echo(f"revision {found.revision}")
    for number, text in found.damage.items():
        show(f"[red]damage:[/] tenant {number}: {escape(text)}; nodes keep the policy that they know")


def _cells(number: int, policy: TenantPolicy) -> list[str]:
    given = sorted(policy.media.items())
    bandwidth = policy.bandwidth
    rates = [f"share {bandwidth.share:g}"]
    rates += [f"guarantee {format_size(bandwidth.guarantee)}/s"] if bandwidth.guarantee else []
    rates += [f"cap {format_size(bandwidth.cap)}/s"] if bandwidth.cap else []
    return [
        policy.name,
        str(number),
        "\n".join(f"{medium} {format_size(one.guaranteed)}" for medium, one in given if one.guaranteed),
        "\n".join(f"{medium} {format_size(one.burst)}" for medium, one in given if one.burst),
        ", ".join(rates),
        str(policy.priority),
    ]


def _fields(found: RegisteredTenants) -> dict[str, object]:
    return {
        "revision": found.revision,
        "members": found.members,
        "media": {
            medium: {
                "bytes": found.media.get(medium, 0),
                "guaranteed": found.guaranteed(medium),
                "oversubscription": found.fleet.factor(medium),
            }
            for medium in sorted({*found.media, *found.fleet.oversubscription})
        },
        "tenants": [
            {"number": number, "damage": found.damage[number]}
            if number in found.damage
            else {"number": number, **msgspec.to_builtins(found.tenants[number])}
            for number in found.fleet.tenants
        ],
    }


@app.command("set")
def set_(
    context: typer.Context,
    name: Name,
    number: Number = None,
    guarantee: Guarantee = [],  # noqa: B006 - typer needs a list, and this function does not change it
    burst: Burst = [],  # noqa: B006 - as above
    bandwidth_share: BandwidthShare = None,
    bandwidth_guarantee: BandwidthGuarantee = None,
    bandwidth_cap: BandwidthCap = None,
    priority: Priority = None,
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """Set what a tenant gets. Options that are not given stay as they are. Nodes follow within seconds."""
    from farpool.cluster.tenants.administration import TenantChange, set_tenant

    change = TenantChange(
        guaranteed=_by_medium(guarantee, "--guarantee", _size),
        burst=_by_medium(burst, "--burst", _size),
        share=bandwidth_share,
        guarantee=None if bandwidth_guarantee is None else _rate(bandwidth_guarantee, "--bandwidth-guarantee"),
        cap=None if bandwidth_cap is None else _rate(bandwidth_cap, "--bandwidth-cap"),
        priority=priority,
    )
    with open_existing(registry or context.obj, timeout) as opened:
        own, policy, revision = set_tenant(opened, name, change, number=number)
    typer.echo(f"tenant {policy.name} (number {own}) set, revision {revision}")


@app.command()
def remove(context: typer.Context, name: Name, registry: Where = None, timeout: Timeout = 10.0) -> None:
    """Remove a tenant's policy. Its objects stay; nodes treat it like any tenant without a policy."""
    from farpool.cluster.tenants.administration import remove_tenant

    with open_existing(registry or context.obj, timeout) as opened:
        own, revision = remove_tenant(opened, name)
    typer.echo(f"policy of tenant {own} removed, revision {revision}")


@app.command("oversubscribe")
def oversubscribe_(
    context: typer.Context,
    factors: Annotated[
        list[str],
        typer.Argument(metavar="MEDIUM=FACTOR...", help="Factors, for example dram=1.5.", show_default=False),
    ],
    registry: Where = None,
    timeout: Timeout = 10.0,
) -> None:
    """State how many times the pool's bytes all guarantees together may be: 1 unless it is stated."""
    from farpool.cluster.tenants.administration import oversubscribe

    given = _by_medium(factors, "oversubscription", _factor)
    with open_existing(registry or context.obj, timeout) as opened:
        revision = oversubscribe(opened, given).revision
    typer.echo(f"oversubscription set, revision {revision}")


def _by_medium(texts: list[str], option: str, parse: Callable[[str, str], _Number]) -> dict[str, _Number]:
    values: dict[str, _Number] = {}
    for text in texts:
        medium, separator, value = text.partition("=")
        if not separator or medium in values:
            raise ConfigError(
                f"{option} is {text!r}, expected a medium, once, and a value, for example dram={_EXAMPLES[option]}"
            )
        values[medium] = parse(value, f"{option} of {medium}")
    return values


_EXAMPLES = {"--guarantee": "10GiB", "--burst": "20GiB", "oversubscription": "1.5"}


def _size(text: str, what: str) -> int:
    return 0 if text.strip() == "0" else parse_size(text, what)


def _rate(text: str, what: str) -> int:
    return 0 if text.strip() == "0" else int(parse_rate(text, what))


def _factor(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{what} is {text!r}, expected a number, for example 1.5") from None
