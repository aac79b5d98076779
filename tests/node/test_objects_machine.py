"""A small node against a plain model: what may go is the node's business, what it answers is not."""

from __future__ import annotations

import shutil
import struct
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from farpool import _native
from farpool.errors import NodeFullError
from farpool.transport.frames import Op, Status
from tests.node.nodes import Peer, generation, reader

CAPACITY = 32 << 10
KEYS = st.sampled_from([b"a", b"b" * 17, b"c" * 256, *(b"key-%d" % n for n in range(9))])
SIZES = st.sampled_from([0, 1, 63, 64, 1000, 3000, 10_000, 20_000, CAPACITY - 512])


class ObjectsMachine(RuleBasedStateMachine):
    """One program that uses a node for itself, so that the newest it was told of is the newest there is."""

    pins = Bundle("pins")
    preparations = Bundle("preparations")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.contents: dict[tuple[bytes, int], bytes | None] = {}  # None: a deletion
        self.newest: dict[bytes, int] = {}
        self.pinned: dict[int, list[bytes]] = {}  # by offset, one for each pin
        self.lent: dict[int, int] = {}
        self.starts = 0
        self.open()

    def open(self) -> None:
        self.starts += 1
        self.server = _native.NodeServer(str(self.folder), CAPACITY, spin=0.0)
        self.server.start()
        self.peer = Peer(self.server)
        self.mapped = reader(self.server, writable=True)
        self.reader = self.mapped.__enter__()

    def close(self) -> None:
        self.peer.close()
        self.mapped.__exit__(None, None, None)
        self.server.stop()

    def teardown(self) -> None:
        self.close()
        shutil.rmtree(self.folder)

    def payload(self, key: bytes, number: int, nbytes: int) -> bytes:
        return (b"%s %d " % (key, number) * (nbytes // 10 + 1))[:nbytes]

    def check(self, key: bytes, reply: _native.Reply) -> None:
        newest = self.newest.get(key, 0)
        if reply.status == Status.MISSING:
            assert reply.generation >= newest
            return
        assert reply.generation == newest
        assert reply.status == (Status.DELETED if self.contents[key, newest] is None else Status.DONE)

    def wrote(self, key: bytes, number: int, reply: _native.Reply) -> None:
        if reply.status == Status.STALE:
            assert reply.generation >= number
        elif reply.status == Status.DONE:
            assert number > self.newest.get(key, 0)
            self.newest[key] = number
        else:
            assert reply.status == Status.FULL

    @rule(key=KEYS, nbytes=SIZES, back=st.sampled_from([0, 0, 0, 0, 1, 50]))
    def put(self, key: bytes, nbytes: int, back: int) -> None:
        number = generation() - back if back == 0 else self.newest.get(key, back) - back
        payload = self.contents.get((key, number), self.payload(key, number, nbytes))
        if payload is not None:
            self.contents[key, number] = payload
            self.wrote(key, number, self.peer.put(key, payload, at=number))

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        reply = self.peer.get(key)
        self.check(key, reply)
        if reply.status == Status.DONE:
            assert (reply.payload or b"") == self.contents[key, reply.generation]
            assert self.reader.get(key) == (reply.payload or b"", reply.generation)
        else:
            assert self.reader.get(key) is None

    @rule(key=KEYS)
    def stat(self, key: bytes) -> None:
        reply = self.peer.ask(Op.STAT, key)
        self.check(key, reply)
        if reply.status == Status.DONE:
            payload = self.contents[key, reply.generation]
            assert payload is not None
            nbytes, _, crc, _ = struct.unpack("<QQII", reply.meta)
            assert (nbytes, crc) == (len(payload), _native.crc32c(payload))

    @rule(key=KEYS)
    def delete(self, key: bytes) -> None:
        number = generation()
        before = self.newest.get(key, 0)
        reply = self.peer.delete(key, number)
        assert reply.status == Status.DONE
        assert reply.generation in (0, before)
        self.contents[key, number] = None
        self.newest[key] = number

    @rule(key=KEYS)
    def forget(self, key: bytes) -> None:
        reply = self.peer.ask(Op.FORGET, key, generation=self.newest.get(key, 0))
        assert reply.status in (Status.DONE, Status.MISSING)
        if reply.status == Status.DONE:
            assert self.contents[key, self.newest[key]] is None

    @rule(key=KEYS, expiry=st.sampled_from([0, 1]))
    def touch(self, key: bytes, expiry: int) -> None:
        self.check(key, self.peer.ask(Op.TOUCH, struct.pack("<Q", expiry) + key))
        if expiry:
            assert self.peer.get(key).status in (Status.MISSING, Status.DELETED)

    @rule(target=pins, key=KEYS)
    def pin(self, key: bytes) -> tuple[int, int, int]:
        reply = self.peer.ask(Op.PIN, key)
        self.check(key, reply)
        if reply.status != Status.DONE:
            return (self.starts, 0, 0)
        offset, nbytes, _, _ = struct.unpack("<QQII", reply.meta)
        payload = self.contents[key, reply.generation]
        assert payload is not None
        assert len(payload) == nbytes
        self.pinned.setdefault(offset, []).append(payload)
        return (self.starts, offset, reply.generation)

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[int, int, int]) -> None:
        start, offset, number = pin
        if start == self.starts and offset:
            assert self.peer.ask(Op.UNPIN, struct.pack("<Q", offset), generation=number).status == Status.DONE
            self.pinned[offset].pop()
            if not self.pinned[offset]:
                del self.pinned[offset]
                assert self.peer.ask(Op.UNPIN, struct.pack("<Q", offset), generation=number).status == Status.UNKNOWN

    @rule(target=preparations, key=KEYS, nbytes=SIZES)
    def prepare(self, key: bytes, nbytes: int) -> tuple[int, bytes, int, int]:
        number = generation()
        reply = self.peer.ask(Op.PREPARE, struct.pack("<QQ", nbytes, 0) + key, generation=number)
        if reply.status != Status.DONE:
            self.wrote(key, number, reply)
            return (0, key, 0, 0)
        (offset,) = struct.unpack("<Q", reply.meta)
        self.contents[key, number] = self.payload(key, number, nbytes)
        return (self.starts, key, number, offset)

    @rule(prepared=consumes(preparations), commit=st.booleans())
    def finish(self, prepared: tuple[int, bytes, int, int], commit: bool) -> None:
        start, key, number, offset = prepared
        if start != self.starts:
            return
        if not commit:
            assert self.peer.ask(Op.ABORT, struct.pack("<Q", offset), generation=number).status == Status.DONE
            return
        payload = self.contents[key, number]
        assert payload is not None
        crc = self.reader.write(offset, payload)
        self.wrote(key, number, self.peer.ask(Op.COMMIT, struct.pack("<QII", offset, crc, 0), generation=number))

    @rule(nbytes=st.sampled_from([1, 5000, CAPACITY // 2, CAPACITY]))
    def lend(self, nbytes: int) -> None:
        try:
            lease = self.server.lend(7, 0, nbytes)
        except NodeFullError:
            return
        self.lent[lease] = nbytes

    @precondition(lambda self: self.lent)
    @rule()
    def release(self) -> None:
        lease, _ = self.lent.popitem()
        self.server.release(7, lease)

    @rule()
    def restart(self) -> None:
        before = self.server.stats()["objects"]
        self.close()
        self.pinned.clear()
        self.open()
        assert self.server.stats()["objects"] == before

    @invariant()
    def pinned_memory_is_as_it_was(self) -> None:
        for offset, (payload, *_) in self.pinned.items():
            assert self.reader.view(offset, len(payload)) == payload

    @invariant()
    def the_budget_adds_up(self) -> None:
        stats = self.server.stats()
        assert stats["lent"] == sum(self.lent.values())
        assert stats["used"] <= CAPACITY
        assert stats["objects"] == len(self.server.list(0, b"", b"", 1000))
        assert stats["tombstones"] == len(self.server.tombstones(0, b"", 1000))


TestObjects = ObjectsMachine.TestCase
TestObjects.settings = settings(max_examples=40, stateful_step_count=60, deadline=None)
