"""One-sided fabrics: found by entry point, and used for objects and leases of nodes in processes of their own."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from farpool import Pool, StaticMembers, Store
from farpool._native import crc32c
from farpool.abc.fabric import Exposed, Exposure, Fabric
from farpool.cluster.node import Node
from farpool.cluster.node.exposures import Exposures
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.channel import Channel
from farpool.cluster.wire.fabrics import GROUP, load_fabric
from farpool.cluster.wire.frames import COMMIT, HEAD, OFFSET, Op, Right, Status
from farpool.errors import (
    AccessDeniedError,
    ChecksumError,
    ConfigError,
    LeaseLostError,
    NodeError,
    ProtocolError,
    TierTimeoutError,
)
from farpool.memory.tiers import Tier
from farpool.memory.tiers.remote import Remote
from farpool.testing import TierConformance
from tests.forking import in_forked_child
from tests.nodes import eventually, stats, stop

MIB = 1 << 20
SECRET = b"0123456789abcdef"
PACKAGE = Path(__file__).with_name("fabric_package")
ENTRIES = {
    "socket": "socket_fabric:SocketFabric",
    "damaging": "socket_fabric:DamagingFabric",
    "unusable": "socket_fabric:Unusable",
    "gone": "socket_fabric:Nothing",
    "other": "builtins:dict",
}


def soon(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module", autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with an installed package, on the path of this process and of those that it starts."""
    site = tmp_path_factory.mktemp("site")
    for module in PACKAGE.glob("*.py"):
        (site / module.name).write_text(module.read_text())
    info = site / "somebodys_fabrics-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-fabrics\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in ENTRIES.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        patch.setenv("PYTHONPATH", str(site), prepend=os.pathsep)
        yield site


@pytest.fixture(scope="module")
def pair() -> Iterator[list[RunningNode]]:
    with running_node("128MiB", fabric="socket") as a, running_node("128MiB", fabric="socket") as b:
        yield [a, b]


@pytest.fixture
def node() -> Iterator[RunningNode]:
    with running_node(fabric="socket", grace=1) as node:
        yield node


@pytest.fixture
def channel(node: RunningNode) -> Iterator[Channel]:
    channel = Channel(parse_address(node.address), transport="socket")
    yield channel
    channel.close()


def servers(pid: int) -> list[psutil.Process]:
    """The processes that expose segments for a process."""
    found = []
    for child in psutil.Process(pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # also raised for one that has ended
            if "socket_server" in " ".join(child.cmdline()):
                found.append(child)
    return found


def in_process(folder: Path, fabric: str = "", keys: dict[str, Grant] | None = None) -> Node:
    return Node(Address("tcp", "127.0.0.1", 0), 16 * MIB, folder=folder, ephemeral=True, fabric=fabric, keys=keys)


def test_a_fabric_is_found_by_the_name_of_its_entry_point() -> None:
    assert isinstance(load_fabric("socket"), Fabric)


def test_a_fabric_that_is_not_installed_is_named_with_what_to_install() -> None:
    wanted = r"transport of far is 'pigeon', expected auto, mapped, tcp or .*socket.*pip install 'farpool\[nixl\]'"
    with pytest.raises(ConfigError, match=wanted) as raised:
        Remote("a:1", name="far", size=MIB, transport="pigeon")
    assert raised.value.setting == "transport"
    with pytest.raises(ConfigError, match=r"transport is 'pigeon'"):
        Store("a:1", transport="pigeon")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("unusable", "socket_fabric:Unusable of the package somebodys-fabrics cannot be loaded: no adapter"),
        ("gone", "socket_fabric:Nothing of the package somebodys-fabrics cannot be loaded: .*Nothing"),
        ("other", "builtins:dict of the package somebodys-fabrics cannot be loaded: {} is no fabric"),
    ],
)
def test_a_fabric_that_cannot_be_used_is_named_with_its_package(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"transport is {name!r}, but {reason}"):
        Store("a:1", transport=name)
    with pytest.raises(ConfigError, match=f"--fabric is {name!r}, but {reason}") as raised:
        in_process(tmp_path / "node", name).start()
    assert raised.value.setting == "fabric"
    assert not (tmp_path / "node").exists()


