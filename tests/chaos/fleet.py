"""The pool of a run: three members of etcd, five nodes, three managers, and the programs of three tenants."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from farpool.cluster.manager.credentials import set_identity
from farpool.cluster.manager.records import Role as Rights
from farpool.cluster.registry import Registry, open_registry
from farpool.errors import FarpoolError
from tests.certificates import Certificates, keys_file
from tests.chaos.machines import Disk, Machine
from tests.chaos.processes import ChaosProcess
from tests.chaos.schedule import COUNTS, Role
from tests.registry.cluster import ETCD

__all__ = ["PROGRAMS", "Fleet", "persist"]

PATIENCE_S = 120.0
PROGRAMS = (
    ("objects-1", "objects", 1),
    ("objects-2", "objects", 2),
    ("names-1", "names", 1),
    ("loans-2", "loans", 2),
    ("memory-3", "memory", 3),
)
"""Name, kind and tenant of each program."""
_NUMBERS: dict[Role, int] = {"etcd": 10, "node": 20, "manager": 30, "program": 40}
_NODE_MIB, _NODE_DISK_MIB, _ETCD_DISK_MIB, _MANAGER_DISK_MIB = 96, 128, 320, 2
_LEASE = "ttl=30&reclaim_ms=60000"
_RESULT = TypeVar("_RESULT")


def persist(act: Callable[[], _RESULT], what: str) -> _RESULT:
    """Return the result of an action, which is tried until it works."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return act()
        except FarpoolError as error:
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} failed for {PATIENCE_S:g} s: {error}") from error
            time.sleep(0.2)


