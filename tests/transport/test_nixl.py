"""One-sided transfers with NIXL, over TCP and, where the system allows it, from process to process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from farpool import Pool
from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    LeaseLostError,
    NodeError,
    NodeTimeoutError,
    ProtocolError,
    TierTimeoutError,
)
from farpool.node import Node
from farpool.node.nixl import Exposures
from farpool.store import Store
from farpool.testing import TierConformance
from farpool.tiers import Tier
from farpool.tiers.remote import Remote
from farpool.transport.access import AccessKey, Grant
from farpool.transport.address import Address
from farpool.transport.channel import Channel
from farpool.transport.frames import Right
from farpool.transport.nixl import Exposed, OneSided, Region

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu13") is None, reason="nixl-cu13 is not installed (farpool[rdma])"
)

MIB = 1 << 20
SECRET = b"0123456789abcdef"


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the other end takes part: otherwise the system copies between processes, even from a stopped one."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(
        Address("tcp", "127.0.0.1", 0), 64 * MIB, folder=tmp_path / "node", ephemeral=True, nixl=True, grace=1.0
    ) as running:
        yield running


@pytest.fixture
def exposures() -> Iterator[Exposures]:
    exposures = Exposures(loopback=True)
    exposures.hold(1)
    yield exposures
    exposures.close()


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(24 * MIB))
    return path


@pytest.fixture
def way() -> Iterator[OneSided]:
    way = OneSided("tcp://node")
    yield way
    way.close()


def exposing_process() -> psutil.Process:
    """The one process that exposes memory now."""
    (process,) = [child for child in psutil.Process().children() if "farpool.transport.nixl_worker" in child.cmdline()]
    return process


def read(region: Region, offset: int, nbytes: int, seconds: float = 10.0) -> bytes:
    into = bytearray(nbytes)
    region.read(offset, memoryview(into), soon(seconds))
    return bytes(into)


@pytest.mark.parametrize("transports", ["tcp", "all"])
def test_what_is_written_one_sided_is_in_the_file_and_is_read_back(
    exposures: Exposures, segment: Path, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    way = OneSided("tcp://node")
    region = way.attach(exposures.expose(1, str(segment)))
    try:
        for offset, nbytes in ((0, 1), (4095, 3), (MIB, 4 * MIB), (1, 4 * MIB + 1), (3 * MIB + 5, 17 * MIB)):
            assert read(region, offset, nbytes) == segment.read_bytes()[offset : offset + nbytes]
            data = os.urandom(nbytes)
            region.write(offset, memoryview(data), soon())
            assert segment.read_bytes()[offset : offset + nbytes] == data
            assert read(region, offset, nbytes) == data
    finally:
        way.close()


def test_a_range_outside_of_what_is_exposed_is_refused(exposures: Exposures, segment: Path, way: OneSided) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    for offset, nbytes in ((-1, 1), (24 * MIB, 1), (24 * MIB - 1, 2)):
        with pytest.raises(ValueError, match="outside of memory"):
            read(region, offset, nbytes)


def test_a_stopped_peer_is_a_timeout_and_never_writes_into_the_callers_memory_later(
    exposures: Exposures, segment: Path, way: OneSided
) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    contents = segment.read_bytes()
    assert read(region, 0, MIB) == contents[:MIB]
    process = exposing_process()
    process.suspend()
    try:
        buffer = bytearray(6 * MIB)
        for _ in range(12):  # also when what may be given up is used up
            began = time.monotonic()
            with pytest.raises(NodeTimeoutError, match="tcp://node"):
                region.read(0, memoryview(buffer), soon(0.1))
            assert time.monotonic() - began < 60.0
        buffer[:] = b"\xee" * len(buffer)
    finally:
        process.resume()
    deadline = soon(20)
    while way.slabs.given_up:
        assert read(region, MIB, MIB) == contents[MIB : 2 * MIB]
        assert time.monotonic() < deadline
    assert buffer == b"\xee" * len(buffer)
    assert read(region, 0, 24 * MIB) == contents


def test_a_write_that_was_given_up_never_overtakes_a_later_one(
    exposures: Exposures, segment: Path, way: OneSided
) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    assert len(read(region, 0, 1)) == 1
    process = exposing_process()
    process.suspend()
    try:
        with pytest.raises(NodeTimeoutError):
            region.write(0, memoryview(b"1" * 8 * MIB), soon(0.1))
        for _ in range(2):
            with pytest.raises(NodeTimeoutError, match="could not begin"):
                region.write(0, memoryview(b"2" * 8 * MIB), soon(0.1))
    finally:
        process.resume()
    region.write(0, memoryview(b"3" * 8 * MIB), soon())
    assert way.slabs.given_up == 0
    assert read(region, 0, 8 * MIB) == b"3" * 8 * MIB


def test_a_program_that_ends_in_the_middle_of_a_transfer_leaves_the_memory_to_be_exposed_again(
    exposures: Exposures, segment: Path, way: OneSided
) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    process = exposing_process()
    assert len(read(region, 0, 1)) == 1
    process.suspend()
    with pytest.raises(NodeTimeoutError):
        read(region, 0, 8 * MIB, 0.1)
    way.close()
    process.resume()
    again = OneSided("tcp://node")
    try:
        deadline = soon(20)
        while True:
            try:
                assert read(again.attach(exposures.expose(1, str(segment))), 0, MIB) == segment.read_bytes()[:MIB]
                break
            except NodeError:  # the process is on its way out
                assert time.monotonic() < deadline
    finally:
        again.close()


def test_many_threads_read_at_once(exposures: Exposures, segment: Path, way: OneSided) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    contents = segment.read_bytes()
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(8):
            offset = (number * 7 + step * 3) % 14 * MIB + number
            if read(region, offset, 9 * MIB) != contents[offset : offset + 9 * MIB]:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_what_is_withdrawn_cannot_be_read_any_more(exposures: Exposures, segment: Path, way: OneSided) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    assert len(read(region, 0, 1)) == 1
    exposures.withdraw(str(segment))
    with pytest.raises(NodeError):
        read(region, 0, MIB, 5.0)


def test_the_last_control_connection_of_a_session_takes_its_exposures_with_it(
    exposures: Exposures, segment: Path, way: OneSided
) -> None:
    region = way.attach(exposures.expose(1, str(segment)))
    assert len(read(region, 0, 1)) == 1
    exposures.drop(1)
    with pytest.raises(NodeError):
        read(region, 0, MIB, 5.0)
    with pytest.raises(NodeError, match="closed"):
        exposures.expose(1, str(segment))


def test_metadata_that_is_none_is_an_error_that_names_the_node(way: OneSided) -> None:
    with pytest.raises(NodeError, match="tcp://node"):
        way.attach(Exposed(b"nonsense", 4096, 4096))


def test_a_process_that_uses_nixl_ends_with_status_zero() -> None:
    code = "from farpool.transport.nixl import OneSided; OneSided('tcp://node')"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_published_objects_are_read_one_sided(node: Node) -> None:
    with Store(str(node.address), transport="nixl") as store:
        payloads = {f"key {size}": os.urandom(size) for size in (0, 1, 4096, MIB, 9 * MIB + 7)}
        for key, payload in payloads.items():
            store.put(key, payload)
        before = node.stats()["bytes_out"]
        moved = 2 * sum(map(len, payloads.values()))
        for key, payload in payloads.items():
            assert store.get(key) == payload
            into = bytearray(len(payload) + 3)
            assert store.get_into(key, into) == len(payload)
            assert into[: len(payload)] == payload
        assert node.stats()["bytes_out"] - before < moved / 1000
        assert store.get("no such key") is None
        with pytest.raises(ValueError, match="9437191"):
            store.get_into(f"key {9 * MIB + 7}", bytearray(5))
        assert [info.pins for info in store.objects()] == [0] * len(payloads)


def test_a_damaged_object_is_never_returned(node: Node, tmp_path: Path) -> None:
    with Store(str(node.address), transport="nixl") as store:
        store.put("key", b"a" * MIB)
        assert store.get("key") == b"a" * MIB
        (data,) = (tmp_path / "node").glob("objects-*.data")
        place = data.read_bytes().index(b"a" * 4096)
        with data.open("r+b") as file:
            file.seek(place)
            file.write(b"b")
        with pytest.raises(ChecksumError):
            store.get("key")


def test_a_lease_that_was_released_is_lost(node: Node) -> None:
    channel = Channel(node.address, transport="nixl")
    try:
        lease = channel.lend(MIB, soon())
        assert channel.one_sided is not None
        into = bytearray(b"x" * 4096)
        channel.one_sided.read(lease.id, 0, memoryview(into), soon())
        assert into == bytes(4096)
        lease.release(soon())
        with pytest.raises(LeaseLostError):
            channel.one_sided.read(lease.id, 0, memoryview(into), soon())
    finally:
        channel.close()


def test_a_key_that_may_only_read_gets_no_memory_that_it_could_write(tmp_path: Path) -> None:
    keys = {"reader": Grant(SECRET, Right.READ, 0)}
    with Node(
        Address("tcp", "127.0.0.1", 0), MIB, folder=tmp_path / "node", ephemeral=True, nixl=True, keys=keys
    ) as node:
        channel = Channel(node.address, key=AccessKey("reader", SECRET), transport="nixl")
        try:
            with pytest.raises(AccessDeniedError, match="reader"):
                channel.call("nixl_metadata", soon())
        finally:
            channel.close()


def test_a_node_without_nixl_says_so(tmp_path: Path) -> None:
    with Node(Address("tcp", "127.0.0.1", 0), MIB, folder=tmp_path / "node", ephemeral=True) as node:
        channel = Channel(node.address, transport="nixl")
        try:
            with pytest.raises(ProtocolError, match="--nixl"):
                channel.call("nixl_metadata", soon())
        finally:
            channel.close()


def test_an_exposure_that_was_killed_is_made_anew_without_an_error(node: Node) -> None:
    with Remote(str(node.address), size=8 * MIB, transport="nixl") as tier:
        extent = tier.reserve(3 * MIB)
        data = os.urandom(3 * MIB)
        tier.write_from(extent, memoryview(data))
        process = exposing_process()
        process.kill()
        psutil.wait_procs([process], timeout=10)
        into = bytearray(3 * MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data


def test_a_stopped_exposure_is_the_tiers_timeout(node: Node) -> None:
    with Remote(str(node.address), size=8 * MIB, transport="nixl", timeout=2.0) as tier:
        extent = tier.reserve(MIB)
        data = os.urandom(MIB)
        tier.write_from(extent, memoryview(data))
        process = exposing_process()
        process.suspend()
        try:
            with pytest.raises(TierTimeoutError):
                tier.read_into(extent, memoryview(bytearray(MIB)))
        finally:
            process.resume()
        into = bytearray(MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data


def test_a_pool_pages_over_nixl(node: Node) -> None:
    with Pool(fast=4 * MIB, tiers=[Remote(str(node.address), size=16 * MIB, transport="nixl")]) as pool:
        tensors = [pool.full((MIB // 4,), float(number)) for number in range(10)]
        for _ in range(2):
            for number, tensor in enumerate(tensors):
                assert float(tensor.min()) == float(tensor.max()) == number


def test_extents_lie_on_all_nodes_in_stripes(two_nodes: list[str]) -> None:
    with Remote(*two_nodes, size=32 * MIB, transport="nixl") as tier:
        kept = []
        for nbytes in (1, MIB - 64, 3 * MIB + 17, 64, 9 * MIB):
            extent, data = tier.reserve(nbytes), os.urandom(nbytes)
            tier.write_from(extent, memoryview(data))
            kept.append((extent, data))
        for extent, data in kept:
            into = bytearray(len(data))
            tier.read_into(extent, memoryview(into))
            assert into == data


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    folder = tmp_path_factory.mktemp("nodes")
    with ExitStack() as stack:
        yield [
            str(
                stack.enter_context(
                    Node(Address("tcp", "127.0.0.1", 0), 160 * MIB, folder=folder / name, ephemeral=True, nixl=True)
                ).address
            )
            for name in ("a", "b")
        ]


class TestOneSidedRemote(TierConformance):
    @pytest.fixture(autouse=True)
    def _nodes(self, two_nodes: list[str]) -> None:
        self.nodes = two_nodes

    def make_tier(self) -> Tier:
        return Remote(self.nodes[0], size=16 * MIB, transport="nixl")
