"""A real etcd cluster on free loopback ports, whose members can be killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from farpool.cluster.registry import Registry
from farpool.cluster.registry.etcd import EtcdRegistry
from farpool.errors import RegistryError
from tests.nodes import stop

ETCD = shutil.which("etcd") or ("/usr/bin/etcd" if os.access("/usr/bin/etcd", os.X_OK) else None)
needs_etcd = pytest.mark.skipif(ETCD is None, reason="etcd is not installed (Debian: etcd-server)")
START_SECONDS = 120.0


class Member:
    """One etcd process with its folder and its ports."""

    def __init__(self, number: int, folder: Path, client: int, peer: int) -> None:
        self.name = f"m{number}"
        self.folder = folder / self.name
        self.client, self.peer = client, peer
        self.process: subprocess.Popen[bytes] | None = None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(60)

    def stop(self) -> None:
        assert self.process is not None
        stop(self.process.pid)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)


class Cluster:
    """Members that are started together."""

    def __init__(self, members: int, folder: Path, *, scheme: str = "http", options: Sequence[str] = ()) -> None:
        ports = _free_ports(2 * members)
        self.members = [Member(i, folder, ports[2 * i], ports[2 * i + 1]) for i in range(members)]
        self._scheme = scheme
        self._options = list(options)
        for member in self.members:
            self.start(member)

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        return [("127.0.0.1", member.client) for member in self.members]

    @property
    def hosts(self) -> str:
        return ",".join(f"127.0.0.1:{member.client}" for member in self.members)

    def start(self, member: Member) -> None:
        peers = ",".join(f"{one.name}=http://127.0.0.1:{one.peer}" for one in self.members)
        client, peer = f"{self._scheme}://127.0.0.1:{member.client}", f"http://127.0.0.1:{member.peer}"
        with open(member.folder.parent / f"{member.name}.log", "ab") as log:
            member.process = subprocess.Popen(
                [
                    *(str(ETCD), "--name", member.name, "--data-dir", str(member.folder), "--log-level", "error"),
                    *("--listen-client-urls", client, "--advertise-client-urls", client),
                    *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
                    *("--initial-cluster", peers),
                    *self._options,
                ],
                stdout=log,
                stderr=log,
            )

    def registry(self, prefix: str = "test/", timeout: float = 30.0, **options: object) -> Registry:
        return EtcdRegistry(*self.endpoints, prefix=prefix, timeout=timeout, **options)  # type: ignore[arg-type]

    def wait(self, **options: object) -> None:
        """Wait until every member answers by itself."""
        until = time.monotonic() + START_SECONDS
        for endpoint in self.endpoints:
            with EtcdRegistry(endpoint, timeout=5.0, **options) as registry:  # type: ignore[arg-type]
                while True:
                    try:
                        registry.get("nothing")
                        break
                    except RegistryError:
                        if time.monotonic() > until:
                            raise
                        time.sleep(0.1)

    def end(self) -> None:
        for member in self.members:
            if member.process is not None and member.process.poll() is None:
                member.process.kill()
                member.process.wait(60)


@contextlib.contextmanager
def running_cluster(members: int, **options: object) -> Iterator[Cluster]:
    with tempfile.TemporaryDirectory(prefix="farpool-etcd-", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(members, Path(folder), **options)  # type: ignore[arg-type]
        try:
            if not options:
                cluster.wait()
            yield cluster
        finally:
            cluster.end()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
