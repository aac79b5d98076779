"""Runs a manager: listens, serves HTTP and ends at a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import secrets
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import uvicorn

from farpool.abc.registry import Registry
from farpool.cluster.manager.alarms import LOOK_INTERVAL_S
from farpool.cluster.manager.app import application
from farpool.cluster.manager.credentials import list_identities, list_tokens
from farpool.cluster.manager.gate import Gate
from farpool.cluster.manager.manager import Manager, Settings
from farpool.cluster.manager.peer import PeerProtocol, tls_context
from farpool.cluster.manager.records import ManagerRecord
from farpool.cluster.manager.repairs import RepairPolicy
from farpool.cluster.node.logs import log
from farpool.cluster.wire.address import Address
from farpool.errors import ConfigError, FarpoolError, RegistryError

__all__ = ["Listening", "default_audit", "listen", "serve"]

_CONNECTIONS_MAX = 1024
_GRACE_S = 5


@dataclass(frozen=True, slots=True)
class Listening:
    """A socket that listens, before the manager serves there.

    Attributes
    ----------
    socket : socket.socket
        The socket.
    tls : Path or None
        Folder of the certificate; None without TLS.
    url : str
        URL at which programs reach the manager.
    """

    socket: socket.socket
    tls: Path | None
    url: str

    @property
    def is_plain_loopback(self) -> bool:
        """True without TLS, which only loopback may be."""
        return self.tls is None


def listen(address: Address, tls: Path | None) -> Listening:
    """Listen at an address.

    Raises
    ------
    ConfigError
        The address is beyond loopback and there is no TLS, or this process cannot listen there.
    """
    if address.scheme != "tcp":
        raise ConfigError(f"--listen is {address}, expected HOST:PORT", setting="listen")
    if tls is None and not _is_loopback(address.host):
        raise ConfigError(
            f"--listen is {address.host}:{address.port}, which other hosts can reach, expected an address of loopback "
            "without --tls; give --tls DIR with a certificate of 'farpool certs issue --role node'",
            setting="listen",
        )
    try:
        family, _, _, _, target = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listening = socket.create_server(target[:2], family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"--listen is {address.host}:{address.port}, where this process cannot listen: {error.strerror}; choose "
            "another port",
            setting="listen",
        ) from error
    host = f"[{address.host}]" if ":" in address.host else address.host
    url = f"{'http' if tls is None else 'https'}://{host}:{listening.getsockname()[1]}"
    return Listening(listening, tls, url)


def default_audit(port: int) -> Path:
    """Return the file of the audit log of the manager at a port, in this user's state folder."""
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if state else Path.home() / ".local" / "state"
    return folder / "farpool" / f"audit-{port}.jsonl"


def serve(
    registry: Registry,
    listening: Listening,
    *,
    audit: Path,
    token_required: bool = False,
    ttl: float = 3.0,
    repair: RepairPolicy | None = None,
    alarm_interval: float = LOOK_INTERVAL_S,
    ready: Callable[[ManagerRecord], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT, or an error that ends the manager.

    Parameters
    ----------
    registry : Registry
        The registry.
    listening : Listening
        The socket, which this function closes.
    audit : Path
        File of the audit log.
    token_required : bool
        True if users of this host need a token even while there is none.
    ttl : float
        Seconds without a sign of this manager after which another one becomes the leader.
    repair : RepairPolicy, optional
        How the manager repairs while it leads; it does not repair without.
    alarm_interval : float
        Seconds between two looks at the pool for alarms.
    ready : callable, optional
        Called when the manager answers.

    Raises
    ------
    ConfigError
        The certificate or the audit log cannot be used.
    RegistryReplacedError
        Another registry has taken the place of this one.
    """
    with contextlib.closing(listening.socket):
        context = None if listening.tls is None else tls_context(listening.tls)
        settings = Settings(
            record=_new_record(listening.url),
            audit=audit,
            is_plain_loopback=listening.is_plain_loopback,
            token_required=token_required,
            ttl=ttl,
            repair=repair,
            alarm_interval=alarm_interval,
        )
        reasons: list[FarpoolError] = []
        running: list[_Server] = []

        def end(reason: FarpoolError) -> None:
            reasons.append(reason)
            for one in running:
                one.should_exit = True

        with Manager(registry, settings, end) as manager:
            if context is not None:
                _warn_if_no_caller_is_known(registry)
            server = _Server(application(manager), manager, listening, context, ready)
            running.append(server)
            if not reasons:
                server.run(sockets=[listening.socket])
    if reasons:
        raise reasons[0]


def _new_record(url: str) -> ManagerRecord:
    return ManagerRecord(
        manager=secrets.token_hex(8),
        address=url,
        process=f"{socket.gethostname()}:{os.getpid()}",
        version=version("farpool"),
        started=time.time(),
    )


class _Server(uvicorn.Server):
    """uvicorn's server with TLS of our own, whose signals end it with the exit code 0."""

    def __init__(
        self,
        app: Gate,
        manager: Manager,
        listening: Listening,
        context: ssl.SSLContext | None,
        ready: Callable[[ManagerRecord], None] | None,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=PeerProtocol,
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            # Otherwise a caller on this host could choose the address by which it is audited and limited.
            proxy_headers=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_graceful_shutdown=_GRACE_S,
        )
        config.load()
        config.ssl = context
        self._context = context
        if context is not None:
            # Each connection gets the latest context, because a context that is in use only learns more authorities.
            context.sni_callback = self._use_latest
        super().__init__(config)
        self._manager, self._listening, self._ready = manager, listening, ready
        # uvicorn warns of each request that is no HTTP, of which any stranger can send many; errors still reach stderr.
        logging.getLogger("uvicorn").setLevel(logging.ERROR)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End the streams and the server at the first signal, and read the certificate again at SIGHUP."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        for number in numbers[:2]:
            loop.add_signal_handler(number, self._stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._ready is not None:
            self._ready(self._manager.settings.record)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._manager.feed.end_streams()
        await super().shutdown(sockets)

    def _stop(self) -> None:
        self.should_exit = True

    def _use_latest(self, connection: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
        if self._context is not None:
            connection.context = self._context

    def _reload(self) -> None:
        if self._listening.tls is not None:
            try:
                self._context = tls_context(self._listening.tls)
            except ConfigError as error:
                log("not reloaded, the certificate stays as it was", level=logging.ERROR, reason=str(error))


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _warn_if_no_caller_is_known(registry: Registry) -> None:
    try:
        if not list_tokens(registry) and not list_identities(registry):
            print(
                "there are no tokens and no identities, so the manager refuses all callers; make a token with "
                "'farpool tokens create --role admin'",
                file=sys.stderr,
                flush=True,
            )
    except RegistryError:
        pass  # /readyz shows it
