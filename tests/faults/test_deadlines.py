"""A peer that was stopped is an error with its name within the deadline, and is not flooded when it comes back."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from farpool.errors import FarpoolError, NodeError, NodeTimeoutError
from farpool.store import Store
from farpool.transport.address import parse_address
from farpool.transport.channel import Channel
from tests.faults.forge import PATIENCE, Forge, ForgedNode, eventually
from tests.faults.given import GivenDeadlines

TIMEOUT = 0.5
SLACK = 60.0
"""The nodes stay stopped: what has no deadline takes for ever, however slow the machine is."""
LARGE = 64 << 20
KEYS = [f"key {number}" for number in range(12)]


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


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("act", ["put", "get", "get_into", "stat", "delete", "touch", "pin", "put_many", "get_many"])
def test_a_node_that_is_stopped_before_the_first_contact_is_a_timeout(
    node: ForgedNode, act: str, transport: Any
) -> None:
    node.stop()
    with Store(node.address, timeout=TIMEOUT, transport=transport) as store:
        acts: dict[str, Callable[[], object]] = {
            "put": lambda: store.put("key", b"value"),
            "get": lambda: store.get("key"),
            "get_into": lambda: store.get_into("key", bytearray(10)),
            "stat": lambda: store.stat("key"),
            "delete": lambda: store.delete("key"),
            "touch": lambda: store.touch("key", None),
            "pin": lambda: store.pin("key"),
            "put_many": lambda: store.put_many({"key": b"value"}),
            "get_many": lambda: store.get_many(["key"]),
        }
        timed_out(node, acts[act])


@pytest.mark.parametrize("replicas", [1, 2])
def test_several_nodes_that_are_stopped_share_one_deadline(replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[Callable[[Store], object]] = [
        lambda store: store.get_many(KEYS),
        lambda store: store.put_many(dict.fromkeys(KEYS, b"value")),
        lambda store: store.delete_many(KEYS),
        lambda store: store.exists_many(KEYS),
        lambda store: store.pin(KEYS[0]),
        lambda store: store.put(KEYS[0], b"value"),
        lambda store: store.get(KEYS[0]),
        lambda store: store.delete(KEYS[0]),
    ]
    with Forge() as forge, contextlib.ExitStack() as stack:
        nodes = [forge.node() for _ in range(3)]
        addresses = [node.address for node in nodes]
        stores = [
            stack.enter_context(Store(*addresses, replicas=replicas, timeout=TIMEOUT, transport="tcp")) for _ in acts
        ]
        for store in stores:
            persist(lambda store=store: store.put_many(dict.fromkeys(KEYS, b"value")))
        for node in nodes:
            node.stop()
        given = GivenDeadlines(monkeypatch)
        outcomes: list[object] = []

        def work(number: int) -> None:
            outcomes.append(attempted(lambda: acts[number](stores[number])))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(len(acts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        for node in nodes:
            node.cont()
        assert len(outcomes) == len(acts)
        assert all(isinstance(outcome, NodeError) for outcome in outcomes)
        for store in stores:
            given.assert_one(store, TIMEOUT)


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


def test_the_breaker_opens_and_names_the_cause_and_closes_when_the_node_is_back(node: ForgedNode) -> None:
    with Store(node.address, timeout=TIMEOUT, transport="tcp") as store:
        persist(lambda: store.put("key", b"value"))
        node.stop()
        timed_out(node, lambda: store.get("key"))
        not_asked(node, lambda: store.get("key"))
        [status] = store.nodes()
        assert status.breaker == "open"
        assert status.failing > 0
        assert "did not answer" in status.error
        node.cont()
        assert persist(lambda: store.get("key")) == b"value"
        assert store.nodes()[0].breaker == "closed"


def not_asked(node: ForgedNode, act: Callable[[], object]) -> None:
    """The breaker is open. Where this process was so slow that it was a probe, it stays open for longer."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with pytest.raises(NodeError, match=f"{node.address}.* did not answer") as caught:
            act()
        if f"{node.address} is not asked" in str(caught.value):
            return
        assert time.monotonic() < deadline


def persist(act: Callable[[], object]) -> object:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return act()
        except FarpoolError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.parametrize("act", ["get", "put"])
def test_a_node_that_is_stopped_in_the_middle_of_a_large_object_is_a_timeout(node: ForgedNode, act: str) -> None:
    """Whether it is the middle is up to the moment, so it is tried until it was."""
    old, new = bytes([1]) * LARGE, bytes([2]) * LARGE
    with Store(node.address, timeout=PATIENCE, transport="tcp") as store:
        store.put("key", old)
    allowed = {old[:1]}
    for attempt in range(30):
        outcome = interrupted(node, new if act == "put" else None, 0.001 * attempt)
        allowed |= {new[:1]} if act == "put" else set()
        if isinstance(outcome, NodeTimeoutError):
            break
    else:
        pytest.fail("it was never stopped in the middle")
    assert outcome.node == node.address
    with Store(node.address, timeout=PATIENCE, transport="tcp") as store:
        value = store.get("key")
        assert value is not None
        assert value[:1] in allowed
        assert value == value[:1] * LARGE


def interrupted(node: ForgedNode, value: bytes | None, after: float) -> object:
    """What comes of putting a value, or of getting one, while the node is stopped and goes on after the deadline."""
    with Store(node.address, timeout=TIMEOUT, transport="tcp") as store:
        persist(lambda: store.stat("key"))
        buffer = bytearray(LARGE)
        outcome: list[object] = []
        act = (lambda: store.get_into("key", buffer)) if value is None else (lambda: store.put("key", value))
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


def test_a_node_that_comes_back_does_not_get_all_writes_at_once(node: ForgedNode) -> None:
    with Store(node.address, timeout=TIMEOUT, transport="tcp") as store, counting(node) as puts:
        persist(lambda: store.put("key", b"value"))
        node.stop()
        timed_out(node, lambda: store.get("key"))
        node.cont()
        persist(lambda: store.get("key"))
        # It answers again, so it may be given one write; it does not take it, and the others wait in vain.
        before = puts()
        node.stop()
        outcomes: list[object] = []
        threads = [
            threading.Thread(target=lambda n=n: outcomes.append(attempted(lambda: store.put(f"key {n}", b"value"))))
            for n in range(16)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
        node.cont()
        assert len(outcomes) == 16
        assert all(isinstance(outcome, NodeError) for outcome in outcomes)
        persist(lambda: store.get("key"))
        assert puts() - before <= 1
        # Once it keeps up it gets them all.
        for n in range(16):
            persist(lambda n=n: store.put(f"key {n}", b"value"))
        assert puts() - before >= 16


@contextlib.contextmanager
def counting(node: ForgedNode) -> Iterator[Callable[[], int]]:
    """How many puts the node has done."""
    channel = Channel(parse_address(node.address), transport="tcp")
    try:
        yield lambda: int(channel.call("stats", time.monotonic() + PATIENCE)["puts"])
    finally:
        channel.close()
