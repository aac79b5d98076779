"""Control connections of a real node: who may call what, what comes back, which files are passed."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import FrameReader, Op, Status, pack_frame
from farpool.errors import AccessDeniedError, LeaseLostError, NodeFullError, ProtocolError

SECRETS = {name: f"{name}-0123456789abcdef" for name in ("reader", "writer", "publisher", "admin", "other")}
RIGHTS = {
    "reader": ["read"],
    "writer": ["write"],
    "publisher": ["read", "publish"],
    "admin": ["admin"],
    "other": ["read", "write"],
}


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    """A node with a key for each right; ``other`` is of another tenant."""
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(
        "".join(
            f'[keys.{name}]\nsecret = "{secret}"\nrights = {RIGHTS[name]}\ntenant = {int(name == "other")}\n'
            for name, secret in SECRETS.items()
        )
    )
    with running_node(keys=path, listen="0.0.0.0:0", insecure_plaintext=True) as node:
        yield node


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    """A node that lets everybody do everything."""
    with running_node() as node:
        yield node


def tcp(node: RunningNode, key: AccessKey | None = None, session: int = 0) -> Control:
    address = node.address.replace("0.0.0.0", "127.0.0.1")
    return Control(dial(parse_address(address), "control", key=key, session=session, deadline=soon()))


def local(node: RunningNode, name: str | None = None, session: int = 0) -> Control:
    address = parse_address(f"unix://{node.ready['socket']}")
    key = None if name is None else AccessKey(name, SECRETS[name].encode())
    return Control(dial(address, "control", key=key, session=session, deadline=soon()))


def attached(control: Control, name: str, **arguments: Any) -> tuple[dict[str, Any], list[int]]:
    return control.call_with_files(name, soon(), **arguments)


def access_mode(file: int) -> int:
    return fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE


CALLS: list[tuple[str, dict[str, Any], set[str]]] = [
    ("stats", {}, {"reader", "publisher", "admin"}),
    ("list", {}, {"reader", "publisher", "admin"}),
    ("changes", {}, {"reader", "publisher", "admin"}),
    ("set_state", {"state": "active", "reason": "test"}, {"admin"}),
    ("pins", {}, {"admin"}),
    ("lend", {"bytes": 4096}, {"writer"}),
    ("leases", {}, {"writer"}),
    ("attach_objects", {}, {"reader", "publisher"}),
]


@pytest.mark.parametrize("name", ["reader", "writer", "publisher", "admin"])
def test_a_key_allows_what_its_rights_say_and_nothing_else(guarded: RunningNode, name: str) -> None:
    with local(guarded, name) as control:
        for call, arguments, allowed in CALLS:
            if name in allowed:
                control.call(call, soon(), **arguments)
            else:
                with pytest.raises(AccessDeniedError, match=f"{call}: the access key '{name}' lacks the right"):
                    control.call(call, soon(), **arguments)
        if name != "writer":
            for call in ("release", "attach_lease"):
                with pytest.raises(AccessDeniedError, match="which is write"):
                    control.call(call, soon(), lease=1)


@pytest.mark.parametrize(("name", "secret"), [("reader", "f" * 32), ("nobody", "f" * 32)])
def test_a_wrong_secret_and_an_unknown_key_look_alike(guarded: RunningNode, name: str, secret: str) -> None:
    with pytest.raises(AccessDeniedError, match=f"the secret of the access key '{name}' was not proved"):
        tcp(guarded, AccessKey(name, secret.encode()))


def test_without_a_key_a_guarded_node_says_that_it_needs_one(guarded: RunningNode) -> None:
    with pytest.raises(AccessDeniedError, match="needs an access key"):
        tcp(guarded)


def test_a_key_is_not_used_on_a_node_without_keys(node: RunningNode) -> None:
    with pytest.raises(AccessDeniedError, match="has no access keys"):
        tcp(node, AccessKey("reader", b"0123456789abcdef"))


def test_the_files_of_objects_are_passed_to_be_read_whatever_the_key_allows(guarded: RunningNode) -> None:
    for name in ("reader", "publisher"):
        with local(guarded, name) as control:
            result, files = attached(control, "attach_objects")
            index, data, visited = files
            assert result == {}
            assert access_mode(index) == os.O_RDONLY
            assert access_mode(data) == os.O_RDONLY
            assert access_mode(visited) == os.O_RDWR
            for file in files:
                assert os.pread(file, 8, 0) == b"FARPSEG\0"
                assert not os.get_inheritable(file)
                os.close(file)


def test_another_tenant_gets_other_files(guarded: RunningNode) -> None:
    found = []
    for name in ("reader", "other"):
        with local(guarded, name) as control:
            _, files = attached(control, "attach_objects")
            found.append([os.fstat(file).st_ino for file in files])
            for file in files:
                os.close(file)
    assert not set(found[0]) & set(found[1])


def test_a_read_only_file_cannot_be_mapped_writable(guarded: RunningNode) -> None:
    with local(guarded, "reader") as control:
        _, files = attached(control, "attach_objects")
        for file in files[:2]:
            with pytest.raises(PermissionError):
                mmap.mmap(file, 4096)
        for file in files:
            os.close(file)


def test_a_lease_is_lent_listed_attached_and_released(node: RunningNode) -> None:
    with local(node) as control:
        lease = control.call("lend", soon(), bytes=1 << 20)["lease"]
        assert control.call("leases", soon())["leases"] == [[lease, 1 << 20]]
        _, [file] = attached(control, "attach_lease", lease=lease)
        assert access_mode(file) == os.O_RDWR
        os.close(file)
        assert control.call("release", soon(), lease=lease) == {}
        assert control.call("leases", soon())["leases"] == []
        with pytest.raises(LeaseLostError):
            control.call("release", soon(), lease=lease)
        with pytest.raises(LeaseLostError):
            control.call("attach_lease", soon(), lease=lease)


def test_a_lease_belongs_to_its_session(node: RunningNode) -> None:
    with local(node) as owner, local(node) as stranger:
        lease = owner.call("lend", soon(), bytes=4096)["lease"]
        for call in ("release", "attach_lease"):
            with pytest.raises(LeaseLostError):
                stranger.call(call, soon(), lease=lease)
        with tcp(node, session=owner.welcome.session) as second:
            assert second.call("leases", soon())["leases"] == [[lease, 4096]]
            second.call("release", soon(), lease=lease)


def test_more_than_the_node_has_is_refused_and_the_connection_goes_on(node: RunningNode) -> None:
    with tcp(node) as control:
        with pytest.raises(NodeFullError):
            control.call("lend", soon(), bytes=1 << 40)
        assert control.call("leases", soon())["leases"] == []


def test_files_are_not_passed_over_tcp(node: RunningNode) -> None:
    with tcp(node) as control, pytest.raises(ProtocolError, match="over the node's UNIX socket"):
        control.call("attach_objects", soon())


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("nothing", {}),
        ("lend", {}),
        ("lend", {"bytes": 0}),
        ("lend", {"bytes": "1"}),
        ("list", {"limit": 1000}),
        ("changes", {"since": -1}),
        ("changes", {"since": 1 << 63}),
        ("set_state", {"state": "active"}),
        ("set_state", {"state": "asleep", "reason": "test"}),
        ("pins", {"after": (1, 2)}),
        ("pins", {"after": (1 << 32, 0, 0, 0)}),
        ("end_pin", {"pin": (0, 0, 0, 0), "serial": 1, "reason": ""}),
    ],
)
def test_a_call_with_wrong_arguments_says_what_was_expected(
    node: RunningNode, call: str, arguments: dict[str, Any]
) -> None:
    with tcp(node) as control:
        with pytest.raises(ProtocolError, match="expected one of the calls stats, list"):
            control.call(call, soon(), **arguments)
        assert control.call("stats", soon())["capacity"] == 64 << 20


def test_another_operation_is_refused_and_a_broken_frame_ends_the_connection(node: RunningNode) -> None:
    with dial(parse_address(node.address), "control", deadline=soon()).socket as connection:
        connection.settimeout(20)
        connection.sendall(pack_frame(Op.GET, b"key", request=5))
        reader = FrameReader("")
        frame = None
        while frame is None:
            frame = reader.feed(connection.recv(reader.needed))
        assert (frame.op, frame.request, frame.status) == (Op.CALL, 5, Status.BAD_REQUEST)
        connection.sendall(bytes(64))
        assert connection.recv(1) == b""


@pytest.mark.slow
def test_the_node_keeps_no_descriptors_of_connections_that_ended() -> None:
    with running_node(grace=0.1) as node:  # less than `settled` waits
        folder = Path(f"/proc/{node.pid}/fd")

        def visit() -> None:
            with local(node) as control:
                lease = control.call("lend", soon(), bytes=4096)["lease"]
                for call, arguments in (("attach_objects", {}), ("attach_lease", {"lease": lease})):
                    for file in attached(control, call, **arguments)[1]:
                        os.close(file)
                control.call("release", soon(), lease=lease)
            dial(parse_address(node.address), "data", deadline=soon()).socket.close()

        visit()
        before = settled(folder)
        for _ in range(20):
            visit()
        deadline = soon()
        while len(list(folder.iterdir())) > before:
            assert time.monotonic() < deadline, [os.readlink(entry) for entry in folder.iterdir()]
            time.sleep(0.02)


def settled(folder: Path) -> int:
    """How many entries there are once that number has not changed for a while."""
    count, since = len(list(folder.iterdir())), time.monotonic()
    deadline = soon()
    while time.monotonic() - since < 0.3:
        now = len(list(folder.iterdir()))
        if now != count:
            count, since = now, time.monotonic()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return count


def test_a_call_under_way_ends_when_its_connection_is_closed(node: RunningNode) -> None:
    first = tcp(node)
    first.close()
    first.close()
    with pytest.raises(ConnectionError, match="this connection was closed"):
        first.call("stats", soon())


@pytest.mark.slow
def test_a_session_is_alive_as_long_as_its_control_connection() -> None:
    with running_node(grace=0.2) as node:
        with tcp(node) as control:
            control.call("lend", soon(), bytes=4096)
            time.sleep(1.0)  # several times the grace
            assert control.call("stats", soon())["lent"] >= 4096
        with tcp(node) as control:
            deadline = soon()
            while control.call("stats", soon())["lent"]:
                assert time.monotonic() < deadline, node.log
                time.sleep(0.05)
