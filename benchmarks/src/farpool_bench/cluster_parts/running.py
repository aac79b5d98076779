"""Processes of a pool that the parts measure: members of an etcd, managers, and a node that two tenants use."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import Registry, open_registry
from farpool.cluster.tenants.administration import TenantChange, set_tenant
from farpool.cluster.wire.frames import TOUCH, Op, pack_frame
from farpool.errors import FarpoolError, RegistryError
from farpool.sizes import parse_size
from farpool_bench.turns_flood import KEYS, connected, put_of, received_whole

__all__ = [
    "SECRET",
    "RunningManager",
    "TwoTenants",
    "key_of",
    "registries",
    "running_manager",
    "running_sqlite",
    "wait_for",
    "warm",
]

SECRET = "0123456789abcdef"
_START_S = 60.0
_LOOK_S = 0.02
_WARM_BYTES = 8 << 20
_KEEP = 1
_METRIC = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_TENANT = re.compile(r'tenant="(\d+)"')
_WAYS = ("received", "sent")


def key_of(name: str) -> str:
    """Access key, ``NAME:SECRET``, of a program of `TwoTenants`."""
    return f"{name}:{SECRET}"


def wait_for(condition: Callable[[], object], what: str, timeout: float = _START_S) -> float:
    """Wait until a condition holds; return how many seconds it took.

    Raises
    ------
    FarpoolError
        It did not hold in time.
    """
    start = time.monotonic()
    while not condition():
        if time.monotonic() > start + timeout:
            raise FarpoolError(f"{what} did not happen within {timeout:g} s")
        time.sleep(_LOOK_S)
    return time.monotonic() - start


# Registries


def etcd_program() -> str | None:
    """Path of etcd; None if it is not installed."""
    return shutil.which("etcd") or ("/usr/bin/etcd" if os.access("/usr/bin/etcd", os.X_OK) else None)


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextlib.contextmanager
def running_etcd(folder: Path | None, members: int = 3) -> Iterator[str]:
    """Run members of an etcd; yields the address of their registry.

    Raises
    ------
    FarpoolError
        etcd is not installed, or its members did not answer.
    """
    program = etcd_program()
    if program is None:
        raise FarpoolError("etcd is not installed (Debian and Ubuntu: apt-get install etcd-server)")
    ports = _free_ports(2 * members)
    peers = ",".join(f"m{one}=http://127.0.0.1:{ports[members + one]}" for one in range(members))
    with ExitStack() as stack:
        place = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="farpool-etcd-", dir=folder, ignore_cleanup_errors=True)
        )
        for number in range(members):
            client, peer = (f"http://127.0.0.1:{ports[at + number]}" for at in (0, members))
            words = ["--name", f"m{number}", "--data-dir", f"{place}/m{number}", "--initial-cluster", peers]
            words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--log-level", "error"]
            words += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
            log = stack.enter_context(open(f"{place}/m{number}.log", "wb"))
            process = subprocess.Popen([program, *words], stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        address = "etcd://" + ",".join(f"127.0.0.1:{port}" for port in ports[:members]) + "/bench"
        wait_for(lambda: _answers(address), "an answer of etcd")
        yield address


def _answers(address: str) -> bool:
    try:
        with open_registry(address, timeout=2.0) as registry:
            registry.get("nothing")
    except RegistryError:
        return False
    return True


@contextlib.contextmanager
def running_sqlite(folder: Path | None) -> Iterator[str]:
    """Make a folder for a registry in a file; yields its address."""
    with tempfile.TemporaryDirectory(prefix="farpool-registry-", dir=folder) as place:
        yield f"sqlite://{place}/registry.sqlite"


def registries(folder: Path | None) -> Iterator[tuple[str, contextlib.AbstractContextManager[str]]]:
    """The kinds of registries that can run here: a file, and an etcd of three members if it is installed."""
    yield "SQLite", running_sqlite(folder)
    if etcd_program() is not None:
        yield "etcd", running_etcd(folder)


# Managers


class RunningManager:
    """A process of ``farpool manager``.

    Attributes
    ----------
    url : str
        Its address.
    name : str
        Its number in the registry.
    """

    def __init__(self, registry: str, options: Sequence[str], folder: str) -> None:
        self._log = Path(folder, f"manager-{time.monotonic_ns()}.log")
        words = ["--registry", registry, "--listen", "127.0.0.1:0", "--json", "--audit", f"{self._log}.audit", *options]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "farpool", "manager", *words], stdout=subprocess.PIPE, stderr=log
            )
        try:
            ready = self._ready_line()
        except BaseException:
            self.kill()
            raise
        self.url, self.name = str(ready["address"]), str(ready["manager"])

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def get(self, path: str) -> Any:
        """Ask the manager; return the decoded JSON of its answer."""
        with urllib.request.urlopen(self.url + path, timeout=_START_S) as reply:
            return msgspec.json.decode(reply.read())

    def kill(self) -> None:
        """End the process with SIGKILL. Idempotent."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _ready_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        deadline, line = time.monotonic() + _START_S, b""
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                data = os.read(self._process.stdout.fileno(), 4096) if ready else b""
                if not data:
                    raise FarpoolError(f"a manager was not ready: {self._log.read_text(errors='replace')[-2000:]}")
                line += data
        ready_line: dict[str, Any] = msgspec.json.decode(line)
        return ready_line


