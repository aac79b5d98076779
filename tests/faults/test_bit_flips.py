"""Flipped bits, on the wire and in the segment files: an error, a miss or the right bytes, never wrong ones.

More than 100,000 trials in all, most of them in the slow tests.
"""

from __future__ import annotations

import contextlib
import mmap
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool._native import Connection, NodeServer, ObjectReader
from farpool.cluster.store import Store
from farpool.cluster.wire.frames import HEAD, Op, Status
from farpool.errors import ChecksumError, NodeError
from tests.faults.flips import FlippingWire, flipped
from tests.faults.forge import Forge
from tests.faults.historian import Historian
from tests.faults.history import Losses, violations
from tests.faults.proxy import FlippingProxy
from tests.net.live_node import connect, map_file, put, read_objects, serving, soon

SEED = 20
WIRE_TRIALS = [2000, pytest.param(20_000, marks=pytest.mark.slow)]
DATA_TRIALS = 45_000
INDEX_TRIALS = 25_000
SERVED_TRIALS = [1000, pytest.param(3000, marks=pytest.mark.slow)]
_EXTENT = struct.Struct("<4sHHQQ")
_EXTENT_BYTES = 64

Known = dict[bytes, tuple[bytes, int]]
"""Payload and serial by key."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NodeServer]:
    with serving(tmp_path, 1 << 20) as running:
        yield running


def publish_some(connection: Connection, rng: random.Random, count: int = 60) -> Known:
    known: Known = {}
    for number in range(count):
        key = rng.randbytes(rng.randint(1, 40)) + b"%d" % number
        payload = rng.randbytes(rng.choice([1, 30, 100, 400, 3000]))
        known[key] = payload, put(connection, key, payload)
    return known


def read_all(connection: Connection, known: Known) -> None:
    for key, (payload, serial) in known.items():
        reply = connection.exchange(Op.GET, key, soon())
        assert (reply.status, reply.serial, reply.payload) == (Status.DONE, serial, payload)


@pytest.mark.parametrize("trials", WIRE_TRIALS)
@pytest.mark.parametrize("direction", ["request", "reply"])
@pytest.mark.slow
def test_every_flip_on_the_wire_is_found_and_changes_nothing(server: NodeServer, direction: str, trials: int) -> None:
    """A key that has a value is dropped, one that has none is put; only a damaged reply comes too late."""
    rng = random.Random(f"{SEED} {direction}")
    clean = connect(server)
    known: dict[bytes, bytes | None] = {key: payload for key, (payload, _) in publish_some(clean, rng).items()}
    known |= {b"nothing yet %d" % number: None for number in range(60)}
    keys = sorted(known)
    wire = FlippingWire(server, rng, 2)
    found = dict.fromkeys(["header", "payload"], 0)
    for trial in range(trials):
        wire = wire.renewed(server)
        key, op, payload = rng.choice(keys), rng.choice([Op.GET, Op.PUT, Op.PUT, Op.STAT]), None
        if op == Op.PUT and known[key] is not None:
            op = Op.DROP
        if op == Op.PUT:
            payload = rng.randbytes(rng.randint(100, 1000))
        reply = wire.ask(op, HEAD.pack(0, 1, 0, 1, 0, 0, 0) + key if op == Op.PUT else key, payload)
        if op in (Op.PUT, Op.DROP) and direction == "reply":
            known[key] = payload
        wire.pass_request(flip=direction == "request")
        wire.pass_reply(flip=direction == "reply")
        found[wire.where] += 1
        try:
            status = reply.result().status
        except (NodeError, ChecksumError):
            continue
        assert direction == "request", f"trial {trial}: a damaged reply was taken"
        assert status in (Status.CHECKSUM, Status.BAD_REQUEST, Status.TOO_LARGE), f"trial {trial}: {status}"
    wire.close()
    for key, payload in known.items():
        last = clean.exchange(Op.GET, key, soon())
        assert (last.status, last.payload) == (Status.MISSING if payload is None else Status.DONE, payload)
    clean.close()
    assert min(found.values()) > trials / 20


def extents(memory: mmap.mmap, known: Known) -> dict[bytes, tuple[int, int, int]]:
    """Where an object's header begins, how many bytes header and key have, and where its payload begins."""
    places = {}
    at = memory.find(b"FOBJ")
    while at >= 0:
        _, key_nbytes, _, serial, nbytes = _EXTENT.unpack_from(memory, at)
        key = memory[at + _EXTENT_BYTES : at + _EXTENT_BYTES + key_nbytes]
        payload = at + (_EXTENT_BYTES + key_nbytes + 63) // 64 * 64
        if at % 64 == 0 and known.get(key) == (memory[payload : payload + nbytes], serial):
            places[key] = (at, _EXTENT_BYTES + key_nbytes, payload)
        at = memory.find(b"FOBJ", at + 1)
    assert places.keys() == known.keys()
    return places


