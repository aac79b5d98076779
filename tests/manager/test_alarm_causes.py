"""Each alarm, caused for real: nodes and managers are processes, and a registry in a file is between them."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from farpool import Store
from farpool.abc.registry import Put
from farpool.cli.main import app
from farpool.cluster.members.administration import remove
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.registry import open_registry
from farpool.cluster.tenants.administration import TenantChange, set_tenant
from farpool.cluster.tenants.records import policy_key
from farpool.cluster.wire.frames import Op, pack_frame
from tests.attacks.wire import Connection
from tests.manager.running import RunningManager, Stream, events, leader
from tests.nodes import eventually

pytestmark = pytest.mark.slow

MIB = 1 << 20
QUICK = "0.1"
"""Interval of the looks. With it, all times of alarms are a fiftieth of their usual length."""


class Pool:
    """Nodes, managers and their registry."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.place = f"sqlite://{folder}/registry.sqlite"
        self.registry = stack.enter_context(open_registry(self.place, timeout=60.0))

    def manager(self, *options: str, interval: str = QUICK) -> RunningManager:
        manager = RunningManager(self.place, "--alarm-interval", interval, *options)
        self.stack.callback(manager.close)
        eventually(lambda: leader(self.registry) is not None)
        return manager

    def node(self, dram: str = "8MiB", **options: Any) -> RunningNode:
        return self.stack.enter_context(running_node(dram, registry=self.place, slow_start=0, **options))

    def stream(self, manager: RunningManager) -> Stream:
        client = self.stack.enter_context(manager.client())
        return self.stack.enter_context(events(client))

    def status(self, *words: str) -> str:
        done = CliRunner().invoke(app, ["status", "--registry", self.place, *words], env={"COLUMNS": "200"})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        assert done.exit_code == 0, done.output
        return done.output


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(tmp_path, stack)


def raised(manager: RunningManager, kind: str) -> dict[str, Any] | None:
    return next((one for one in manager.get("/v1/alarms")["alarms"] if one["kind"] == kind), None)


def check(pool: Pool, manager: RunningManager, stream: Stream, kind: str, text: str, subject: str = "") -> None:
    """An alarm is an event, a metric, an entry of the API, and a line for people."""
    eventually(lambda: raised(manager, kind) is not None)
    found = raised(manager, kind)
    assert found is not None
    assert re.search(text, found["text"]), found
    assert found["subject"] == subject or not subject
    while (event := stream.until("alarm.raised")[-1][1])["kind"] != kind:
        pass
    assert event["text"] == found["text"]
    with manager.client() as client:
        eventually(lambda: f'farpool_manager_alarms{{kind="{kind}"}} 1.0' in client.get("/metrics").text)
    lines = [line for line in pool.status().splitlines() if line.startswith(f"alarm {kind} ")]
    assert len(lines) == 1
    assert re.search(text, lines[0])


def check_cleared(manager: RunningManager, stream: Stream, kind: str) -> None:
    eventually(lambda: raised(manager, kind) is None)
    while stream.until("alarm.cleared")[-1][1]["kind"] != kind:
        pass


@contextmanager
def repeated(act: Callable[[], object]) -> Iterator[None]:
    """Do something again and again, because an alarm ends soon after its cause."""
    end, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not end.wait(0.02):
                act()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
    if errors:
        raise errors[0]


def data(node: RunningNode, purpose: str = "data") -> Connection:
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")
    return Connection((host, int(port)), purpose=purpose)


def test_lookups_that_find_nothing_while_puts_succeed(pool: Pool) -> None:
    manager, node = pool.manager(), pool.node()
    stream = pool.stream(manager)
    eventually(lambda: len(manager.get("/v1/members")["members"]) == 1)
    with data(node) as connection:
        done = 0

        def work() -> None:
            """Put objects under some keys, and look up others, as a program with another layout of keys does."""
            nonlocal done
            for number in range(done, done + 20):
                assert connection.put(b"layout-1/%d" % number, b"value").done
            connection.lookup([b"layout-2/%d" % number for number in range(done, done + 20)])
            done += 20

        with repeated(work):
            check(pool, manager, stream, "no-hits", "not one key was found", "tenant-0")
        with repeated(lambda: connection.lookup([b"layout-1/%d" % number for number in range(20)])):
            check_cleared(manager, stream, "no-hits")


