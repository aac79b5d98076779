"""Calls use their deadline up before they fail, and end in time with an error that names the node."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from farpool.cluster.store import Store
from farpool.cluster.wire.address import parse_address
from farpool.errors import NodeError, NodeTimeoutError, ReplicationError
from tests.faults.forge import PATIENCE, Forge, ForgedNode, eventually
from tests.faults.given import GivenDeadlines
from tests.faults.ranks import ranked
from tests.faults.trial import persist

TIMEOUT = 0.5
SLACK = 60.0
"""The nodes stay stopped: what has no deadline takes for ever, however slow the machine is."""
LARGE = 64 << 20
KEYS = [f"key {number}" for number in range(12)]
ITEMS = [(key, b"value") for key in KEYS]


@pytest.fixture
def node() -> Iterator[ForgedNode]:
    with Forge() as forge:
        yield forge.node(160 << 20)


def timed_out(node: ForgedNode, act: Callable[[], object]) -> None:
    began = time.monotonic()
    with pytest.raises(NodeTimeoutError, match=node.address) as caught:
        act()
    assert caught.value.node == node.address
    assert time.monotonic() - began < TIMEOUT + SLACK


ACTS: dict[str, Callable[[Store], object]] = {
    "put": lambda store: store.put(KEYS[0], b"value"),
    "get": lambda store: store.get(KEYS[0]),
    "put_many": lambda store: store.put_many(ITEMS),
    "get_many": lambda store: store.get_many(KEYS),
    "get_into": lambda store: store.get_into(KEYS[0], bytearray(10)),
    "stat": lambda store: store.stat(KEYS[0]),
    "lookup": lambda store: store.lookup(KEYS),
    "pin": lambda store: store.pin(KEYS[0]).release(),
    "drop": lambda store: store.drop(KEYS[0]),
    "touch": lambda store: store.touch(KEYS[0], None),
}


def acts(*quick: str) -> list[Any]:
    """All of them; the tests of those that are not named are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in ACTS]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("act", acts("put", "get", "lookup"))