def test_every_flip_in_an_object_is_found_by_who_has_it_mapped(server: NodeServer) -> None:
    rng = random.Random(SEED)
    publisher = connect(server)
    known = publish_some(publisher, rng)
    reader = read_objects(server)
    memory = map_file(server.objects_paths(0)[1])
    places, keys = extents(memory, known), sorted(known)
    buffer = bytearray(4096)
    for trial in range(DATA_TRIALS):
        key = keys[trial % len(keys)]
        byte = rng.choice(byte_ranges(places[key], len(known[key][0])))
        bit = 1 << rng.randrange(8)
        at = rng.choice(byte)
        memory[at] ^= bit
        try:
            result = reader.get(key) if trial % 2 else reader.get_into(key, buffer)
        except ChecksumError:
            pass
        else:
            assert result is None, f"trial {trial}: byte {at} of the segment, bit {bit}: {result!r}"
        memory[at] ^= bit
    assert {key: reader.get(key) for key in keys} == known
    publisher.close()


def byte_ranges(place: tuple[int, int, int], nbytes: int) -> list[range]:
    at, header, payload = place
    return [range(at, at + header), range(payload, payload + nbytes)]


@pytest.mark.parametrize("trials", SERVED_TRIALS)
def test_a_flip_in_an_object_that_a_node_sends_is_found_by_who_receives_it(server: NodeServer, trials: int) -> None:
    rng = random.Random(SEED)
    connection = connect(server)
    known = publish_some(connection, rng)
    memory = map_file(server.objects_paths(0)[1])
    places, keys = extents(memory, known), sorted(known)
    for trial in range(trials):
        key = keys[trial % len(keys)]
        at, bit = rng.choice(rng.choice(byte_ranges(places[key], len(known[key][0])))), 1 << rng.randrange(8)
        memory[at] ^= bit
        missing = False
        with contextlib.suppress(ChecksumError):
            reply = connection.exchange(Op.GET, key, soon())
            missing = reply.status == Status.MISSING
            right = (reply.payload, reply.serial) == known[key]
            assert right or missing, f"trial {trial}: byte {at} of the segment, bit {bit}"
        memory[at] ^= bit
        if missing:  # the node has dropped what it found damaged
            known[key] = known[key][0], put(connection, key, known[key][0])
            places = extents(memory, known)
    read_all(connection, known)
    connection.close()


def test_a_flip_in_the_index_never_gives_wrong_bytes(server: NodeServer) -> None:
    rng = random.Random(SEED)
    publisher = connect(server)
    known = publish_some(publisher, rng, 200)
    reader = read_objects(server)
    index = map_file(server.objects_paths(0)[0])
    buckets_at, slots_at = struct.unpack_from("<QQ", index, 88)
    ranges = [range(128, 152), range(buckets_at, buckets_at + 1024), range(slots_at, slots_at + 200 * 48)]
    keys = sorted(known)
    noticed = 0
    for trial in range(INDEX_TRIALS):
        at, bit = rng.choice(rng.choice(ranges)), 1 << rng.randrange(8)
        index[at] ^= bit
        for key in rng.sample(keys, 2):
            result = None
            with contextlib.suppress(ChecksumError):
                result = reader.get(key)
                assert result in (None, known[key]), f"trial {trial}: byte {at} of the index, bit {bit}"
            noticed += result is None
        index[at] ^= bit
    assert noticed > 100
    assert {key: reader.get(key) for key in keys} == known
    publisher.close()


