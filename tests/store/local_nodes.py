"""Real data loops of nodes in this process, that can be killed, stopped from answering and replaced."""

from __future__ import annotations

import hashlib
import itertools
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from farpool._native import Connection, ConnectionPool, NodeServer, ObjectReader, TenantEpoch
from farpool.abc.membership import Membership
from farpool.abc.redundancy import Redundancy
from farpool.cluster.members import StaticMembers
from farpool.cluster.redundancy import Copies
from farpool.cluster.store import Store
from farpool.cluster.wire.features import FEATURES
from farpool.cluster.wire.frames import Right
from farpool.errors import NodeError, NodeTimeoutError
from tests.net.live_node import object_files, opened
from tests.node.nodes import walked

__all__ = ["LocalNode", "store_over"]

MIB = 1 << 20
_ALL = int(Right.READ | Right.WRITE | Right.PUBLISH | Right.ADMIN)
_SESSIONS = itertools.count(1)


class LocalNode:
    """A node's memory and the data loop over it."""

    def __init__(self, folder: Path, number: int, capacity: int = 8 * MIB, *, mapped: bool = False) -> None:
        self.name = f"tcp://node{number}:7471"
        self.mapped = mapped
        self.rights = _ALL
        self.features = FEATURES.bits
        self._folder = folder
        self._capacity = capacity
        self._lives = itertools.count()
        self.replace()

    def replace(self) -> None:
        """Begin anew, with nothing and as another node."""
        self.kill()
        self._path = self._folder / f"{self.name.rpartition('/')[2].partition(':')[0]}-{next(self._lives)}"
        self._path.mkdir()
        # Not a random one: the order of nodes for a key is the same in each run.
        self.identity = hashlib.sha256(self._path.name.encode()).digest()[:16]
        self.restart()

    def move(self, number: int) -> None:
        """Restart it at another address, on the memory that it left."""
        self.kill()
        self.name = f"tcp://node{number}:7471"
        self.restart()

    def kill(self) -> None:
        """End it; its memory stays."""
        server: NodeServer | None = getattr(self, "server", None)
        if server is not None:
            server.stop()
        self.server = None

    def restart(self) -> None:
        """Start it on the memory that it left."""
        server = NodeServer(str(self._path), self._capacity, grace=0.2)
        server.start()
        # Before `server`: a store's probe that sees the new server must not take it for the node before.
        self.contact = SimpleNamespace(
            identity=self.identity,
            id=os.urandom(16),
            largest=self._capacity,
            rights=Right(self.rights),
            features=self.features,
        )
        self.server = server

    def damage(self, value: bytes) -> None:
        """Flip a bit of the first object with this value where it lies in memory."""
        (path,) = self._path.glob("objects-0.data")
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            at = memory.find(value)
            assert at > 0
            memory[at] ^= 1

    @property
    def is_up(self) -> bool:
        return self.server is not None


Nodes = Callable[..., list[LocalNode]]
"""A function that makes nodes: their number, and the settings of each."""


class LocalChannel:
    """A store's channel to a local node, like `farpool.cluster.wire.channel.Channel`."""

    def __init__(self, node: LocalNode, nodes: Sequence[LocalNode] = ()) -> None:
        self.name = node.name
        self._nodes = nodes
        self.epoch = TenantEpoch()
        self.welcome: Any = None
        self.reader: ObjectReader | None = None
        self.one_sided = None
        self.pool = ConnectionPool()
        self.dialled = 0
        self._node = node
        self._session = next(_SESSIONS)
        self._lock = threading.Lock()
        self._closed = False

    def attach(self, deadline: float) -> ObjectReader | None:
        server = self._contact()
        if self._node.mapped and self.reader is None:
            self.reader = _read(server, self.epoch)
        return self.reader

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        connection = None if fresh else self.pool.take()
        if connection is None:
            server = self._contact()
            ours, theirs = socket.socketpair()
            try:
                server.adopt(theirs.detach(), self._session, 0, self._node.rights, "")
            except OSError as error:  # the node has just been killed
                ours.close()
                raise NodeError(f"{self.name}: connecting failed: {error}", node=self.name) from error
            connection = self.pool.lend(
                Connection(
                    ours.detach(),
                    self.name,
                    tenant=0,
                    credential=0,
                    spin=0.0,
                    area=self._node.mapped,
                    epoch=self.epoch,
                )
            )
            self.dialled += 1
        return connection

    def call(self, name: str, deadline: float, **arguments: Any) -> dict[str, Any]:
        server = self._contact()
        if name == "list":
            found = walked(server, 0, arguments.get("after", b""), arguments.get("prefix", b""), 128)
            return {"objects": found, "next": found[-1][0] if len(found) >= 128 else b""}
        assert name == "stats"
        return server.stats()

    def move(self, address: str) -> None:
        self.name, self._node = address, _named(self._nodes, address)

    def close(self) -> None:
        self._closed = True
        self.pool.close()

    def _contact(self) -> NodeServer:
        if self._closed:
            raise NodeError(f"{self.name}: this channel was closed", node=self.name)
        self._node = next((node for node in self._nodes if node.name == self.name), self._node)
        server = self._node.server
        if server is None or self._node.name != self.name:
            raise NodeError(f"{self.name}: connecting failed: Connection refused", node=self.name)
        if self.welcome is not self._node.contact:
            self.welcome = self._node.contact
            self.reader = None
        return server


class StoppedChannel(LocalChannel):
    """A way to a node that takes connections and does not answer on them."""

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        self._contact()
        time.sleep(max(0.0, deadline - time.monotonic()))
        raise NodeTimeoutError(f"{self.name}: the node did not answer within the deadline", node=self.name)


def _named(nodes: Sequence[LocalNode], address: str) -> Any:
    """Return the node at an address; a node that is down if there is none."""
    return next((node for node in nodes if node.name == address), SimpleNamespace(name=address, server=None))


def _read(server: NodeServer, epoch: TenantEpoch) -> ObjectReader:
    with object_files(server) as paths, opened(paths) as (index, data, visited):
        return ObjectReader(index, data, visited, "local", epoch=epoch)


def store_over(
    nodes: list[LocalNode],
    replicas: int = 1,
    timeout: float = 10.0,
    channel: type[LocalChannel] = LocalChannel,
    registry: Path | None = None,
    members: Membership | None = None,
    redundancy: Redundancy | None = None,
) -> Store:
    """A store on these nodes; with `members` on the ones that it lists."""
    store = Store.__new__(Store)
    store._start(
        members or StaticMembers(*[node.name for node in nodes]),
        lambda address: channel(_named(nodes, address), nodes),  # type: ignore[arg-type,return-value]
        redundancy or Copies(replicas),
        timeout,
        registry,
    )
    return store
