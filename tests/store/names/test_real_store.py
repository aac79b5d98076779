"""Names over real nodes: objects of a name are not evicted, survive a node, and are released with the last hold."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import Names, Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.errors import NameHeldError, NameLostError, NameMissingError, NodeError
from tests.nodes import stop
from tests.registry.cluster import needs_etcd, running_cluster


@pytest.fixture
def nodes() -> Iterator[list[RunningNode]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_node("64MiB")) for _ in range(2)]


def read(names: Names, name: str) -> bytes:
    with names.open(name) as opened:
        return opened.read()


@pytest.mark.slow
def test_the_objects_of_a_name_survive_churn_and_the_loss_of_a_node(nodes: list[RunningNode], tmp_path: Path) -> None:
    value = os.urandom(3 << 20)
    with (
        Store(*(node.address for node in nodes), replicas=2, timeout=30.0) as store,
        Names(store, tmp_path / "registry", hold=0.0, timeout=60.0) as names,
    ):
        names.publish("n", value)
        with names.open("n") as opened:
            key = opened.manifest.pieces[0].key
        capacity = max(int((status.stats or {})["capacity"]) for status in store.nodes())
        for i in range(capacity * 3 // (4 << 20) + 1):  # three times the memory of a node
            store.put(f"churn/{i}", os.urandom(4 << 20), ttl=1000)
        assert store.get("churn/0") is None  # other objects were evicted
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
def test_a_name_survives_while_its_nodes_die_one_after_the_other_with_repairs_in_between(tmp_path: Path) -> None:
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
        nodes[1].kill()  # the remaining copies of both versions are on the third node
        assert reader.stdout.readline() == f"1 {values[0].hex()}\n"
        assert reader.stdout.readline() == f"2 {values[1].hex()}\n"
        assert reader.wait(60) == 0


@pytest.mark.slow
def test_a_node_refuses_to_keep_or_release_a_copy_whose_mark_has_changed(nodes: list[RunningNode]) -> None:
    with Store(*(node.address for node in nodes), replicas=2, timeout=30.0) as store:
        store.put("k", b"value", ttl=1000)
        first = store.touch_many(["k", "missing"], 1.0)
        assert (first.copies, [len(marks) for marks in first.marks]) == ([2, 0], [2, 0])
        seen = first.marks[:1]
        assert store.touch_many(["k"], None, keep=True, seen=seen).copies == [2]
        late = store.touch_many(["k"], 1.0, keep=False, seen=seen)
        assert (late.copies, late.refused) == ([0], [0])
        kept = store.touch_many(["k"], None, keep=True, seen=seen)  # a kept copy may be kept again
        assert kept.copies == [2]
        info = store.stat("k")
        assert info is not None
        assert (info.kept, info.ttl) == (True, None)
        assert store.touch_many(["k"], 60.0, keep=False, seen=kept.marks).copies == [2]
        assert store.touch_many(["k"], None, keep=True, seen=kept.marks).copies == [0]
        info = store.stat("k")
        assert info is not None
        assert not info.kept
        assert store.touch_many(["missing"], 1.0, keep=False, seen=[{}]).copies == [0]


PUBLISHER = """
import contextlib, itertools, sys, farpool

registry, node, name = sys.argv[1:]
times = {"hold": 0.0, "lease": 1.0, "timeout": 30.0}
with farpool.Store(node, timeout=30.0) as store, farpool.Names(store, registry, **times) as names:
    for turn in itertools.count():
        with contextlib.suppress(farpool.NameHeldError, farpool.NameMovedError, farpool.NameMissingError):
            names.publish(name, [b"%d" % (turn % 3) * 20000, b"%d" % (turn % 2) * 10000])
            if turn % 5 == 4:
                names.unpublish(name)
        print(turn, flush=True)
"""


@pytest.mark.slow
def test_no_name_waits_for_killed_publishers_of_other_names(tmp_path: Path) -> None:
    chance, registry = random.Random(5), tmp_path / "registry"
    with contextlib.ExitStack() as stack:
        node = stack.enter_context(running_node("64MiB"))
        store = stack.enter_context(Store(node.address, timeout=30.0, registry=registry))
        for trial in range(2):
            other = stack.enter_context(_publisher(str(registry), node.address, f"other {trial}"))
            stack.callback(other.kill)
            _await_turns(other, 2 + chance.randrange(10))
            other.kill()
            assert store.publish("ours", b"%d" % trial * 20000).version == trial + 1
            with store.open("ours") as opened:
                assert opened.read() == b"%d" % trial * 20000


@needs_etcd
@pytest.mark.slow
def test_publishers_stopped_for_longer_than_their_lease_lose_no_object_of_a_name(tmp_path: Path) -> None:
    chance = random.Random(7)
    contents = [[b"%d" % (turn % 3) * 20000, b"%d" % (turn % 2) * 10000] for turn in range(6)]
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(running_cluster(1))
        node = stack.enter_context(running_node("64MiB"))
        registry = f"etcd://{cluster.hosts}"
        store = stack.enter_context(Store(node.address, timeout=30.0))
        names = stack.enter_context(Names(store, registry, hold=0.0, timeout=30.0))
        others = [stack.enter_context(_publisher(registry, node.address, name)) for name in ("theirs", "more")]
        for other in others:
            stack.callback(other.kill)
        for turn in range(10):
            for other in others:
                _await_turns(other, 1 + chance.randrange(4))
                time.sleep(chance.random() / 50)
                stop(other.pid)
            _publish_after_its_lease(names, "theirs", contents[turn % 6])
            names.publish("ours", contents[(turn + 1) % 6])
            names.unpublish("theirs")
            names.sweep()
            for other in others:
                other.send_signal(signal.SIGCONT)
            for other in others:
                _await_turns(other, 2)
            assert read(names, "ours") == b"".join(contents[(turn + 1) % 6])
            with contextlib.suppress(NameMissingError):
                assert len(read(names, "more")) == 30000
        for other in others:
            other.kill()
        with names.open("ours") as opened:
            for piece in opened.manifest.pieces:
                info = store.stat(piece.key)
                assert info is not None
                assert info.kept


def _publisher(registry: str, node: str, name: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PUBLISHER, registry, node, name]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def _await_turns(publisher: subprocess.Popen[bytes], turns: int) -> None:
    assert publisher.stdout is not None
    for _ in range(turns):
        assert publisher.stdout.readline(), "the publisher has ended"


def _publish_after_its_lease(names: Names, name: str, content: list[bytes]) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            names.publish(name, content)
        except NameHeldError:
            assert time.monotonic() < until, "the lease of a stopped writer does not end"
            time.sleep(0.1)
        else:
            return