def test_a_node_that_is_stopped_before_the_first_contact_is_a_timeout(
    node: ForgedNode, act: str, transport: Any
) -> None:
    node.stop()
    with Store(node.address, timeout=TIMEOUT, transport=transport) as store:
        timed_out(node, lambda: ACTS[act](store))


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("act", acts("put", "get_many", "drop"))
def test_several_nodes_that_are_stopped_share_one_deadline(
    act: str, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Forge() as forge:
        nodes = [forge.node() for _ in range(3)]
        addresses = [node.address for node in nodes]
        with Store(*addresses, replicas=replicas, timeout=TIMEOUT, transport="tcp") as store:
            persist(lambda: store.put_many(ITEMS))
            for node in nodes:
                node.stop()
            given = GivenDeadlines(monkeypatch)
            began = time.monotonic()
            with pytest.raises(NodeError):
                ACTS[act](store)
            assert time.monotonic() - began >= TIMEOUT
            given.assert_one(TIMEOUT)


@pytest.mark.parametrize("act", acts("put_many", "get", "drop"))
def test_a_call_waits_for_nodes_that_are_down_and_fails_when_its_deadline_is_used_up(act: str) -> None:
    """That nobody listens there is known at once; that nobody will is not."""
    with Forge() as forge:
        nodes = [forge.node() for _ in range(2)]
        with Store(*[node.address for node in nodes], replicas=2, timeout=TIMEOUT, transport="tcp") as store:
            store.put_many(ITEMS)
            for node in nodes:
                node.kill()
            began = time.monotonic()
            with pytest.raises(NodeError):
                ACTS[act](store)
            assert time.monotonic() - began >= TIMEOUT


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("act", acts("put", "get", "lookup"))
def test_a_call_succeeds_if_the_node_that_it_needs_comes_back_within_its_deadline(
    act: str, known: bool, how: str
) -> None:
    """It may be a node that the program has known, or has not met yet."""
    with Forge() as forge:
        nodes = [forge.node() for _ in range(2)]
        addresses = [node.address for node in nodes]
        with Store(*addresses, replicas=2) as store:
            store.put_many(ITEMS)
        with Store(*addresses, replicas=2, timeout=PATIENCE, transport="tcp") as store:
            if known:
                assert store.get_many(KEYS) == [b"value"] * len(KEYS)
            for node in nodes:
                node.kill() if how == "kill" else node.stop()
            outcome: list[object] = []
            thread = threading.Thread(target=lambda: outcome.append(attempted(lambda: ACTS[act](store))))
            thread.start()
            if how == "kill":
                members = store._open().members
                eventually(lambda: any(member.is_failing for member in members))
            else:
                time.sleep(0.05)
            assert thread.is_alive()
            for node in nodes:
                node.start() if how == "kill" else node.cont()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            assert not isinstance(outcome[0], Exception), outcome


@pytest.mark.parametrize("act", acts("put", "get_many"))
@pytest.mark.slow
def test_a_node_that_is_stopped_takes_its_share_of_the_time_and_the_others_do_the_work(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Forge() as forge:
        nodes = [forge.node() for _ in range(3)]
        with Store(*[node.address for node in nodes], replicas=2, timeout=4.0, transport="tcp") as store:
            store.put_many(ITEMS)
            store.nodes()  # all have been met
            stopped = ranked(store, nodes, KEYS[0])[0]
            stopped.stop()
            given = GivenDeadlines(monkeypatch)
            ACTS[act](store)
            given.assert_share(stopped.address, 4.0)
            given.assert_one(4.0)
            # From now on it is left alone, and a call does not even wait for its share.
            given.noted.clear()
            assert store.get_many(KEYS) == [None if act == "drop" and key == KEYS[0] else b"value" for key in KEYS]


def test_a_node_that_is_stopped_in_the_handshake_is_a_timeout(node: ForgedNode) -> None:
    target = parse_address(node.address)
    with socket.create_server(("127.0.0.1", 0)) as between:
        between.settimeout(PATIENCE)

        def pass_challenge_of_a_node_that_stops() -> None:
            client, _ = between.accept()
            with client, socket.create_connection((target.host, target.port), PATIENCE) as connection:
                client.settimeout(PATIENCE)
                connection.sendall(client.recv(4096))
                challenge = connection.recv(4096)
                node.stop()
                client.sendall(challenge)
                while proof := client.recv(4096):
                    connection.sendall(proof)

        thread = threading.Thread(target=pass_challenge_of_a_node_that_stops)
        thread.start()
        name = f"tcp://127.0.0.1:{between.getsockname()[1]}"
        with Store(name, timeout=TIMEOUT, transport="tcp") as store:
            began = time.monotonic()
            with pytest.raises(NodeTimeoutError, match=name):
                store.get("key")
            assert time.monotonic() - began < TIMEOUT + SLACK
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_a_failing_node_is_left_alone_with_its_cause_named_until_it_is_back(node: ForgedNode) -> None:
    with Store(node.address, timeout=TIMEOUT, transport="tcp") as store:
        persist(lambda: store.put("key", b"value"))
        node.stop()
        timed_out(node, lambda: store.get("key"))
        [status] = store.nodes()
        assert status.failing > 0
        assert "did not answer" in status.error
        node.cont()
        assert persist(lambda: store.get("key")) == b"value"
        assert store.nodes()[0].failing == 0


@pytest.mark.parametrize("act", ["get", "put"])
def test_a_node_that_is_stopped_in_the_middle_of_a_large_object_is_a_timeout(node: ForgedNode, act: str) -> None:
    """Whether it is the middle is up to the moment, so it is tried until it was."""
    value = bytes([1]) * LARGE
    with Store(node.address, timeout=PATIENCE, transport="tcp") as store:
        store.put("key", value)
    for attempt in range(30):
        key = "key" if act == "get" else f"key {attempt}"
        outcome = interrupted(node, key, value if act == "put" else None, 0.001 * attempt)
        if isinstance(outcome, NodeTimeoutError):
            break
        with Store(node.address, timeout=PATIENCE, transport="tcp") as store:
            store.drop(f"key {attempt}")
    else:
        pytest.fail("it was never stopped in the middle")
    assert outcome.node == node.address
    with Store(node.address, timeout=PATIENCE, transport="tcp") as store:
        assert store.get(key) in ([value] if act == "get" else [value, None])
        assert store.get("key") == value


def interrupted(node: ForgedNode, key: str, value: bytes | None, after: float) -> object:
    """What comes of putting a value, or of getting one, while the node is stopped and goes on after the deadline."""
    with Store(node.address, timeout=TIMEOUT, transport="tcp") as store:
        persist(lambda: store.stat("key"))
        buffer = bytearray(LARGE)
        outcome: list[object] = []
        act = (lambda: store.get_into(key, buffer)) if value is None else (lambda: store.put(key, value))
        thread = threading.Thread(target=lambda: outcome.append(attempted(act)))
        began = time.monotonic()
        thread.start()
        if value is None:
            eventually(lambda: buffer[0] or not thread.is_alive())
        else:
            time.sleep(after)
        node.stop()
        thread.join(PATIENCE)
        node.cont()
    assert not thread.is_alive()
    assert time.monotonic() - began < TIMEOUT + SLACK
    return outcome[0]


def attempted(act: Callable[[], object]) -> object:
    try:
        return act()
    except Exception as error:
        return error


@pytest.mark.parametrize("replicas", [2, 3])
def test_a_node_that_was_never_met_has_not_confirmed_a_put(replicas: int) -> None:
    with Forge() as forge:
        nodes = [forge.node() for _ in range(3)]
        for node in nodes[replicas - 1 :]:
            node.kill()
        with Store(*[node.address for node in nodes], replicas=replicas, timeout=TIMEOUT) as store:
            expected = f"{replicas - 1} of {replicas} nodes confirmed"
            for value in (b"value", b"another value"):  # which is there the second time
                persist(partial(refused_put, store, value, expected))
            assert store.put_many({}) == []


def refused_put(store: Store, value: bytes, expected: str) -> None:
    """Expect this error of a put. A node that was too busy to answer in time causes another error, which is raised."""
    with pytest.raises(ReplicationError) as caught:
        store.put("key", value)
    if expected not in str(caught.value):
        raise caught.value
