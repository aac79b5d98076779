"""``farpool manager``: the HTTP API of a pool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farpool.checks import require_package
from farpool.cli.node import announce
from farpool.cli.registry import Where
from farpool.cluster.wire.address import parse_address
from farpool.errors import ConfigError
from farpool.sizes import parse_rate

if TYPE_CHECKING:
    from farpool.abc.redundancy import Redundancy
    from farpool.cluster.manager.records import ManagerRecord

__all__ = ["Audit", "ManagerListen", "TokenRequired", "manager", "require_manager"]

ManagerListen = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="Address to serve HTTP on; port 0 picks a free one.")
]
Tls = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Serve HTTPS with the certificate in this folder (tls.crt, tls.key, ca.crt). Needed beyond loopback.",
        show_default=False,
    ),
]
Audit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The audit log. Default: a file in your own state folder.",
        show_default=False,
    ),
]
TokenRequired = Annotated[
    bool, typer.Option("--require-token", help="Ask you for a token on loopback, too, even before there is one.")
]
Ttl = Annotated[
    float, typer.Option(metavar="SECONDS", min=1, help="Time after which another manager takes over from this one.")
]
RepairRate = Annotated[
    str,
    typer.Option(metavar="SIZE", help="Limit of bytes copied per second to make lost copies again; 0 for no repair."),
]
RepairGrace = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Time for which a node may be silent before its copies count as lost."),
]
RepairCopysets = Annotated[
    str,
    typer.Option(
        "--copysets",
        metavar="RINGS[:LABEL]",
        help="Put copies on few groups of nodes, as programs with Copysets(..., RINGS, spread=LABEL) do.",
    ),
]
AlarmInterval = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0.1, help="Time between two looks for alarms; all their times grow with it."),
]
Timeout = Annotated[float, typer.Option(metavar="SECONDS", min=0.1, help="Time limit for a request to the registry.")]
Json = Annotated[bool, typer.Option("--json", help="Write the ready line and the log as JSON.")]


def manager(
    registry: Where = None,
    listen: ManagerListen = "127.0.0.1:7470",
    tls: Tls = None,
    audit: Audit = None,
    require_token: TokenRequired = False,
    ttl: Ttl = 3.0,
    repair_rate: RepairRate = "100MB",
    repair_grace: RepairGrace = 30.0,
    copysets: RepairCopysets = "",
    alarm_interval: AlarmInterval = 5.0,
    timeout: Timeout = 3.0,
    json: Json = False,
) -> None:
    """Serve the HTTP API of a pool, until SIGTERM or SIGINT. Several managers may serve the same registry.

    On loopback without --tls you are the administrator until there is a token. After SIGHUP the manager reads the
    certificate of --tls again.
    """
    require_manager("farpool manager")
    from farpool.cluster.manager.repairs import RepairPolicy
    from farpool.cluster.manager.server import default_audit, serve
    from farpool.cluster.manager.server import listen as listen_at
    from farpool.cluster.node.logs import configure
    from farpool.cluster.registry import open_registry
    from farpool.cluster.repair.messages import Settings

    configure(json=json)
    repair = None
    if repair_rate != "0":
        rate = parse_rate(repair_rate, "--repair-rate")
        repair = RepairPolicy(
            nbytes_rate=rate, settings=Settings(grace=repair_grace), redundancy=_redundancy_of(copysets)
        )

    def ready(record: ManagerRecord) -> None:
        announce(_ready_line(record, opened.address, file, json=json))

    listening = listen_at(parse_address(listen, "--listen", any_port=True), tls)
    file = audit or default_audit(listening.socket.getsockname()[1])
    with listening.socket, open_registry(registry, timeout=timeout) as opened:
        serve(
            opened,
            listening,
            audit=file,
            token_required=require_token,
            ttl=ttl,
            repair=repair,
            alarm_interval=alarm_interval,
            ready=ready,
        )


def _redundancy_of(copysets: str) -> Redundancy:
    """Return the redundancy that `--copysets` names. Objects have as many copies as their publishers asked for."""
    from farpool.cluster.redundancy import Copies, Copysets

    if not copysets:
        return Copies(1)
    rings, _, label = copysets.partition(":")
    if not rings.isdecimal():
        raise ConfigError(
            f"--copysets is {copysets!r}, expected a number of rings, and perhaps a label, such as 2 or 2:rack",
            setting="--copysets",
        )
    return Copysets(2, int(rings), spread=label)


def require_manager(command: str) -> None:
    """Raise an error with the command that installs them if a manager's packages are not there."""
    for package in ("fastapi", "uvicorn", "cryptography", "prometheus_client"):
        require_package(package, "manager", command)


def _ready_line(record: ManagerRecord, registry: str, audit: Path, *, json: bool) -> str:
    if not json:
        return f"farpool manager ready: {record.address}, registry {registry}, audit log {audit}\n"
    event = {
        "event": "ready",
        "manager": record.manager,
        "address": record.address,
        "registry": registry,
        "audit": str(audit),
        "pid": os.getpid(),
    }
    return msgspec.json.encode(event).decode() + "\n"
