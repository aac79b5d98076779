"""One-sided transfers with NIXL, over TCP and, where the system allows it, from process to process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from farpool.abc.fabric import Exposed
from farpool.cluster.node import Node
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.store import Store
from farpool.cluster.wire.address import Address
from farpool.errors import NodeError, NodeTimeoutError
from farpool.memory.tiers import Tier
from farpool.memory.tiers.remote import Remote
from farpool.testing import TierConformance
from farpool_nixl.endpoint import NixlEndpoint, NixlRegion
from tests.nodes import PATIENCE, stop

INSTALLED = importlib.util.find_spec("nixl_cu13") is not None
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not INSTALLED, reason="nixl-cu13 is not installed (farpool[nixl])"),
]

MIB = 1 << 20


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(autouse=True)
def over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use TCP, so that the other end takes part: else the system copies between processes, even from a stopped one."""
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(
        Address("tcp", "127.0.0.1", 0), 64 * MIB, folder=tmp_path / "node", ephemeral=True, fabric="nixl", grace=1.0
    ) as running:
        yield running


@pytest.fixture
def exposures() -> Iterator[Exposures]:
    exposures = Exposures("nixl", loopback=True)
    exposures.connect(1)
    yield exposures
    exposures.close()


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "segment"
    path.write_bytes(os.urandom(24 * MIB))
    return path


@pytest.fixture
def endpoint() -> Iterator[NixlEndpoint]:
    endpoint = NixlEndpoint("tcp://node")
    yield endpoint
    endpoint.close()


def exposing_process() -> psutil.Process:
    """Return the one process that exposes memory now."""
    (process,) = [child for child in psutil.Process().children() if "farpool_nixl.worker" in child.cmdline()]
    return process


def read(region: NixlRegion, offset: int, nbytes: int, seconds: float = 10.0) -> bytes:
    into = bytearray(nbytes)
    region.read(offset, memoryview(into), soon(seconds))
    return bytes(into)


@pytest.mark.parametrize("transports", ["tcp", "all"])
@pytest.mark.slow
def test_what_is_written_one_sided_is_in_the_file_and_is_read_back(
    exposures: Exposures, segment: Path, transports: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", transports)
    endpoint = NixlEndpoint("tcp://node")
    region = endpoint.attach(exposures.expose(1, str(segment)))
    try:
        for offset, nbytes in ((0, 1), (4095, 3), (MIB, 4 * MIB), (1, 4 * MIB + 1), (3 * MIB + 5, 17 * MIB)):
            assert read(region, offset, nbytes) == segment.read_bytes()[offset : offset + nbytes]
            data = os.urandom(nbytes)
            region.write(offset, memoryview(data), soon())
            assert segment.read_bytes()[offset : offset + nbytes] == data
            assert read(region, offset, nbytes) == data
    finally:
        endpoint.close()


@pytest.mark.slow
def test_a_range_outside_of_what_is_exposed_is_refused(
    exposures: Exposures, segment: Path, endpoint: NixlEndpoint
) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
    for offset, nbytes in ((-1, 1), (24 * MIB, 1), (24 * MIB - 1, 2)):
        with pytest.raises(ValueError, match="outside of memory"):
            read(region, offset, nbytes)


@pytest.mark.slow
def test_a_stopped_peer_is_a_timeout_and_never_writes_into_the_callers_memory_later(
    exposures: Exposures, segment: Path, endpoint: NixlEndpoint
) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
    contents = segment.read_bytes()
    assert read(region, 0, MIB) == contents[:MIB]
    process = exposing_process()
    stop(process.pid)
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
    while endpoint.given_up:
        assert read(region, MIB, MIB) == contents[MIB : 2 * MIB]
        assert time.monotonic() < deadline
    assert buffer == b"\xee" * len(buffer)
    assert read(region, 0, 24 * MIB) == contents


@pytest.mark.slow
def test_a_write_that_was_given_up_never_overtakes_a_later_one(
    exposures: Exposures, segment: Path, endpoint: NixlEndpoint
) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
    assert len(read(region, 0, 1)) == 1
    process = exposing_process()
    stop(process.pid)
    try:
        with pytest.raises(NodeTimeoutError):
            region.write(0, memoryview(b"1" * 8 * MIB), soon(0.1))
        for _ in range(2):
            with pytest.raises(NodeTimeoutError, match="could not begin"):
                region.write(0, memoryview(b"2" * 8 * MIB), soon(0.1))
    finally:
        process.resume()
    region.write(0, memoryview(b"3" * 8 * MIB), soon())
    assert endpoint.given_up == []
    assert read(region, 0, 8 * MIB) == b"3" * 8 * MIB


@pytest.mark.slow
def test_a_program_that_ends_in_the_middle_of_a_transfer_leaves_the_memory_to_be_exposed_again(
    exposures: Exposures, segment: Path, endpoint: NixlEndpoint
) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
    process = exposing_process()
    assert len(read(region, 0, 1)) == 1
    stop(process.pid)
    with pytest.raises(NodeTimeoutError):
        read(region, 0, 8 * MIB, 0.1)
    endpoint.close()
    process.resume()
    again = NixlEndpoint("tcp://node")
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


@pytest.mark.slow
def test_many_threads_read_at_once(exposures: Exposures, segment: Path, endpoint: NixlEndpoint) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
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


@pytest.mark.slow
def test_what_is_withdrawn_cannot_be_read_any_more(exposures: Exposures, segment: Path, endpoint: NixlEndpoint) -> None:
    region = endpoint.attach(exposures.expose(1, str(segment)))
    assert len(read(region, 0, 1)) == 1
    exposures.withdraw(str(segment))
    with pytest.raises(NodeError):
        read(region, 0, MIB, 5.0)


def test_metadata_that_is_none_is_an_error_that_names_the_node(endpoint: NixlEndpoint) -> None:
    with pytest.raises(NodeError, match="tcp://node"):
        endpoint.attach(Exposed(b"nonsense", 4096, 4096))


def test_a_process_that_uses_nixl_ends_with_status_zero() -> None:
    code = "from farpool_nixl.endpoint import NixlEndpoint; NixlEndpoint('tcp://node')"
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


@pytest.mark.slow
def test_published_objects_are_read_one_sided(node: Node) -> None:
    with Store(str(node.address), transport="nixl", timeout=PATIENCE) as store:
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
        assert [info.pins for info in store.objects()] == [0] * len(payloads)


@pytest.mark.slow
def test_an_exposure_that_was_killed_is_made_anew_without_an_error(node: Node) -> None:
    with Remote(str(node.address), size=8 * MIB, transport="nixl", timeout=PATIENCE) as tier:
        extent = tier.reserve(3 * MIB)
        data = os.urandom(3 * MIB)
        tier.write_from(extent, memoryview(data))
        process = exposing_process()
        process.kill()
        psutil.wait_procs([process], timeout=10)
        into = bytearray(3 * MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("node") / "a"
    with Node(Address("tcp", "127.0.0.1", 0), 160 * MIB, folder=folder, ephemeral=True, fabric="nixl") as node:
        yield str(node.address)


class TestOneSidedRemote(TierConformance):
    @pytest.fixture(autouse=True)
    def _node(self, standing: str) -> None:
        self.node = standing

    def make_tier(self) -> Tier:
        return Remote(self.node, size=16 * MIB, transport="nixl", timeout=PATIENCE)
