"""A node or a program without descriptors left is short of something for a while; nobody is denied for it."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import farpool
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire import host
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, Status
from farpool.errors import NodeError, NodeFullError
from tests.node.nodes import Peer, node
from tests.nodes import PATIENCE, eventually


def descriptors(pid: int) -> dict[int, str]:
    """What a process has open, by number."""
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # the list's own, or one that was closed since
            found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def sockets(pid: int) -> int:
    return sum(link.startswith("socket:") for link in descriptors(pid).values())


def limit(pid: int, free: int) -> int:
    """The limit on open files that leaves a process so many more."""
    used = descriptors(pid)
    number = 0
    while free or number in used:
        free -= number not in used
        number += 1
    return number


@contextmanager
def short(pid: int, free: int) -> Iterator[None]:
    """Leave a process only so many free descriptors."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit(pid, free), before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.fixture
def running() -> Iterator[RunningNode]:
    """A node with a tenant's files open and no connection."""
    with running_node() as running:
        idle = sockets(running.pid)
        with farpool.Store(running.address, transport="tcp") as store:
            store.put("key", b"value")
        eventually(lambda: sockets(running.pid) == idle)
        yield running


@pytest.mark.slow
def test_a_node_without_descriptors_is_full_for_a_while_and_denies_nobody(running: RunningNode) -> None:
    with short(running.pid, 1), pytest.raises(NodeFullError, match="is short of descriptors or memory") as caught:
        dial(parse_address(running.address), "data", deadline=time.monotonic() + PATIENCE)
    assert not caught.value.refused  # so a store asks it again


@pytest.mark.slow
def test_a_store_waits_for_a_node_that_has_no_descriptors(running: RunningNode) -> None:
    ends = threading.Event()

    def hold() -> None:
        with short(running.pid, 1):
            began.set()
            eventually(lambda: "is short of descriptors or memory" in running.log)
        ends.set()

    began = threading.Event()
    holder = threading.Thread(target=hold)
    holder.start()
    assert began.wait(PATIENCE)
    try:
        with farpool.Store(running.address, transport="tcp", timeout=PATIENCE) as store:
            store.put("other", b"value")
            assert ends.is_set()
            assert store.get("other") == b"value"
    finally:
        holder.join()


@pytest.mark.slow
def test_a_program_maps_no_objects_of_a_node_without_descriptors_for_them_and_reads_them_all_the_same(
    running: RunningNode,
) -> None:
    with short(running.pid, 3), farpool.Store(running.address) as store:
        assert store.get("key") == b"value"
        assert not store.nodes()[0].mapped


def test_a_publish_area_that_the_node_has_no_descriptor_for_is_refused_and_the_connection_goes_on(
    tmp_path: Path,
) -> None:
    with node(tmp_path, 8 << 20) as server:
        peer = Peer(server)
        with short(os.getpid(), 0):
            refused = peer.ask(Op.AREA)
        assert (refused.status, refused.meta) == (Status.FULL, b"Too many open files")
        assert peer.published(b"key", bytes(100_000))


@pytest.mark.slow
def test_a_program_without_descriptors_says_that_the_shortage_is_its_own(running: RunningNode) -> None:
    with short(os.getpid(), 0), pytest.raises(NodeError, match="this process is short of descriptors or memory"):
        dial(parse_address(running.address), "data", deadline=time.monotonic() + PATIENCE)


def test_the_host_is_asked_again_after_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    expected = host.host_id()
    assert expected
    host._boot_id.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(host, "_BOOT_ID", tmp_path / "nothing")
        assert host.host_id() == ""
    assert host.host_id() == expected