def test_objects_with_fewer_copies_than_confirmed(pool: Pool) -> None:
    nodes = [pool.node() for _ in range(2)]
    with Store(pool.place, replicas=2) as store:
        for number in range(5):
            store.put(f"key-{number}", b"value" * 100)
    manager = pool.manager("--repair-grace", "0.5")
    stream = pool.stream(manager)
    eventually(lambda: "0" in manager.get("/v1/repairs")["tenants"])
    eventually(lambda: "5 objects" in pool.status())
    assert "all have their copies" in pool.status()
    assert f"if {nodes[0].folder.name} were lost, 5 objects" in " ".join(pool.status().split())
    nodes[0].kill()
    check(pool, manager, stream, "too-few-copies", "5 objects have fewer copies", "tenant-0")
    assert "5 have too few copies" in pool.status()
    nodes[0].start()
    check_cleared(manager, stream, "too-few-copies")


def test_repair_that_cannot_copy(pool: Pool) -> None:
    first, _second = pool.node("32MiB"), pool.node("32MiB")
    with Store(pool.place, replicas=2) as store:
        store.put("large", os.urandom(8 * MIB))
    manager = pool.manager("--repair-grace", "0.5")
    stream = pool.stream(manager)
    third = pool.node("4MiB")  # the object has no place there
    eventually(lambda: "0" in manager.get("/v1/repairs")["tenants"])
    first.kill()
    check(pool, manager, stream, "repair-stuck", "the copies of 1 objects could not be made", "tenant-0")
    remove(pool.registry, third.ready["identity"], force=True)
    third.kill()
    first.start()
    check_cleared(manager, stream, "repair-stuck")


def test_eviction_that_makes_no_room(pool: Pool) -> None:
    manager, node = pool.manager(), pool.node()
    stream = pool.stream(manager)
    with data(node, "control") as control, data(node) as connection:
        lent = [control.lend(MIB).result.get("lease") for _ in range(16)]
        assert lent[-1] is None  # all memory is lent, so nothing can be evicted
        value = b"v" * MIB
        with repeated(lambda: connection.put(b"key", value)):
            check(pool, manager, stream, "eviction-stuck", "for want of room in [0-9]+ s, and has evicted nothing")
        for lease in lent:
            if lease is not None:
                control.release(lease)
        assert connection.put(b"key", value).done
        check_cleared(manager, stream, "eviction-stuck")


def damage_policy(pool: Pool, node: RunningNode) -> None:
    """Let the registry have a policy that the node cannot take over."""
    set_tenant(pool.registry, "web", TenantChange(guaranteed={"dram": MIB}), number=3)
    eventually(lambda: policy_of(node) > 0)
    pool.registry.commit([], [Put(policy_key(3), b"{")])
    set_tenant(pool.registry, "batch", TenantChange(priority=1), number=4)


def policy_of(node: RunningNode) -> int:
    with data(node, "control") as control:
        return int(control.stats()["policy_revision"])


def test_a_policy_older_than_the_registrys(pool: Pool) -> None:
    manager, node = pool.manager(), pool.node()
    stream = pool.stream(manager)
    damage_policy(pool, node)
    check(pool, manager, stream, "old-policy", "it applies revision [0-9]+ of", node.ready["identity"])
    set_tenant(pool.registry, "web", TenantChange(guaranteed={"dram": MIB}), number=3)
    check_cleared(manager, stream, "old-policy")


