"""A node's state, and the pins that an administrator lists and ends."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from farpool import _native
from farpool.cluster.wire.frames import MARK_OF_NONE, PLACE, UNPIN, Op, Right, Status
from farpool.errors import NodeFullError
from tests.node.nodes import Exposed, Peer, node, reader, until

KEYS = {"a": (0, True, 0), "b": (0, True, 0), "c": (1, True, 0)}
KEYS_OF = {9: "a", 5: "b", 7: "c"}
START = (0, 0, 0, 0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[_native.NodeServer]:
    with node(tmp_path, 1 << 20) as server:
        server.expect_tenants({0, 1})
        server.expect_keys(KEYS)
        yield server


def reason(meta: bytes) -> str:
    return meta.decode()


@pytest.mark.parametrize("state", ["draining", "read-only"])
def test_a_node_that_does_not_take_objects_refuses_new_ones_as_if_it_were_full(
    server: _native.NodeServer, state: str
) -> None:
    peer = Peer(server)
    serial = peer.published(b"there", b"value")
    offset, under_way = peer.prepare(b"begun", 5)
    exposed = Exposed(server)
    server.set_state(state)
    assert server.state() == (state, state)
    for refused in (peer.put(b"new", b"value"), peer.put(b"new", b""), peer.prepared(b"new", 5)):
        assert refused.status == Status.FULL
        assert reason(refused.meta) == f"the node is {state}: it takes no new objects and leases"
    assert peer.get(b"new").status == Status.MISSING
    # An object that is there needs no room, and a publish that has begun may finish.
    assert peer.put(b"there", b"value").status == Status.PRESENT
    assert peer.commit(offset, under_way, exposed.write(offset, b"begun")).status == Status.DONE
    exposed.close()
    assert bytes(peer.get(b"there").payload or b"") == b"value"
    place, nbytes = peer.pin(b"there")
    assert nbytes == 5
    assert peer.unpin(place, serial) == Status.DONE
    with pytest.raises(NodeFullError, match=f"the node is {state}"):
        server.lend(7, 0, 4096)
    server.set_state("active")
    assert peer.put(b"new", b"value").status == Status.DONE
    assert server.lend(7, 0, 4096) > 0
    peer.close()


def test_objects_of_a_draining_node_change_and_of_a_read_only_one_do_not(server: _native.NodeServer) -> None:
    peer = Peer(server)
    for key in (b"one", b"two"):
        peer.published(key, b"value")
    assert server.stats()["state"] == 0
    server.set_state("draining")
    assert server.stats()["state"] == 1
    assert peer.touch(b"one", 0, 1) == Status.DONE
    assert peer.touch(b"one", 0, 2) == Status.DONE
    assert peer.drop(b"one") == Status.DONE
    server.set_state("read-only")
    for refused in (
        peer.ask(Op.DROP, b"two"),
        peer.ask(Op.DEMOTE, b"two"),
        peer.ask(Op.RETAIN, bytes(24) + b"two"),
        peer.ask(Op.END_SESSION, bytes(8)),
        peer.ask(Op.TOUCH, bytes(16) + b"two", serial=MARK_OF_NONE),
    ):
        assert refused.status == Status.DENIED
        assert reason(refused.meta) == "the node is read-only: its objects cannot be changed or dropped"
    assert peer.get(b"two").status == Status.DONE
    # An epoch makes objects unreadable that must not be read any more, whatever the state.
    assert peer.rotate(1)[1] == 1
    assert peer.get(b"two").status == Status.MISSING
    peer.close()


def test_the_stricter_of_order_and_record_counts(server: _native.NodeServer) -> None:
    server.follow_record(True)
    assert server.state() == ("draining", "active")
    server.set_state("read-only")
    assert server.state() == ("read-only", "read-only")
    server.follow_record(False)
    assert server.state() == ("read-only", "read-only")
    server.follow_record(True)
    server.set_state("active")
    assert server.state() == ("draining", "active")
    server.follow_record(False)
    assert server.state() == ("active", "active")
    with pytest.raises(ValueError, match="state is 'asleep', expected active, draining or read-only"):
        server.set_state("asleep")
    assert server.state() == ("active", "active")


def test_a_start_takes_no_order_over(tmp_path: Path) -> None:
    with node(tmp_path) as server:
        server.set_state("read-only")
    with node(tmp_path) as server:
        assert server.state() == ("active", "active")


def test_pins_are_listed_in_pages_with_what_they_hold(server: _native.NodeServer) -> None:
    peers = {
        session: Peer(server, session=session, tenant=tenant, key=key)
        for session, tenant, key in ((9, 0, "a"), (5, 0, "b"), (7, 1, "c"))
    }
    expected = []
    for session, peer in peers.items():
        tenant = int(session == 7)
        for number in range(5):
            key = b"%d of %d" % (number, tenant)
            peer.put(key, bytes(100))
            reply = peer.pinned(key, 3_600_000 if number else 0)
            offset, _, _, pin = PLACE.unpack(reply.meta)
            expected.append(((tenant, session, offset, pin), reply.serial, KEYS_OF[session], key, number > 0))
    expected.sort()
    found = server.pins(None, START, 100)
    assert [(pin[:8], pin[9]) for pin in found] == [
        ((*place, serial, owner, key, 256), False) for place, serial, owner, key, _ in expected
    ]
    assert [pin[8] is not None and 3_500_000 < pin[8] <= 3_600_000 for pin in found] == [
        has_end for *_, has_end in expected
    ]
    for limit in (1, 2, 4, 15, 16):
        found, after = [], START
        while some := server.pins(None, after, limit):
            assert len(some) <= limit
            found += some
            after = some[-1][:4]
        assert [pin[:4] for pin in found] == [place for place, *_ in expected]
    for tenant in (0, 1, 2):
        assert [pin[:4] for pin in server.pins(tenant, START, 100)] == [
            place for place, *_ in expected if place[0] == tenant
        ]
    for peer in peers.values():
        peer.close()


def test_a_released_pin_is_not_listed_and_a_dropped_object_keeps_its_key(server: _native.NodeServer) -> None:
    peer = Peer(server, key="a")
    for key in (b"one", b"two"):
        peer.put(key, b"value")
    serial = peer.get(b"one").serial
    one, _ = peer.pin(b"one")
    peer.pin(b"two")
    peer.drop(b"two")
    assert [pin[6] for pin in server.pins(None, START, 9)] == [b"one", b"two"]
    assert peer.unpin(one, serial) == Status.DONE
    assert [pin[6] for pin in server.pins(None, START, 9)] == [b"two"]
    peer.close()


def test_the_memory_of_an_ended_pin_is_not_used_again_before_the_program_lets_it_go(
    server: _native.NodeServer,
) -> None:
    peer = Peer(server, key="a")
    payload = bytes(range(256)) * 64
    peer.put(b"mapped", payload)
    with reader(server) as mapped:
        reply = peer.pinned(b"mapped")
        offset, nbytes, _, number = PLACE.unpack(reply.meta)
        view = mapped.view(offset, nbytes)
        before = server.keys()["a"]
        [pin] = server.pins(None, START, 9)
        assert server.end_pin(pin[:4], pin[4], "the host is to be taken down") == pin
        [ended] = server.pins(None, START, 9)
        assert ended == (*pin[:9], True)
        assert server.end_pin(pin[:4], pin[4], "again") == ended
        assert server.keys()["a"]["pins"] == before["pins"] - 1
        assert server.keys()["a"]["held"] < before["held"]
        [event] = [text for kind, session, text in server.events() if kind == "pin_ended" and session == 7]
        assert "of tenant 0: the host is to be taken down" in event
        # The object goes, and others want its memory: many times the node's memory goes through it.
        assert peer.drop(b"mapped") == Status.DONE
        for turn in range(400):
            assert peer.put(b"%d" % turn, bytes([turn % 256]) * 16_384).status == Status.DONE
        assert zlib.crc32(bytes(view)) == zlib.crc32(payload)
        assert peer.ask(Op.UNPIN, UNPIN.pack(offset, number), serial=reply.serial).status == Status.DONE
        assert server.pins(None, START, 9) == []
        assert server.keys()["a"]["pins"] == 0
        assert server.tenants()[0]["pins"] == 0
        assert peer.unpin(offset, reply.serial) == Status.UNKNOWN
    peer.close()


@pytest.mark.slow
def test_an_ended_pin_leaves_with_its_time_or_its_session(tmp_path: Path) -> None:
    with node(tmp_path, 1 << 20, grace=0.01) as server:
        peer = Peer(server)
        for key, ttl_ms in ((b"timed", 1), (b"untimed", 0)):
            peer.put(key, b"value")
            peer.pin(key, ttl_ms)
        timed, untimed = sorted(server.pins(None, START, 9), key=lambda pin: pin[8] is None)
        for pin in (timed, untimed):
            server.end_pin(pin[:4], pin[4], "test")
        until(lambda: [pin[6] for pin in server.pins(None, START, 9)] == [b"untimed"], "its time is over")
        assert server.tenants()[0]["pins"] == 0
        peer.close()
        until(lambda: server.pins(None, START, 9) == [], "its session has ended")
        assert server.tenants()[0]["pins"] == 0


def test_what_is_no_pin_cannot_be_ended(server: _native.NodeServer) -> None:
    peer = Peer(server)
    peer.put(b"key", b"value")
    peer.pin(b"key")
    [pin] = server.pins(None, START, 9)
    tenant, session, offset, number, serial = pin[:5]
    for place, its_serial in (
        ((tenant, session, offset, number), serial + 1),
        ((tenant, session, offset, number + 1), serial),
        ((tenant, session, offset + 64, number), serial),
        ((tenant, session + 1, offset, number), serial),
        ((tenant + 1, session, offset, number), serial),
    ):
        with pytest.raises(KeyError, match="there is no such pin"):
            server.end_pin(place, its_serial, "test")
    assert server.pins(None, START, 9) == [pin]
    peer.close()


def test_one_object_may_be_pinned_often_and_each_pin_goes_alone(server: _native.NodeServer) -> None:
    peer = Peer(server)
    peer.put(b"key", b"value")
    numbers = [PLACE.unpack(peer.pinned(b"key").meta)[3] for _ in range(6)]
    offset, _ = peer.pin(b"key")
    serial = peer.get(b"key").serial
    assert peer.ask(Op.UNPIN, UNPIN.pack(offset, numbers[3]), serial=serial).status == Status.DONE
    assert peer.ask(Op.UNPIN, UNPIN.pack(offset, numbers[3]), serial=serial).status == Status.UNKNOWN
    assert peer.ask(Op.UNPIN, UNPIN.pack(offset, 1 << 40), serial=serial).status == Status.UNKNOWN
    assert [pin[3] for pin in server.pins(None, START, 9)] == [*numbers[:3], *numbers[4:], numbers[5] + 1]
    for _ in range(6):
        assert peer.unpin(offset, serial) == Status.DONE
    assert peer.unpin(offset, serial) == Status.UNKNOWN
    assert server.pins(None, START, 9) == []
    peer.close()


def test_rights_of_the_loop_do_not_depend_on_the_state(server: _native.NodeServer) -> None:
    peer = Peer(server, rights=Right.READ)
    server.set_state("draining")
    assert peer.put(b"key", b"value").status == Status.DENIED
    assert peer.drop(b"key") == Status.DENIED
    peer.close()
