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
from farpool.cluster.wire.access import load_keys
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.certificate import CertificateFolder
from farpool.errors import ConfigError
from farpool.sizes import format_size, parse_size

if TYPE_CHECKING:
    from farpool.cluster.node import Node

__all__ = ["node"]

_SAME_STOP_SECONDS = 1.0


def node(
    dram: Annotated[str, typer.Option(metavar="SIZE", help="Memory to lend, for example 2GiB.", show_default=False)],
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 picks a free one.")
    ] = "127.0.0.1:7471",
    nvme: Annotated[
        tuple[str, str],
        typer.Option(
            metavar="PATH SIZE",
            help="A file for objects for which memory has no room, and its size; without it, the node forgets them.",
            show_default=False,
        ),
    ] = ("", ""),
    name: Annotated[str, typer.Option(metavar="NAME", help="The node's name; its port by default.")] = "",
    folder: Annotated[
        str | None,  # a path would make "." of an empty one
        typer.Option(metavar="PATH", help="Where segments are kept; /dev/shm/farpool-UID/NAME by default."),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Access keys (TOML, mode 0600). Needed to listen beyond loopback."),
    ] = None,
    metrics: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Serve /metrics for Prometheus there.", show_default=False)
    ] = "",
    ephemeral: Annotated[
        bool, typer.Option("--ephemeral", help="Forget what an earlier start left, and leave nothing behind.")
    ] = False,
    grace: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="How long a program that is gone keeps its leases and pins."),
    ] = 10.0,
    spin: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0, help="How long to look for the next request before sleeping; 0 sleeps at once."
        ),
    ] = 50e-6,
    share: Annotated[
        list[str],
        typer.Option(
            metavar="TENANT=SIZE",
            help="Memory guaranteed to a tenant, for example 3=512MiB; may be given several times.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer wants a list, and nobody changes it
    fabric: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Expose memory over a one-sided fabric, too, for example nixl; see docs/nixl.md first.",
            show_default=False,
        ),
    ] = "",
    tls: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Serve TLS with the certificate in this folder (tls.crt, tls.key, ca.crt); see farpool certs.",
        ),
    ] = None,
    insecure_plaintext: Annotated[
        bool, typer.Option("--insecure-plaintext", help="Listen beyond loopback without TLS, too.")
    ] = False,
    socket_group: Annotated[
        str,
        typer.Option(
            metavar="GROUP",
            help="A group whose members may use the UNIX socket, and map memory read-only; they need keys.",
            show_default=False,
        ),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Write the ready line and the log as JSON.")] = False,
) -> None:
    """Lend memory of this host to programs here and elsewhere, until SIGTERM or SIGINT.

    Objects and leases stay in shared memory for the next start with the same name or folder. SIGHUP reads --keys and
    --tls again.
    """
    # Not imported above: the command's other verbs would wait for it.
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
    )
    _allow_many_files()
    configure(json=json)
    wait = _wait_for_stop(partial(_reload, running, keys))
    with running:
        _announce(_ready_line(running, json=json))
        wait()
        log("stopping")


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


def _reload(running: Node, keys: Path | None) -> None:
    """Make the node use the current keys and certificate; if they are invalid, log why and keep the old ones."""
    try:
        running.reload(lambda: None if keys is None else load_keys(keys))
    except ConfigError as error:
        log("not reloaded, the keys and the certificate stay as they were", level=logging.ERROR, reason=str(error))
    except Exception:  # the thread that this runs in also waits for SIGTERM
        log("failed", level=logging.ERROR, detail=traceback.format_exc())


def _announce(line: str) -> None:
    """Write a line for the program that started the node; if writing fails, the node still lends memory."""
    try:
        print(line, end="", flush=True)  # writes nothing where there is no stdout
    except OSError as error:
        log("the ready line cannot be written", level=logging.WARNING, reason=error.strerror or str(error))
        # The text in its buffer would be written, and fail, once more at exit.
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
    }
    return msgspec.json.encode(event).decode() + "\n"


def _wait_for_stop(reload: Callable[[], object]) -> Callable[[], object]:
    """Catch SIGTERM and SIGINT from now on; return a function that waits for one. SIGHUP calls `reload`.

    A later one ends the process. One that comes within a second is the same stop: `timeout` and other wrappers signal
    the process and then its whole group.
    """
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    # The signal may reach any thread; the handler would run in the main one, which nothing wakes then. The pipe does.
    signal.set_wakeup_fd(writable)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    stopping = threading.Event()

    def watch() -> None:
        while os.read(readable, 1)[0] == signal.SIGHUP:
            reload()
        until = time.monotonic() + _SAME_STOP_SECONDS
        stopping.set()
        while True:
            [number] = os.read(readable, 1)
            if number != signal.SIGHUP and time.monotonic() > until:
                os._exit(
                    128 + number
                )  # as a shell says it; the default action could be restored by the main thread only

    threading.Thread(target=watch, name="farpool-signals", daemon=True).start()
    return stopping.wait


def _allow_many_files() -> None:
    """Raise the limit on open files: each connection is one, and the usual 1,024 is for programs that use select."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
