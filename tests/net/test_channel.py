"""A program's way to a node: contact, connections, mapped objects, leases; and what happens when the node goes."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from farpool._native import Memory, ObjectReader, RemotePort
from farpool.cluster.node import Node
from farpool.cluster.node.process import running_node
from farpool.cluster.wire import channel as channel_module
from farpool.cluster.wire.access import AccessKey, Grant
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.channel import Channel, Transport
from farpool.cluster.wire.dial import Dialled, dial
from farpool.cluster.wire.frames import Op, Right, Status
from farpool.errors import AccessDeniedError, LeaseLostError, NodeError, NodeFullError, NodeTimeoutError
from tests.forking import in_forked_child
from tests.net.live_node import MIB, soon

SECRET = b"0123456789abcdef"
TRANSPORTS: list[Transport] = ["mapped", "tcp"]


def make_node(folder: Path, port: int = 0, **options: Any) -> Node:
    options = {"ephemeral": True, "grace": 5.0, **options}
    return Node(Address("tcp", "127.0.0.1", port), 64 * MIB, folder=folder, **options)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with make_node(tmp_path / "node") as node:
        yield node


def channel_to(node: Node, **options: Any) -> Channel:
    return Channel(node.address, **options)


def put(channel: Channel, key: bytes, payload: bytes) -> int:
    with channel.connection(soon()) as connection:
        reply = connection.exchange(Op.PUT, bytes(32) + key, soon(), payload=payload)
    assert reply.status == Status.DONE
    return reply.serial


def get(channel: Channel, key: bytes) -> bytes | None:
    with channel.connection(soon()) as connection:
        reply = connection.exchange(Op.GET, key, soon())
    return reply.payload if reply.status == Status.DONE else None


def eventually(condition: Callable[[], bool]) -> None:
    deadline = soon()
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class CountingDial:
    """As `dial`; counts, and changes the welcome."""

    def __init__(self, **changes: Any) -> None:
        self.calls: list[tuple[str, str]] = []
        self.sessions: list[int] = []
        self._changes = changes

    def __call__(self, address: Address, purpose: Any, **options: Any) -> Dialled:
        self.calls.append((address.scheme, purpose))
        dialled = dial(address, purpose, **options)
        self.sessions.append(dialled.welcome.session)
        return replace(dialled, welcome=replace(dialled.welcome, **self._changes)) if self._changes else dialled


def test_a_channel_opens_nothing_before_it_is_used() -> None:
    counting = CountingDial()
    channel = Channel(Address("tcp", "127.0.0.1", 9), dial=counting)
    assert (channel.name, channel.reader, channel.welcome) == ("tcp://127.0.0.1:9", None, None)
    channel.close()
    assert counting.calls == []


@pytest.mark.parametrize("transport", ["auto", "mapped"])
def test_a_node_on_this_host_is_mapped_and_used_over_its_unix_socket(node: Node, transport: Transport) -> None:
    counting = CountingDial()
    with closing(channel_to(node, transport=transport, dial=counting)) as channel:
        assert channel.connect(soon()).socket == node.socket_path
        serial = put(channel, b"key", b"bytes")
        reader = channel.attach(soon())
        assert reader is not None
        assert reader is channel.reader
        assert channel.attach(soon()) is reader
        assert reader.get(b"key") == (b"bytes", serial)
        assert counting.calls == [("tcp", "control"), ("unix", "control"), ("unix", "data")]


def test_over_tcp_nothing_is_mapped(node: Node) -> None:
    counting = CountingDial()
    with closing(channel_to(node, transport="tcp", dial=counting)) as channel:
        assert channel.attach(soon()) is None
        put(channel, b"key", b"bytes")
        assert get(channel, b"key") == b"bytes"
        lease = channel.lend(MIB, soon())
        assert lease.address is None
        lease.release(soon())
        assert counting.calls == [("tcp", "control"), ("tcp", "data")]


@pytest.mark.parametrize(
    "changes", [{"host": "another"}, {"host": ""}, {"socket": "/nowhere/socket"}, {"id": b"x" * 16}]
)
def test_where_mapping_is_impossible_auto_takes_tcp_and_mapped_is_an_error(node: Node, changes: dict[str, Any]) -> None:
    class OnlyOverTcp(CountingDial):
        """Another id over TCP only: as if another node listened at the path."""

        def __call__(self, address: Address, purpose: Any, **options: Any) -> Dialled:
            dialled = super().__call__(address, purpose, **options)
            if "id" in changes and address.scheme == "tcp":
                return replace(dialled, welcome=replace(dialled.welcome, **changes))
            return dialled

    def make() -> CountingDial:
        return OnlyOverTcp() if "id" in changes else CountingDial(**changes)

    with closing(channel_to(node, transport="auto", dial=make())) as channel:
        assert channel.attach(soon()) is None
        put(channel, b"key", b"bytes")
        assert get(channel, b"key") == b"bytes"
    with closing(channel_to(node, transport="mapped", dial=make())) as channel:
        with pytest.raises(NodeError):
            channel.connect(soon())
        with pytest.raises(NodeError):
            channel.lend(MIB, soon())


def test_connections_are_used_again_and_broken_ones_are_not(node: Node) -> None:
    counting = CountingDial()
    with closing(channel_to(node, dial=counting)) as channel:
        with channel.connection(soon()) as first:
            pass
        with channel.connection(soon()) as again, channel.connection(soon()) as second:
            assert again is first
            assert second is not first
        for connection in (first, second):
            connection.close()
        assert get(channel, b"key") is None
        assert [purpose for _, purpose in counting.calls].count("data") == 3
        assert len(set(counting.sessions)) == 1


def test_no_data_connection_to_another_node_than_the_control_connection_is_used(tmp_path: Path) -> None:
    with make_node(tmp_path / "old") as old, make_node(tmp_path / "new") as new:
        leads_to = {"control": old, "data": old}

        def moving(address: Address, purpose: Any, **options: Any) -> Dialled:
            return dial(leads_to[purpose].address, purpose, **options)

        with closing(Channel(old.address, transport="tcp", dial=moving)) as channel:
            put(channel, b"key", b"value")
            known = channel.welcome
            with channel.connection(soon()) as connection:
                connection.close()
            # The address belongs to another node now, but nothing has closed the old node's control connection.
            leads_to["data"] = new
            with pytest.raises(NodeError, match="led to different nodes"):
                get(channel, b"key")
            leads_to["control"] = new
            assert get(channel, b"key") is None
            assert known is not None
            assert channel.welcome is not None
            assert channel.welcome.identity != known.identity


def test_threads_share_a_channel(node: Node) -> None:
    failures: list[BaseException] = []
    with closing(channel_to(node)) as channel:

        def work(number: int) -> None:
            try:
                for step in range(30):
                    payload = b"%d/%d" % (number, step) * 100
                    put(channel, b"%d/%d" % (number, step), payload)
                    assert get(channel, b"%d/%d" % (number, step)) == payload
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures, failures
        assert node.stats()["sessions"] == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_restarted_node_is_met_again_with_what_was_lent_and_published(tmp_path: Path, transport: Transport) -> None:
    first = make_node(tmp_path / "node", ephemeral=False)
    first.start()
    with closing(channel_to(first, transport=transport)) as channel:
        put(channel, b"key", b"bytes")
        reader = channel.attach(soon())
        lease = channel.lend(MIB, soon())
        port = RemotePort("remote", lease.end(10.0), timeout=10.0)
        memory = Memory(4096)
        memoryview(memory)[:4096] = b"x" * 4096
        port.write(8192, memory.address, 4096)
        session = channel.connect(soon()).session
        first.stop()
        if reader is not None:
            assert reader.get(b"key") is None
        with pytest.raises(NodeError):
            get(channel, b"key")
        with make_node(tmp_path / "node", first.address.port, ephemeral=False) as second:
            assert get(channel, b"key") == b"bytes"
            assert channel.connect(soon()).session == session
            again = channel.attach(soon())
            assert (again is None) == (reader is None)
            if again is not None:
                assert again.get(b"key") is not None
            memoryview(memory)[:4096] = bytes(4096)
            port.read(8192, memory.address, 4096)
            assert memoryview(memory)[:4096] == b"x" * 4096
            assert second.stats()["leases"] == 1
            lease.release(soon())
            assert second.stats()["leases"] == 0


def test_a_node_that_began_anew_has_lost_the_lease(tmp_path: Path) -> None:
    first = make_node(tmp_path / "node")
    first.start()
    with closing(channel_to(first)) as channel:
        lease = channel.lend(MIB, soon())
        port = RemotePort("remote", lease.end(10.0), timeout=10.0)
        first.stop()
        with make_node(tmp_path / "node", first.address.port):
            memory = Memory(4096)
            with pytest.raises(LeaseLostError):
                port.read(0, memory.address, 4096)
            with pytest.raises(NodeError):
                lease.release(soon())
            assert channel.call("leases", soon()) == {"leases": []}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_memory_is_lent_zeroed_and_given_back(node: Node, transport: Transport) -> None:
    with closing(channel_to(node, transport=transport)) as channel:
        lease = channel.lend(MIB, soon())
        assert (lease.address is None) == (transport == "tcp")
        assert node.stats()["lent"] >= MIB
        memory = Memory(MIB)
        memoryview(memory)[:] = b"x" * memory.nbytes
        RemotePort("remote", lease.end(10.0), timeout=10.0).read(0, memory.address, MIB)
        assert not any(memoryview(memory)[:MIB])
        lease.release(soon())
        assert lease.address is None
        assert node.stats()["lent"] == 0
        with pytest.raises(NodeFullError):
            channel.lend(65 * MIB, soon())
        assert node.stats()["lent"] == 0


def test_memory_that_cannot_be_mapped_is_given_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise NodeError("it cannot be mapped")

    monkeypatch.setattr("farpool.cluster.wire.channel.map_lease", fail)
    with closing(channel_to(node)) as channel:
        with pytest.raises(NodeError, match="cannot be mapped"):
            channel.lend(MIB, soon())
        assert node.stats()["lent"] == 0


def test_mapped_memory_lives_as_long_as_a_port_uses_it(node: Node) -> None:
    with closing(channel_to(node)) as channel:
        lease = channel.lend(MIB, soon())
        port = RemotePort("remote", lease.end(10.0), timeout=10.0)
        lease.release(soon())
        del lease
        memory = Memory(4096)
        with pytest.raises(LeaseLostError):
            port.read(0, memory.address, 4096)


def test_rights_decide_what_is_mapped(tmp_path: Path) -> None:
    grants = {
        "reader": Grant(SECRET, Right.READ, 0),
        "writer": Grant(SECRET, Right.WRITE, 0),
        "publisher": Grant(SECRET, Right.READ | Right.PUBLISH, 0),
    }
    with make_node(tmp_path / "node", keys=grants) as node:
        channels = {name: channel_to(node, key=AccessKey(name, SECRET)) for name in grants}
        readers = {name: channel.attach(soon()) for name, channel in channels.items()}
        assert readers["writer"] is None
        assert readers["reader"] is not None
        assert readers["publisher"] is not None
        with pytest.raises(AccessDeniedError):
            channels["reader"].lend(MIB, soon())
        for channel in channels.values():
            channel.close()
        for key in (None, AccessKey("reader", SECRET[::-1])):
            with closing(channel_to(node, key=key)) as channel, pytest.raises(AccessDeniedError):
                channel.connect(soon())


def test_a_node_that_does_not_answer_is_an_error_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        channel = Channel(Address("tcp", "127.0.0.1", listening.getsockname()[1]))
        began = time.monotonic()
        errors: list[BaseException] = []

        def connect() -> None:
            try:
                channel.connect(began + 0.3)
            except NodeTimeoutError as error:
                errors.append(error)

        threads = [threading.Thread(target=connect) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(errors) == 3
        channel.close()


@pytest.mark.slow
def test_a_stopped_node_is_an_error_at_the_deadline_and_is_met_again_afterwards() -> None:
    with running_node() as process:
        for transport in TRANSPORTS:
            with closing(Channel(parse_address(process.address), transport=transport)) as channel:
                key = transport.encode()
                put(channel, key, b"bytes")
                process.stop()
                began = time.monotonic()
                with pytest.raises(NodeTimeoutError), channel.connection(soon()) as connection:
                    connection.exchange(Op.GET, key, began + 0.2)
                with pytest.raises(NodeTimeoutError):
                    channel.call("stats", time.monotonic() + 0.2)
                process.cont()
                assert get(channel, key) == b"bytes"
                assert channel.call("stats", soon())["objects"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_node_is_met_again(transport: Transport) -> None:
    with running_node() as process, closing(Channel(parse_address(process.address), transport=transport)) as channel:
        put(channel, b"key", b"bytes")
        process.kill()
        with pytest.raises(NodeError):
            get(channel, b"key")
        process.start()
        assert get(channel, b"key") == b"bytes"


def test_errors_name_the_address_that_was_given(node: Node) -> None:
    with closing(channel_to(node)) as channel:
        channel.attach(soon())
        assert channel.reader is not None
        with pytest.raises(NodeFullError, match=f"^{node.address}: ") as caught:
            channel.lend(1 << 40, soon())
        assert caught.value.node == str(node.address)
        channel._data_address = Address("unix", path="/nowhere")
        with pytest.raises(NodeError, match=f"^{node.address}") as caught:
            channel.take(soon())
        assert caught.value.node == str(node.address)


def test_a_closed_channel_says_so_and_ends_its_connections(node: Node) -> None:
    channel = channel_to(node)
    with channel.connection(soon()) as connection:
        channel.close()
        channel.close()
    assert connection.broken
    eventually(lambda: node.stats()["connections"] == 0)
    for act in (channel.connect, channel.attach, channel.take, lambda deadline: channel.lend(MIB, deadline)):
        with pytest.raises(NodeError, match="was closed"):
            act(soon())


def test_closing_a_channel_ends_what_other_threads_wait_for() -> None:
    with running_node() as running, closing(Channel(parse_address(running.address), transport="tcp")) as channel:
        put(channel, b"k", b"v")
        began = threading.Event()
        failures: list[NodeError] = []

        def ask() -> None:
            with channel.connection(soon()) as connection:
                began.set()
                with pytest.raises(NodeError) as caught:
                    connection.exchange(Op.GET, b"k", time.monotonic() + 120)
            failures.append(caught.value)

        thread = threading.Thread(target=ask)
        with running.suspended():
            thread.start()
            assert began.wait(30)
            time.sleep(0.1)
            channel.close()
            thread.join(30)
        assert not isinstance(failures[0], NodeTimeoutError)
        with pytest.raises(NodeError, match="was closed"):
            channel.take(soon())


@pytest.mark.parametrize("at", [1, 2, 3], ids=["first contact", "contact over the UNIX socket", "data"])
def test_a_channel_that_is_closed_while_it_makes_contact_leaves_nothing_open(node: Node, at: int) -> None:
    sockets = []

    def dial_and_close(address: Address, purpose: Any, **options: Any) -> Dialled:
        dialled = dial(address, purpose, **options)
        sockets.append(dialled.socket)
        if len(sockets) == at:
            channel.close()
        return dialled

    channel = channel_to(node, dial=dial_and_close)
    if at < 3:
        with pytest.raises(NodeError, match="was closed"):
            channel.attach(soon())
    else:
        with channel.connection(soon()) as connection:
            pass
        assert connection.broken
    assert [connected.fileno() for connected in sockets] == [-1] * max(at, 2)
    eventually(lambda: node.stats()["connections"] == 0)


def test_a_channel_that_is_closed_while_it_maps_objects_keeps_none_of_them_mapped(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = channel_to(node, transport="mapped")
    map_objects = channel._map_objects

    def map_and_close(*arguments: Any) -> ObjectReader | None:
        reader = map_objects(*arguments)
        channel.close()
        return reader

    monkeypatch.setattr(channel, "_map_objects", map_and_close)
    with pytest.raises(NodeError, match="was closed"):
        channel.attach(soon())
    assert channel.reader is None


@pytest.mark.parametrize("step", ["before the look", "in the look", "after the look"])
def test_a_channel_that_is_closed_while_its_contact_is_looked_at_is_a_node_error(
    node: Node, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    channel = channel_to(node, transport="tcp")
    channel.connect(soon())
    has_hung_up = channel_module._has_hung_up

    def close_and_look(connected: socket.socket | None) -> bool:
        if step == "before the look":
            channel.close()
        if step == "in the look":
            connected = ClosedWhileAsked(channel, connected)
        gone = has_hung_up(connected)
        if step == "after the look":
            channel.close()
        return gone

    monkeypatch.setattr(channel_module, "_has_hung_up", close_and_look)
    with pytest.raises(NodeError, match="was closed"):
        channel.call("stats", soon())


class ClosedWhileAsked:
    """A channel's socket; as if another thread closed the channel once its descriptor was told."""

    def __init__(self, channel: Channel, connected: socket.socket | None) -> None:
        assert connected is not None
        self._channel = channel
        self._connected = connected

    def fileno(self) -> int:
        descriptor = self._connected.fileno()
        self._channel.close()
        return descriptor


def test_a_forked_child_has_connections_and_a_session_of_its_own(node: Node) -> None:
    with closing(channel_to(node)) as channel:
        put(channel, b"key", b"parent")
        session = channel.connect(soon()).session

        def child() -> None:
            assert channel.reader is None
            assert get(channel, b"key") == b"parent"
            assert channel.connect(soon()).session != session
            channel.close()

        in_forked_child(child)
        assert channel.connect(soon()).session == session
        assert get(channel, b"key") == b"parent"
        assert channel.call("leases", soon()) == {"leases": []}
