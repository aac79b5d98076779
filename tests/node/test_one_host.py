"""Programs of other users on the node's host: where they are let in, what they are passed, what they can do with it."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from farpool import AccessDeniedError, ConfigError, NodeError, Store
from farpool.cluster.node import Node
from farpool.cluster.node.process import RunningNode
from farpool.cluster.node.users import group_id, user_of
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import Address, parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from tests.attacks.lab import as_user, why_no_second_user
from tests.node.nodes import PATIENCE

OTHER = 65432
GROUP = 65430
OF_NO_GROUP = 65431
KEYS = """
[keys.publisher]
secret = "of the publisher"
rights = ["read", "publish", "write"]
tenant = 1
[keys.neighbour]
secret = "of the neighbour"
rights = ["read", "publish"]
tenant = 2
"""
KEY = AccessKey("publisher", b"of the publisher")
TEXT = "publisher:of the publisher"

as_root = pytest.mark.skipif(bool(why_no_second_user()), reason=why_no_second_user() or "never")


@pytest.fixture
def parent() -> Iterator[Path]:
    """A folder in shared memory that others may pass through."""
    path = Path(tempfile.mkdtemp(prefix="farpool-one-host-", dir="/dev/shm"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@contextmanager
def started(parent: Path, *options: str, keys: bool = True) -> Iterator[RunningNode]:
    given = ["--dram", "32MiB", *options]
    if keys:
        file = parent / "keys.toml"
        file.write_text(KEYS)
        file.chmod(0o600)
        given += ["--keys", str(file)]
    running = RunningNode(str(parent / "node"), given)
    try:
        running.start()
        yield running
    finally:
        running.close()


def mode(path: Path | str) -> tuple[int, int]:
    state = os.stat(path)
    return stat.S_IMODE(state.st_mode), state.st_gid


def can(act: Callable[[], object]) -> bool:
    try:
        act()
    except PermissionError:
        return False
    return True


def learned(running: RunningNode) -> dict[str, Any]:
    """What a program finds out about the files that it is passed, and about the node's folder."""
    address = Address("unix", path=running.ready["socket"])
    control = Control(dial(address, "control", key=KEY, deadline=time.monotonic() + PATIENCE))
    _, files = control.call_with_files("attach_objects", time.monotonic() + PATIENCE)
    names = [*SEGMENTS, "identity", "node.lock"]
    found = {
        "modes": [fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE for file in files],
        "reopened": [can(lambda file=file: os.open(f"/proc/self/fd/{file}", os.O_RDWR)) for file in files[:2]],  # type: ignore[misc]
        "cut": [can(lambda file=file: os.ftruncate(file, 4096)) for file in files[2:]],  # type: ignore[misc]
        "opened": [name for name in names if can(lambda name=name: open_if_there(running.folder / name))],  # type: ignore[misc]
        "listed": can(lambda: os.listdir(running.folder)),
    }
    control.close()
    return found


SEGMENTS = [f"objects-{tenant}.{kind}" for tenant in (1, 2) for kind in ("index", "data")]


