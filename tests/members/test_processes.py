"""Nodes as processes in the pool of a registry: they are killed, stopped, copied, and lose their registry."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool import NodeFullError, Store
from farpool.abc.membership import MemberInfo, MemberState
from farpool.abc.registry import Registry
from farpool.cluster.members.records import MEMBERS, alive_key, read_members, record_key
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import open_registry
from tests.nodes import eventually, move, stats
from tests.registry.cluster import Cluster, needs_etcd, running_cluster
from tests.registry.conftest import place, single

__all__ = ["place", "single"]

pytestmark = pytest.mark.slow
of_one_kind = pytest.mark.parametrize("place", ["sqlite"], indirect=True)
"""Registries of the other kind behave alike here, as tests without processes show."""

COMMAND = [sys.executable, "-c", "from farpool.cli.main import main; main()"]


@pytest.fixture
def registry(place: str) -> Iterator[Registry]:
    with open_registry(place, timeout=60.0) as registry:
        yield registry


def command(*words: str) -> str:
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=120, check=True).stdout


def identity(node: RunningNode) -> bytes:
    return bytes.fromhex(node.ready["identity"])


def member(registry: Registry, node: RunningNode) -> MemberInfo | None:
    return read_members(registry.range(MEMBERS).entries, {})[0].get(identity(node))


def state(registry: Registry, node: RunningNode) -> MemberState | None:
    found = member(registry, node)
    return None if found is None else found.state


def test_a_node_is_listed_from_its_start_to_its_end(place: str, registry: Registry) -> None:
    options: dict[str, Any] = {"label": ["rack=r1", "zone=a"], "weight": 2, "slow_start": 0, "metrics": "127.0.0.1:0"}
    with running_node(registry=place, **options) as node:
        assert node.ready["registry"] == registry.address
        assert member(registry, node) == MemberInfo(
            (node.address,), identity(node), MemberState.ACTIVE, 2.0, {"rack": "r1", "zone": "a"}
        )
        [shown] = json.loads(command("members", "--registry", place, "--json"))
        assert (shown["name"], shown["state"], shown["media"]) == (node.folder.name, "active", {"dram": 64 << 20})
        assert shown["bandwidth"]["dram"] > 0
        assert node.address in command("members", "--registry", place)
        with urllib.request.urlopen(node.ready["metrics"], timeout=20) as page:
            text = page.read().decode()
        assert f'farpool_node_registered{{node="{node.folder.name}"}} 1.0' in text
        assert "farpool_node_registry_silence_seconds" in text
        assert stats(node.address)["registered"] == 1
        move(node)  # it was killed
        assert state(registry, node) is MemberState.ACTIVE
        moved = member(registry, node)
        assert moved is not None
        assert moved.addresses == (node.address,)
        assert node.terminate() == 0
        assert state(registry, node) is MemberState.SUSPECT


@of_one_kind
def test_a_killed_node_does_not_wait_for_its_lease(place: str, registry: Registry) -> None:
    with running_node(registry=place, member_ttl=3600) as node:
        before = identity(node)
        node.kill()
        assert state(registry, node) is MemberState.ACTIVE  # the lease goes on
        node.start()
        assert identity(node) == before
        assert state(registry, node) is MemberState.ACTIVE
        assert "waiting for the end" not in node.log


def test_a_killed_node_counts_as_down_when_its_lease_has_ended(place: str, registry: Registry) -> None:
    with running_node(registry=place, member_ttl=2) as node:
        node.kill()
        eventually(lambda: state(registry, node) is MemberState.SUSPECT)


def test_a_node_that_stood_still_past_its_lease_comes_back_by_itself(place: str, registry: Registry) -> None:
    with running_node(registry=place, member_ttl=1) as node:
        before = registry.get(alive_key(identity(node)))
        assert before is not None
        with node.suspended():
            eventually(lambda: state(registry, node) is MemberState.SUSPECT)
        eventually(lambda: state(registry, node) is MemberState.ACTIVE)
        after = registry.get(alive_key(identity(node)))
        assert after is not None
        assert after.revision > before.revision


@of_one_kind
def test_a_copied_folder_is_refused_while_the_original_runs(place: str, registry: Registry, tmp_path: Path) -> None:
    with running_node(registry=place, member_ttl=5) as node:
        entry = registry.get(record_key(identity(node)))
        copy = RunningNode(str(tmp_path / "copy"), ["--dram", "64MiB", "--registry", place])
        shutil.copytree(node.folder, copy.folder, ignore=shutil.ignore_patterns("socket", "node.lock"))
        copy.folder.chmod(0o700)
        with contextlib.closing(copy):
            with pytest.raises(RuntimeError, match=rf"process {node.pid} is already the member {identity(node).hex()}"):
                copy.start()
            assert state(registry, node) is MemberState.ACTIVE
            assert registry.get(record_key(identity(node))) == entry
            (copy.folder / "identity").unlink()
            copy.start()
            assert identity(copy) != identity(node)
            assert state(registry, copy) is state(registry, node) is MemberState.ACTIVE


@of_one_kind
def test_of_two_processes_with_one_identity_only_one_writes(place: str, registry: Registry, tmp_path: Path) -> None:
    with running_node(registry=place, member_ttl=1) as node, contextlib.ExitStack() as stack:
        copy = RunningNode(str(tmp_path / "copy"), ["--dram", "64MiB", "--registry", place, "--member-ttl", "3600"])
        stack.callback(copy.close)
        shutil.copytree(node.folder, copy.folder, ignore=shutil.ignore_patterns("socket", "node.lock"))
        copy.folder.chmod(0o700)
        with node.suspended():
            copy.start()
            entry = registry.get(record_key(identity(copy)))
        eventually(lambda: "another process is this member" in node.log)
        assert f"process {copy.pid}" in node.log
        assert stats(node.address)["registered"] == 0
        assert registry.get(record_key(identity(copy))) == entry
        copy.terminate()
        eventually(lambda: state(registry, node) is MemberState.ACTIVE and stats(node.address)["registered"] == 1)
        found = member(registry, node)
        assert found is not None
        assert found.addresses == (node.address,)
        assert node.log.count("another process is this member") == 1


@of_one_kind
def test_a_member_drains_on_after_a_restart(place: str, registry: Registry) -> None:
    with running_node(registry=place) as node, running_node(registry=place) as other:
        command("members", "drain", node.folder.name, "--registry", place)
        node.restart()
        assert state(registry, node) is MemberState.DRAINING
        node.terminate()
        node.start()
        assert state(registry, node) is MemberState.DRAINING
        command("members", "undrain", node.folder.name, "--registry", place)
        assert state(registry, node) is state(registry, other) is MemberState.ACTIVE
        refused = subprocess.run(
            [*COMMAND, "members", "remove", other.folder.name, "--registry", place],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert refused.returncode == 2
        assert f"process {other.pid}" in refused.stderr
        other.terminate()
        command("members", "remove", other.folder.name, "--registry", place)
        assert state(registry, other) is None
        other.start()
        assert state(registry, other) is MemberState.ACTIVE


@of_one_kind
def test_a_node_refuses_objects_of_programs_with_an_old_list_while_its_record_says_that_it_drains(place: str) -> None:
    with (
        running_node(registry=place, member_ttl=1) as node,
        running_node(registry=place),
        Store(node.address, timeout=20) as store,
    ):
        store.put("before", b"value")
        numbers, refusals = itertools.count(), list[str]()

        def takes_objects() -> bool:
            try:
                store.put(f"key-{next(numbers)}", b"value")
            except NodeFullError as error:
                refusals.append(str(error))
                return False
            return True

        command("members", "drain", node.folder.name, "--registry", place)
        eventually(lambda: not takes_objects())
        node.restart()  # as the record says from the first moment on
        assert not takes_objects()
        assert store.get("before") == b"value"
        assert stats(node.address)["state"] == 1
        command("members", "undrain", node.folder.name, "--registry", place)
        eventually(takes_objects)
        assert stats(node.address)["state"] == 0
        assert all("the node is draining: it takes no new objects and leases" in refusal for refusal in refusals)


def test_a_node_that_waits_for_its_registry_ends_when_it_is_told_to(tmp_path: Path) -> None:
    options = ["--dram", "1MiB", "--listen", "127.0.0.1:0", "--folder", str(tmp_path / "n")]
    with subprocess.Popen(
        [*COMMAND, "node", *options, "--registry", "etcd://127.0.0.1:1/pool"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        assert "waiting for the registry" in process.stderr.readline()
        process.terminate()
        assert process.wait(120) == 0
        assert "stopped during the start" in process.stderr.read()
    assert not (tmp_path / "n").exists()


@contextlib.contextmanager
def own_etcd() -> Iterator[tuple[Cluster, str]]:
    with running_cluster(1) as cluster:
        yield cluster, f"etcd://{cluster.hosts}/pool"


@needs_etcd
def test_a_node_goes_on_while_its_registry_is_away_and_starts_again_without_it() -> None:
    with own_etcd() as (cluster, url), running_node(registry=url, member_ttl=2) as node:
        [etcd] = cluster.members
        etcd.kill()
        eventually(lambda: stats(node.address)["registered"] == 0)
        assert stats(node.address)["registry_silence"] > 0
        assert node.log.count("the registry does not answer") == 1
        node.restart()
        assert "the node starts without its registry" in node.log
        assert stats(node.address)["registered"] == 0
        cluster.start(etcd)
        cluster.wait()
        with open_registry(url, timeout=60.0) as registry:
            eventually(lambda: stats(node.address)["registered"] == 1)
            assert state(registry, node) is MemberState.ACTIVE
            assert "registered again" in node.log
            etcd.kill()
            eventually(lambda: stats(node.address)["registered"] == 0)
            cluster.start(etcd)
            cluster.wait()
            eventually(lambda: stats(node.address)["registered"] == 1)
            assert state(registry, node) is MemberState.ACTIVE
            etcd.kill()
            assert node.terminate() == 0
