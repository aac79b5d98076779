"""Nodes as processes that follow the policy of tenants: killed, and without their registry."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.abc.registry import Delete, Registry
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.node.tenancy import FILE
from farpool.cluster.registry import open_registry
from farpool.cluster.store import Store
from farpool.cluster.tenants.administration import TenantChange, list_tenants, remove_tenant, set_tenant
from farpool.errors import ConfigError
from tests.members.registered import write
from tests.nodes import eventually, stats
from tests.registry.cluster import needs_etcd, running_cluster

pytestmark = pytest.mark.slow
of_one_kind = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
"""Registries of the other kind behave alike here, as tests without processes show."""

MIB = 1 << 20
COMMAND = [sys.executable, "-c", "from farpool.cli.main import main; main()", "tenants"]
SECRET = "x" * 32
KEY = "t{}:" + SECRET
PIECE = bytes(256 << 10)


@pytest.fixture
def registry(place: str) -> Iterator[Registry]:
    with open_registry(place, timeout=60.0) as registry:
        yield registry


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    path.touch(mode=0o600)
    for tenant in (1, 2):
        with path.open("a") as file:
            file.write(f'[keys.t{tenant}]\nsecret = "{SECRET}"\ntenant = {tenant}\nrights = ["read", "publish"]\n')
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, check=False)


def guarantee(registry: Registry, number: int, nbytes: int, burst: int = 0) -> int:
    change = TenantChange(guaranteed={"dram": nbytes}, burst={"dram": burst})
    return set_tenant(registry, f"t{number}", change, number=number)[2]


def metrics(node: RunningNode) -> dict[str, float]:
    """The node's metrics by name and labels, without its own name."""
    with urllib.request.urlopen(node.ready["metrics"], timeout=60) as page:
        lines = (
            page.read().decode().replace(f'node="{node.folder.name}",', "").replace("farpool_node_", "").splitlines()
        )
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def follows(node: RunningNode, revision: int) -> Callable[[], bool]:
    return lambda: stats(node.address)["policy_revision"] == revision


def reads(node: RunningNode, revision: int) -> Callable[[], bool]:
    """The same for a node with access keys, as its metrics say it."""
    return lambda: metrics(node)[f'policy_revision{{node="{node.folder.name}"}}'] == revision


def fill(store: Store, name: str, count: int) -> None:
    for number in range(count):
        store.put(f"{name}/{number}", PIECE)


def of_tenant(node: RunningNode, tenant: int, what: str) -> float:
    return metrics(node)[f'tenant_{what}{{tenant="{tenant}"}}']


def test_a_policy_reaches_running_nodes_and_the_commands_show_it(place: str, registry: Registry) -> None:
    options: dict[str, Any] = {"registry": place, "slow_start": 0, "metrics": "127.0.0.1:0"}
    with running_node("96MiB", **options) as one, running_node("32MiB", **options) as two:
        assert metrics(one)[f'policy_revision{{node="{one.folder.name}"}}'] == 0
        with pytest.raises(ConfigError, match=r"would be 129 MiB .* the pool lends 128 MiB .*members: 2"):
            guarantee(registry, 0, 129 * MIB)
        done = run(
            *("set", "web", "--number", "0", "--guarantee", "dram=64MiB", "--burst", "dram=100MiB", "--priority", "2"),
            *("--bandwidth-share", "2", "--bandwidth-guarantee", "1GB/s", "--registry", place),
        )
        assert done.returncode == 0, done.stderr
        found = list_tenants(registry)
        assert (found.media, found.guaranteed("dram")) == ({"dram": 128 * MIB}, 64 * MIB)
        for node, part in ((one, 3), (two, 1)):
            eventually(follows(node, found.revision))
            with Store(node.address) as store:
                store.put("key", b"value")
            assert of_tenant(node, 0, "share_bytes") == part * 16 * MIB
            assert of_tenant(node, 0, "burst_bytes") == part * 25 * MIB
            assert of_tenant(node, 0, "priority") == 2
            assert f'policy_silence_seconds{{node="{node.folder.name}"}}' in metrics(node)
        eventually(follows(one, remove_tenant(registry, "web")[1]))
        assert of_tenant(one, 0, "share_bytes") == 96 * MIB
        assert of_tenant(one, 0, "burst_bytes") == 0