def test_a_node_whose_fabric_exposes_nothing_does_not_start() -> None:
    with pytest.raises(ConfigError, match="loopback only"):
        Exposures("socket", loopback=False)


def test_published_objects_are_read_one_sided(node: RunningNode) -> None:
    with Store(node.address, transport="socket") as store:
        payloads = {f"key {size}": os.urandom(size) for size in (0, 1, 4096, MIB, 9 * MIB + 7)}
        for key, payload in payloads.items():
            store.put(key, payload)
        before = stats(node.address)["bytes_out"]
        for key, payload in payloads.items():
            assert store.get(key) == payload
            into = bytearray(len(payload) + 3)
            assert store.get_into(key, into) == len(payload)
            assert into[: len(payload)] == payload
        assert stats(node.address)["bytes_out"] - before < 100_000
        assert store.get("no such key") is None
        with pytest.raises(ValueError, match="9437191"):
            store.get_into(f"key {9 * MIB + 7}", bytearray(5))
        assert [info.pins for info in store.objects()] == [0] * len(payloads)
        assert len(servers(node.pid)) == 1
    eventually(lambda: not servers(node.pid))  # gone with the session's last control connection


def test_threads_that_come_at_once_share_one_exposure(node: RunningNode) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for step in range(10):
            if store.get(f"key {(number + step) % 4}") != bytes([(number + step) % 4]) * 100_000:
                wrong.append(number)

    with Store(node.address, transport="socket") as store:
        for number in range(4):
            store.put(f"key {number}", bytes([number]) * 100_000)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
        assert len(servers(node.pid)) == 1


def test_an_object_that_is_damaged_at_the_node_is_never_returned(node: RunningNode) -> None:
    with Store(node.address, transport="socket") as store:
        store.put("key", b"a" * MIB)
        assert store.get("key") == b"a" * MIB
        (data,) = node.folder.glob("objects-*.data")
        place = data.read_bytes().index(b"a" * 4096)
        with data.open("r+b") as file:
            file.seek(place)
            file.write(b"b")
        with pytest.raises(ChecksumError):
            store.get("key")


def test_what_the_fabric_damages_is_asked_of_the_node_or_is_an_error(tmp_path: Path) -> None:
    with in_process(tmp_path / "node", "damaging") as node:
        with Store(str(node.address), transport="damaging") as store:
            store.put("key", b"a" * MIB)
            before = node.stats()["bytes_out"]
            assert store.get("key") == b"a" * MIB
            assert node.stats()["bytes_out"] - before >= MIB
        with Remote(str(node.address), size=2 * MIB, transport="damaging") as tier:
            extent = tier.reserve(MIB)
            tier.write_from(extent, memoryview(bytes(MIB)))
            with pytest.raises(ChecksumError):
                tier.read_into(extent, memoryview(bytearray(MIB)))


def test_places_are_prepared_for_those_that_the_objects_are_exposed_to(node: RunningNode, channel: Channel) -> None:
    meta = OFFSET.pack(3) + HEAD.pack(0, 1, 0, 1, 0, 0, 0) + b"prepared"
    with channel.connection(soon()) as connection:
        assert connection.exchange(Op.PREPARE, meta, soon()).status == Status.DENIED
    exposed = msgspec.convert(channel.call("expose", soon(), fabric="socket"), Exposed)
    endpoint = load_fabric("socket").endpoint(channel.name)
    region = endpoint.attach(exposed)
    with channel.connection(soon()) as connection:
        prepared = connection.exchange(Op.PREPARE, meta, soon())
        assert prepared.status == Status.DONE
        (offset,) = OFFSET.unpack(prepared.meta)
        region.write(offset, memoryview(b"abc"), soon())
        commit = COMMIT.pack(offset, crc32c(b"abc"), 0)
        assert connection.exchange(Op.COMMIT, commit, soon(), serial=prepared.serial).status == Status.DONE
        assert connection.exchange(Op.GET, b"prepared", soon()).payload == b"abc"
    region.close()
    endpoint.close()
    other = Channel(parse_address(node.address))
    with other.connection(soon()) as connection:
        assert connection.exchange(Op.PREPARE, meta + b"!", soon()).status == Status.DENIED
    other.close()