def open_if_there(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        raise PermissionError from None


def populate(running: RunningNode) -> None:
    for key in (TEXT, "neighbour:of the neighbour"):
        with Store(running.address, key=key, timeout=PATIENCE) as store:
            store.put("key", b"value" * 100)


@as_root
@pytest.mark.parametrize("options", [(), ("--ephemeral",)])
def test_a_program_of_the_group_maps_read_only_and_opens_nothing_a_second_time(
    parent: Path, options: tuple[str, ...]
) -> None:
    with started(parent, "--socket-group", str(GROUP), *options) as running:
        populate(running)
        assert mode(running.folder) == (0o710, GROUP)
        assert mode(running.ready["socket"]) == (0o660, GROUP)
        found = as_user(OTHER, GROUP, lambda: learned(running))
    assert found == {
        "modes": [os.O_RDONLY, os.O_RDONLY, os.O_RDWR],
        "reopened": [False, False],
        "cut": [False],
        "opened": [],
        "listed": False,
    }


@as_root
def test_the_nodes_own_user_is_passed_read_only_files_and_can_reopen_them(parent: Path) -> None:
    # The page about segment files says so: nothing separates the programs of one user.
    with started(parent, "--socket-group", str(GROUP)) as running:
        populate(running)
        found = as_user(os.getuid(), os.getgid(), lambda: learned(running))
    assert found["modes"] == [os.O_RDONLY, os.O_RDONLY, os.O_RDWR]
    assert found["reopened"] == [True, True]


def test_what_the_nodes_own_user_is_passed_cannot_be_written(parent: Path) -> None:
    with started(parent) as running:
        populate(running)
        address = Address("unix", path=running.ready["socket"])
        with Control(dial(address, "control", key=KEY, deadline=time.monotonic() + PATIENCE)) as control:
            _, files = control.call_with_files("attach_objects", time.monotonic() + PATIENCE)
        for file in files[:2]:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.pwrite(file, b"x", 8192)
            with pytest.raises(OSError, match="Invalid argument"):  # of a file that is not open for writing
                os.ftruncate(file, 0)
            with pytest.raises(PermissionError):
                mmap.mmap(file, 0)
            with mmap.mmap(file, 0, prot=mmap.PROT_READ) as memory, pytest.raises(TypeError, match="readonly"):
                memory[8192:8193] = b"x"
        for file in files:
            os.close(file)


@as_root
def test_another_user_reads_and_publishes_through_memory(parent: Path) -> None:
    with started(parent, "--socket-group", str(GROUP)) as running:
        populate(running)
        value = bytes(range(256)) * 4096

        def use() -> list[object]:
            with Store(running.address, key=TEXT, transport="mapped", timeout=PATIENCE) as store:
                store.put("first", value)  # is sent together with the question for a publish area
                outcome = store.put("large", value)
                reader = store._cluster.members[0].channel.reader
                assert reader is not None
                mapped = reader.get(b"large")
                return [str(outcome), store.get("large") == value, mapped is not None and mapped[0] == value]

        assert as_user(OTHER, GROUP, use) == ["stored", True, True]
        with Store(running.address, key=TEXT, timeout=PATIENCE) as store:
            assert store.get("large") == value


@as_root
@pytest.mark.parametrize("group", [(), ("--socket-group", str(GROUP))])
def test_a_user_of_no_group_does_not_reach_the_socket_and_is_served_over_tcp(
    parent: Path, group: tuple[str, ...]
) -> None:
    with started(parent, *group) as running:
        populate(running)

        def use() -> list[object]:
            reached = can(lambda: socket.socket(socket.AF_UNIX).connect(running.ready["socket"]))
            with Store(running.address, key=TEXT, timeout=PATIENCE) as store:
                value = store.get("key")
                assert store._cluster.members[0].channel.reader is None
            return [reached, value == b"value" * 100]

        assert as_user(OTHER, OF_NO_GROUP, use) == [False, True]


@as_root
@pytest.mark.slow
def test_a_start_without_a_group_lets_nobody_in_any_more(parent: Path) -> None:
    with started(parent, "--socket-group", str(GROUP)) as running:
        assert mode(running.folder) == (0o710, GROUP)
        running.terminate()
        again = RunningNode(str(running.folder), ["--dram", "32MiB"])
        try:
            again.start()
            assert mode(again.folder)[0] == 0o700
            assert mode(again.ready["socket"])[0] == 0o600
        finally:
            again.close()


def node(parent: Path, **settings: Any) -> Node:
    return Node(parse_address("127.0.0.1:0", "--listen", any_port=True), 16 << 20, name="node", **settings)


def test_a_group_needs_keys_has_to_be_there_and_to_reach_the_folder(parent: Path) -> None:
    with pytest.raises(ConfigError, match="no access keys, without which only the node's own user is let in"):
        node(parent, folder=parent / "node", socket_group="root").start()
    with pytest.raises(ConfigError, match="this host has no such group"):
        node(parent, folder=parent / "node", socket_group="no such group", keys={}).start()
    parent.chmod(0o700)
    with pytest.raises(ConfigError, match=f"chmod o\\+x {parent}"):
        node(parent, folder=parent / "node", socket_group=str(os.getgid() + 1), keys={}).start()
    assert not (parent / "node").exists()
    assert group_id("root") == 0


@as_root
def test_a_group_of_other_users_is_refused(parent: Path) -> None:
    (parent / "node").mkdir(mode=0o700)
    os.chown(parent / "node", OTHER, OTHER)

    def start() -> str:
        try:
            node(parent, folder=parent / "node", socket_group=str(GROUP), keys={}).start()
        except ConfigError as error:
            return str(error)
        return ""

    assert f"group {GROUP}, which user {OTHER} is no member of" in as_user(OTHER, OTHER, start)


@as_root
def test_without_keys_another_user_is_refused_by_name(parent: Path) -> None:
    with started(parent, keys=False) as running:
        with Store(running.address, timeout=PATIENCE) as store:
            store.put("key", b"value")

        def use() -> str:
            with Store(running.address, timeout=PATIENCE) as store:
                try:
                    return str(store.get("key"))
                except AccessDeniedError as error:
                    return str(error)

        said = as_user(OTHER, OTHER, use)
        assert f"only its own user {os.getuid()} may use it, and this is user {OTHER}" in said
        with Store(running.address, timeout=PATIENCE) as store:
            assert store.get("key") == b"value"


@contextmanager
def connected(host: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:
        theirs = socket.create_connection(listening.getsockname()[:2])
        ours, _ = listening.accept()
        with theirs, ours:
            yield theirs, ours


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_user_at_the_other_end_is_known_until_it_closes(host: str) -> None:
    with ExitStack() as stack:
        try:
            theirs, ours = stack.enter_context(connected(host))
        except OSError as error:
            pytest.skip(f"no address {host} here: {error}")
        assert user_of(ours) == os.geteuid()
        # The kernel says root's number for a socket that is nobody's any more.
        theirs.close()
        assert user_of(ours) is None


@as_root
def test_the_user_at_the_other_end_is_the_one_who_opened_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        target = listening.getsockname()
        seen: list[int | None] = []
        child = os.fork()
        if child == 0:
            os.setresuid(OTHER, OTHER, OTHER)
            connection = socket.create_connection(target)
            connection.recv(1)
            os._exit(0)
        ours, _ = listening.accept()
        seen.append(user_of(ours))
        ours.close()
        os.waitpid(child, 0)
    assert seen == [OTHER]


@pytest.mark.slow
def test_a_killed_ephemeral_node_leaves_no_memory(parent: Path) -> None:
    with started(parent, "--ephemeral") as running:
        with Store(running.address, key=TEXT, timeout=PATIENCE) as store:
            for number in range(8):
                store.put(f"key {number}", bytes(1 << 20))
        assert not list(running.folder.glob("objects-*"))
        running.kill()
        left = list(running.folder.iterdir())
        assert sum(path.lstat().st_blocks for path in left) == 0, left
        assert {path.name for path in left} <= {"node.lock", "socket"}
        running.start()  # what is left of the names is in nobody's way
        with Store(running.address, key=TEXT, timeout=PATIENCE) as store:
            assert store.get("key 0") is None


@pytest.mark.slow
def test_an_ephemeral_node_removes_what_an_earlier_start_has_left(parent: Path) -> None:
    with started(parent) as running:
        with Store(running.address, key=TEXT, timeout=PATIENCE) as store:
            store.put("key", b"value")
        running.kill()
        assert list(running.folder.glob("objects-1.*"))
        again = RunningNode(str(running.folder), [*running._options, "--ephemeral"])
        try:
            again.start()
            assert not list(again.folder.glob("objects-*"))
            with Store(again.address, key=TEXT, timeout=PATIENCE) as store:
                assert store.get("key") is None
        finally:
            again.close()


def test_a_lease_of_an_ephemeral_node_is_mapped_and_lies_in_no_file(parent: Path) -> None:
    from farpool.cluster.wire.channel import Channel

    with started(parent, "--ephemeral") as running:
        channel = Channel(parse_address(running.address), key=KEY, transport="mapped")
        lease = channel.lend(1 << 20, time.monotonic() + PATIENCE)
        assert lease.address is not None
        assert not list(running.folder.glob("lease-*"))
        lease.release(time.monotonic() + PATIENCE)
        with pytest.raises(NodeError):
            channel.call("attach_lease", time.monotonic() + PATIENCE, lease=lease.id)
        channel.close()
