"""``farpool status``: members, tenants, leases, exposure and alarms of a pool."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farpool.cli.registry import Timeout, Where, open_existing
from farpool.errors import ManagerError
from farpool.sizes import format_size

if TYPE_CHECKING:
    from farpool.cluster.manager.status import Loss, PoolStatus, RepairStatus

__all__ = ["status"]

Manager = Annotated[
    list[str],
    typer.Option(
        "--manager",
        metavar="URL",
        help="Ask this manager, and no registry; repeatable. Default: the managers that the registry names.",
        show_default=False,
    ),
]
_LOSSES_MAX = 10
"""Losses of each tenant that are shown to people, the costliest first."""
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def status(registry: Where = None, manager: Manager = [], json: Json = False, timeout: Timeout = 10.0) -> None:  # noqa: B006 - typer needs a list, and this function does not change it
    """Show a pool: members, tenants, leases, what a loss would cost, and alarms.

    The leading manager is asked. If none answers, the registry's part is shown, which is all but the copies of objects.
    """
    found, notes = _read(registry, manager, timeout)
    if json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    _show(found, notes)


def _read(where: str | None, managers: list[str], timeout: float) -> tuple[PoolStatus, list[str]]:
    from farpool.cluster.leases.client import client_token
    from farpool.cluster.manager.status import ask_manager, read_status

    if managers:
        return ask_manager(managers, client_token(), timeout), []
    with open_existing(where, timeout) as opened:
        found = read_status(opened)
    urls = [one.address for one in sorted(found.managers, key=lambda one: not one.leads)]
    try:
        return ask_manager(urls, client_token(), min(timeout, 5.0)), []
    except ManagerError as error:
        return found, [f"from the registry alone, because no manager answered: {error}"]


def _show(found: PoolStatus, notes: list[str]) -> None:
    from rich.markup import escape

    from farpool.observe.tables import show

    show(escape(_headline(found)))
    _show_members(found)
    _show_tenants(found)
    for line in _exposure(found):
        show(escape(line))
    for note in [*notes, *found.notes]:
        show(f"[yellow]note:[/] {escape(note)}")
    if not found.alarms:
        show("no alarms")
    for one in found.alarms:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
        show(f"[bold red]alarm[/] [red]{escape(one.kind)}[/] {escape(f'{one.about}: {one.text} (since {since})')}")


def _headline(found: PoolStatus) -> str:
    leader = next((one.address for one in found.managers if one.leads), "")
    led = f"{leader} leads" if leader else "no manager leads"
    orders = f", and {found.orders} extents wait for their nodes" if found.orders else ""
    return f"{found.registry}: {len(found.managers)} managers, {led}; {found.leases} leases{orders}"


def _show_members(found: PoolStatus) -> None:
    from rich.text import Text

    from farpool.observe.tables import Table, show

    if not found.members:
        show("no members; start one with 'farpool node --registry URL'")
        return
    table = Table()
    table.add_names("member", "identity")
    table.add_texts("state")
    table.add_names("lends", "leased")
    table.add_texts("labels", "version")
    for one in found.members:
        labels = " ".join(f"{name}={value}" for name, value in sorted(one.labels.items()))
        state = one.state or "damaged"
        cells = [one.name, one.identity[:8], state, _sizes(one.lends), _sizes(one.leased), labels, one.version]
        table.add_row(*map(Text, cells))
    show(table)


def _show_tenants(found: PoolStatus) -> None:
    from rich.text import Text

    from farpool.observe.tables import Table, show

    if not found.tenants:
        return
    table = Table()
    table.add_names("tenant")
    table.add_figures("number")
    table.add_names("guaranteed", "burst", "leased")
    table.add_figures("leases")
    for one in found.tenants:
        sizes = (_sizes(each) for each in (one.guaranteed, one.burst, one.leased))
        table.add_row(*map(Text, [one.name, str(one.number), *sizes, str(one.leases)]))
    show(table)


def _sizes(media: Mapping[str, int]) -> str:
    return "\n".join(f"{medium} {format_size(nbytes)}" for medium, nbytes in sorted(media.items()) if nbytes)


def _exposure(found: PoolStatus) -> Iterator[str]:
    """Yield sentences about the copies of objects."""
    if found.repair is None:
        yield "copies of objects: not known, because no manager with repair was asked that leads"
        return
    names = {one.identity: one.name or one.identity[:8] for one in found.members}
    for repair in found.repair:
        yield _copies(repair)
        costs = [f"  {_cost(loss, names)}" for loss in repair.losses if loss.objects or loss.below]
        yield from costs[:_LOSSES_MAX]
        if len(costs) > _LOSSES_MAX:
            yield f"  {len(costs) - _LOSSES_MAX} more losses are in the output of --json"


def _copies(repair: RepairStatus) -> str:
    size = f"tenant {repair.tenant}: {repair.objects} objects, {format_size(repair.nbytes)}"
    if not repair.lacking:
        return f"{size}; all have their copies"
    failed = f", {repair.failed} of them could not be copied" if repair.failed else ""
    return f"{size}; {repair.lacking} have too few copies{failed}"


def _cost(loss: Loss, names: Mapping[str, str]) -> str:
    if loss.label:
        what = f"if all members with {loss.label} were lost"
    else:
        what = f"if {names.get(loss.member, loss.member[:8])} were lost"
    parts = []
    if loss.objects:
        parts.append(f"{loss.objects} objects ({format_size(loss.nbytes)}) would be gone")
    if loss.below:
        parts.append(f"{loss.below} objects ({format_size(loss.below_nbytes)}) would have to be copied again")
    return f"{what}, {' and '.join(parts)}"
