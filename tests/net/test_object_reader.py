"""Published objects, read from the memory of a node that changes it at the same time."""

from __future__ import annotations

import gc
import os
import random
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool._native import Connection, NodeServer, ObjectReader
from farpool.cluster.wire.frames import Op
from farpool.errors import ChecksumError, NodeError, NodeTimeoutError, ProtocolError
from tests.net.live_node import (
    MIB,
    NAME,
    connect,
    drop,
    map_file,
    object_files,
    opened,
    put,
    read_objects,
    serving,
    soon,
)

HEADER_BYTES = 4096
SLOT = struct.Struct("<QQQQII")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    with serving(tmp_path) as server:
        yield server


@pytest.fixture
def publisher(server: NodeServer) -> Iterator[Connection]:
    connection = connect(server)
    yield connection
    connection.close()


def content(nbytes: int, seed: object = 0) -> bytes:
    return random.Random(f"{nbytes}/{seed}").randbytes(nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 65536, 65537, 3 * MIB + 1])
def test_what_was_published_is_read_with_its_serial(server: NodeServer, publisher: Connection, nbytes: int) -> None:
    reader = read_objects(server)
    expected = {}
    for key_nbytes in (1, 15, 16, 17, 256):
        key = content(key_nbytes, "key")
        expected[key] = (content(nbytes, key), put(publisher, key, content(nbytes, key)))
    for key, (payload, serial) in expected.items():
        assert reader.get(key) == (payload, serial)
        buffer = bytearray(nbytes + 3)
        assert reader.get_into(key, buffer) == (nbytes, serial)
        assert buffer == payload + bytes(3)


