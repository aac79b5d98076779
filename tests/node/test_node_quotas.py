"""What one access key may hold beside the others of its tenant, whatever the number of its sessions."""

from __future__ import annotations

import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from farpool import _native
from farpool.cluster.node import Node
from farpool.cluster.node import node as node_module
from farpool.cluster.node.access import NodeAccess
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import AccessDeniedError, QuotaExceededError
from tests.attacks.lab import Key, Lab
from tests.node.nodes import Peer, node, until

MIB = 1 << 20
FILES = 256
SECRET = b"sixteen bytes or more"
TWO_KEYS = {"one": (1, True, 0), "two": (1, True, 0)}


def until_refused(act: Callable[[int], object]) -> int:
    """How often it could be done."""
    for count in itertools.count():
        try:
            act(count)
        except QuotaExceededError:
            return count
    raise AssertionError


def lent(server: _native.NodeServer, key: str, sessions: list[int], tenant: int = 1) -> int:
    """How many leases of 1 MiB the sessions get together, each as many as it can."""
    for session in sessions:
        server.connect(session, tenant, key)
    return sum(until_refused(lambda _, own=session: server.lend(own, tenant, MIB)) for session in sessions)


def test_a_key_leases_half_of_what_its_tenant_may(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys({**TWO_KEYS, "three": (2, True, 0)})
        assert lent(server, "one", [1, 2, 3]) == 4
        assert lent(server, "two", [4, 5]) == 4
        assert {name: told["held"] for name, told in server.keys().items()} == {
            "one": 4 * MIB,
            "two": 4 * MIB,
            "three": 0,
        }
        with pytest.raises(
            QuotaExceededError, match=f"the access key may hold {4 * MIB} bytes in .*half of its tenant's"
        ):
            server.lend(1, 1, MIB)


def test_the_only_key_that_can_hold_something_has_all_of_its_tenant(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys({"one": (1, True, 0), "monitor": (1, False, 0), "other": (2, True, 0)})
        assert lent(server, "one", [1, 2]) == 8


@pytest.mark.parametrize("nbytes", [3, 6])
def test_the_keys_file_can_say_how_much_a_key_may_hold(tmp_path: Path, nbytes: int) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys({**TWO_KEYS, "one": (1, True, nbytes * MIB)})
        assert lent(server, "one", [1, 2]) == nbytes
        with pytest.raises(QuotaExceededError, match="its bytes in the node's keys file"):
            server.lend(1, 1, MIB)


def test_what_a_key_gives_back_it_can_take_again(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys(TWO_KEYS)
        server.connect(1, 1, "one")
        for _ in range(3):
            leases = [server.lend(1, 1, MIB) for _ in range(4)]
            for lease in leases:
                server.release(1, lease)
        assert server.keys()["one"]["held"] == 0


def test_an_object_that_a_key_pins_often_counts_once(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys(TWO_KEYS)
        writer = Peer(server, session=1, tenant=1, key="two")
        serials = {name: writer.published(name, bytes(MIB - 1024)) for name in (b"a", b"b", b"c", b"d", b"e")}
        readers = [Peer(server, session=session, tenant=1, key="one") for session in (2, 3)]
        places = [reader.pin(b"a")[0] for reader in readers for _ in range(8)]
        told = server.keys()["one"]
        assert (told["pins"], told["held"] <= MIB) == (16, True)
        for name in (b"b", b"c"):
            readers[0].pin(name)
        assert readers[0].pinned(b"d").status == Status.BUSY  # an eighth is left to publishes
        readers[0].prepare(b"published", MIB // 2)
        refused = readers[1].pinned(b"e")
        assert refused.status == Status.BUSY
        assert b"the access key may hold" in refused.meta
        assert writer.pinned(b"e").status == Status.DONE
        assert server.tenants()[1]["pins"] == 19
        for number, place in enumerate(places):
            assert readers[number // 8].unpin(place, serials[b"a"]) == Status.DONE
        assert readers[1].pinned(b"e").status == Status.DONE


def test_unfinished_publishes_of_a_key_count_until_they_end(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB, grace=0.0) as server:
        server.expect_tenants({1, 2})
        server.expect_keys(TWO_KEYS)
        first, second = (Peer(server, session=session, tenant=1, key="one") for session in (1, 2))
        made = [first.prepare(b"%d" % number, MIB) for number in range(4)]
        refused = second.prepared(b"more", MIB)
        assert refused.status == Status.BUSY
        assert b"half of its tenant's share" in refused.meta
        assert second.prepared(b"larger than the node", 1 << 40).status == Status.TOO_LARGE
        assert first.abort(*made[0]) == Status.DONE
        offset, serial = second.prepare(b"more", MIB)
        assert second.commit(offset, serial, 1).status == Status.CHECKSUM
        assert server.keys()["one"]["held"] == 3 * MIB
        first.connection.close()
        until(lambda: server.keys()["one"]["preparations"] == 0, "what a session that has gone had prepared stays")
        assert server.keys()["one"]["held"] == 0


def test_one_publish_of_a_key_may_be_larger_than_what_it_may_hold(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_tenants({1, 2})
        server.expect_keys(TWO_KEYS)
        peer = Peer(server, session=1, tenant=1, key="one")
        offset, serial = peer.prepare(b"large", 6 * MIB)
        assert peer.prepared(b"small", 1).status == Status.BUSY
        assert peer.abort(offset, serial) == Status.DONE
        peer.prepare(b"small", 1)
        assert peer.prepared(b"large", 6 * MIB).status == Status.BUSY


def test_a_key_has_half_of_its_tenants_unfinished_publishes_in_all_its_sessions(tmp_path: Path) -> None:
    with node(tmp_path, 64 * MIB) as server:
        server.expect_tenants({1})
        server.expect_keys(TWO_KEYS)
        sessions = [Peer(server, session=session, tenant=1, key="one") for session in (1, 2, 3)]
        for number in range(8192):
            assert sessions[number % 2].prepared(b"%d" % number, 1).status == Status.DONE
        refused = sessions[2].prepared(b"more", 1)
        assert (refused.status, refused.meta) == (
            Status.BUSY,
            b"the access key has 8192 unfinished publishes, and may not have more in all its sessions",
        )
        other = Peer(server, session=4, tenant=1, key="two")
        assert other.prepared(b"of another key", 1).status == Status.DONE


def test_leases_that_are_adopted_are_charged_to_their_key(tmp_path: Path) -> None:
    with node(tmp_path, 16 * MIB) as server:
        server.expect_keys(TWO_KEYS)
        server.connect(1, 1, "one")
        server.lend(1, 1, 3 * MIB)
    with node(tmp_path, 16 * MIB) as again:
        again.expect_keys(TWO_KEYS)
        assert (again.keys()["one"]["leases"], again.keys()["one"]["held"]) == (1, 3 * MIB)
        assert again.keys()["two"]["leases"] == 0


@pytest.fixture
def files(request: pytest.FixtureRequest) -> Iterator[None]:
    """A process that may have so many files open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (getattr(request, "param", FILES), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def held_connections(server: _native.NodeServer, key: str, tenant: int, first: int) -> int:
    return until_refused(lambda count: server.connect(first + count, tenant, key))


@pytest.mark.usefixtures("files")
def test_the_descriptors_of_the_node_are_shared_by_tenants_and_keys(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.expect_keys({**TWO_KEYS, "three": (2, True, 0)})
        assert held_connections(server, "one", 1, 1000) == FILES * 3 // 4 // 2 // 2
        assert held_connections(server, "two", 1, 2000) == FILES * 3 // 4 // 2 // 2
        assert held_connections(server, "three", 2, 3000) == FILES * 3 // 4 // 2  # the only key of its tenant
        with pytest.raises(
            QuotaExceededError, match="the access key has 48 connections, leases and publish areas, its part of the 256"
        ):
            server.connect(9999, 1, "one")
        server.disconnect(1000)
        server.connect(9999, 1, "one")
        assert server.keys()["one"]["connections"] == 48


@pytest.mark.usefixtures("files")
def test_leases_count_as_the_descriptors_that_they_are(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.expect_keys(TWO_KEYS)
        server.connect(1, 1, "one")
        leases = until_refused(lambda _: server.lend(1, 1, 1))
        assert leases == FILES * 3 // 4 // 2 - 1
        with pytest.raises(QuotaExceededError, match="the access key has 96 connections, leases and publish areas"):
            server.lend(1, 1, 1)
        server.connect(2, 1, "two")
        server.lend(2, 1, 1)


def test_connections_that_end_are_not_counted_any_more(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.expect_keys(TWO_KEYS)
        peers = [Peer(server, session=session, tenant=1, key="one") for session in (1, 1, 2)]
        assert server.keys()["one"]["connections"] == 3
        for peer in peers:
            assert peer.ask(Op.PING).status == Status.DONE
            peer.connection.close()
        until(lambda: server.keys()["one"]["connections"] == 0, "connections that have ended count")


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("purpose", ["control", "data"])
def test_a_client_is_told_why_it_has_too_many_connections(tmp_path: Path, purpose: Literal["control", "data"]) -> None:
    grants = {name: Grant(SECRET, Right.READ | Right.ADMIN, tenant) for name, tenant in (("one", 1), ("two", 2))}
    running = Node(parse_address("127.0.0.1:0", any_port=True), MIB, folder=tmp_path / "n", ephemeral=True, keys=grants)
    running.start()
    deadline = time.monotonic() + 60
    most = FILES * 3 // 4 // 2  # of this process's, which are also those of the clients
    server = running._server
    assert server is not None
    for _ in range(most - 1):
        server.connect(7, 1, "one")
    with dial(running.address, purpose, key=AccessKey("one", SECRET), deadline=deadline).socket:
        has = f"the access key has {most} connections, leases and publish areas, its part of the 256"
        said = f"the node refused the connection: {has}"
        with pytest.raises(QuotaExceededError, match=said) as caught:
            dial(running.address, purpose, key=AccessKey("one", SECRET), deadline=deadline)
        assert caught.value.refused
        assert running.stats()["refused"] == 1
        with Control(dial(running.address, "control", key=AccessKey("two", SECRET), deadline=deadline)) as calls:
            assert calls.call("stats", deadline)["capacity"] == MIB
    until(lambda: running.keys()["one"]["connections"] == most - 1, "a connection that has ended counts")
    dial(running.address, purpose, key=AccessKey("one", SECRET), deadline=deadline).socket.close()
    running.stop()


def test_another_number_of_bytes_in_the_keys_file_counts_from_then_on_and_ends_no_connection(tmp_path: Path) -> None:
    def grants(nbytes: int) -> dict[str, Grant]:
        return {"one": Grant(SECRET, Right.WRITE, 1, nbytes), "two": Grant(SECRET, Right.WRITE, 1)}

    running = Node(
        parse_address("127.0.0.1:0", any_port=True), 8 * MIB, folder=tmp_path / "n", ephemeral=True, keys=grants(MIB)
    )
    running.start()
    deadline = time.monotonic() + 60
    with Control(dial(running.address, "control", key=AccessKey("one", SECRET), deadline=deadline)) as calls:
        calls.call("lend", deadline, bytes=MIB)
        with pytest.raises(QuotaExceededError, match="its bytes in the node's keys file"):
            calls.call("lend", deadline, bytes=MIB)
        running.reload(lambda: grants(2 * MIB))
        calls.call("lend", deadline, bytes=MIB)
    running.stop()


def test_a_node_that_reads_its_keys_again_while_it_starts_uses_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {name: {name: Grant(SECRET, Right.WRITE, 1)} for name in ("old", "new")}
    running = Node(
        parse_address("127.0.0.1:0", any_port=True), 8 * MIB, folder=tmp_path / "n", ephemeral=True, keys=keys["old"]
    )
    reloading = threading.Thread(target=running.reload, args=(lambda: keys["new"],))

    class Access(NodeAccess):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            reloading.start()
            reloading.join(0.2)  # it may have to wait until the node has started

    monkeypatch.setattr(node_module, "NodeAccess", Access)
    with running:
        reloading.join(60)
        deadline = time.monotonic() + 60
        with Control(dial(running.address, "control", key=AccessKey("new", SECRET), deadline=deadline)) as calls:
            calls.call("lend", deadline, bytes=MIB)
        with pytest.raises(AccessDeniedError):
            dial(running.address, "control", key=AccessKey("old", SECRET), deadline=deadline)


@pytest.mark.parametrize("files", [4096], indirect=True)
@pytest.mark.usefixtures("files")
def test_a_pool_of_connections_in_many_programs_of_one_key_is_normal_use(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.expect_keys({**TWO_KEYS, "three": (2, True, 0)})
        for connection in range(64 * 9):  # 64 programs, 8 for data and 1 for control in each
            server.connect(1 + connection % 64, 1, "one")
        assert server.keys()["one"]["connections"] == 576


@pytest.mark.slow
def test_metrics_tell_what_keys_of_the_file_hold() -> None:
    with Lab() as lab:
        running = lab.node(16 * MIB, [Key("one", tenant=3), Key("two", tenant=3)], metrics=True)
        with running.connect(Key("one", tenant=3), purpose="control") as control:
            assert control.lend(MIB).done
            told = running.metrics()
    of_keys = {name: value for name, value in told.items() if "_key_" in name}
    of_one = {name.partition("{")[0]: value for name, value in of_keys.items() if 'key="one"' in name}
    assert of_one == {
        "farpool_node_key_held_bytes": MIB,
        "farpool_node_key_pins": 0,
        "farpool_node_key_preparations": 0,
        "farpool_node_key_leases": 1,
        "farpool_node_key_connections": 1,
    }
    assert all('tenant="3"' in name and "node=" in name for name in of_keys)
    assert len(of_keys) == 10