class Fleet:
    """All processes of a run, each on its own machine.

    Parameters
    ----------
    folder : Path
        Folder for logs, journals and disks.

    Attributes
    ----------
    place : str
        URL of the registry.
    processes : dict
        The processes by role.
    registry : Registry
        A client of the registry.
    """

    def __init__(self, folder: Path) -> None:
        self.logs, self.journals = folder / "logs", folder / "journals"
        certificates = folder / "certificates"
        for path in (self.logs, self.journals, certificates):
            path.mkdir(parents=True)
        self._disks = Path("/run/disks")
        self._certificates = Certificates(certificates)
        self.machines: dict[Role, list[Machine]] = {
            role: [Machine(f"{role}{index}", _NUMBERS[role] + index) for index in range(COUNTS[role])]
            for role in COUNTS
        }
        self.place = f"etcd://{','.join(one.address for one in self.machines['etcd'])}/farpool"
        self._keys = keys_file(
            folder / "keys.toml",
            {
                "manager": (["repair", "admin"], 0),
                "peer": (["repair"], 0),
                **{name: (["read", "write", "publish"], tenant) for name, _, tenant in PROGRAMS},
            },
        )
        self.managers_tls = self._certificates.client("manager")
        self._peer_tls = self._certificates.client("peer")

        self.processes: dict[Role, list[ChaosProcess]] = {
            "etcd": [self._etcd(index) for index in range(COUNTS["etcd"])],
            "node": [self._node(index) for index in range(COUNTS["node"])],
            "manager": [self._manager(index) for index in range(COUNTS["manager"])],
            "program": [self._program(index) for index in range(COUNTS["program"])],
        }
        self.registry: Registry = open_registry(self.place, timeout=PATIENCE_S)

    @property
    def all(self) -> list[ChaosProcess]:
        """All processes."""
        return [one for role in self.processes.values() for one in role]

    @property
    def nodes(self) -> dict[str, str]:
        """Addresses of the nodes by name."""
        pairs = zip(self.processes["node"], self.machines["node"], strict=True)
        return {process.name: f"tls://{machine.address}:7471" for process, machine in pairs}

    @property
    def node_folders(self) -> dict[str, Path]:
        """Folders of the nodes by address."""
        pairs = zip(self.nodes.values(), self.processes["node"], strict=True)
        return {address: process.disk.folder / "node" for address, process in pairs if process.disk is not None}

    def start(self) -> None:
        """Start everything, and wait until all but the programs are ready."""
        for process in self.processes["etcd"]:
            process.start()
        persist(lambda: self.registry.get("any"), "the first call of etcd")
        for name, _, tenant in PROGRAMS:
            set_identity(self.registry, name, Rights.TENANT, tenant=tenant)
        for process in (*self.processes["node"], *self.processes["manager"]):
            process.start()
        for process in (*self.processes["node"], *self.processes["manager"]):
            process.wait_until_ready()
        for process in self.processes["program"]:
            process.start()

    def lose_node(self, index: int) -> None:
        """Kill a node and remove its folder: the next start is another member at the same address."""
        process = self.processes["node"][index]
        process.kill()
        assert process.disk is not None
        shutil.rmtree(process.disk.folder / "node")

    def close(self) -> None:
        """End all processes."""
        self.registry.close()
        for process in self.all:
            if process.lives and process.code is None:
                process.go_on()
                process.kill()

    def _etcd(self, index: int) -> ChaosProcess:
        machine = self.machines["etcd"][index]
        disk = Disk(self._disks / machine.name, _ETCD_DISK_MIB)
        peers = ",".join(f"{one.name}=http://{one.address}:2380" for one in self.machines["etcd"])
        client, peer = f"http://{machine.address}:2379", f"http://{machine.address}:2380"
        command = [str(ETCD), "--name", machine.name, "--data-dir", str(disk.folder / "data"), "--log-level", "warn"]
        command += ["--listen-client-urls", client, "--advertise-client-urls", client]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", peers]
        return ChaosProcess(machine.name, machine, command, self.logs, {}, disk)

    def _node(self, index: int) -> ChaosProcess:
        machine = self.machines["node"][index]
        disk = Disk(self._disks / machine.name, _NODE_DISK_MIB)
        served = self._certificates.node(machine.name, hosts=(machine.address,))
        command = [sys.executable, "-m", "farpool", "node", "--dram", f"{_NODE_MIB}MiB", "--json"]
        command += ["--listen", f"{machine.address}:7471", "--folder", str(disk.folder / "node")]
        command += ["--name", machine.name, "--keys", str(self._keys), "--tls", str(served)]
        command += ["--registry", self.place, "--label", f"rack=r{index}", "--slow-start", "5"]
        return ChaosProcess(machine.name, machine, command, self.logs, {"FARPOOL_TLS": str(self._peer_tls)}, disk)

    def _manager(self, index: int) -> ChaosProcess:
        machine = self.machines["manager"][index]
        disk = Disk(self._disks / machine.name, _MANAGER_DISK_MIB)
        served = self._certificates.node(machine.name, hosts=(machine.address,))
        command = [sys.executable, "-m", "farpool", "manager", "--registry", self.place, "--json"]
        command += ["--listen", f"{machine.address}:7470", "--tls", str(served), "--repair-grace", "3"]
        command += ["--audit", str(disk.folder / "audit.jsonl")]
        return ChaosProcess(machine.name, machine, command, self.logs, {"FARPOOL_TLS": str(self.managers_tls)}, disk)

    def _program(self, index: int) -> ChaosProcess:
        name, kind, tenant = PROGRAMS[index]
        machine = self.machines["program"][index]
        managers = ",".join(f"{one.address}:7470" for one in self.machines["manager"])
        environment = {
            "CHAOS_REGISTRY": self.place,
            "CHAOS_POOL": f"farpool://{managers}?tenant={tenant}&{_LEASE}",
            "FARPOOL_TLS": str(self._certificates.client(name)),
            "OMP_NUM_THREADS": "1",
        }
        journal = self.journals / f"{name}.jsonl"
        command = [sys.executable, "-m", "tests.chaos.programs", kind, str(journal), "{life}"]
        return ChaosProcess(name, machine, command, self.logs, environment)
