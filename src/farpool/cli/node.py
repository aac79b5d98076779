"""``farpool node``: lend memory of this host."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from farpool.cluster.node.logs import log
from farpool.cluster.wire.access import load_keys, read_key
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.certificate import CertificateFolder
from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool.cluster.node import Node

__all__ = ["announce", "node"]

_SIGNAL_PAIR_S = 1.0
"""A second signal within this time after the first one counts as the same request to stop."""

Size = Annotated[str, typer.Option(metavar="SIZE", help="Memory to lend, for example 2GiB.", show_default=False)]
Listen = Annotated[str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.")]
Nvme = Annotated[
    tuple[str, str],
    typer.Option(
        metavar="PATH SIZE",
        help="A file for objects that memory has no room for, and its size. Without it, the node evicts such objects.",
        show_default=False,
    ),
]
NvmeWear = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Bytes a day that may be written to the NVMe file before the managers raise an alarm. Default: its size.",
        show_default=False,
    ),
]
Name = Annotated[str, typer.Option(metavar="NAME", help="The node's name; its port by default.")]
Folder = Annotated[
    str | None,  # a path would turn an empty string into "."
    typer.Option(metavar="PATH", help="Folder of the segments; /dev/shm/farpool-UID/NAME by default."),
]
Keys = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Access keys (TOML, mode 0600). Needed to listen beyond loopback.")
]
Metrics = Annotated[
    str,
    typer.Option(metavar="HOST:PORT", help="Address to serve /metrics for Prometheus on.", show_default=False),
]
Ephemeral = Annotated[
    bool, typer.Option("--ephemeral", help="Ignore the data of earlier starts, and leave none behind.")
]
Grace = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Time for which a program that is gone keeps its leases and pins."),
]
Spin = Annotated[
    float,
    typer.Option(metavar="SECONDS", min=0, help="Time to poll for the next request before sleeping; 0 sleeps at once."),
]
Share = Annotated[
    list[str],
    typer.Option(
        metavar="TENANT=SIZE",
        help="Memory guaranteed to a tenant, for example 3=512MiB; repeatable.",
        show_default=False,
    ),
]
Fabric = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Also expose memory over a one-sided fabric, for example nixl; see docs/nixl.md first.",
        show_default=False,
    ),
]
Tls = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Serve TLS with the certificate in this folder (tls.crt, tls.key, ca.crt); see farpool certs.",
    ),
]
InsecurePlaintext = Annotated[
    bool, typer.Option("--insecure-plaintext", help="Allow to listen beyond loopback without TLS.")
]
SocketGroup = Annotated[
    str,
    typer.Option(
        metavar="GROUP",
        help="A group whose members may use the UNIX socket and map memory read-only; they need keys.",
        show_default=False,
    ),
]
RegistryUrl = Annotated[
    str | None,
    typer.Option(
        "--registry",
        metavar="URL",
        help="Join the pool of this registry: a path, or etcd://HOST,HOST2/PREFIX.",
        show_default=False,
    ),
]
Label = Annotated[
    list[str],
    typer.Option(
        metavar="NAME=VALUE", help="A property of the member, for example rack=r1; repeatable.", show_default=False
    ),
]
Weight = Annotated[
    float, typer.Option(metavar="NUMBER", help="Share of the pool's new objects, relative to other members.")
]
Advertise = Annotated[
    list[str],
    typer.Option(
        metavar="HOST:PORT",
        help="Address at which the pool's programs reach the node; repeatable, the best first. Default: --listen.",
        show_default=False,
    ),
]
MemberTtl = Annotated[
    float, typer.Option(metavar="SECONDS", help="Time after which the pool counts a silent member as down.")
]
SlowStart = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time over which the weight of a new, empty member grows; 0 for none."),
]
PeerKey = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Access key (NAME:SECRET, mode 0600) with which the node copies objects from other members of the pool.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write the ready line and the log as JSON.")]


def node(
    dram: Size,
    listen: Listen = "127.0.0.1:7471",
    nvme: Nvme = ("", ""),
    name: Name = "",
    folder: Folder = None,
    keys: Keys = None,
    metrics: Metrics = "",
    ephemeral: Ephemeral = False,
    grace: Grace = 10.0,
    spin: Spin = 50e-6,
    share: Share = [],  # noqa: B006 - typer needs a list, and this function does not change it
    fabric: Fabric = "",
    tls: Tls = None,
    insecure_plaintext: InsecurePlaintext = False,
    socket_group: SocketGroup = "",
    registry: RegistryUrl = None,
    label: Label = [],  # noqa: B006 - as above
    weight: Weight = 1.0,
    advertise: Advertise = [],  # noqa: B006 - as above
    member_ttl: MemberTtl = 3.0,
    slow_start: SlowStart = 60.0,
    peer_key: PeerKey = None,
    nvme_wear: NvmeWear = "",
    json: Json = False,
) -> None:
    """Lend memory of this host to programs on this and other hosts, until SIGTERM or SIGINT.

    Objects and leases stay in shared memory for the next start with the same name or folder. After SIGHUP the node
    reads --keys and --tls again.
    """
    # Imported here, so that the command's other verbs do not have to wait for this import.
    from farpool.cluster.node import Node
    from farpool.cluster.node.logs import configure

    running = Node(
        parse_address(listen, "--listen", any_port=True),
        parse_size(dram, "--dram"),
        name=name,
        folder=folder,
        keys=None if keys is None else load_keys(keys),
        metrics=parse_address(metrics, "--metrics", any_port=True) if metrics else None,
        ephemeral=ephemeral,
        grace=grace,
        nvme=(os.path.abspath(nvme[0]), parse_size(nvme[1], "size of --nvme")) if nvme[0] else None,
        fabric=fabric,
        shares=_shares(share),
        spin=spin,
        tls=None if tls is None else CertificateFolder(tls, "--tls"),
        insecure_plaintext=insecure_plaintext,
        socket_group=socket_group,
        registry=registry,
        labels=_labels(label),
        weight=weight,
        advertise=tuple(parse_address(address, "--advertise", any_port=True) for address in advertise),
        member_ttl=member_ttl,
        slow_start=slow_start,
        peer_key=None if peer_key is None else read_key(peer_key, "--peer-key"),
        nvme_wear=parse_size(nvme_wear, "--nvme-wear") if nvme_wear else 0,
    )
    _allow_many_files()
    configure(json=json)
    # Before the node opens, so a signal during the start is not lost.
    stopping = _watch_signals(partial(_reload, running, keys), running.cancel)
    if not _start(running, stopping):
        return
    try:
        announce(_ready_line(running, json=json))
        stopping.wait()
        log("stopping")
    finally:
        running.stop()


def _start(running: Node, stopping: threading.Event) -> bool:
    """Start the node; return False if a signal ended the start."""
    try:
        running.start()
    except ConfigError:
        if not stopping.is_set():
            raise
        log("stopped during the start")
        return False
    return True


def _shares(given: list[str]) -> dict[int, int]:
    shares: dict[int, int] = {}
    for text in given:
        tenant, _, size = text.partition("=")
        if not (tenant.isascii() and tenant.isdigit() and int(tenant) < 1 << 32 and int(tenant) not in shares):
            raise ConfigError(
                f"--share is {text!r}, expected a tenant's number, once, and a size, for example 3=512MiB",
                setting="share",
            )
        shares[int(tenant)] = parse_size(size, f"--share of tenant {tenant}")
    return shares


def _labels(given: list[str]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for text in given:
        name, separator, value = text.partition("=")
        if not separator or name in labels:
            raise ConfigError(
                f"--label is {text!r}, expected NAME=VALUE, each name once, for example rack=r1", setting="labels"
            )
        labels[name] = value
    return labels


def _reload(running: Node, keys: Path | None) -> None:
    """Make the node read its keys and its certificate again.

    If the new keys or the new certificate are invalid, log the reason. The node then keeps the old ones.
    """
    try:
        running.reload(lambda: None if keys is None else load_keys(keys))
    except ConfigError as error:
        log("not reloaded, the keys and the certificate stay as they were", level=logging.ERROR, reason=str(error))
    except Exception:  # this thread also waits for SIGTERM, so it must not end
        log("failed", level=logging.ERROR, detail=traceback.format_exc())


def announce(line: str) -> None:
    """Write a line for the program that started the node; if writing fails, log the failure and continue."""
    try:
        print(line, end="", flush=True)  # does nothing if there is no stdout
    except OSError as error:
        log("the ready line cannot be written", level=logging.WARNING, reason=error.strerror or str(error))
        # At exit Python would write the buffered text again, and fail again.
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _ready_line(running: Node, *, json: bool) -> str:
    if not json:
        less = f" (room for {format_size(running.room)} now)" if running.room < running.capacity else ""
        return f"farpool node {running.name} ready: {running.address}, {format_size(running.capacity)}{less}\n"
    metrics = running.metrics_address
    event = {
        "event": "ready",
        "node": running.name,
        "address": str(running.address),
        "socket": running.socket_path,
        "metrics": None if metrics is None else f"http://{str(metrics).removeprefix('tcp://')}/metrics",
        "capacity": running.capacity,
        "room": running.room,
        "pid": os.getpid(),
        "identity": running.identity.hex(),
        "registry": running.registry_address or None,
    }
    return msgspec.json.encode(event).decode() + "\n"


def _watch_signals(reload: Callable[[], object], cancel: Callable[[], object]) -> threading.Event:
    """Catch SIGTERM, SIGINT and SIGHUP from now on; return an event that SIGTERM or SIGINT sets.

    Until then, each SIGHUP calls `reload`. The first SIGTERM or SIGINT also calls `cancel`. A second one ends the
    process at once, unless it arrives within a second after the first one. Such a signal is ignored, because `timeout`
    and similar programs send two signals to request one stop: one to the process, and one to its whole group.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    # The system may deliver a signal to any thread, but Python runs handlers in the main thread only, which sleeps. So
    # the handlers do nothing: the signal's number is written to a pipe, and a thread reads it.
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    stopping = threading.Event()

    def watch() -> None:
        while os.read(readable, 1)[0] == signal.SIGHUP:
            reload()
        until = time.monotonic() + _SIGNAL_PAIR_S
        stopping.set()
        cancel()
        while True:
            [number] = os.read(readable, 1)
            if number != signal.SIGHUP and time.monotonic() > until:
                # The code that a shell gives for this signal. Only the main thread could restore the default action.
                os._exit(128 + number)

    threading.Thread(target=watch, name="farpool-signals", daemon=True).start()
    return stopping


def _allow_many_files() -> None:
    """Raise this process's limit of open files.

    Each connection is an open file, and the usual limit of 1,024 is too low for a node.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
