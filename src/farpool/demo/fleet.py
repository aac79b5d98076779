"""A shared pool on this host for the demo: a registry in a file, a manager and three nodes, all as processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farpool.abc.membership import MemberState
from farpool.cluster.members.administration import find_member, list_members
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import Registry, open_registry
from farpool.cluster.store import Store
from farpool.cluster.tenants.administration import TenantChange, set_tenant
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Channel
from farpool.errors import FarpoolError

__all__ = ["NAMES", "TRAINER", "WEB", "Fleet", "Held", "running_fleet"]

NAMES = ("alpha", "beta", "gamma")
TRAINER, WEB = 1, 2
"""Numbers of the two tenants."""
_KEYS = {
    "trainer": (TRAINER, ["read", "write"]),
    "web": (WEB, ["read", "publish"]),
    "manager": (0, ["admin", "repair"]),
}
_START_TIMEOUT_S = 60.0
_CALL_TIMEOUT_S = 2.0
_COPIES_TIMEOUT_S = 30.0
_REGISTRY_TIMEOUT_S = 30.0
_MEMBER_TTL_S = 1
"""Seconds after which the pool notices that a node was killed."""
_REPAIR_GRACE_S = 1
"""Seconds for which the manager waits for a killed node to come back; a person would rather choose the default."""


@dataclass(frozen=True, slots=True)
class Held:
    """Memory that a node has in use.

    Attributes
    ----------
    leased : int
        Bytes of leases.
    objects : int
        Bytes of objects.
    """

    leased: int = 0
    objects: int = 0


class Fleet:
    """The processes of the demo's pool. Made by `running_fleet`.

    Attributes
    ----------
    place : str
        Address of the registry.
    registry : Registry
        The registry.
    manager : str
        ``HOST:PORT`` of the manager.
    nodes : dict of str to RunningNode
        The nodes by name.
    """

    def __init__(self, folder: Path, stack: ExitStack, dram: int) -> None:
        self._keys = {name: secrets.token_hex(16) for name in _KEYS}
        self._channels: dict[str, Channel] = {}
        self._asking = threading.Lock()
        """Held during a question for a node's memory: events and samples ask in different threads."""
        self.place = f"sqlite://{folder}/registry.sqlite"
        self.registry: Registry = stack.enter_context(open_registry(self.place, timeout=_REGISTRY_TIMEOUT_S))
        stack.callback(self._disconnect)
        keys, peer = folder / "keys.toml", folder / "peer-key"
        _write_secret(keys, self._keys_file())
        _write_secret(peer, self.key("manager"))
        self.manager = stack.enter_context(_running_manager(folder, self.place, self.key("manager")))
        self.nodes: dict[str, RunningNode] = {}
        for rack, name in enumerate(NAMES, 1):
            self.nodes[name] = stack.enter_context(
                running_node(
                    dram,
                    name=name,
                    keys=keys,
                    peer_key=peer,
                    registry=self.place,
                    label=f"rack=r{rack}",
                    member_ttl=_MEMBER_TTL_S,
                    slow_start=0,
                )
            )

    def key(self, name: str) -> str:
        """Return an access key as ``NAME:SECRET``. The names are trainer, web and manager."""
        return f"{name}:{self._keys[name]}"

    def guarantee(self, tenants: Mapping[str, int]) -> None:
        """Guarantee bytes of the whole pool's memory to tenants, by their names."""
        for name, nbytes in tenants.items():
            change = TenantChange(guaranteed={"dram": nbytes}, burst={"dram": nbytes})
            set_tenant(self.registry, name, change, number=_KEYS[name][0])

    def store(self) -> Store:
        """Open the store of the tenant `web`, which keeps two copies of each object."""
        return Store(self.place, replicas=2, key=self.key("web"), transport="tcp")

    def held(self, name: str) -> Held | None:
        """Ask a node for the memory that it has in use; return None if it does not answer in two seconds."""
        with self._asking:
            channel = self._channels.get(name)
            if channel is None:
                key = AccessKey.parse(self.key("manager"))
                channel = Channel(parse_address(self.nodes[name].address), key=key, transport="tcp")
                self._channels[name] = channel
            try:
                stats = channel.call("stats", time.monotonic() + _CALL_TIMEOUT_S)
            except FarpoolError:
                del self._channels[name]
                channel.close()
                return None
        return Held(int(stats["lent"]), int(stats["object_bytes"]))

    def copies(self, name: str) -> set[bytes]:
        """Ask a node for the keys of the objects of which it has a copy.

        Raises
        ------
        FarpoolError
            The node does not answer in time.
        """
        with Store(self.nodes[name].address, key=self.key("web"), timeout=_COPIES_TIMEOUT_S, transport="tcp") as one:
            return set(one.keys())

    def takes_objects(self, name: str) -> bool:
        """Return True if the pool counts a node as up, and gives it new objects."""
        with contextlib.suppress(FarpoolError):
            return find_member(list_members(self.registry), name).state is MemberState.ACTIVE
        return False

    def lose(self, name: str) -> None:
        """Kill a node as if its host had lost power: its memory is gone, too."""
        node = self.nodes[name]
        node.kill()
        shutil.rmtree(node.folder)

    def _keys_file(self) -> str:
        return "".join(
            f'[keys.{name}]\nsecret = "{self._keys[name]}"\nrights = {msgspec.json.encode(rights).decode()}\n'
            f"tenant = {tenant}\n"
            for name, (tenant, rights) in _KEYS.items()
        )

    def _disconnect(self) -> None:
        for channel in self._channels.values():
            channel.close()


@contextlib.contextmanager
def running_fleet(dram: int) -> Iterator[Fleet]:
    """Run a registry, a manager and three nodes, which lend `dram` bytes each, while the context is open.

    Raises
    ------
    FarpoolError
        A process does not start; the message contains its output.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="farpool-demo-")))
        try:
            fleet = Fleet(folder, stack, dram)
        except RuntimeError as error:
            raise FarpoolError(f"a node of the demo did not start: {error}") from error
        yield fleet


@contextlib.contextmanager
def _running_manager(folder: Path, registry: str, key: str) -> Iterator[str]:
    """Run a manager, and yield its ``HOST:PORT``."""
    command = [sys.executable, "-m", "farpool", "manager", "--json", "--listen", "127.0.0.1:0", "--registry", registry]
    command += ["--audit", str(folder / "audit.jsonl"), "--repair-grace", str(_REPAIR_GRACE_S)]
    log = folder / "manager.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env={**os.environ, "FARPOOL_KEY": key}
        )
    assert process.stdout is not None
    try:
        end = threading.Timer(_START_TIMEOUT_S, process.kill)
        end.start()
        line = process.stdout.readline()
        end.cancel()
        if not line:
            raise FarpoolError(f"the manager of the demo did not start: {log.read_text(errors='replace')}")
        yield str(msgspec.json.decode(line)["address"]).partition("://")[2]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def _write_secret(file: Path, text: str) -> None:
    file.touch(mode=0o600)
    file.write_text(text)