def test_a_lease_that_was_released_is_lost(node: RunningNode, channel: Channel) -> None:
    lease = channel.lend(MIB, soon())
    assert channel.one_sided is not None
    into = bytearray(b"x" * 4096)
    channel.one_sided.read(lease.id, 0, memoryview(into), soon())
    assert into == bytes(4096)
    lease.release(soon())
    assert not servers(node.pid)
    with pytest.raises(LeaseLostError):
        channel.one_sided.read(lease.id, 0, memoryview(into), soon())


def test_a_key_that_may_only_read_gets_no_memory_that_it_could_write(tmp_path: Path) -> None:
    with in_process(tmp_path / "node", "socket", {"reader": Grant(SECRET, Right.READ, 0)}) as node:
        channel = Channel(node.address, key=AccessKey("reader", SECRET), transport="socket")
        try:
            with pytest.raises(AccessDeniedError, match="reader"):
                channel.call("expose", soon(), fabric="socket")
        finally:
            channel.close()


@pytest.mark.parametrize(("fabric", "there"), [("", "none"), ("damaging", "'damaging'")])
def test_a_node_without_the_fabric_says_so(fabric: str, there: str, tmp_path: Path) -> None:
    with in_process(tmp_path / "node", fabric) as node:
        channel = Channel(node.address, transport="socket")
        try:
            with pytest.raises(
                ProtocolError, match=f"fabric 'socket', only over {there}; start it with --fabric socket"
            ):
                channel.call("expose", soon(), fabric="socket")
        finally:
            channel.close()


