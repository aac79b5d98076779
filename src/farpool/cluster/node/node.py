"""A node: lends memory of this host to programs here and elsewhere."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal

from farpool._native import NodeServer, tls_available
from farpool.abc.registry import Registry
from farpool.available import available_memory
from farpool.checks import require_package, require_seconds
from farpool.cluster.node.access import NodeAccess
from farpool.cluster.node.claims import Claims
from farpool.cluster.node.control import ControlService
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.node.folder import Folder, check_name, default_folder
from farpool.cluster.node.joining import Joining
from farpool.cluster.node.listener import Listener
from farpool.cluster.node.logs import log
from farpool.cluster.node.reloads import LastReload
from farpool.cluster.node.users import group_id
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import Address
from farpool.cluster.wire.certificate import CertificateFolder
from farpool.cluster.wire.frames import Right, Status
from farpool.cluster.wire.handshake import Identity
from farpool.cluster.wire.host import host_id
from farpool.errors import ConfigError
from farpool.sizes import format_size

if TYPE_CHECKING:
    from farpool.cluster.members.registration import Registration
    from farpool.cluster.node.tenancy import Tenancy
    from farpool.cluster.node.ticket_keys import TicketKeys
    from farpool.cluster.tenants.follower import KnownPolicy

__all__ = ["Node"]

_BACKLOG_CONNECTIONS = 1024


class Node:
    """Node that lends memory of this host until it is stopped.

    Parameters
    ----------
    listen : Address
        Address to listen at with TCP; port 0 for any free port.
    capacity : int
        Bytes to lend.
    name : str
        The node's name; empty to use the port number as the name.
    folder : str or path-like or None
        Folder of the node's segments; by default ``/dev/shm/farpool-UID/NAME``. If an earlier node left segments in the
        folder, this node continues with them.
    keys : mapping of str to Grant, or None
        Access keys by name. Without keys the node listens only on loopback, its own user has all rights, and other
        users have none.
    metrics : Address or None
        Address at which to serve metrics for Prometheus; port 0 for any free port.
    ephemeral : bool
        True to delete the segments of an earlier node at the start, and this node's own segments at the end.
    grace : float
        Seconds for which a program's leases and pins outlive its last connection.
    spin : float
        Seconds for which the data loop polls for more requests before it sleeps; 0 to sleep at once.
    nvme : pair of str and int, or None
        Path of a file and its size in bytes. When the node evicts objects from memory, it writes them to this file.
    fabric : str
        Name of a one-sided fabric over which the node also exposes its memory; empty for none.
    shares : mapping of int to int, or None
        Bytes guaranteed to each tenant, by the tenant's number. If a tenant holds no more than its guarantee, the node
        does not evict the tenant's objects to make room for other tenants. All tenants that hold something and have no
        guarantee share the rest equally. A guarantee of the pool's policy takes the place of the tenant's share here.
    tls : CertificateFolder or None
        The node's certificate. With it, connections over TCP begin with TLS, and each client must show a certificate.
    insecure_plaintext : bool
        True to allow listening beyond loopback without TLS.
    socket_group : str
        Name or number of a group. Its members may use the UNIX socket with a key, and map memory read-only. Empty to
        allow this only to the node's own user.
    registry : Registry or str or path-like or None
        Registry of a pool, or its address. The node is a member of this pool while it runs.
    labels : mapping of str to str, or None
        Properties of the member, such as its rack.
    weight : float
        Share of the pool's new objects that the member gets, relative to the weights of other members.
    advertise : tuple of Address
        Addresses at which the pool's programs reach the node; by default the one at which it listens. Port 0 stands for
        the port at which it listens.
    member_ttl : float
        Seconds after which the pool counts the node as down if the registry hears nothing from it.
    slow_start : float
        Seconds over which the weight grows if the node is new in the pool and empty; 0 for the full weight at once.
    peer_key : AccessKey or None
        Access key with the right to repair that the node shows to other members when it copies objects from them; None
        if they need none. Over TLS its certificate takes the place of the key.
    nvme_wear : int
        Bytes a day that may be written to the NVMe file; the managers raise an alarm if it is more. 0 for the size of
        the file.

    Attributes
    ----------
    address : Address
        Address at which the node listens; before the start, the parameter `listen`.
    identity : bytes
        The 16 bytes that identify the node, once started.
    name : str
        The node's name; before the start, the parameter `name`.
    metrics_address : Address or None
        Address at which the node serves metrics; before the start, the parameter `metrics`.
    """

    def __init__(
        self,
        listen: Address,
        capacity: int,
        *,
        name: str = "",
        folder: str | os.PathLike[str] | None = None,
        keys: Mapping[str, Grant] | None = None,
        metrics: Address | None = None,
        ephemeral: bool = False,
        grace: float = 10.0,
        spin: float = 50e-6,
        nvme: tuple[str, int] | None = None,
        fabric: str = "",
        shares: Mapping[int, int] | None = None,
        tls: CertificateFolder | None = None,
        insecure_plaintext: bool = False,
        socket_group: str = "",
        registry: Registry | str | os.PathLike[str] | None = None,
        labels: Mapping[str, str] | None = None,
        weight: float = 1.0,
        advertise: tuple[Address, ...] = (),
        member_ttl: float = 3.0,
        slow_start: float = 60.0,
        peer_key: AccessKey | None = None,
        nvme_wear: int = 0,
    ) -> None:
        self.address = listen
        self.identity = b""
        self.name = name
        self.metrics_address = metrics
        self._capacity = capacity
        self._path = folder
        self._keys = keys
        self._peer_key = peer_key
        self._ephemeral = ephemeral
        self._grace = grace
        self._spin = spin
        self._nvme = nvme
        self._nvme_wear = nvme_wear
        self._fabric = fabric
        self._shares = dict(shares or {})
        self._tls = tls
        self._insecure_plaintext = insecure_plaintext
        self._socket_group = socket_group
        self._joining = Joining(registry, dict(labels or {}), weight, advertise, member_ttl, slow_start)
        self._registration: Registration | None = None
        self._tenancy: Tenancy | None = None
        self._drains = False  # as the member's record says
        self._cancelled = threading.Event()
        self._room = capacity
        self._last_reload = LastReload(time.time(), succeeded=True)
        self._control: ControlService | None = None
        self._folder: Folder | None = None
        self._server: NodeServer | None = None
        self._listener: Listener | None = None
        self._undo = ExitStack()
        # Held while the keys are given to the data loop and the listener: a reload may come during the start.
        self._using_keys = threading.Lock()

    @property
    def capacity(self) -> int:
        """Bytes to lend."""
        return self._capacity

    @property
    def room(self) -> int:
        """Bytes, at most `capacity`, for which the folder's file system had room when the node started."""
        return self._room

    @property
    def socket_path(self) -> str:
        """Path of the UNIX socket; empty before the start."""
        return str(self._folder.socket_path) if self._folder else ""

    @property
    def registry_address(self) -> str:
        """Address of the registry without secrets; empty without a registry, and before the start."""
        registration = self._registration
        return "" if registration is None else registration.address

    def start(self) -> None:
        """Check all settings, then open the node.

        Raises
        ------
        ConfigError
            The node cannot work with these settings. Nothing stays open.
        """
        if self.name:
            check_name(self.name)
        for setting, seconds in (("grace", self._grace), ("spin", self._spin)):
            require_seconds(seconds, f"--{setting}", setting=setting)
        if self.metrics_address is not None and self.metrics_address.scheme != "tcp":
            raise ConfigError(f"--metrics is {str(self.metrics_address)!r}, expected HOST:PORT", setting="metrics")
        if self.metrics_address is not None:
            require_package("prometheus_client", "metrics", "--metrics")
            if self._tls is not None:  # the metrics say when its certificates end
                require_package("cryptography", "tls", "--metrics with --tls")
        if sum(self._shares.values()) > self._capacity:
            raise ConfigError(
                f"--share guarantees {format_size(sum(self._shares.values()))} altogether, but --dram is "
                f"{format_size(self._capacity)}",
                setting="share",
            )
        if self._socket_group and self._keys is None:
            raise ConfigError(
                f"--socket-group is {self._socket_group!r}, but there are no access keys, without which only the "
                "node's own user is let in; give --keys FILE",
                setting="socket_group",
            )
        target = self._resolved()
        self._joining.check(target[1][0])
        # Without a name and a port, the folder is named after the port that the system gives us below.
        folder = self._own_folder(self.name or str(self.address.port)) if self.name or self.address.port else None
        with ExitStack() as undo:
            listening = undo.enter_context(_listening(target, self.address))
            scheme: Literal["tcp", "tls"] = "tcp" if self._tls is None else "tls"
            self.address = Address(scheme, self.address.host, listening.getsockname()[1])
            self.name = self.name or str(self.address.port)
            self._folder = folder or self._own_folder(self.name)
            self._open(listening, self._folder, undo)
            self._undo = undo.pop_all()
        if self._room < self._capacity:
            log(
                "the file system has less room than --dram; the node lends the memory that it gets",
                level=logging.WARNING,
                dram=self._capacity,
                room=self._room,
            )

    def cancel(self) -> None:
        """End a start that waits for the registry. `start` then raises `ConfigError`. Any thread may call this."""
        self._cancelled.set()

    def reload(self, read_keys: Callable[[], Mapping[str, Grant] | None]) -> None:
        """Read the keys and the certificate again, and use them from now on.

        Connections that were opened with a key that was removed or changed are ended. All other connections stay open.

        Parameters
        ----------
        read_keys : callable
            Returns the keys. Errors of this function are raised to the caller.

        Raises
        ------
        ConfigError
            The node cannot use the new keys or the new certificate; it keeps the old ones.
        """
        # Recorded as a failure first, so that `/metrics` shows a failure if any of the calls below raises an error.
        self._last_reload = LastReload(time.time(), succeeded=False)
        # We read both before we use either: if one file is wrong, the node keeps both as they were.
        keys = read_keys()
        tls = None if self._tls is None else self._tls.reload()
        with self._using_keys:
            self._keys = keys
            if self._server is not None and self._listener is not None:
                # The data loop first: once the listener has the keys, connections with new ones may come.
                _expect(self._server, keys)
                self._listener.replace(keys, tls)
        self._last_reload = LastReload(time.time(), succeeded=True)

    def stop(self) -> None:
        """Stop listening and end all connections. Idempotent.

        The segments stay for the next start, unless the node is ephemeral.
        """
        self._undo.close()
        # These objects hold the segments' descriptors.
        self._server = self._listener = self._control = self._registration = self._tenancy = None

    def stats(self) -> dict[str, int | float]:
        """Return the node's counters by name; empty unless the node runs."""
        # Read once, because a thread of the metrics may ask while the node stops.
        server, listener, registration, tenancy = self._server, self._listener, self._registration, self._tenancy
        if server is None or listener is None:
            return {}
        full = sum(by_status.get(Status.FULL, 0) for by_status in server.refusals().values())
        in_pool: dict[str, int | float] = {}
        if registration is not None:
            in_pool = {"registered": int(registration.registered), "registry_silence": registration.silence}
        if tenancy is not None:
            in_pool.update(tenancy.stats())
        return {
            **server.stats(),
            "process": _own_memory(),
            "refused": listener.refused,
            "incompatible": listener.incompatible,
            "half_open": listener.half_open,
            "full": full,
            "nvme_budget": 0 if self._nvme is None else self._nvme_wear or self._nvme[1],
            # Both, so that a jump of the clock shows.
            "clock": time.time(),
            "clock_monotonic": time.monotonic(),
            **in_pool,
        }

    def tenants(self) -> dict[int, dict[str, int]]:
        """Return each tenant's counters by name, such as objects and bytes; empty unless the node runs.

        Bytes are counted as used, backed by memory, taken in shared memory, lent and guaranteed. `burst` is the most
        that the tenant may use, 0 for no limit; `priority` is the pool's for the tenant.
        """
        server = self._server
        return {} if server is None else server.tenants()

    def set_bandwidth(self, tenants: Mapping[int, tuple[float, int, int]]) -> None:
        """Set the share, the guarantee and the cap of each tenant's bandwidth, from now on.

        Parameters
        ----------
        tenants : mapping of int to tuple
            By the tenant's number: its weight next to other tenants that have work, and the least and the most bytes a
            second (0 for none). A tenant that is not named has the weight 1, no guarantee and no cap.

        Raises
        ------
        ConfigError
            A value cannot be used, or the node does not run. Nothing changes.
        """
        server = self._server
        if server is None:
            raise ConfigError("the node does not run, so it has no bandwidth to set", setting="bandwidth")
        try:
            server.set_bandwidth(dict(tenants))
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error), setting="bandwidth") from error

    def bandwidth(self) -> dict[int, tuple[float, int, int]]:
        """Return what `set_bandwidth` has set; empty unless the node runs."""
        server = self._server
        return {} if server is None else server.bandwidth()

    def keys(self) -> dict[str, dict[str, int]]:
        """Return the counters of each access key in the keys file, by the key's name; empty unless the node runs.

        The counters are the tenant's number, and the bytes, pins, unfinished publishes, leases and connections of
        programs with this key.
        """
        server = self._server
        return {} if server is None else server.keys()

    def refusals(self) -> dict[int, dict[int, int]]:
        """Return how many requests were refused, by tenant and then by status; empty unless the node runs."""
        server, control = self._server, self._control
        if server is None or control is None:
            return {}
        found = server.refusals()
        for (tenant, status), count in control.refusals().items():
            of_tenant = found.setdefault(tenant, {})
            of_tenant[status] = of_tenant.get(status, 0) + count
        return found

    def latencies(self) -> dict[int, tuple[list[int], float]]:
        """Return reply times by operation, as `NodeServer.latencies` does; empty unless the node runs."""
        server = self._server
        return {} if server is None else server.latencies()

    def certificates(self) -> dict[str, float]:
        """Return, by file name, when the certificates in use expire, in seconds since 1970; empty without TLS."""
        return {} if self._tls is None else self._tls.ends()

    def last_reload(self) -> LastReload:
        """Return the time and the outcome of the node's last attempt to read its keys and certificate.

        Before the first `reload`, this is the time at which this object was made, as a success.
        """
        return self._last_reload

    def __enter__(self) -> Node:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _open(self, listening: socket.socket, folder: Folder, undo: ExitStack) -> None:
        if self.metrics_address is not None:
            # Imported here, because most nodes serve no metrics and should start quickly.
            from farpool.cluster.node.metrics import NodeCollector
            from farpool.cluster.node.metrics_server import MetricsServer

            # It serves before the node runs; `stats` is empty until then.
            metrics = MetricsServer(self.metrics_address, NodeCollector(self))
            undo.callback(metrics.close)
            self.metrics_address = metrics.address
        exposures = None
        if self._fabric:
            here = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
            exposures = Exposures(self._fabric, loopback=here.is_loopback)
            undo.callback(exposures.close)
        # Locked before the segments are opened, because another node may use them.
        folder.take()
        undo.callback(folder.close)
        self.identity = folder.identity(kept=not self._ephemeral)
        if self._joining.registry is not None:
            # Before the segments are opened: that may take long, and no other process may have the identity.
            self._registration = self._registered_in(folder)
            undo.callback(self._registration.close)
        server = self._server_in(folder)
        folder.settle()
        undo.callback(server.stop)
        ticket_keys: TicketKeys | None = None
        if self._registration is not None:
            # Before the first connection: a policy that comes later would find the memory taken.
            self._tenancy = self._tenancy_of(server, folder, self._registration)
            undo.callback(self._tenancy.close)
            ticket_keys = self._ticket_keys_of(folder, self._registration)
            undo.callback(ticket_keys.close)
        server.follow_record(self._drains)
        # A reload waits for this, because the parts made here would keep the keys from before it.
        with self._using_keys:
            _expect(server, self._keys)
            local = undo.enter_context(folder.listen(_BACKLOG_CONNECTIONS))
            undo.callback(folder.socket_path.unlink, missing_ok=True)
            server.start()
            instance = os.urandom(16)
            identity = Identity(self.name, instance, self.identity, self._capacity, host_id(), str(folder.socket_path))
            access = NodeAccess(identity, self._keys, None if self._tls is None else self._tls.context)
            claims = Claims(server, self.identity, None if ticket_keys is None else ticket_keys.keys)
            control = ControlService(server, self.stats, exposures, claims, self._peer_key)
            undo.callback(control.close)
            listener = Listener([listening, local], access, server, control)
            # Set before the listener starts, because its clients may ask for `stats` at once.
            self._server, self._listener, self._control = server, listener, control
        listener.start()
        # Registered last, so it ends first: no client may come while the rest is taken down.
        undo.callback(listener.stop)
        if self._registration is not None:
            self._registration.ready(empty=server.stats()["objects"] == 0)
            # Even before the listener ends: programs then know that the node is down and does not only answer late.
            undo.callback(self._registration.close)
        for following in (self._tenancy, ticket_keys):
            if following is not None:
                following.start()

    def _tenancy_of(self, server: NodeServer, folder: Folder, registration: Registration) -> Tenancy:
        # Imported here, because most nodes have no registry and are to start at once.
        from farpool.cluster.node.tenancy import Tenancy
        from farpool.cluster.tenants.follower import part_of

        def apply(policy: KnownPolicy, evicts: bool) -> None:
            server.set_memory(part_of(policy, self._capacity, "dram"), evicts)
            limits = {number: tenant.bandwidth for number, tenant in policy.tenants.items()}
            server.set_bandwidth({number: (one.share, one.guarantee, one.cap) for number, one in limits.items()})

        assert self._joining.registry is not None
        tenancy = Tenancy(
            self._joining.registry, self.identity, folder.path, kept=not self._ephemeral, apply=apply, log=log
        )
        tenancy.begin(registration.address, is_away=registration.is_late)
        return tenancy

    def _ticket_keys_of(self, folder: Folder, registration: Registration) -> TicketKeys:
        from farpool.cluster.node.ticket_keys import TicketKeys

        assert self._joining.registry is not None
        ticket_keys = TicketKeys(self._joining.registry, folder.path, kept=not self._ephemeral, log=log)
        ticket_keys.begin(registration.address, is_away=registration.is_late)
        return ticket_keys

    def _registered_in(self, folder: Folder) -> Registration:
        media = {"dram": self._capacity}
        if self._nvme is not None:
            media["nvme"] = self._nvme[1]
        return self._joining.register(
            self.identity,
            self.name,
            self.address,
            media,
            folder.path,
            self._cancelled,
            kept=not self._ephemeral,
            follow=self._follow_record,
        )

    def _follow_record(self, draining: bool) -> None:
        """Refuse new objects while the member's record says that it drains, so programs with an old list obey, too."""
        self._drains = draining
        server = self._server
        if server is not None:
            server.follow_record(draining)
        log("the record says that this member drains" if draining else "the record says that this member is active")

    def _server_in(self, folder: Folder) -> NodeServer:
        path, nvme_capacity = self._nvme or ("", 0)
        was_there = os.path.lexists(path)
        try:
            return NodeServer(
                str(folder.path),
                self._capacity,
                ephemeral=self._ephemeral,
                grace=self._grace,
                spin=self._spin,
                nvme=path,
                nvme_capacity=nvme_capacity,
                shares=self._shares,
            )
        except (OSError, ValueError, RuntimeError) as error:
            if path and not was_there:
                Path(path).unlink(missing_ok=True)
            if isinstance(error, OSError) and path and str(error.filename).startswith(f"{path}: "):
                raise ConfigError(
                    f"--nvme is {path!r}, which cannot be used: {error.strerror}", setting="nvme"
                ) from error
            if isinstance(error, RuntimeError):
                raise ConfigError(f"--nvme: {error}", setting="nvme") from error
            raise ConfigError(f"the folder {folder.path} cannot be used: {error}", setting="folder") from error

    def _own_folder(self, name: str) -> Folder:
        group = group_id(self._socket_group) if self._socket_group else None
        folder = Folder(default_folder(name) if self._path is None else self._path, group)
        self._room = self._capacity
        if self._ephemeral:
            folder.check(0)
        else:
            self._room = folder.check(self._capacity)
        if self._ephemeral and self._capacity > (room := available_memory()):
            raise ConfigError(
                f"--dram is {format_size(self._capacity)}, but the host has {format_size(room)} of memory left; lend "
                "less",
                setting="dram",
            )
        return folder

    def _resolved(self) -> tuple[socket.AddressFamily, tuple[str, int]]:
        """Return the family and the address to bind, IPv4 if the host has it.

        Raises ConfigError if the node may not listen at this address.
        """
        if self.address.scheme == "unix":
            raise ConfigError(f"--listen is {str(self.address)!r}, expected HOST:PORT", setting="listen")
        if self.address.scheme == "tls" and self._tls is None:
            raise ConfigError(
                f"--listen is {str(self.address)!r}, but there is no certificate; give --tls DIR", setting="listen"
            )
        try:
            found = socket.getaddrinfo(self.address.host.encode(), self.address.port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            raise ConfigError(
                f"--listen is {str(self.address)!r}, but the host is not known: {error.strerror}", setting="listen"
            ) from error
        family, _, _, _, target = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        host = str(target[0])
        beyond = not ipaddress.ip_address(host.partition("%")[0]).is_loopback
        if self._keys is None and beyond:
            raise ConfigError(
                f"--listen is {str(self.address)!r}, which other hosts can reach, but there are no access keys; give "
                "--keys FILE, or listen on 127.0.0.1",
                setting="listen",
            )
        if self._tls is None and beyond and not self._insecure_plaintext:
            missing = "" if tls_available else " (first sudo apt-get install libssl-dev, and build farpool again)"
            raise ConfigError(
                f"--listen is {str(self.address)!r}, which other hosts can reach, but there is no TLS: give --tls DIR, "
                f"a folder of 'farpool certs issue'{missing}, listen on 127.0.0.1, or give --insecure-plaintext if no "
                "stranger can reach the network",
                setting="listen",
            )
        return family, (host, int(target[1]))


def _expect(server: NodeServer, keys: Mapping[str, Grant] | None) -> None:
    """Give the data loop the present tenants and keys, and which of them may hold memory."""
    memory_rights = Right.READ | Right.WRITE | Right.PUBLISH
    grants = {
        name: (grant.tenant, bool(grant.rights & memory_rights), grant.bytes) for name, grant in (keys or {}).items()
    }
    server.expect_tenants({tenant for tenant, has_memory, _ in grants.values() if has_memory})
    server.expect_keys(grants)


def _own_memory() -> int:
    """Return the resident bytes of this process, without files and shared memory."""
    _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _listening(target: tuple[socket.AddressFamily, tuple[str, int]], address: Address) -> socket.socket:
    family, where = target
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Connections of an earlier start may still be in TIME_WAIT, and would keep the port from this one.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(where)
        listening.listen(_BACKLOG_CONNECTIONS)
    except OSError as error:
        listening.close()
        advice = "another process listens there; choose another port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(
            f"--listen is {str(address)!r}, where this process cannot listen: {advice or error.strerror}",
            setting="listen",
        ) from error
    return listening