@contextlib.contextmanager
def running_manager(registry: str, *options: str) -> Iterator[RunningManager]:
    """Run a manager; it is killed at the end of the block."""
    with tempfile.TemporaryDirectory(prefix="farpool-manager-", ignore_cleanup_errors=True) as folder:
        manager = RunningManager(registry, options, folder)
        try:
            yield manager
        finally:
            manager.kill()


# A node that two tenants use


def warm(address: str, key: str, nbytes: int) -> None:
    """Put objects of 8 MiB until a node has written to all of its memory, so that later puts pay for no page fault."""
    with connected(address, key) as stream:
        for number in range(-(-nbytes // _WARM_BYTES)):
            stream.sendall(put_of(b"warm %d" % number, bytes(_WARM_BYTES)))
            received_whole(stream)


class TwoTenants:
    """A node with the tenants ``flooding`` and ``victim``, which also has the key ``quick`` of the latency class.

    Parameters
    ----------
    stack : ExitStack
        Ends the node.
    folder : Path or None
        Folder for the registry.
    dram : str
        Memory that the node lends. All of it is written to.

    Attributes
    ----------
    node : RunningNode
        The node.
    registry : Registry
        The registry whose policy the node follows.
    """

    TENANTS: ClassVar = {"flooding": 1, "victim": 2, "quick": 2}

    def __init__(self, stack: ExitStack, folder: Path | None, dram: str = "512MiB") -> None:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-keys-")))
        keys = place / "keys.toml"
        keys.touch(mode=0o600)
        lines = []
        for name, tenant in self.TENANTS.items():
            lines.append(f'[keys.{name}]\nsecret = "{SECRET}"\ntenant = {tenant}\nrights = ["read", "publish"]\n')
            lines.append('class = "latency"\n' if name == "quick" else "")
        keys.write_text("".join(lines))
        address = stack.enter_context(running_sqlite(folder))
        self.registry: Registry = stack.enter_context(open_registry(address))
        self.node: RunningNode = stack.enter_context(
            running_node(dram, keys=str(keys), ephemeral=True, registry=address, slow_start=0, metrics="127.0.0.1:0")
        )
        warm(self.node.address, key_of("flooding"), parse_size(dram))

    def limit(self, **changes: TenantChange) -> None:
        """Write policies of tenants, and wait until the node applies them."""
        revision = 0
        for name, change in changes.items():
            _, _, revision = set_tenant(self.registry, name, change, number=self.TENANTS[name])
        wait_for(lambda: self._applied() >= revision, "the node's new policy")

    def moved(self) -> dict[str, int]:
        """Bytes that the node has received from each tenant and sent to it, all at the same moment."""
        found = self._metrics()
        return {
            name: int(sum(found.get(f"farpool_node_tenant_{way}_bytes_total", {}).get(tenant, 0) for way in _WAYS))
            for name, tenant in self.TENANTS.items()
        }

    def fill(self) -> None:
        """Put the objects that programs read, in case a flood has evicted them."""
        for name in ("flooding", "victim"):
            with connected(self.node.address, key_of(name)) as stream:
                for key, nbytes in ((b"4 KiB", 4 << 10), (b"64 KiB", 64 << 10), (b"8 MiB", 8 << 20)):
                    stream.sendall(put_of(key, bytes(nbytes)))
                    received_whole(stream)
                    # A flood that puts next to this must not evict it: a program would wait for bytes that never come.
                    stream.sendall(pack_frame(Op.TOUCH, TOUCH.pack(0, _KEEP) + key))
                    received_whole(stream)
                for number in range(KEYS if name == "flooding" else 0):
                    stream.sendall(put_of(b"found %d" % number, b"x"))
                    received_whole(stream)
                stream.sendall(pack_frame(Op.GET, b"8 MiB"))
                if received_whole(stream) < 8 << 20:
                    raise FarpoolError(f"the node did not keep the objects of the tenant {name}")

    def _applied(self) -> float:
        return self._metrics().get("farpool_node_policy_revision", {}).get(-1, 0.0)

    def _metrics(self) -> dict[str, dict[int, float]]:
        """The node's metrics by name and tenant; -1 stands for metrics of the whole node."""
        with urllib.request.urlopen(self.node.ready["metrics"], timeout=_START_S) as reply:
            text = reply.read().decode()
        found: dict[str, dict[int, float]] = {}
        for name, labels, value in _METRIC.findall(text):
            tenant = _TENANT.search(labels)
            found.setdefault(name, {})[int(tenant[1]) if tenant else -1] = float(value)
        return found