@of_one_kind
def test_a_guarantee_is_kept_and_a_lowered_burst_evicts_only_its_tenant(
    place: str, registry: Registry, keys: Path
) -> None:
    options: dict[str, Any] = {"registry": place, "slow_start": 0, "metrics": "127.0.0.1:0", "keys": str(keys)}
    with (
        running_node("32MiB", share=["1=8MiB"], **options) as node,
        Store(node.address, key=KEY.format(1)) as first,
        Store(node.address, key=KEY.format(2)) as second,
    ):
        first.put("key", b"value")
        assert of_tenant(node, 1, "share_bytes") == 8 * MIB
        eventually(reads(node, guarantee(registry, 2, 24 * MIB)))
        assert of_tenant(node, 1, "share_bytes") == 8 * MIB  # the policy does not name it
        eventually(reads(node, guarantee(registry, 1, 4 * MIB)))
        assert of_tenant(node, 1, "share_bytes") == 4 * MIB
        fill(second, "b", 80)
        fill(first, "a", 100)
        assert all(second.exists(f"b/{number}") for number in range(80))
        assert first.exists("a/99")
        eventually(reads(node, guarantee(registry, 2, 0, 5 * MIB)))
        eventually(lambda: of_tenant(node, 2, "used_bytes") <= 5 * MIB)
        assert of_tenant(node, 2, "used_bytes") > 4 * MIB
        assert first.exists("a/99")


@of_one_kind
def test_a_killed_node_keeps_the_policy_when_its_registry_was_wiped(place: str, registry: Registry) -> None:
    options: dict[str, Any] = {"registry": place, "slow_start": 0, "member_ttl": 2}
    with running_node("32MiB", **options) as node:
        revision = guarantee(registry, 0, 8 * MIB, 16 * MIB)
        eventually(follows(node, revision))
        assert (node.folder / FILE).stat().st_mode & 0o777 == 0o600
        write(registry, *[Delete(entry.key) for entry in registry.range("").entries])
        eventually(lambda: "wiped or replaced" in node.log)
        assert stats(node.address)["policy_revision"] == revision
        node.restart()
        assert stats(node.address)["policy_revision"] == revision
        with Store(node.address) as store:
            fill(store, "a", 80)
        assert 15 * MIB < stats(node.address)["used"] <= 16 * MIB
        node.kill()
        (node.folder / FILE).write_bytes(b"")
        node.start()
        assert "is not used: it has 0 bytes" in node.log
        assert stats(node.address)["policy_revision"] == 0
        with Store(node.address) as store:
            fill(store, "b", 120)
        assert stats(node.address)["used"] > 28 * MIB


@needs_etcd
def test_a_killed_node_starts_with_its_policy_while_the_registry_is_away() -> None:
    with running_cluster(1) as cluster:
        [etcd], url = cluster.members, f"etcd://{cluster.hosts}/pool"
        with running_node("32MiB", registry=url, slow_start=0, member_ttl=2) as node:
            with open_registry(url, timeout=60.0) as registry:
                revision = guarantee(registry, 0, 8 * MIB, 16 * MIB)
            eventually(follows(node, revision))
            with Store(node.address) as store:
                fill(store, "a", 60)
            etcd.kill()
            eventually(lambda: stats(node.address)["registered"] == 0)
            assert stats(node.address)["policy_revision"] == revision
            node.restart()
            told = stats(node.address)
            assert (told["policy_revision"], told["policy_registry_revision"], told["registered"]) == (revision, 0, 0)
            with Store(node.address) as store:
                assert all(store.exists(f"a/{number}") for number in range(60))
                fill(store, "b", 80)
            assert 15 * MIB < stats(node.address)["used"] <= 16 * MIB
            cluster.start(etcd)
            cluster.wait()
            with open_registry(url, timeout=60.0) as registry:
                newer = guarantee(registry, 0, 8 * MIB, 24 * MIB)
            eventually(follows(node, newer))
            eventually(lambda: stats(node.address)["registered"] == 1)


@of_one_kind
def test_a_node_without_a_registry_or_a_policy_is_as_before(place: str) -> None:
    with running_node("32MiB", share=["5=4MiB"]) as node:
        assert "policy_revision" not in stats(node.address)
        assert not (node.folder / FILE).exists()
    with running_node("32MiB", registry=place, share=["5=4MiB"]) as node:
        eventually(follows(node, 0))
        assert not (node.folder / FILE).exists()
        assert "tenants" not in node.log