def test_alarms_survive_the_leader(pool: Pool) -> None:
    first, node = pool.manager(), pool.node()
    damage_policy(pool, node)
    eventually(lambda: raised(first, "old-policy") is not None)
    before = raised(first, "old-policy")
    second = pool.manager()
    stream = pool.stream(second)
    first.kill()
    # With no leader, the registry still has the alarm.
    assert [one["kind"] for one in json.loads(pool.status("--json"))["alarms"]] == ["old-policy"]
    eventually(lambda: leader(pool.registry) == second.ready["manager"])
    seen = stream.until("manager.leads")
    with second.client() as client:
        eventually(lambda: 'farpool_manager_alarms{kind="old-policy"} 1.0' in client.get("/metrics").text)
    assert raised(second, "old-policy") == before
    set_tenant(pool.registry, "web", TenantChange(guaranteed={"dram": MIB}), number=3)
    seen += stream.until("alarm.cleared")
    assert seen[-1][1]["kind"] == "old-policy"
    assert "alarm.raised" not in [kind for kind, _ in seen]


def test_a_clock_that_jumps(pool: Pool) -> None:
    # The node's Python reads its clock through this file.
    code, offset = pool.folder / "code", pool.folder / "offset"
    code.mkdir()
    offset.write_text("0")
    (code / "sitecustomize.py").write_text(
        f"import time\nbefore = time.time\ntime.time = lambda: before() + float(open({str(offset)!r}).read() or 0)\n"
    )
    path = os.pathsep.join(filter(None, [str(code), os.environ.get("PYTHONPATH")]))
    manager, node = pool.manager(), pool.node(environment={"PYTHONPATH": path})
    stream = pool.stream(manager)
    with data(node, "control") as control:
        now = control.stats()["clock"]
        move(offset, "3600")
        assert control.stats()["clock"] > now + 3000
    check(pool, manager, stream, "clock", "its clock is 3[56][0-9]{2}[.][0-9] s ahead of", node.ready["identity"])
    move(offset, "0")
    check_cleared(manager, stream, "clock")


def move(offset: Path, seconds: str) -> None:
    new = offset.with_suffix(".new")
    new.write_text(seconds)
    new.replace(offset)  # the node never sees half of it


def test_a_member_that_comes_and_goes(pool: Pool) -> None:
    manager, node = pool.manager(interval="1"), pool.node()
    stream = pool.stream(manager)
    eventually(lambda: len(manager.get("/v1/members")["members"]) == 1)
    for _ in range(3):
        node.restart()
    check(pool, manager, stream, "flapping", "3 times in 120 s", node.ready["identity"])
    node.kill()
    remove(pool.registry, node.ready["identity"], force=True)
    check_cleared(manager, stream, "flapping")


def test_nvme_wear_above_its_budget(pool: Pool) -> None:
    manager = pool.manager()
    node = pool.node(nvme=(pool.folder / "far.nvme", "64MiB"), nvme_wear="64KiB")
    stream = pool.stream(manager)
    value = os.urandom(MIB // 2)
    with data(node) as connection:
        number = 0

        def work() -> None:
            nonlocal number
            number += 1
            connection.put(b"key-%d" % number, value)

        with repeated(work):
            text = "written to its NVMe file than 64 KiB a day"
            check(pool, manager, stream, "nvme-wear", text, node.ready["identity"])
    node.kill()
    remove(pool.registry, node.ready["identity"], force=True)
    check_cleared(manager, stream, "nvme-wear")


def test_a_version_that_is_refused_at_the_hello(pool: Pool) -> None:
    manager, node = pool.manager(), pool.node()
    stream = pool.stream(manager)
    host, _, port = node.address.removeprefix("tcp://").rpartition(":")

    def greet() -> None:
        hello = pack_frame(Op.HELLO, msgspec.msgpack.encode({"versions": [9, 9]}))
        with socket.create_connection((host, int(port)), 20) as connection:
            connection.sendall(hello)
            while connection.recv(1 << 16):
                pass

    with repeated(greet):
        check(pool, manager, stream, "incompatible", "has to be upgraded", node.ready["identity"])
    check_cleared(manager, stream, "incompatible")
