"""Administrators and followers of nodes that are processes: over control connections, and across kills."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from farpool import Store
from farpool.cluster.node.process import RunningNode, running_node
from farpool.cluster.store.feed import ChangesFollower, NodeObjects, advance, list_pins
from farpool.cluster.wire.access import AccessKey
from farpool.cluster.wire.address import parse_address
from farpool.cluster.wire.control import Control
from farpool.cluster.wire.dial import dial
from farpool.errors import AccessDeniedError, LeaseLostError, NodeError, NodeFullError, ReplicationError

SECRET = "0123456789abcdef"
KEYS = {
    "operator": (["admin"], 0),
    "owner": (["read", "publish", "admin"], 1),
    "other": (["read", "publish", "admin"], 2),
}


def soon() -> float:
    return time.monotonic() + 20.0


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.touch(mode=0o600)
    path.write_text(
        "".join(
            f'[keys.{name}]\nsecret = "{name}{SECRET}"\nrights = {rights}\ntenant = {tenant}\n'
            for name, (rights, tenant) in KEYS.items()
        )
    )
    with running_node(keys=path) as node:
        yield node


def control(node: RunningNode, name: str = "") -> Control:
    key = AccessKey(name, f"{name}{SECRET}".encode()) if name else None
    return Control(dial(parse_address(node.address), "control", key=key, deadline=soon()))


def set_state(node: RunningNode, state: str, name: str = "") -> dict[str, Any]:
    with control(node, name) as calls:
        return calls.call("set_state", soon(), state=state, reason="test")


@pytest.mark.slow
def test_a_store_puts_elsewhere_while_a_node_drains_by_order() -> None:
    with running_node() as one, running_node() as two, Store(one.address, two.address, timeout=20) as store:
        store.put("before", b"value")
        assert set_state(one, "draining") == {"state": "draining", "ordered": "draining"}
        for number in range(20):
            assert store.put(f"key-{number}", b"value") == "stored"
            assert store.get(f"key-{number}") == b"value"
        with control(one) as calls:
            found = calls.call("list", soon())["objects"]
            assert [entry[0] for entry in found if entry[0] != b"before"] == []
            assert calls.call("stats", soon())["state"] == 1
            with pytest.raises(NodeFullError, match="the node is draining: it takes no new objects and leases"):
                calls.call("lend", soon(), bytes=4096)
        assert '"event":"state set","key":"","reason":"test","ordered":"draining"' in one.log
        assert store.get("before") == b"value"
        set_state(two, "read-only")
        with pytest.raises(NodeFullError, match=r"the node is (draining|read-only): it takes no new objects"):
            store.put("nowhere", b"value")
        one.restart()  # forgets the order
        assert store.put("again", b"value") == "stored"


def test_copies_that_cannot_be_made_are_reported_and_not_confirmed() -> None:
    with (
        running_node() as one,
        running_node() as two,
        Store(one.address, two.address, replicas=2, timeout=20) as store,
    ):
        set_state(two, "draining")
        with pytest.raises(ReplicationError, match=r"1 of 2 nodes confirmed the put .*the node is draining"):
            store.put("key", b"value")


def test_an_administrator_of_a_tenant_does_not_run_the_node(guarded: RunningNode) -> None:
    for name in ("owner", "other"):
        with pytest.raises(AccessDeniedError, match=f"key '{name}' is of tenant ., expected a key of tenant 0"):
            set_state(guarded, "draining", name)
    assert set_state(guarded, "active", "operator") == {"state": "active", "ordered": "active"}


def test_pins_are_listed_and_ended_by_operators_and_by_administrators_of_the_tenant(guarded: RunningNode) -> None:
    payload = bytes(range(256)) * 100
    with Store(guarded.address, key=f"owner:owner{SECRET}", timeout=20) as store:
        for number in range(3):
            store.put(f"key-{number}", payload)
        pins = store.pin_many([f"key-{number}" for number in range(3)])
        with control(guarded, "operator") as operator, control(guarded, "owner") as owner:
            found = list(list_pins(operator.call, soon))
            assert [(pin[0], pin[5], pin[6]) for pin in found] == [(1, "owner", b"key-%d" % n) for n in range(3)]
            assert list(list_pins(owner.call, soon)) == found
            first = operator.call("pins", soon(), limit=2)
            assert first["pins"] == found[:2]
            assert operator.call("pins", soon(), after=first["next"], limit=2) == {"pins": found[2:], "next": []}
            with control(guarded, "other") as other:
                assert list(list_pins(other.call, soon)) == []
                with pytest.raises(AccessDeniedError, match="may end only pins of its tenant 2"):
                    other.call("end_pin", soon(), pin=found[0][:4], serial=found[0][4], reason="not mine")
            for calls, pin in ((operator, found[0]), (owner, found[1])):
                ended = calls.call("end_pin", soon(), pin=pin[:4], serial=pin[4], reason="the host leaves")
                assert ended == {"pin": pin}
            assert [pin[9] for pin in list_pins(operator.call, soon)] == [True, True, False]
            with pytest.raises(LeaseLostError, match="there is no such pin"):
                operator.call("end_pin", soon(), pin=found[0][:4], serial=1 << 40, reason="test")
        assert "the host leaves" in guarded.log
        for number, pin in enumerate(pins):
            assert pin is not None
            assert pin.is_mapped
            store.drop(f"key-{number}")
            assert pin.view == payload
        pins.verify()
        pins.release()
        with control(guarded, "operator") as operator:
            assert list(list_pins(operator.call, soon)) == []


def test_a_follower_goes_on_after_a_node_was_killed() -> None:
    with running_node() as node, Store(node.address, timeout=20) as store:
        follower, objects = ChangesFollower(), NodeObjects()

        def catch_up() -> list[bytes]:
            calls = control(node)
            with calls:
                while True:
                    for change in advance(follower, calls.call, soon()):
                        objects.apply(change)
                    if follower.is_current:
                        return sorted(one.key for one in objects.by_serial.values())

        for number in range(300):
            store.put(f"{number:03}", b"value")
        assert len(catch_up()) == 300
        for number in range(0, 300, 3):
            store.drop(f"{number:03}")
        assert len(catch_up()) == 200
        assert follower.restarts == 1
        store.drop("001")
        node.kill()
        with pytest.raises(NodeError):
            catch_up()
        node.start()
        store.put("after", b"value")
        found = catch_up()
        assert found == sorted(store.keys())
        assert len(found) == 200
        assert follower.restarts == 2
        store.put("later", b"value")
        assert len(catch_up()) == 201
        assert follower.restarts == 2