def test_thousands_of_objects_are_found_while_the_table_grows(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    serials = {}
    for number in range(5000):
        key = b"object %d" % number
        serials[key] = put(publisher, key, key * 3)
    for key, serial in serials.items():
        assert reader.get(key) == (key * 3, serial)


def test_what_is_not_there_is_left_to_the_node(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    put(publisher, b"dropped", b"bytes")
    put(publisher, b"expired", b"bytes", ttl_ms=30)
    drop(publisher, b"dropped")
    deadline = soon()
    while reader.get(b"expired") is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    for key in (b"dropped", b"expired", b"never", b"", b"x" * 257, b"x" * 70_000):
        assert reader.get(key) is None
        assert reader.get_into(key, bytearray(100)) is None


def test_what_was_put_after_a_drop_is_another_object(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    for step in range(50):
        serial = put(publisher, b"key", content(1000, step))
        assert reader.get(b"key") == (content(1000, step), serial)
        drop(publisher, b"key")
        assert reader.get(b"key") is None


def test_many_keys_are_looked_up_and_what_is_damaged_is_left_to_the_node(
    server: NodeServer, publisher: Connection
) -> None:
    reader = read_objects(server)
    keys = [b"key %d" % number for number in range(256)]
    for key in keys:
        put(publisher, key, key)
    sizes = [len(key) for key in keys]
    assert reader.lookup(keys) == (sizes, [])
    memory = map_file(server.objects_paths(0)[1])
    memory[memory.find(b"key 100") - 20] ^= 1
    assert reader.lookup(keys) == ([*sizes[:100], None, *sizes[101:]], [100])


def test_a_buffer_that_is_too_small_is_refused_and_untouched(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    put(publisher, b"key", content(100))
    buffer = bytearray(b"untouched")
    with pytest.raises(ValueError, match="object has 100 bytes, the buffer 9"):
        reader.get_into(b"key", buffer)
    assert buffer == b"untouched"
    with pytest.raises(BufferError):
        reader.get_into(b"key", bytes(100))


@pytest.mark.parametrize("nbytes", [100, 64 << 10], ids=["alone", "with the second thread"])
def test_many_objects_are_read_at_once(server: NodeServer, publisher: Connection, nbytes: int) -> None:
    reader = read_objects(server)
    keys = [b"key %d" % number for number in range(40)]
    for key in keys:
        put(publisher, key, content(nbytes, key))
    memory = map_file(server.objects_paths(0)[1])
    memory[memory.find(content(nbytes, keys[30])) + nbytes // 2] ^= 1
    drop(publisher, keys[10])
    for _ in range(20):
        rooms = [nbytes + number % 2 - (number == 20) for number in range(len(keys))]
        buffers = [bytearray(room) for room in rooms]
        split = [(memoryview(one)[:70], memoryview(one)[70:]) for one in buffers]
        outcomes = reader.get_many_into(keys, list(split), soon())
        assert isinstance(too_small := outcomes[20], ValueError)
        assert str(too_small).startswith(f"the object has {nbytes} bytes, the buffer {nbytes - 1}")
        missing = {10, 30}  # dropped; damaged
        for number, (key, outcome, buffer) in enumerate(zip(keys, outcomes, buffers, strict=True)):
            assert number == 20 or outcome == (None if number in missing else nbytes)
            if number not in {20, *missing}:
                assert buffer == content(nbytes, key) + bytes(number % 2)
    late = reader.get_many_into(keys, [bytearray(nbytes) for _ in keys], time.monotonic() - 1)
    assert [type(outcome) for outcome in late] == [NodeTimeoutError] * len(keys)
    with pytest.raises(ValueError, match="40 keys and 39 buffers"):
        reader.get_many_into(keys, [bytearray(nbytes)] * 39, soon())


def test_reading_marks_the_object_as_visited(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    put(publisher, b"key", b"bytes")
    with object_files(server) as paths:
        marks = map_file(paths[2])
    marks[HEADER_BYTES:] = bytes(len(marks) - HEADER_BYTES)
    assert reader.get(b"another") is None
    assert sum(marks[HEADER_BYTES:]) == 0
    assert reader.get(b"key") is not None
    assert sum(marks[HEADER_BYTES:]) == 1


def test_a_stopped_node_is_not_read_from(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        connection = connect(server)
        put(connection, b"key", b"bytes")
        reader = read_objects(server)
        assert reader.get(b"key") is not None
    assert reader.get(b"key") is None
    connection.close()


@pytest.mark.parametrize("nbytes", [1, 4096, 200_000])
def test_flipped_bits_of_a_payload_are_found(server: NodeServer, publisher: Connection, nbytes: int) -> None:
    reader = read_objects(server)
    payload = content(nbytes)
    put(publisher, b"key", payload)
    memory = map_file(server.objects_paths(0)[1])
    at = memory.find(b"FOBJ") + 128
    assert memory[at : at + nbytes] == payload
    rng = random.Random(nbytes)
    for _ in range(300):
        bit = rng.randrange(8 * nbytes)
        memory[at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumError, match="damaged in the node's memory") as caught:
            reader.get(b"key")
        assert caught.value.tier == NAME
        with pytest.raises(ChecksumError):
            reader.get_into(b"key", bytearray(nbytes))
        memory[at + bit // 8] ^= 1 << bit % 8
        assert reader.get(b"key") is not None


def test_flipped_bits_of_an_objects_header_never_give_other_bytes(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    payload = content(300)
    serial = put(publisher, b"a key of 19 letters", payload)
    memory = map_file(server.objects_paths(0)[1])
    at = memory.find(b"FOBJ")
    for bit in range(8 * (64 + 19)):
        memory[at + bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumError):
            reader.get(b"a key of 19 letters")
        memory[at + bit // 8] ^= 1 << bit % 8
    assert reader.get(b"a key of 19 letters") == (payload, serial)


def test_an_index_of_nonsense_neither_crashes_nor_gives_other_bytes(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    objects = {}
    for number in range(200):
        key = b"key %d" % number
        objects[key] = (content(100, key), put(publisher, key, content(100, key)))
    path = server.objects_paths(0)[0]
    index = map_file(path)
    slots_at, buckets_at = struct.unpack_from("<Q", index, 96)[0], struct.unpack_from("<Q", index, 88)[0]
    rng = random.Random(3)
    words = [0, 1, 63, 200, 4096, 2**31, 2**32 - 1, 2**63, 2**64 - 1]
    for _ in range(3000):
        place = rng.choice(
            [128, slots_at + 8 * rng.randrange(200 * 6), buckets_at + 8 * rng.randrange(512)]
        )  # the table's state, slots, buckets
        before = index[place : place + 8]
        word = rng.choice(
            [rng.choice(words), rng.getrandbits(64), rng.choice(words) | rng.choice(words) << 32 & 2**64 - 1]
        )
        index[place : place + 8] = struct.pack("<Q", word & 2**64 - 1)
        for key in rng.sample(sorted(objects), 5):
            try:
                found = reader.get(key)
            except ChecksumError:
                continue
            assert found is None or found == objects[key] or found[0] == objects[key][0]
        index[place : place + 8] = before
    assert all(reader.get(key) == expected for key, expected in objects.items())


def test_readers_of_objects_that_are_dropped_and_evicted_see_whole_ones_only(tmp_path: Path) -> None:
    keys = [b"key %d" % number for number in range(6)]
    published: dict[tuple[bytes, int], int] = {}  # bytes by key and turn
    ended = threading.Event()
    with serving(tmp_path, 4 * MIB) as server:
        reader = read_objects(server)

        def publish() -> None:
            rng = random.Random(1)
            with_room = connect(server)
            turn = 0
            while not ended.is_set():
                key, turn = rng.choice(keys), turn + 1
                with_room.exchange(Op.DROP, key, soon())
                nbytes = rng.choice([500, 50_000, 1_500_000])
                published[key, turn] = nbytes
                payload = struct.pack("<Q", turn) * (nbytes // 8) + key
                with_room.exchange(Op.PUT, bytes(32) + key, soon(), payload=payload)
            with_room.close()

        publisher = threading.Thread(target=publish)
        publisher.start()
        hits = 0
        until = soon(60)
        try:
            while (hits < 3000 or len(published) < 300) and time.monotonic() < until:
                for key in keys:
                    found = reader.get(key)
                    if found is not None:
                        (turn,) = struct.unpack_from("<Q", found[0])
                        assert found[0] == struct.pack("<Q", turn) * (published[key, turn] // 8) + key
                        hits += 1
        finally:
            ended.set()
            publisher.join(20)
    assert hits >= 3000
    assert len(published) >= 300
    assert not publisher.is_alive()


def test_a_view_reads_where_the_object_lies_and_outlives_the_reader(server: NodeServer, publisher: Connection) -> None:
    reader = read_objects(server)
    payload = content(10_000)
    put(publisher, b"key", payload)
    reply = publisher.exchange(Op.PIN, bytes(8) + b"key", soon())
    offset, nbytes, _, _ = struct.unpack("<QQII", reply.meta)
    view = reader.view(offset, nbytes)
    assert view.readonly
    assert view.nbytes == 10_000
    del reader
    gc.collect()
    assert view == payload


def test_what_lies_outside_of_the_objects_cannot_be_viewed(server: NodeServer) -> None:
    reader = read_objects(server)
    size = os.stat(server.objects_paths(0)[1]).st_size
    for offset, nbytes in [(0, 1), (4095, 1), (size, 1), (4096, size), (2**64 - 1, 2), (8192, 2**64 - 1)]:
        with pytest.raises(ValueError, match="outside"):
            reader.view(offset, nbytes)


def damaged(paths: list[str], which: int, change: tuple[int, bytes] | None, folder: Path) -> list[str]:
    copies = []
    for number, path in enumerate(paths):
        copy = folder / f"copy-{number}"
        with open(path, "rb") as source:
            head = bytearray(source.read(HEADER_BYTES))
        if number == which and change is not None:
            head[change[0] : change[0] + len(change[1])] = change[1]
        copy.write_bytes(head)
        os.truncate(copy, os.stat(path).st_size if number != which or change is not None else 100)
        copies.append(str(copy))
    return copies


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (None, "not a segment file"),
        ((0, b"SOMETHNG"), "not a segment file"),
        ((8, b"\1"), "of version 1, which this farpool reads no more: it reads version 2"),
        ((8, b"\3"), "another version; this farpool reads version 2"),
        ((24, b"\1"), "damaged header"),
    ],
)
def test_files_that_are_not_those_of_a_node_are_refused_by_name(
    server: NodeServer, tmp_path: Path, which: int, change: tuple[int, bytes] | None, text: str
) -> None:
    with object_files(server) as originals:
        paths = damaged(originals, which, change, tmp_path)
    names = ("index", "data", "visited")
    with opened(paths) as files, pytest.raises(ProtocolError, match=f"{names[which]} file of its objects.*{text}"):
        ObjectReader(*files, NAME)


def test_files_of_another_kind_or_of_two_tenants_are_refused(server: NodeServer) -> None:
    with object_files(server) as (index, data, visited), object_files(server, 1) as (_, other_data, other_visited):
        with opened([index, visited, data]) as files, pytest.raises(ProtocolError, match="another kind"):
            ObjectReader(*files, NAME)
        for mixed in ([index, other_data, visited], [index, data, other_visited]):
            with opened(mixed) as files, pytest.raises(ProtocolError, match="do not belong together"):
                ObjectReader(*files, NAME)
    with pytest.raises(NodeError, match="Bad file descriptor"):
        ObjectReader(-1, -1, -1, NAME)
