"""``farpool kv`` and ``farpool why`` on a real node."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.kv import BlockCache
from farpool.kv.blocks import namespaces
from farpool.kv.journal import journal_folder
from farpool.kv.keys import namespace_key
from tests.cli.here import command
from tests.kv.test_blocks import blocks
from tests.kv.test_keys import NAMESPACE
from tests.nodes import PATIENCE


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node() as running:
        yield running


def save(node: RunningNode, count: int, **changes: str) -> bytes:
    """Save blocks of a namespace and return its digest."""
    with BlockCache([node.address], replace(NAMESPACE, **changes), timeout=PATIENCE) as cache:  # type: ignore[arg-type]
        assert cache.save(*blocks(cache, count)) == [None] * count
        return cache.digest


def listed(node: RunningNode, folder: Path) -> dict[str, int]:
    said = command("kv", "ls", "--json", "--node", node.address, cwd=folder)
    assert said.returncode == 0, said.stderr
    return {one["namespace"]: one["blocks"] for one in json.loads(said.stdout)}


@pytest.mark.slow
def test_kv_is_listed_and_purged_by_weights_tenant_and_namespace(node: RunningNode, tmp_path: Path) -> None:
    one = save(node, 2, weights="one", tenant="alice").hex()
    two = save(node, 3, weights="two", tenant="alice").hex()
    three = save(node, 4, weights="two", tenant="bob").hex()
    four = save(node, 1, weights="four").hex()
    assert listed(node, tmp_path) == {one: 2, two: 3, three: 4, four: 1}
    shown = command("kv", "ls", "--node", node.address, cwd=tmp_path).stdout
    assert "alice" in shown
    for options, left in (
        (("--weights", "two", "--tenant", "alice"), {one: 2, three: 4, four: 1}),
        (("--weights", "two"), {one: 2, four: 1}),
        (("--tenant", "alice"), {four: 1}),
        (("--namespace", four), {}),
    ):
        assert command("kv", "purge", *options, "--node", node.address, cwd=tmp_path).returncode == 0
        assert listed(node, tmp_path) == left
    again = command("kv", "purge", "--weights", "two", "--node", node.address, cwd=tmp_path)
    assert (again.returncode, again.stderr) == (1, "0 blocks removed\n")


def test_blocks_whose_description_is_lost_are_told_and_removed_by_their_namespace(
    node: RunningNode, tmp_path: Path
) -> None:
    known = save(node, 2, weights="lost", tenant="alice").hex()
    lost = save(node, 3, weights="lost", tenant="bob")
    left = f"3 blocks of unknown namespace {lost.hex()}: farpool kv purge --namespace {lost.hex()}\n"
    with Store(node.address, timeout=PATIENCE) as store:
        assert store.drop(namespace_key(lost))
    shown = command("kv", "ls", "--node", node.address, cwd=tmp_path)
    assert shown.stderr == left
    assert listed(node, tmp_path) == {known: 2, lost.hex(): 3}
    # They may be of these weights, so it is no success.
    done = command("kv", "purge", "--weights", "lost", "--node", node.address, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, f"2 blocks removed\n{left}")
    done = command("kv", "purge", "--namespace", lost.hex(), "--node", node.address, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "3 blocks removed\n")
    assert listed(node, tmp_path) == {}


@pytest.mark.parametrize("ttl", [None, 600.0])
def test_a_description_outlives_the_blocks_that_came_after_it(ttl: float | None) -> None:
    with running_node("4MiB") as small, Store(small.address, timeout=PATIENCE) as store:
        with BlockCache([small.address], NAMESPACE, timeout=PATIENCE, ttl=ttl) as cache:
            first, values = blocks(cache, 1)
            assert cache.save(first, values) == [None]
            told = store.stat(namespace_key(cache.digest))
            for number in range(16):  # four times as much as there is room for
                store.put(f"other {number}", bytes(1 << 20))
            assert cache.lookup(first).leading == 0
        assert list(namespaces(store)) == [NAMESPACE.digest]
    assert told is not None
    assert told.kept
    assert told.ttl is None if ttl is None else told.ttl is not None and 610 < told.ttl < 721


@pytest.mark.parametrize(
    ("options", "said"), [((), "no KV is selected"), (("--namespace", "zz"), "expected 32 hexadecimal digits")]
)
def test_a_purge_of_nothing_is_refused(node: RunningNode, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    refused = command("kv", "purge", *options, "--node", node.address, cwd=tmp_path)
    assert refused.returncode == 2
    assert said in refused.stderr


@pytest.mark.slow
def test_another_process_says_why_a_request_missed(node: RunningNode, tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from farpool.kv import BlockCache\n"
        "from tests.kv.test_blocks import NAMESPACE, blocks\n"
        f"with BlockCache([{node.address!r}], NAMESPACE, timeout={PATIENCE}) as cache:\n"
        "    keys, values = blocks(cache, 4, first=640)\n"
        "    cache.save(keys[:3], values[:3], request='chat-17')\n"
        "    cache.lookup(keys, request='chat-17')\n"
        "    print('ready', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
    ) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        try:
            assert engine.stdout.readline() == b"ready\n"
            said = command("why", "chat-1", "--json", cwd=tmp_path)
            steps = json.loads(said.stdout)
            assert [(one["process"], one["step"], one["done"], one["blocks"], one["reasons"]) for one in steps] == [
                (engine.pid, "save", 3, 3, {}),
                (engine.pid, "lookup", 3, 4, {"absent": 1}),
            ]
            table = command("why", "chat-1", cwd=tmp_path)
            assert table.returncode == 0
            assert "1 absent" in " ".join(table.stdout.split())
        finally:
            engine.stdin.close()
            engine.wait(PATIENCE)
    gone = command("why", "chat-17", cwd=tmp_path)
    assert gone.returncode == 1
    assert "no engine of this user" in gone.stderr
    assert not (journal_folder() / f"kv-{engine.pid}.sock").exists()
