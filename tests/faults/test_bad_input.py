"""What is wrong is said on the side that can do something about it, and nothing else suffers."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from farpool._native import crc32c
from farpool.cluster.node import Node
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store import PutOutcome, Store
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.channel import Transport
from farpool.cluster.wire.dial import dial
from farpool.cluster.wire.frames import HEAD, LOOKUP, OFFSET, RETAIN, TOUCH, TTL, Op, Status
from farpool.errors import (
    AccessDeniedError,
    ConfigError,
    KeyConflictError,
    NodeFullError,
    ObjectTooLargeError,
    ProtocolError,
)
from tests.faults.forge import eventually

SECRET = "a secret of more than 16 bytes"
_HEADER = struct.Struct("<4sBBHQIIQQQIIB3s")


@pytest.fixture(scope="module")
def node() -> Iterator[RunningNode]:
    with running_node("4MiB") as running:
        yield running


@pytest.fixture
def store(node: RunningNode) -> Iterator[Store]:
    with Store(node.address) as opened:
        opened.put("key", b"value")
        yield opened
        # Whatever a test did, who does nothing wrong is served as before.
        assert opened.get("key") == b"value"
        opened.put("another key", b"another value")


def header(op: int, *, version: int = 2, meta_nbytes: int = 0, payload_nbytes: int = 0, meta: bytes = b"") -> bytes:
    """A frame without its payload. Its announced lengths are those given, if any."""
    nbytes = meta_nbytes or len(meta)
    fields = _HEADER.pack(b"FPW1", version, op, 0, 1, nbytes, 0, payload_nbytes, 0, 0, 0, 0, 0, bytes(3))
    return fields + struct.pack("<I", crc32c(meta, crc32c(fields))) + meta


def said_until_the_end(connection: socket.socket) -> bytes:
    connection.settimeout(20)
    said = b""
    while data := connection.recv(4096):
        said += data
    return said


def test_a_wrong_secret_is_an_access_error_for_the_program_and_a_warning_for_the_node(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.touch(mode=0o600)
    keys.write_text(f'[keys.tester]\nsecret = "{SECRET}"\nrights = ["read", "publish"]\n')
    with running_node("4MiB", keys=keys) as guarded:
        with (
            Store(guarded.address, key=f"tester:not {SECRET}") as store,
            pytest.raises(AccessDeniedError, match=guarded.address) as caught,
        ):
            store.put("key", b"value")
        assert SECRET not in str(caught.value)
        with Store(guarded.address, key=f"tester:{SECRET}") as store:
            assert store.get("key") is None
        eventually(lambda: '"refused"' in guarded.log, 20)
        assert SECRET not in guarded.log


@pytest.mark.parametrize("version", [1, 9])
def test_another_version_of_the_protocol_is_named_to_the_program_and_in_the_nodes_log(
    node: RunningNode, store: Store, version: int
) -> None:
    target = parse_address(node.address)
    with socket.create_connection((target.host, target.port), 20) as connection:
        connection.sendall(header(1, version=version))
        assert b"version %d" % version in said_until_the_end(connection)
    eventually(lambda: f"version {version}" in node.log, 20)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with Store(address, timeout=1) as stranger:
            thread = threading.Thread(target=answer_all, args=(other, header(2, version=version)))
            thread.start()
            with pytest.raises(ProtocolError, match=f"{address}.*version {version}"):
                stranger.get("key")
            other.shutdown(socket.SHUT_RDWR)
            thread.join(20)


def answer_all(listening: socket.socket, answer: bytes) -> None:
    """Say the same to everybody, until it listens no more."""
    with contextlib.suppress(OSError):
        while True:
            connection, _ = listening.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)
                said_until_the_end(connection)


KEY_AND_MORE = {
    Op.GET: b"",
    Op.STAT: b"",
    Op.DROP: b"",
    Op.PIN: TTL.pack(0),
    Op.TOUCH: TOUCH.pack(0, 0),
    Op.RETAIN: RETAIN.pack(0, 1, 0),
    Op.PUT: HEAD.pack(0, 1, 0, 1, 0, 0, 0),
    Op.PREPARE: OFFSET.pack(10) + HEAD.pack(0, 1, 0, 1, 0, 0, 0),
}
BAD_METAS = [
    *((op, before) for op, before in KEY_AND_MORE.items()),
    *((op, before + b"x" * 257) for op, before in KEY_AND_MORE.items()),
    *((op, before[:-1]) for op, before in KEY_AND_MORE.items() if before),
    (Op.TOUCH, TOUCH.pack(0, 9) + b"key"),
    (Op.RETAIN, RETAIN.pack(0, 8, 0) + b"key"),
    (Op.END_SESSION, b"short"),
    (Op.COMMIT, b"short"),
    (Op.UNPIN, b"short"),
    (Op.LOOKUP, b""),
    (Op.LOOKUP, LOOKUP.pack(0, 2) + b"\x03\0key"),
    (Op.LOOKUP, LOOKUP.pack(0, 1) + b"\x09\0key"),
    (Op.LOOKUP, LOOKUP.pack(0, 1) + b"\x03\0key and more"),
    (Op.LOOKUP, LOOKUP.pack(0, 2**32 - 1)),
    (99, b"key"),
]


@pytest.mark.parametrize(("op", "meta"), BAD_METAS)
def test_a_request_that_is_not_one_is_a_bad_request_and_nothing_else(
    node: RunningNode, store: Store, op: int, meta: bytes
) -> None:
    before = list(store.keys())
    with dial(parse_address(node.address), "data", deadline=time.monotonic() + 20).socket as connection:
        connection.settimeout(20)
        connection.sendall(header(op, meta=meta))
        reply = connection.recv(4096)
    assert struct.unpack_from("<H", reply, 6)[0] == Status.BAD_REQUEST
    assert list(store.keys()) == before


BAD_KEYS = ["", b"", "x" * 257, b"x" * 257, "\u00e4" * 129, "\udcff"]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_key_that_cannot_be_one_is_refused_before_a_node_is_asked(store: Store, key: str | bytes) -> None:
    acts: list[Callable[[Store], object]] = [
        lambda one: one.put(key, b"value"),
        lambda one: one.get(key),
        lambda one: one.get_into(key, bytearray(1)),
        lambda one: one.lookup(["key", key]),
        lambda one: one.stat(key),
        lambda one: one.drop(key),
        lambda one: one.touch(key, 1.0),
        lambda one: one.pin(key),
        lambda one: one.put_many([("another", b"value"), (key, b"value")]),
        lambda one: one.get_many(["key", key]),
    ]
    with Store("tcp://127.0.0.1:1", timeout=0.2) as nowhere:
        for act, one in itertools.product(acts, (store, nowhere)):
            with pytest.raises(ConfigError, match="key") as caught:
                act(one)
            assert caught.value.setting == "key"
    assert store.get("another") is None


@pytest.mark.parametrize("key", [None, 7, bytearray(b"key"), ("key",)])
def test_a_key_of_another_type_is_a_type_error(store: Store, key: object) -> None:
    with pytest.raises(TypeError, match="a key is a str or bytes"):
        store.put(key, b"value")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a key is a str or bytes"):
        store.lookup(["key", key])  # type: ignore[list-item]


@pytest.mark.parametrize("transport", ["mapped", "tcp"])
@pytest.mark.parametrize("nbytes", [0, 100, 100_000])
def test_a_key_that_has_another_value_is_a_conflict_if_asked_for_and_the_value_stays(
    node: RunningNode, store: Store, transport: Transport, nbytes: int
) -> None:
    key, value = f"written once {transport} {nbytes}", bytes(nbytes)
    with Store(node.address, transport=transport) as other:
        assert other.put(key, value, check=True) is PutOutcome.STORED
        assert other.put(key, value, check=True) is PutOutcome.PRESENT
        for another in (value + b"more", b"\1" * nbytes if nbytes else b"\1"):
            assert other.put(key, another) is PutOutcome.PRESENT
            with pytest.raises(KeyConflictError, match=f"{nbytes} bytes.*{len(another)} bytes.*drop it first"):
                other.put(key, another, check=True)
            with pytest.raises(KeyConflictError):
                other.put_many([(key, value), (key, another)], check=True)
            assert other.get(key) == store.get(key) == value
        assert other.drop(key)
        assert other.put(key, b"another", check=True) is PutOutcome.STORED
        assert store.get(key) == b"another"
        other.drop(key)


def test_a_frame_that_is_too_long_ends_its_connection(node: RunningNode, store: Store) -> None:
    for bad in (header(Op.GET, meta_nbytes=65_537), header(Op.GET, meta_nbytes=2**32 - 1)):
        with dial(parse_address(node.address), "data", deadline=time.monotonic() + 20).socket as connection:
            connection.sendall(bad)
            said_until_the_end(connection)
    eventually(lambda: node.log.count("bad_frame") >= 2, 20)


def test_a_payload_larger_than_the_node_is_refused_before_it_is_sent(node: RunningNode, store: Store) -> None:
    with dial(parse_address(node.address), "data", deadline=time.monotonic() + 20).socket as connection:
        connection.sendall(header(Op.PUT, payload_nbytes=2**63))
        reply = said_until_the_end(connection)
    assert struct.unpack_from("<H", reply, 6)[0] == Status.TOO_LARGE


def test_an_object_larger_than_the_node_is_refused_by_name(node: RunningNode, store: Store) -> None:
    for transport in ("mapped", "tcp"):
        with Store(node.address, transport=transport) as other:
            for nbytes in (4 << 20, 9 << 20):
                with pytest.raises(ObjectTooLargeError, match=node.address):
                    other.put("large", bytes(nbytes))
            assert other.get("large") is None


def test_objects_that_are_all_pinned_leave_no_room_and_the_node_says_so(node: RunningNode) -> None:
    with Store(node.address, transport="mapped") as store:
        store.put("held", bytes(3 << 20))
        with store.pin("held"), pytest.raises(NodeFullError, match=node.address):
            store.put("more", bytes(2 << 20))
        store.put("more", bytes(2 << 20))


def test_an_unknown_key_is_a_miss_in_each_way(store: Store) -> None:
    assert store.get("unknown") is None
    assert store.get_into("unknown", bytearray(10)) is None
    assert store.get_many(["unknown", "key"]) == [None, b"value"]
    assert store.stat("unknown") is None
    assert not store.exists("unknown")
    assert not store.drop("unknown")
    assert not store.touch("unknown", 1.0)
    with pytest.raises(KeyError, match="unknown"):
        store.pin("unknown")


@pytest.mark.slow
def test_a_port_that_is_taken_ends_a_node_with_its_reason(node: RunningNode, store: Store) -> None:
    taken = node.address.removeprefix("tcp://")
    with pytest.raises(RuntimeError, match=f"{taken}.*another process listens there"), running_node(listen=taken):
        pass


@pytest.mark.parametrize("content", [b"x", b"my thesis\n" * 10_000, bytes(8192)])
def test_a_file_that_is_no_nodes_is_not_taken_for_nvme(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "thesis.txt"
    path.write_bytes(content)
    assert "not a file of a node" in not_started(tmp_path, path)
    assert path.read_bytes() == content


def test_a_path_for_nvme_that_cannot_be_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "folder", tmp_path / "nowhere" / "file"):
        assert str(path) in not_started(tmp_path, path)


def not_started(tmp_path: Path, nvme: Path) -> str:
    """Why a node with this file does not start."""
    folder = tmp_path / "node"
    node = Node(
        parse_address("127.0.0.1:0", any_port=True), 1 << 20, folder=folder, name="node", nvme=(str(nvme), 4 << 20)
    )
    with pytest.raises(ConfigError) as caught:
        node.start()
    node.stop()
    assert caught.value.setting in ("nvme", "folder")
    assert str(nvme) in str(caught.value)
    return str(caught.value)


def test_other_files_in_a_nodes_folder_stay_what_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    folder.mkdir(mode=0o700)
    others = {"notes.txt": b"mine", "objects.data": b"mine, too", "lease-x.data": b"no lease", "objects-0.text": b""}
    for name, content in others.items():
        (folder / name).write_bytes(content)
    (folder / "folder").mkdir()
    for ephemeral in (False, True):
        address = parse_address("127.0.0.1:0", any_port=True)
        with (
            Node(address, 1 << 20, folder=folder, name="node", ephemeral=ephemeral) as running,
            Store(str(running.address)) as store,
        ):
            store.put("key", b"value")
            assert store.get("key") == b"value"
        for name, content in others.items():
            assert (folder / name).read_bytes() == content
        assert (folder / "folder").is_dir()
    assert sorted(os.listdir(folder)) == sorted([*others, "folder"])
