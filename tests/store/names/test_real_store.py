"""Names over real nodes: what a name holds is not evicted, survives a node, and goes when nobody holds it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Names, Store
from farpool.errors import NameLostError, NodeError
from farpool.node.process import RunningNode, running_node


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_node("64MiB")) for _ in range(2)]


def read(names: Names, name: str) -> bytes:
    with names.open(name) as opened:
        return opened.read()


def test_what_a_name_holds_survives_churn_and_a_node(nodes: list[RunningNode], tmp_path: Path) -> None:
    value = os.urandom(3 << 20)
    with (
        Store(*(node.address for node in nodes), replicas=2, timeout=30.0) as store,
        Names(store, tmp_path / "registry", hold=0.0, timeout=60.0) as names,
    ):
        names.publish("n", value)
        with names.open("n") as opened:
            key = opened.manifest.pieces[0].key
        capacity = max(int((status.stats or {})["capacity"]) for status in store.nodes())
        for i in range(capacity * 3 // (4 << 20) + 1):  # three times what a node holds
            store.put(f"churn/{i}", os.urandom(4 << 20), ttl=1000)
        assert store.get("churn/0") is None  # others were evicted
        assert read(names, "n") == value
        assert names.publish("m", value).objects == 2
        names.unpublish("n")
        info = store.stat(key)
        assert info is not None
        assert info.kept
        names.unpublish("m")
        info = store.stat(key)
        assert info is None or not info.kept
        names.publish("n", value)
        nodes[0].kill()
        assert read(names, "n") == value
        nodes[1].kill()
    with (
        Store(*(node.address for node in nodes), replicas=2, timeout=1.0) as store,
        Names(store, tmp_path / "registry", timeout=60.0) as names,
        pytest.raises((NameLostError, NodeError)),
    ):
        read(names, "n")


READER = """
import sys, farpool

registry, *nodes = sys.argv[1:]
with farpool.Store(*nodes, replicas=2, timeout=30.0, registry=registry) as store:
    with store.open("model") as first, store.watch("model", after=first.info.version) as watch:
        print(first.info.version, first.read().hex(), flush=True)
        while (info := watch.next(timeout=5.0)) is None:
            pass
        print(first.info.version, first.read().hex(), flush=True)
    with store.open("model") as second:
        print(second.info.version, second.read().hex(), flush=True)
"""


@pytest.mark.slow
def test_a_name_lives_while_its_nodes_die_one_after_the_other_with_repairs_between(tmp_path: Path) -> None:
    registry, values = tmp_path / "registry", [os.urandom(3000), os.urandom(200_000)]
    with contextlib.ExitStack() as stack:
        nodes = [stack.enter_context(running_node("64MiB")) for _ in range(3)]
        addresses = [node.address for node in nodes]
        store = stack.enter_context(Store(*addresses, replicas=2, timeout=30.0, registry=registry))
        assert store.publish("model", values[0]).version == 1
        command = [sys.executable, "-W", "error", "-c", READER, str(registry), *addresses]
        reader = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(reader.kill)
        assert reader.stdout is not None
        assert reader.stdout.readline() == f"1 {values[0].hex()}\n"
        nodes[0].kill()
        repair = [sys.executable, "-m", "farpool", "store", "repair", "--replicas", "2", "--timeout", "30"]
        subprocess.run([*repair, *(f"--node={address}" for address in addresses)], check=True, timeout=100)
        assert store.publish("model", values[1], expect=1).version == 2
        nodes[1].kill()  # what is left of both versions lies on the third
        assert reader.stdout.readline() == f"1 {values[0].hex()}\n"
        assert reader.stdout.readline() == f"2 {values[1].hex()}\n"
        assert reader.wait(60) == 0
