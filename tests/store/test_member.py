"""One node as a store sees it, without a node."""

from __future__ import annotations

import threading

import pytest

from farpool._native import Connection
from farpool.errors import AccessDeniedError, NodeError, NodeTimeoutError
from farpool.net.address import parse_address
from farpool.net.channel import Channel
from farpool.store.member import Member
from tests.nodes import eventually


class Refusing(Channel):
    """Fails in the ways that it is told, and counts the attempts."""

    def __init__(self, *failures: NodeError) -> None:
        super().__init__(parse_address("a:1"))
        self.failures = list(failures)
        self.attempts = 0
        self.tried = threading.Event()

    def take(self, deadline: float, *, fresh: bool = False) -> Connection:
        self.attempts += 1
        self.tried.set()
        raise self.failures.pop(0) if len(self.failures) > 1 else self.failures[0]


def test_a_node_that_has_failed_is_not_asked_and_is_probed_again_and_again() -> None:
    channel = Refusing(NodeError("it is down"))
    member = Member(channel, lambda member: None)
    with pytest.raises(NodeError, match=r"^it is down$"):
        member.take(0.0)
    for _ in range(100):
        with pytest.raises(NodeError, match=r"^tcp://a:1 is not asked: it has been failing for .* s .*: it is down$"):
            member.take(0.0)
    assert channel.attempts < 50  # the probe's
    seen = channel.attempts
    eventually(lambda: channel.attempts > seen + 2)
    assert member.status()[0] > 0
    member.close()
    assert not any(thread.name == "farpool-store-probe" for thread in threading.enumerate())


def test_a_probe_ends_when_the_node_answers_if_only_to_refuse() -> None:
    channel = Refusing(NodeTimeoutError("too late"), NodeError("it is down"), AccessDeniedError("no"))
    member = Member(channel, lambda member: None)
    with pytest.raises(NodeTimeoutError, match=r"^too late$"):
        member.take(0.0)
    with pytest.raises(NodeTimeoutError, match="is not asked"):
        member.take(0.0)
    eventually(lambda: member.status() == (0.0, ""))
    assert channel.attempts == 3
    with pytest.raises(AccessDeniedError):
        member.take(0.0)
    assert member.status() == (0.0, "")
    member.close()
