"""A small node against a perfect model: what it may forget to make room is its business, what it answers is not."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from farpool import _native
from farpool.cluster.wire.frames import HEAD, PLACE, Op, Status
from farpool.errors import NodeFullError
from tests.node.nodes import Exposed, Head, Peer, present, reader, stated, walked

CAPACITY = 32 << 10
KEYS = st.sampled_from([b"a", b"b" * 17, b"c" * 256, *(b"key-%d" % n for n in range(9))])
SIZES = st.sampled_from([0, 1, 63, 64, 1000, 3000, 10_000, 20_000, CAPACITY - 512])
HOUR = 3_600_000
TTLS = st.sampled_from([0, HOUR, 2 * HOUR, 50 * HOUR])
"""Far enough apart that the time a test takes changes no comparison."""


@dataclass
class Object:
    serial: int
    payload: bytes
    ttl_ms: int  # as last set; the node says a little less
    copies: int
    kept: bool = False


class ObjectsMachine(RuleBasedStateMachine):
    """One program that uses a node for itself, so that it knows all that can be there."""

    pins = Bundle("pins")
    preparations = Bundle("preparations")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.objects: dict[bytes, Object] = {}
        self.serials: set[int] = set()
        self.pinned: dict[int, list[tuple[int, bytes]]] = {}  # by offset, one for each pin: serial, payload
        self.lent: dict[int, int] = {}
        self.starts = 0
        self.epoch = 0
        self.newest_before = 0  # serial when the epoch began
        self.written = 0
        self.open(self.folder)

    def open(self, folder: Path) -> None:
        self.starts += 1
        self.server = _native.NodeServer(str(folder), CAPACITY, spin=0.0)
        self.server.start()
        self.peer = Peer(self.server)
        self.mapped = reader(self.server)
        self.reader = self.mapped.__enter__()
        self.exposed = Exposed(self.server)

    def close(self) -> None:
        self.peer.close()
        self.mapped.__exit__(None, None, None)
        self.exposed.close()
        self.server.stop()

    def teardown(self) -> None:
        self.close()
        shutil.rmtree(self.folder)

    def fresh(self, key: bytes, nbytes: int) -> bytes:
        """Bytes that no other publish has had."""
        self.written += 1
        text = b"%s %d " % (key, self.written)
        return (text * (nbytes // len(text) + 1))[:nbytes]

    def is_there(self, key: bytes, status: int) -> Object | None:
        """What the model has; what the node has forgotten goes there, too, unless it had to keep it."""
        known = self.objects.get(key)
        if status == Status.MISSING:
            assert known is None or not known.kept
            assert known is None or known.serial not in [serial for pins in self.pinned.values() for serial, _ in pins]
            self.objects.pop(key, None)
            return None
        assert known is not None, f"{key!r} is there and was not put, or was dropped"
        return known

    def check_head(self, known: Object, head: Head) -> None:
        assert head.copies == known.copies
        assert (head.ttl_ms == 0) == (known.ttl_ms == 0)
        assert known.ttl_ms - HOUR / 2 < head.ttl_ms <= known.ttl_ms

    def took(self, key: bytes, payload: bytes, ttl_ms: int, copies: int, reply: _native.Reply) -> None:
        """Note what came of a publish: stored, present or refused for want of room."""
        if reply.status == Status.PRESENT:
            known = self.is_there(key, Status.DONE)
            assert known is not None
            known.ttl_ms = longer(known.ttl_ms, ttl_ms)
            nbytes, checksum, head = present(reply)
            assert (reply.serial, nbytes, checksum) == (known.serial, len(known.payload), _native.crc32c(known.payload))
            self.check_head(known, head)
        elif reply.status == Status.DONE:
            self.is_there(key, Status.MISSING)
            self.new_serial(reply.serial)
            self.objects[key] = Object(reply.serial, payload, ttl_ms, copies)
        else:
            assert reply.status in (Status.FULL, Status.BUSY)

    def new_serial(self, serial: int) -> None:
        assert serial > max(self.serials, default=0)
        self.serials.add(serial)

    @rule(key=KEYS, nbytes=SIZES, ttl_ms=TTLS, copies=st.integers(0, 3))
    def put(self, key: bytes, nbytes: int, ttl_ms: int, copies: int) -> None:
        payload = self.fresh(key, nbytes)
        self.took(key, payload, ttl_ms, copies, self.peer.put(key, payload, Head(ttl_ms, copies)))

    @rule(key=KEYS, ttl_ms=TTLS)
    def put_what_is_there(self, key: bytes, ttl_ms: int) -> None:
        """With other bytes: those that are there stay."""
        if self.is_there(key, self.peer.ask(Op.STAT, key).status) is not None:
            reply = self.peer.put(key, b"other bytes", Head(ttl_ms, 9))
            assert reply.status == Status.PRESENT
            self.took(key, b"", ttl_ms, 9, reply)

    @rule(key=KEYS)
    def get(self, key: bytes) -> None:
        reply = self.peer.get(key)
        known = self.is_there(key, reply.status)
        if known is None:
            assert self.reader.get(key) is None
            return
        assert (reply.serial, reply.payload or b"") == (known.serial, known.payload)
        self.check_head(known, Head._make(HEAD.unpack(reply.meta)))
        assert reply.epoch == self.epoch
        assert self.reader.get(key) == (known.payload, known.serial)

    @rule(key=KEYS)
    def stat(self, key: bytes) -> None:
        reply = self.peer.ask(Op.STAT, key)
        known = self.is_there(key, reply.status)
        if known is not None:
            nbytes, checksum, _, head = stated(reply)
            assert (reply.serial, nbytes, checksum) == (known.serial, len(known.payload), _native.crc32c(known.payload))
            self.check_head(known, head)

    @rule(keys=st.lists(KEYS, max_size=20))
    def lookup(self, keys: list[bytes]) -> None:
        found = self.peer.lookup(keys)
        for key, size in zip(keys, found.sizes, strict=True):
            known = self.is_there(key, Status.MISSING if size is None else Status.DONE)
            assert known is None or size == len(known.payload)
        sizes, missing = self.reader.lookup(keys)
        assert missing == [number for number, size in enumerate(sizes) if size is None]
        for size, told in zip(sizes, found.sizes, strict=True):
            assert size is None or size == told

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        status = self.peer.drop(key)
        assert status in (Status.DONE, Status.MISSING)
        if status == Status.DONE:
            assert self.objects.pop(key, None) is not None
        else:
            self.is_there(key, status)
        assert self.peer.get(key).status == Status.MISSING
        assert self.reader.get(key) is None

    @rule(key=KEYS, ttl_ms=TTLS, keep=st.integers(0, 2))
    def touch(self, key: bytes, ttl_ms: int, keep: int) -> None:
        status = self.peer.touch(key, ttl_ms, keep)
        known = self.is_there(key, status)
        if status == Status.BUSY:
            assert self.is_a_lot(known)
        elif known is not None:
            known.ttl_ms = ttl_ms if keep == 2 else longer(known.ttl_ms, ttl_ms)
            known.kept = keep == 1 or (keep == 0 and known.kept)

    @rule(key=KEYS, keep=st.booleans())
    def expire(self, key: bytes, keep: bool) -> None:
        """Over at once, unless it is kept."""
        if self.is_there(key, self.peer.touch(key, 1, 2)) is None:
            return
        if keep:
            keep = self.peer.touch(key, 1, 1) == Status.DONE
        deadline = 10_000
        while self.peer.ask(Op.STAT, key).status == Status.DONE and not keep:
            deadline -= 1
            assert deadline > 0
        if self.peer.ask(Op.STAT, key).status == Status.DONE:
            assert self.peer.touch(key, 0, 2) == Status.DONE
            self.objects[key].ttl_ms, self.objects[key].kept = 0, False
        else:
            del self.objects[key]

    @rule(target=pins, key=KEYS)
    def pin(self, key: bytes) -> tuple[int, int, int]:
        reply = self.peer.pinned(key)
        known = self.is_there(key, reply.status)
        if known is None or reply.status == Status.BUSY:
            assert reply.status == Status.MISSING or self.is_a_lot(known)
            return (self.starts, 0, 0)
        assert reply.serial == known.serial
        offset, nbytes, checksum, _ = PLACE.unpack(reply.meta)
        assert (nbytes, checksum) == (len(known.payload), _native.crc32c(known.payload))
        self.pinned.setdefault(offset, []).append((known.serial, known.payload))
        return (self.starts, offset, reply.serial)

    @rule(pin=consumes(pins))
    def unpin(self, pin: tuple[int, int, int]) -> None:
        start, offset, serial = pin
        if start == self.starts and offset:
            assert self.peer.unpin(offset, serial) == Status.DONE
            self.pinned[offset].pop()
            if not self.pinned[offset]:
                del self.pinned[offset]
                assert self.peer.unpin(offset, serial) == Status.UNKNOWN

    def is_a_lot(self, known: Object | None) -> bool:
        """Tell if this and what is pinned or kept would be more than 7/8 of the node, with the largest headers."""
        assert known is not None
        pinned = sum(len(payload) + 384 for (_, payload), *_ in self.pinned.values())
        kept = sum(len(one.payload) + 384 for one in self.objects.values() if one.kept)
        return len(known.payload) + 384 + pinned + kept > (CAPACITY - sum(self.lent.values())) * 7 // 8

    @rule(target=preparations, key=KEYS, nbytes=SIZES, ttl_ms=TTLS)
    def prepare(self, key: bytes, nbytes: int, ttl_ms: int) -> tuple[int, bytes, int, int, int, int]:
        reply = self.peer.prepared(key, nbytes, Head(ttl_ms, 1))
        if reply.status != Status.DONE:
            self.took(key, b"", ttl_ms, 1, reply)
            return (0, key, 0, 0, 0, 0)
        self.is_there(key, Status.MISSING)
        self.new_serial(reply.serial)
        return (self.starts, key, nbytes, ttl_ms, reply.serial, int.from_bytes(reply.meta, "little"))

    @rule(prepared=consumes(preparations), commit=st.booleans())
    def finish(self, prepared: tuple[int, bytes, int, int, int, int], commit: bool) -> None:
        start, key, nbytes, ttl_ms, serial, offset = prepared
        if start != self.starts:
            return
        if not commit:
            assert self.peer.abort(offset, serial) == Status.DONE
            assert self.peer.commit(offset, serial, 0).status == Status.UNKNOWN
            return
        payload = self.fresh(key, nbytes)
        reply = self.peer.commit(offset, serial, self.exposed.write(offset, payload))
        if reply.status == Status.DONE:
            if serial <= self.newest_before:  # it is of this epoch nevertheless
                self.new_serial(reply.serial)
            else:
                assert reply.serial == serial
            self.is_there(key, Status.MISSING)
            self.objects[key] = Object(reply.serial, payload, ttl_ms, 1)
        else:  # another one was first
            self.took(key, payload, ttl_ms, 1, reply)

    @rule()
    def rotate(self) -> None:
        listed = walked(self.server, 0, b"", b"", 1000)
        self.epoch += 1
        self.newest_before = max(self.serials, default=0)
        assert self.peer.rotate(self.epoch) == (self.epoch, len(listed), sum(entry[2] for entry in listed))
        self.objects.clear()

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

    @rule(killed=st.booleans())
    def restart(self, killed: bool) -> None:
        """Stopped, or killed: then the next start finds the files as they were at this moment."""
        before = self.server.stats()["objects"]
        copy = Path(tempfile.mkdtemp())
        if killed:
            shutil.copytree(self.folder, copy, dirs_exist_ok=True)
        self.close()
        if killed:
            shutil.rmtree(self.folder)
            copy.rename(self.folder)
        else:
            copy.rmdir()
        self.pinned.clear()
        self.open(self.folder)
        assert self.server.stats()["objects"] == self.server.stats()["adopted"] == before

    @invariant()
    def pinned_memory_is_as_it_was(self) -> None:
        for offset, ((_, payload), *_) in self.pinned.items():
            assert self.reader.view(offset, len(payload)) == payload

    @invariant()
    def the_budget_adds_up(self) -> None:
        stats = self.server.stats()
        assert stats["lent"] == sum(self.lent.values())
        assert stats["used"] <= CAPACITY
        listed = walked(self.server, 0, b"", b"", 1000)
        assert stats["objects"] == len(listed)
        for key, serial, nbytes, _, _, copies, kept in listed:
            known = self.objects[key]
            assert (serial, nbytes, copies, kept) == (known.serial, len(known.payload), known.copies, known.kept)


def longer(one: int, other: int) -> int:
    return 0 if 0 in (one, other) else max(one, other)


TestObjects = ObjectsMachine.TestCase
TestObjects.settings = settings(max_examples=15, stateful_step_count=60, deadline=None)


class LongObjectsMachine(ObjectsMachine):
    """The same, longer."""


LongObjectsMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


@pytest.mark.slow
class TestLongObjects(LongObjectsMachine.TestCase):  # type: ignore[misc,name-defined]
    pass