@pytest.mark.slow
def test_a_node_that_starts_on_damaged_segments_gives_the_right_bytes_or_none(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    for trial in range(40):
        folder = tmp_path / f"node{trial % 4}"
        folder.mkdir(exist_ok=True)
        with serving(folder, 1 << 20, ephemeral=False) as server:
            connection = connect(server)
            known = publish_some(connection, rng, 30)
            index_path, data_path = server.objects_paths(0)
            connection.close()
        damage(Path(index_path), rng, 3)
        damage(Path(data_path), rng, 10)
        with serving(folder, 1 << 20, ephemeral=False) as server:
            connection, reader = connect(server), read_objects(server)
            for key, expected in known.items():
                check_one(connection, reader, key, expected)
            connection.close()


def damage(path: Path, rng: random.Random, count: int) -> None:
    """Flip bits where something lies."""
    memory = map_file(str(path))
    used = [at for at in range(0, len(memory), 64) if any(memory[at : at + 64])]
    for _ in range(count):
        at = rng.choice(used) + rng.randrange(64)
        memory[at] ^= 1 << rng.randrange(8)
    memory.close()


def check_one(connection: Connection, reader: ObjectReader, key: bytes, expected: tuple[bytes, int]) -> None:
    with contextlib.suppress(ChecksumError):
        reply = connection.exchange(Op.GET, key, soon())
        assert reply.status == Status.MISSING or (reply.payload, reply.serial) == expected
    with contextlib.suppress(ChecksumError):
        assert reader.get(key) in (None, expected)


@pytest.mark.parametrize("seed", [SEED, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12))])
def test_a_store_behind_a_wire_that_flips_bits_never_gives_wrong_bytes(seed: int) -> None:
    """A read gives what was put or a typed error, and nothing that was confirmed is missing."""
    keys = [f"key {number}" for number in range(40)]
    with Forge() as forge, contextlib.ExitStack() as stack:
        nodes = [forge.node() for _ in range(3)]
        proxies = [stack.enter_context(FlippingProxy(node.address, f"{seed} {node.name}")) for node in nodes]
        addresses = [proxy.address for proxy in proxies]
        store = stack.enter_context(Store(*addresses, replicas=2, timeout=20.0, transport="tcp"))
        client = Historian(store, keys, f"{seed}", largest=20_000, drops=25, calm=False)
        for _ in range(20):
            client.run(400)
            if sum(proxy.flips for proxy in proxies) > 10:  # fewer bytes pass by while connections are broken
                break
        with Store(*[node.address for node in nodes], replicas=2, timeout=20.0) as unharmed:
            afterwards = Historian(unharmed, keys, "afterwards", largest=1, drops=0)
            afterwards.read_all()
        flips = sum(proxy.flips for proxy in proxies)
    events = [*client.events, *afterwards.events]
    reads = sum(event.kind == "read" and event.value is not None for event in events)
    errors = sum(event.kind == "error" for event in events)
    print(f"seed {seed}: {flips} flips, {reads} values, {errors} errors")
    assert violations(events, evicts=False, losses=Losses(2)) == []
    assert flips > 10
    assert reads > 100


def test_flipping_is_undone_by_flipping_again() -> None:
    assert flipped(b"ab", [0, 15]) == b"`\xe2"
    assert flipped(flipped(b"ab", [3, 9]), [3, 9]) == b"ab"