def test_an_answer_that_describes_no_memory_names_the_node(channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
    lease = channel.lend(MIB, soon())
    monkeypatch.setattr(channel, "call", lambda *_, **__: {"metadata": b"", "address": "everywhere", "nbytes": 1})
    assert channel.one_sided is not None
    with pytest.raises(ProtocolError, match=rf"{channel.name} did not say how its memory is reached.*address"):
        channel.one_sided.read(lease.id, 0, memoryview(bytearray(1)), soon())


def test_an_exposure_that_was_killed_is_made_anew_without_an_error(node: RunningNode) -> None:
    with Remote(node.address, size=8 * MIB, transport="socket") as tier:
        extent = tier.reserve(3 * MIB)
        data = os.urandom(3 * MIB)
        tier.write_from(extent, memoryview(data))
        (server,) = servers(node.pid)
        server.kill()
        into = bytearray(3 * MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data
        assert server.pid not in [other.pid for other in servers(node.pid)]


@pytest.mark.slow
def test_a_part_moves_to_another_member_one_sided(node: RunningNode, pair: list[RunningNode]) -> None:
    joined = pair[0]
    members = StaticMembers(node.address, pair[1].address)
    with Remote(members, size=8 * MIB, transport="socket") as tier:
        extent = tier.reserve(5 * MIB)
        data = os.urandom(5 * MIB)
        tier.write_from(extent, memoryview(data))
        before = stats(joined.address)["bytes_in"]
        members.update([one.address for one in pair])
        eventually(lambda: tier.nodes == (joined.address, pair[1].address))
        node.kill()
        into = bytearray(5 * MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data
        assert stats(joined.address)["bytes_in"] - before < MIB, "the bytes were not moved one-sided"
        tier.write_from(extent, memoryview(data[::-1]))
        tier.read_into(extent, memoryview(into))
        assert into == data[::-1]


@pytest.mark.slow
def test_a_stopped_exposure_is_the_tiers_timeout(node: RunningNode) -> None:
    with Remote(node.address, size=8 * MIB, transport="socket", timeout=1.0) as tier:
        extent = tier.reserve(MIB)
        data = os.urandom(MIB)
        tier.write_from(extent, memoryview(data))
        (server,) = servers(node.pid)
        stop(server.pid)
        try:
            with pytest.raises(TierTimeoutError):
                tier.read_into(extent, memoryview(bytearray(MIB)))
        finally:
            server.resume()
        into = bytearray(MIB)
        tier.read_into(extent, memoryview(into))
        assert into == data


def test_an_exposure_that_comes_after_its_session_has_gone_is_taken_back(tmp_path: Path) -> None:
    exposures = Exposures("socket", loopback=True)
    (tmp_path / "segment").write_bytes(bytes(4096))
    exposures.connect(1)
    first = exposures.expose(1, str(tmp_path / "segment"))
    assert exposures.expose(1, str(tmp_path / "segment")) is first
    exposures.disconnect(1)
    with pytest.raises(NodeError, match="closed"):
        exposures.expose(1, str(tmp_path / "segment"))
    assert not servers(os.getpid())
    exposures.close()


def test_an_exposure_that_comes_after_its_segment_was_withdrawn_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exposures = Exposures("socket", loopback=True)
    path = str(tmp_path / "segment")
    (tmp_path / "segment").write_bytes(bytes(4096))
    exposures.connect(1)
    expose = exposures._fabric.expose

    def released(file: int, *, loopback: bool) -> Exposure:
        exposure = expose(file, loopback=loopback)
        exposures.withdraw(path)  # another connection of the session gives the lease back
        return exposure

    with monkeypatch.context() as patched:
        patched.setattr(exposures._fabric, "expose", released)
        with pytest.raises(LeaseLostError, match="lease was released"):
            exposures.expose(1, path)
    assert not servers(os.getpid())
    exposures.expose(1, path)
    exposures.close()
    assert not servers(os.getpid())


def test_an_exposure_that_failed_the_session_is_made_anew_although_it_looks_alive(tmp_path: Path) -> None:
    exposures = Exposures("socket", loopback=True)
    (tmp_path / "segment").write_bytes(bytes(4096))
    exposures.connect(1)
    first = exposures.expose(1, str(tmp_path / "segment"))
    (before,) = servers(os.getpid())
    second = exposures.expose(1, str(tmp_path / "segment"), failed=first.metadata)
    assert second.metadata != first.metadata
    assert before.pid not in [one.pid for one in servers(os.getpid())]
    # Another thread was failed by the same one, and tells it later.
    assert exposures.expose(1, str(tmp_path / "segment"), failed=first.metadata) is second
    exposures.close()
    assert not servers(os.getpid())


@pytest.mark.slow
def test_a_forked_child_reads_by_itself_and_leaves_the_parents_way_alone(node: RunningNode) -> None:
    with Store(node.address, transport="socket") as store:
        store.put("key", b"a" * MIB)
        assert store.get("key") == b"a" * MIB

        def child() -> None:
            with Store(node.address, transport="socket") as own:
                assert own.get("key") == b"a" * MIB

        in_forked_child(child)
        assert store.get("key") == b"a" * MIB


def test_a_pool_pages_over_two_nodes_in_stripes(pair: list[RunningNode]) -> None:
    far = Remote(*[node.address for node in pair], size=32 * MIB, transport="socket")
    with Pool(fast=4 * MIB, tiers=[far]) as pool:
        tensors = [pool.full((MIB // 4,), float(number)) for number in range(10)]
        for _ in range(2):
            for number, tensor in enumerate(tensors):
                assert float(tensor.min()) == float(tensor.max()) == number
        assert [len(servers(node.pid)) for node in pair] == [1, 1]


class TestOneSidedRemote(TierConformance):
    @pytest.fixture(autouse=True)
    def _nodes(self, pair: list[RunningNode]) -> None:
        self.nodes = [node.address for node in pair]

    def make_tier(self) -> Tier:
        return Remote(*self.nodes, size=16 * MIB, transport="socket")
